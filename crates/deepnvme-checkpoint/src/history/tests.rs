//! A folder of checkpoints that is saved into, killed at any step and reopened, among foreign files.

use std::collections::BTreeMap;
use std::fs as real;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_file::{Replacement, Target};
use deepnvme_format::checksums::checksums_of;
use proptest::prelude::*;

use super::*;
use crate::error::Error;

/// Returns the content of a checkpoint's file: arbitrary, as long as its index can be compared.
fn bytes_of(save: u64) -> Vec<u8> {
    format!("checkpoint number {save} {}", "x".repeat(save as usize % 50)).into_bytes()
}

fn entry(file: &str, step: u64, bytes: &[u8]) -> ManifestEntry {
    let crc64 = checksums_of(bytes).crc64;
    ManifestEntry {
        file: file.into(),
        step,
        nbytes: bytes.len() as u64,
        index_nbytes: bytes.len() as u64,
        index_crc64: format!("{crc64:016x}"),
        ..ManifestEntry::default()
    }
}

fn holder() -> Holder {
    Holder::new("a test".into(), "group".into())
}

/// Writes a file under a private name, with the entry that lists it.
fn written(history: &History, step: u64, save: u64) -> (ManifestEntry, Replacement) {
    let name = history.reserve(step, ".pt", &[]).unwrap();
    let new = Replacement::new(&Target::Path(history.folder().join(&name))).unwrap();
    real::write(new.temporary().path(), bytes_of(save)).unwrap();
    (entry(&name, step, &bytes_of(save)), new)
}

/// An event in a folder.
#[derive(Clone, Debug)]
enum Event {
    /// A save that dies after this many of its four steps.
    Save { step: u64, steps: u8 },
    /// A foreign file takes a checkpoint's name.
    Foreign { step: u64, again: u64 },
    /// A foreign file replaces a checkpoint.
    Replaced { which: usize },
    /// The program ends and restarts.
    Reopen,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0u64..6, 0u8..=4).prop_map(|(step, steps)| Event::Save { step, steps }),
        1 => (0u64..6, 0u64..3).prop_map(|(step, again)| Event::Foreign { step, again }),
        1 => (0usize..4).prop_map(|which| Event::Replaced { which }),
        1 => Just(Event::Reopen),
    ]
}

