//! Replacing files and stripe sets: foreign files, refusals and concurrency.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use deepnvme_file::{FileReader, FileWriter, Replacement, StripeSet, Target};
use deepnvme_io::mem::Region;
use deepnvme_io::{Access, Config, DirectMode, Durability, Engine, ErrorKind, TensorFile, WriteOptions};
use deepnvme_testkit::skips::{left_out, skipped};

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config::default()).unwrap())
}

fn save(engine: &Arc<Engine>, target: &Target, bytes: &[u8]) -> deepnvme_io::Result<()> {
    let mut writer = FileWriter::create(Arc::clone(engine), target, Durability::None)?;
    writer.write(bytes)?;
    writer.commit()
}

fn load(engine: &Arc<Engine>, target: &Target) -> deepnvme_io::Result<Vec<u8>> {
    let mut reader = FileReader::open(Arc::clone(engine), target)?;
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes)?;
    Ok(bytes)
}

fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.clone(), fs::read(&path).unwrap_or_default())).collect()
}

fn set(folders: &[&Path]) -> StripeSet {
    StripeSet::new(folders.iter().map(|folder| folder.join("model")).collect(), 4096).unwrap()
}

#[test]
fn a_save_that_only_begins_leaves_the_committed_stripes() {
    let engine = engine();
    let (root, data) = (tempfile::tempdir().unwrap(), vec![7_u8; 100_000]);
    let (one, two, link) = (root.path().join("one"), root.path().join("two"), root.path().join("link"));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&two).unwrap();
    symlink(&one, &link).unwrap();
    let committed = set(&[&one, &two]);
    save(&engine, &Target::Stripes(committed.clone()), &data).unwrap();
    // Leftovers of a writer with other naming, and shards of other libraries.
    for name in ["model.part-1-1", "model.part-00001-of-00002.safetensors", ".model.stripes.json.deepnvme-tmp-1-1"] {
        fs::write(one.join(name), name).unwrap();
    }
    let before = (files(&one), files(&two));
    for folders in [[&two, &one], [&link, &two], [&two, &link], [&one, &two]] {
        let other = set(&folders.map(PathBuf::as_path));
        drop(Replacement::new(&Target::Stripes(other)).unwrap());
        assert!((files(&one), files(&two)) == before, "{folders:?}");
    }
    assert!(load(&engine, &Target::Stripes(committed.clone())).unwrap() == data);
    // A manifest of a later version tells nothing about its files, so nothing changes.
    let manifest = committed.manifest_path();
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replace("\"version\": ", "\"version\": 9")).unwrap();
    let before = (files(&one), files(&two));
    let refused = Replacement::new(&Target::Stripes(committed)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert!(refused.to_string().contains("model.stripes.json"), "{refused}");
    assert!((files(&one), files(&two)) == before);
}

#[test]
fn a_set_from_a_manifest_is_saved_under_that_manifest() {
    let engine = engine();
    let root = tempfile::tempdir().unwrap();
    let named = set(&[root.path()]);
    let manifest = named.manifest_path();
    for data in [[1_u8; 9000], [2; 9000], [3; 9000]] {
        let found = StripeSet::from_manifest(&manifest).unwrap_or_else(|_| named.clone());
        assert_eq!(found.manifest_path(), manifest);
        save(&engine, &Target::Stripes(found.clone()), &data).unwrap();
        for target in [Target::Stripes(named.clone()), Target::Stripes(found), Target::from(manifest.clone())] {
            assert!(load(&engine, &target).unwrap() == data);
        }
        let names: Vec<_> = files(root.path()).into_keys().map(|path| path.file_name().unwrap().to_owned()).collect();
        let marks = names.iter().map(|name| name.to_str().unwrap().matches(".part-").count()).sum::<usize>();
        assert!(names.len() == 2 && marks == 1, "{names:?}");
    }
}

#[test]
fn a_stripe_set_takes_no_names_of_something_else() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let target = Target::Stripes(set(&[folder.path()]));
    let notes = folder.path().join("model.stripes.json");
    fs::write(&notes, "my notes").unwrap();
    let refused = save(&engine, &target, b"bytes").unwrap_err();
    assert!(refused.kind() == ErrorKind::InvalidInput && refused.to_string().contains("move it away"), "{refused}");
    assert_eq!(files(folder.path()), BTreeMap::from([(notes.clone(), b"my notes".to_vec())]));
    fs::remove_file(notes).unwrap();

    let part = folder.path().join("model");
    for make in [|path: &Path| fs::create_dir(path).unwrap(), |path: &Path| symlink("/dev/null", path).unwrap()] {
        make(&part);
        let refused = save(&engine, &target, b"bytes").unwrap_err();
        assert!(refused.kind() == ErrorKind::InvalidInput && refused.to_string().contains("regular file"), "{refused}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        fs::remove_dir(&part).or_else(|_| fs::remove_file(&part)).unwrap();
    }
    save(&engine, &target, b"bytes").unwrap();
}

/// Saves each of these to the target, on threads of their own that start together.
fn save_at_once(engine: &Arc<Engine>, target: &Target, contents: &[Vec<u8>]) {
    let barrier = Barrier::new(contents.len());
    std::thread::scope(|savers| {
        for bytes in contents {
            savers.spawn(|| {
                barrier.wait();
                save(engine, target, bytes).unwrap();
            });
        }
    });
}