#[test]
fn a_save_that_began_earlier_is_older_and_retires_nothing_newer() {
    let entry = |step: u64| entry(&format!("step-{step}.pt"), step, b"x");
    let steps = |manifest: &Manifest| manifest.checkpoints.iter().map(|entry| entry.step).collect::<Vec<_>>();
    let next = |now: &Manifest, step, keep, newer: &[u64]| retention::next(now, &entry(step), keep, newer, |_| true);
    let mut manifest = Manifest::empty();
    for step in [10, 20, 30] {
        manifest = next(&manifest, step, Some(3), &[]);
    }
    // Training went back to step 10, and goes on from there.
    for (step, expected) in [(11, [20, 30, 11]), (12, [30, 11, 12]), (13, [11, 12, 13])] {
        manifest = next(&manifest, step, Some(3), &[]);
        assert_eq!(steps(&manifest), expected);
    }
    assert_eq!(steps(&next(&manifest, 5, Some(3), &[13])), [12, 5, 13]);
    assert_eq!(steps(&next(&manifest, 5, Some(1), &[11, 12, 13])), [5, 11, 12, 13]);
    assert_eq!(steps(&next(&manifest, 12, None, &[])), [11, 13, 12]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_last_committed_is_there_and_nothing_of_others_goes(
        events in proptest::collection::vec(event(), 1..25), keep in 1usize..4
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut foreign: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut contents: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut expected: Option<(u64, Vec<u8>)> = None;
        let open = || {
            let history = History::new(folder.path().to_path_buf(), Some(keep), true);
            history.make().unwrap();
            history.read().unwrap();
            history
        };
        let mut history = open();
        for (number, event) in events.into_iter().enumerate() {
            let save = number as u64;
            match event {
                Event::Save { step, steps } => {
                    history.claim(&holder(), true).unwrap();
                    let (mut new_entry, new) = written(&history, step, save);
                    if steps == 4 {
                        history.commit(new_entry.clone(), Some(new), &[]).unwrap();
                    } else {
                        // Killed: only the steps so far took place.
                        if steps >= 1 {
                            new.take_mode().unwrap();
                            new_entry.pending.insert(new_entry.file.clone(), private_name(&new).unwrap());
                        }
                        if steps >= 2 {
                            history.publish(&new_entry, &[]).unwrap();
                        }
                        // Releases the lock of its file.
                        new.keep();
                        if steps >= 3 {
                            let _ = files::place(folder.path(), &new_entry);
                        }
                        history = open();
                    }
                    if steps >= 2 {
                        expected = Some((step, bytes_of(save)));
                        contents.insert(format!("{step}"), bytes_of(save));
                    }
                }
                Event::Foreign { step, again } => {
                    let name = names::name(step, ".pt", again);
                    let path = folder.path().join(&name);
                    if !path.exists() {
                        real::write(path, b"foreign").unwrap();
                        foreign.insert(name, b"foreign".to_vec());
                    }
                }
                Event::Replaced { which } => {
                    let listed = history.read().unwrap().checkpoints;
                    if listed.len() > 1 && let Some(entry) = listed.get(which) {
                        let path = folder.path().join(&entry.file);
                        if expected.as_ref().is_some_and(|(step, _)| *step != entry.step) && path.exists() {
                            real::remove_file(&path).unwrap();
                            real::write(path, b"foreign").unwrap();
                            foreign.insert(entry.file.clone(), b"foreign".to_vec());
                        }
                    }
                }
                Event::Reopen => history = open(),
            }
            // Any reader now finds the latest checkpoint, complete, without a lock.
            let reader = History::new(folder.path().to_path_buf(), None, false);
            let shown = reader.read().unwrap();
            if let Some((step, bytes)) = &expected {
                // Whatever its step, the last one saved is the newest.
                let entry = shown.checkpoints.last().expect("one is current");
                prop_assert_eq!(entry.step, *step, "{:?}", shown);
                let paths = std::iter::once(&entry.file).chain(entry.pending.get(&entry.file));
                let found: Vec<Vec<u8>> = paths.filter_map(|name| real::read(folder.path().join(name)).ok()).collect();
                prop_assert!(found.contains(bytes), "step {step} is not there: {shown:?}");
                prop_assert!(shown.checkpoints.len() <= keep + 1);
            }
            for (name, bytes) in &foreign {
                prop_assert_eq!(&real::read(folder.path().join(name)).unwrap(), bytes, "{} was touched", name);
            }
        }
        // After one more save, no leftover exists.
        drop(history);
        let history = open();
        history.claim(&holder(), true).unwrap();
        history.settle();
        let (new_entry, new) = written(&history, 9, 99);
        history.commit(new_entry, Some(new), &[]).unwrap();
        let manifest = history.manifest();
        drop(history);
        for entry in real::read_dir(folder.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_listed = manifest.checkpoints.iter().any(|entry| entry.file == name);
            prop_assert!(is_listed || name == MANIFEST || foreign.contains_key(&name), "{name} is nobody's");
        }
    }
}

#[test]
fn a_second_holder_is_refused_until_the_first_lets_go() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = [(); 2].map(|()| History::new(folder.path().to_path_buf(), None, false));
    first.claim(&holder(), true).unwrap();
    let other = Holder::new("another".into(), "other token".into());
    match second.claim(&other, true) {
        Err(Error::Locked { holder, .. }) => assert_eq!(holder, "a test"),
        claimed => panic!("{claimed:?}"),
    }
    // Processes that save together share the lock.
    second.claim(&holder(), false).unwrap();
    assert!(!second.is_claimed());
    first.release();
    assert!(!folder.path().join(LOCK).exists());
    second.claim(&other, true).unwrap();
}

#[test]
fn a_name_that_was_taken_meanwhile_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let history = History::new(folder.path().to_path_buf(), Some(2), true);
    history.claim(&holder(), true).unwrap();
    let (new_entry, new) = written(&history, 3, 7);
    real::write(folder.path().join(&new_entry.file), b"mine").unwrap();
    history.commit(new_entry, Some(new), &[]).unwrap();
    assert_eq!(real::read(folder.path().join("step-00000003.pt")).unwrap(), b"mine");
    assert_eq!(real::read(folder.path().join("step-00000003-1.pt")).unwrap(), bytes_of(7));
    assert_eq!(history.manifest().checkpoints[0].file, "step-00000003-1.pt");
    // Every manifest that was written can be read again, also by a save of the same process.
    let on_disk = real::read(folder.path().join(MANIFEST)).unwrap();
    assert_eq!(Manifest::parse(&on_disk).unwrap().checkpoints[0].file, "step-00000003-1.pt");
}

#[test]
fn a_private_name_that_somebody_took_is_not_given_another() {
    let folder = tempfile::tempdir().unwrap();
    let history = History::new(folder.path().to_path_buf(), Some(2), true);
    history.claim(&holder(), true).unwrap();
    let (mut new_entry, new) = written(&history, 3, 7);
    let private = private_name(&new).unwrap();
    new_entry.pending.insert(new_entry.file.clone(), private.clone());
    history.publish(&new_entry, &[]).unwrap();
    new.keep();
    let place = || find_file(folder.path(), &new_entry.file, &new_entry);
    let (own, private_path) = (folder.path().join(&new_entry.file), folder.path().join(&private));
    assert_eq!(place(), private_path);
    real::write(&own, b"mine").unwrap();
    assert_eq!(place(), private_path, "somebody has its name");
    real::remove_file(&own).unwrap();
    // The file is renamed, but the process dies before the next manifest states it.
    files::place(folder.path(), &new_entry).unwrap();
    assert_eq!(place(), own);
    drop(history);
    real::write(folder.path().join(&private), b"mine").unwrap();
    assert_eq!(place(), own, "somebody has the private name that it had");
    let history = History::new(folder.path().to_path_buf(), Some(2), true);
    history.read().unwrap();
    history.claim(&holder(), true).unwrap();
    history.settle();
    assert_eq!(real::read(folder.path().join(&private)).unwrap(), b"mine");
    assert_eq!(real::read(folder.path().join(&new_entry.file)).unwrap(), bytes_of(7));
    assert_eq!(history.read().unwrap().checkpoints[0].file, "step-00000003.pt");
    // A copy of the folder contains other files under the same names.
    let copy = tempfile::tempdir().unwrap();
    for name in [private.as_str(), MANIFEST] {
        real::copy(folder.path().join(name), copy.path().join(name)).unwrap();
    }
    real::write(copy.path().join(&private), bytes_of(7)).unwrap();
    History::new(copy.path().to_path_buf(), Some(2), true).read().unwrap();
    assert_eq!(real::read(copy.path().join(&new_entry.file)).unwrap(), bytes_of(7));
}