#[test]
fn concurrent_replacements_of_a_stripe_set_leave_one_whole_set() {
    let engine = engine();
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (root.path().join("one"), root.path().join("two"));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&two).unwrap();
    let target = Target::Stripes(set(&[&one, &two]));
    save(&engine, &target, &[0; 50_000]).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut reads = 0;
            while !is_over.load(Ordering::SeqCst) {
                let bytes = load(&engine, &target).unwrap();
                assert!(bytes.len() == 50_000 && bytes.iter().all(|byte| *byte == bytes[0]), "a mixture");
                reads += 1;
            }
            reads
        });
        for round in 0..40 {
            save_at_once(&engine, &target, &[0, 1, 2].map(|saver| vec![round * 3 + saver; 50_000]));
        }
        is_over.store(true, Ordering::SeqCst);
        assert!(reader.join().unwrap() > 0);
    });
    assert_eq!((files(&one).len(), files(&two).len()), (2, 1), "the manifest and two parts");
}

#[test]
fn concurrent_replacements_of_a_file_all_succeed() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let target = Target::from(folder.path().join("file"));
    for _ in 0..500 {
        save_at_once(&engine, &target, &[0, 1, 2, 3].map(|saver| vec![saver; 100]));
    }
    assert_eq!(files(folder.path()).len(), 1);
}

#[test]
fn a_descriptor_that_appends_is_written_where_it_was_asked() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for flags in [libc::O_APPEND, libc::O_APPEND | libc::O_DIRECT] {
        fs::write(&path, vec![1; 16_384]).unwrap();
        let Ok(open) = fs::File::options().read(true).append(true).custom_flags(flags).open(&path) else {
            left_out("the file system refuses O_DIRECT");
            continue;
        };
        let file = TensorFile::from_fd(open.as_fd(), None, Access::ReadWrite, DirectMode::Preferred).unwrap();
        engine.write(&file, 4096, Region::from_vec(vec![2; 8192]), WriteOptions::default()).unwrap().wait().1.unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 16_384, "nothing was appended");
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if (4096..12_288).contains(&at) { 2 } else { 1 }));
    }
}

#[test]
fn only_regular_files_are_replaced() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let make = |name: &str, kind| {
        rustix::fs::mknodat(rustix::fs::CWD, at(name), kind, rustix::fs::Mode::RWXU, rustix::fs::makedev(1, 3)).is_ok()
    };
    assert!(make("pipe", rustix::fs::FileType::Fifo));
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let mut names = vec!["pipe", "socket"];
    if make("device", rustix::fs::FileType::CharacterDevice) {
        names.push("device");
    } else {
        left_out("only the administrator makes devices");
    }
    for name in names {
        let error = save(&engine, &Target::from(at(name)), b"new").unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::InvalidInput, Some(at(name).as_path())), "{error}");
        assert!(!fs::symlink_metadata(at(name)).unwrap().file_type().is_file());
    }
    assert!(fs::symlink_metadata(at("pipe")).unwrap().file_type().is_fifo());
}

#[test]
fn links_that_lead_nowhere_are_not_replaced() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    for (name, leads_to) in [("dangling", "nowhere"), ("loop", "loop")] {
        let path = folder.path().join(name);
        symlink(leads_to, &path).unwrap();
        let error = save(&engine, &Target::from(&path), b"new").unwrap_err();
        assert_eq!(error.path(), Some(path.as_path()), "{error}");
        assert!(fs::symlink_metadata(&path).unwrap().is_symlink() && !path.exists());
    }
}

#[test]
fn the_kernel_decides_whose_links_are_followed() {
    let is_protected = fs::read_to_string("/proc/sys/fs/protected_symlinks").is_ok_and(|text| text.trim() == "1");
    let (shared, private) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (link, victim) = (shared.path().join("link"), private.path().join("victim"));
    fs::write(&victim, "old").unwrap();
    symlink(&victim, &link).unwrap();
    fs::set_permissions(shared.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let owned = |path: &Path| std::os::unix::fs::lchown(path, Some(65_534), None);
    // The link and its folder belong to two different other users.
    if !is_protected || owned(&link).is_err() {
        return skipped("needs the administrator, and fs.protected_symlinks");
    }
    std::os::unix::fs::chown(shared.path(), Some(65_533), None).unwrap();
    let error = save(&engine(), &Target::from(&link), b"new").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert_eq!(fs::read(&victim).unwrap(), b"old");
}

#[test]
fn rights_that_a_file_lends_are_not_passed_on() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    save(&engine, &Target::from(&path), b"new").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
}

#[test]
fn foreign_files_of_every_name_keep_every_byte() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (file, stripes) = (Target::from(at("model")), Target::Stripes(set(&[folder.path()])));
    // Names of real saves, each on another file.
    let mut observed = Vec::new();
    for target in [&file, &stripes] {
        let replacement = Replacement::new(target).unwrap();
        observed.extend(files(folder.path()).into_keys());
        drop(replacement);
        assert!(files(folder.path()).is_empty());
    }
    let pid = std::process::id();
    observed.extend(
        [
            format!(".model.deepnvme-tmp-{pid}-0"),
            format!("model.part-{pid}-0"),
            "model.part-00001-of-00002.safetensors".into(),
            format!("model.stripes.json.{pid}.tmp"),
            ".model.deepnvme-tmp-".into(),
            ".model.deepnvme-tmp-0-0-0000000000000000".into(),
        ]
        .map(|name| at(&name)),
    );
    assert!(observed.len() >= 9, "{observed:?}");
    for (number, path) in observed.iter().enumerate() {
        fs::write(path, format!("{number} of somebody")).unwrap();
    }
    let foreign = files(folder.path());
    for round in 0..3 {
        for target in [&file, &stripes] {
            save(&engine, target, &[round; 10_000]).unwrap();
            assert!(load(&engine, target).unwrap() == [round; 10_000]);
            drop(Replacement::new(target).unwrap());
        }
        let now = files(folder.path());
        assert!(foreign.iter().all(|(path, bytes)| now.get(path) == Some(bytes)));
        assert_eq!(now.len(), foreign.len() + 3, "the file, the manifest and its part");
    }
}