#[test]
fn a_checkpoint_in_a_folder_that_was_renamed_does_not_count_in_another() {
    let above = tempfile::tempdir().unwrap();
    let (folder, elsewhere) = (above.path().join("run"), above.path().join("renamed"));
    real::create_dir(&folder).unwrap();
    let history = History::new(folder.clone(), Some(2), true);
    history.claim(&holder(), true).unwrap();
    let (first, new) = written(&history, 1, 5);
    history.commit(first, Some(new), &[]).unwrap();
    let (second, new) = written(&history, 2, 7);
    real::rename(&folder, &elsewhere).unwrap();
    real::create_dir(&folder).unwrap();
    real::write(folder.join(&second.file), b"mine").unwrap();
    let refused = history.commit(second, Some(new), &[]).unwrap_err().to_string();
    assert!(refused.contains("run") && refused.contains("renamed the folder"), "{refused}");
    assert_eq!(real::read(folder.join("step-00000002.pt")).unwrap(), b"mine");
    assert!(!folder.join(MANIFEST).exists());
    let left = History::new(elsewhere, Some(2), true).read().unwrap();
    assert_eq!(left.checkpoints.iter().map(|entry| entry.step).collect::<Vec<_>>(), [1]);
}

#[test]
fn manifests_that_name_other_files_are_refused() {
    let good = entry("step-00000001.pt", 1, b"x");
    let text = |entry: &ManifestEntry| Manifest { checkpoints: vec![entry.clone()], ..Manifest::empty() }.text();
    assert_eq!(Manifest::parse(text(&good).as_bytes()).unwrap().checkpoints, std::slice::from_ref(&good));
    for file in ["../step-00000001.pt", "/etc/passwd", "step-1.pt", "model.pt", "", "step-00000001.pt/x"] {
        let bad = ManifestEntry { file: file.into(), ..good.clone() };
        assert!(Manifest::parse(text(&bad).as_bytes()).is_err(), "{file}");
        let private = BTreeMap::from([(good.file.clone(), file.into())]);
        let bad = ManifestEntry { pending: private, ..good.clone() };
        assert!(Manifest::parse(text(&bad).as_bytes()).is_err(), "{file}");
    }
    for text in ["", "[]", "{}", r#"{"version": 3, "checkpoints": []}"#, r#"{"version": 2, "checkpoints": [1]}"#] {
        assert!(Manifest::parse(text.as_bytes()).is_err(), "{text}");
    }
}

/// Signals the end, even if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_reader_always_sees_a_checkpoint_while_another_process_writes() {
    let folder = tempfile::tempdir().unwrap();
    let writer = History::new(folder.path().into(), Some(1), false);
    writer.claim(&holder(), true).unwrap();
    let save = |number: u64| {
        let (entry, new) = written(&writer, number, number);
        writer.commit(entry, Some(new), &[]).unwrap();
    };
    save(0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut least = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        let seen = History::new(folder.path().into(), None, false).read().unwrap();
                        assert_eq!(seen.checkpoints.len(), 1, "after step {least}");
                        assert!(seen.checkpoints[0].step >= least);
                        least = seen.checkpoints[0].step;
                    }
                })
            })
            .collect();
        for number in 1..150 {
            save(number);
        }
        drop(over);
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

#[test]
fn any_changed_byte_of_a_manifest_is_reported() {
    let sound = Manifest { checkpoints: vec![entry("step-00000002.pt", 2, &bytes_of(2))], ..Manifest::empty() };
    let text = sound.text().into_bytes();
    assert_eq!(Manifest::parse(&text).unwrap(), sound);
    for place in 0..text.len() {
        for bit in 0..8 {
            let mut changed = text.clone();
            changed[place] ^= 1 << bit;
            assert!(Manifest::parse(&changed).is_err(), "bit {bit} of byte {place}");
        }
        let without = [&text[..place], &text[place + 1..]].concat();
        assert!(Manifest::parse(&without).is_err(), "without byte {place}");
        for byte in [b' ', b'0', text[place]] {
            let with = [&text[..place], &[byte], &text[place..]].concat();
            assert!(Manifest::parse(&with).is_err(), "with {byte} at {place}");
        }
    }
    // A manifest without a checksum was written by hand or by an older version.
    let mut value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    value.as_object_mut().unwrap().remove("deepnvme.checksum").unwrap();
    assert_eq!(Manifest::parse(value.to_string().as_bytes()).unwrap(), sound);
}
