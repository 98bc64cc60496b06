//! Replacing sets concurrently, and from processes that stop at any step.

use std::collections::BTreeMap;
use std::thread::Scope;

use serde_json::Map;
use tempfile::TempDir;

use super::*;
use deepnvme_io::fs::crash;

mod ownership;

const RECORD: [&str; 2] = ["metadata", "files"];

/// Saves a set of two members whose text equals the index's "is".
fn save(index: &Path, text: &str) -> Result<()> {
    let new = begin(index)?;
    fill(&new, text);
    let value = value(&new, text);
    new.commit(value).map(drop)
}

fn begin(index: &Path) -> Result<SetReplacement> {
    let member = |name: &str| Member { prefix: index.with_file_name(name), suffix: ".bin".into() };
    SetReplacement::begin(index, &[member("one-"), member("two-")], &RECORD)
}

fn fill(new: &SetReplacement, text: &str) {
    for member in new.members() {
        std::fs::write(member, text).unwrap();
    }
}

fn value(new: &SetReplacement, text: &str) -> Value {
    let names = new.names().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
    let map: Map<String, Value> = names.enumerate().map(|(at, name)| (at.to_string(), name.into())).collect();
    serde_json::json!({"is": text, "metadata": {"total_size": 1}, "weight_map": map})
}

/// Loads the text of the index. The members must match it.
fn load(index: &Path) -> String {
    let value: Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
    let text = value["is"].as_str().unwrap().to_owned();
    let members = value["weight_map"].as_object().unwrap();
    assert_eq!(members.len(), 2);
    for name in members.values() {
        assert_eq!(std::fs::read_to_string(index.with_file_name(name.as_str().unwrap())).unwrap(), text);
    }
    text
}

fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect()
}

/// Returns a folder, and the path of an index in it.
fn empty_folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let index = folder.path().join("index.json");
    (folder, index)
}

/// Returns a folder with one set, and the path of its index.
fn saved_set(text: &str) -> (TempDir, PathBuf) {
    let (folder, index) = empty_folder();
    save(&index, text).unwrap();
    (folder, index)
}

/// Returns the other files of the index's folder.
fn members(index: &Path) -> Vec<PathBuf> {
    files(index.parent().unwrap()).into_keys().filter(|path| path != index).collect()
}

#[test]
fn a_set_is_replaced_and_nothing_else_is_left() {
    let (folder, index) = empty_folder();
    for text in ["one", "two", "three"] {
        save(&index, text).unwrap();
        assert_eq!(load(&index), text);
        assert_eq!(files(folder.path()).len(), 3);
    }
    drop(begin(&index).unwrap());
    assert_eq!((load(&index), files(folder.path()).len()), ("three".into(), 3));
}

#[test]
fn a_process_that_stops_at_any_step_leaves_one_whole_set_and_the_next_save_clears_up() {
    for has_old in [true, false] {
        let mut texts = Vec::new();
        let steps = crash::at_each_step(|steps| {
            let (folder, index) = empty_folder();
            if has_old {
                save(&index, "old").unwrap();
            }
            let (saved, log) = crash::after(steps, || {
                begin(&index).and_then(|new| {
                    fill(&new, "new");
                    let value = value(&new, "new");
                    new.commit(value)
                })
            });
            if index.exists() {
                texts.push(load(&index));
            } else {
                assert!(!has_old, "after {log:?}");
            }
            save(&index, "next").unwrap_or_else(|error| panic!("after {log:?}: {error}"));
            assert_eq!(load(&index), "next");
            let left: Vec<_> = files(folder.path()).into_keys().collect();
            assert_eq!(left.len(), 3, "after {log:?}: {left:?}");
            saved.is_ok() && log.len() < steps
        });
        assert!(steps > 15, "{steps}");
        assert_eq!(texts.last().unwrap(), "new");
        assert!(!has_old || texts[0] == "old");
    }
}

#[test]
fn old_members_go_only_when_the_new_index_is_on_the_disk() {
    let (folder, index) = saved_set("old");
    let old = members(&index);
    let (saved, log) = crash::after(usize::MAX, || save(&index, "new"));
    saved.unwrap();
    let at = |what: String| log.iter().position(|step| *step == what).unwrap_or_else(|| panic!("{what}: {log:?}"));
    let renamed = at(format!("rename {}", index.display()));
    let real = std::fs::canonicalize(folder.path()).unwrap();
    let synced = renamed + log[renamed..].iter().position(|step| *step == format!("sync {}", real.display())).unwrap();
    for member in old {
        assert!(at(format!("unlink {}", member.display())) > synced);
    }
    // The names of the new members are synced before the change.
    assert!(log[..renamed].iter().filter(|step| **step == format!("sync {}", real.display())).count() >= 2);
}

/// A folder, and the name that it will have.
fn folder_to_rename() -> (TempDir, PathBuf, PathBuf) {
    let above = tempfile::tempdir().unwrap();
    let (folder, renamed) = (above.path().join("one"), above.path().join("other"));
    std::fs::create_dir(&folder).unwrap();
    (above, folder, renamed)
}

/// Starts threads that save at the same time, each with different contents.
fn spawn_savers<'scope>(scope: &'scope Scope<'scope, '_>, index: &'scope Path, round: u32, savers: u32) {
    for saver in 0..savers {
        scope.spawn(move || save(index, &format!("{round}-{saver}")).unwrap());
    }
}

#[test]
fn saves_that_commit_together_leave_one_set_and_no_rest() {
    let (folder, index) = empty_folder();
    for round in 0..30 {
        std::thread::scope(|scope| spawn_savers(scope, &index, round, 4));
        assert!(load(&index).starts_with(&format!("{round}-")));
        assert_eq!(files(folder.path()).len(), 3, "round {round}: {:?}", files(folder.path()).into_keys());
    }
}

#[test]
fn an_index_owns_nothing_that_it_did_not_make() {
    let (folder, index) = saved_set("first");
    // A copy lists the same members, and a foreign index may list any file.
    let copy = folder.path().join("copy.json");
    std::fs::copy(&index, &copy).unwrap();
    let foreign = folder.path().join("foreign.json");
    let precious = folder.path().join("precious.bin");
    std::fs::write(&precious, "precious").unwrap();
    std::fs::write(&foreign, r#"{"metadata": {}, "weight_map": {"a": "precious.bin"}}"#).unwrap();
    let before = files(folder.path());
    for index in [&copy, &foreign] {
        save(index, "second").unwrap();
        assert_eq!(load(index), "second");
    }
    assert_eq!(load(&index), "first");
    let after = files(folder.path());
    assert!(before.iter().all(|(path, bytes)| *path == copy || *path == foreign || after.get(path) == Some(bytes)));
}

#[test]
fn a_damaged_index_loses_nothing() {
    let (folder, index) = saved_set("first");
    let mut text = std::fs::read(&index).unwrap();
    text.truncate(text.len() / 2);
    std::fs::write(&index, &text).unwrap();
    let before = files(folder.path());
    drop(begin(&index).unwrap());
    assert_eq!(files(folder.path()), before);
    save(&index, "second").unwrap();
    let after = files(folder.path());
    assert!(before.iter().all(|(path, bytes)| *path == index || after.get(path) == Some(bytes)));
}

#[test]
fn an_intent_that_somebody_planted_removes_nothing() {
    let (folder, index) = empty_folder();
    let precious = folder.path().join(format!("one-{}.bin", "a".repeat(32)));
    std::fs::write(&precious, "precious").unwrap();
    let intended = |path: &PathBuf, marked: Option<&PathBuf>| IntendedMember {
        path: path.clone(),
        mark: marked.map(|marked| mark_of(&fs::stat(marked).unwrap())),
    };
    let member = intended(&precious, Some(&precious));
    let intent = Intent { format: INTENT.into(), version: 1, members: vec![member] };
    let text = serde_json::to_vec(&intent).unwrap();
    // The intent states another inode, and a file without a token in its name.
    std::fs::write(folder.path().join(".index.json.deepnvme-tmp-1-0-0123456789abcdef"), &text).unwrap();
    drop(begin(&index).unwrap());
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
    let plain = folder.path().join("plain.bin");
    std::fs::write(&plain, "plain").unwrap();
    let own = Temporary::new(&index).unwrap();
    // The mark of the second member is another file's. The third has no mark.
    let other = intended(&precious, Some(&plain));
    let members = vec![intended(&plain, Some(&plain)), other, intended(&precious, None)];
    own.fill(&serde_json::to_vec(&Intent { members, ..intent }).unwrap()).unwrap();
    fs::unlock(own.file()).unwrap();
    let path = own.path().to_path_buf();
    std::mem::forget(own);
    drop(begin(&index).unwrap());
    assert!(plain.exists() && precious.exists() && !path.exists());
}

#[test]
fn a_name_that_a_failed_save_gave_back_is_its_next_owners() {
    let mut kept = 0;
    crash::at_each_step(|steps| {
        let (folder, index) = saved_set("old");
        let mut names: Vec<PathBuf> = Vec::new();
        let (_, log) = crash::after(steps, || {
            let new = begin(&index)?;
            names.extend(new.names().chain(new.members()).map(PathBuf::from));
            fill(&new, "new");
            let value = value(&new, "new");
            new.commit(value)
        });
        let mine: Vec<PathBuf> = names.into_iter().filter(|path| !path.exists()).collect();
        for path in &mine {
            std::fs::write(path, "mine").unwrap();
        }
        kept += usize::from(!mine.is_empty() && files(folder.path()).len() > 3 + mine.len());
        save(&index, "next").unwrap();
        for path in &mine {
            assert_eq!(std::fs::read_to_string(path).ok().as_deref(), Some("mine"), "after {log:?}");
        }
        assert_eq!(files(folder.path()).len(), 3 + mine.len(), "after {log:?}");
        log.len() < steps
    });
    assert!(kept > 0, "no intent outlived its members");
}

#[test]
fn a_set_whose_folder_was_renamed_still_owns_its_members() {
    let (folder, first, then) = folder_to_rename();
    save(&first.join("index.json"), "one").unwrap();
    save(&first.join("index.json"), "two").unwrap();
    std::fs::rename(&first, &then).unwrap();
    save(&then.join("index.json"), "three").unwrap();
    assert_eq!(load(&then.join("index.json")), "three");
    assert_eq!(files(&then).len(), 3, "{:?}", files(&then).into_keys());
    // A copy of the folder contains other files, which no index recorded.
    let copy = folder.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    for (path, bytes) in files(&then) {
        std::fs::write(copy.join(path.file_name().unwrap()), bytes).unwrap();
    }
    remove_whole_set(&copy.join("index.json"), &RECORD);
    assert_eq!(files(&copy).len(), 3);
    remove_whole_set(&then.join("index.json"), &RECORD);
    assert_eq!(files(&then).len(), 0);
}

#[test]
fn an_index_of_one_line_stays_one() {
    let (_folder, index) = empty_folder();
    let written = |text: &str| {
        begin(&index).unwrap().commit_text(text).unwrap();
        std::fs::read_to_string(&index).unwrap()
    };
    let line = written("{\"is\": [1, {\"a\": null}], \"b\": {}}");
    assert!(
        line.starts_with("{\"b\": {}, \"is\": [1, {\"a\": null}], \"metadata\": {\"deepnvme.checksum\": \""),
        "{line}"
    );
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(written("{\n\"is\": 1\n}\n").contains("\n  \"is\": 1,\n"));
}

#[test]
fn a_set_whose_folder_was_moved_is_still_its_own() {
    let (above, folder, moved) = folder_to_rename();
    save(&folder.join("index.json"), "first").unwrap();
    let killed = begin(&folder.join("index.json")).unwrap();
    fill(&killed, "killed");
    killed.intent.iter().chain(&killed.files).for_each(|held| fs::unlock(held.file()).unwrap());
    std::mem::forget(killed);
    std::fs::rename(&folder, &moved).unwrap();
    let index = moved.join("index.json");
    save(&index, "second").unwrap();
    assert_eq!((load(&index), files(&moved).len()), ("second".into(), 3));
    // An index contains no absolute path.
    let text = std::fs::read_to_string(&index).unwrap();
    assert!(!text.contains(above.path().to_str().unwrap()), "{text}");
}

#[test]
fn files_that_an_index_lists_but_does_not_own_stay_and_are_named() {
    let (folder, index) = empty_folder();
    let precious = folder.path().join("precious.bin");
    std::fs::write(&precious, "precious").unwrap();
    std::fs::write(&index, r#"{"weight_map": {"a": "precious.bin"}}"#).unwrap();
    assert_eq!(retire_set(&index, &RECORD).unwrap(), Retired::Foreign);
    let new = begin(&index).unwrap();
    fill(&new, "new");
    let value = value(&new, "new");
    assert_eq!(new.commit(value).unwrap(), [std::fs::canonicalize(&precious).unwrap()]);
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
}

#[test]
fn a_set_is_retired_whole_wherever_that_stops() {
    let steps = crash::at_each_step(|steps| {
        let (folder, index) = saved_set("old");
        let precious = folder.path().join(format!("one-{}.bin", "a".repeat(32)));
        std::fs::write(&precious, "precious").unwrap();
        let (retired, log) = crash::after(steps, || retire_set(&index, &RECORD));
        // While the index exists, its files exist.
        if index.exists() {
            assert_eq!(load(&index), "old", "after {log:?}");
        }
        let is_over = log.len() < steps;
        let removed = Retired::Removed { kept: Vec::new() };
        assert!(!is_over || retired.unwrap() == removed);
        assert!([removed, Retired::Absent].contains(&retire_set(&index, &RECORD).unwrap()), "after {log:?}");
        let left: Vec<_> = files(folder.path()).into_keys().collect();
        assert_eq!(left, [precious], "after {log:?}");
        is_over
    });
    assert!(steps > 5, "{steps}");
}

#[test]
fn sets_that_are_retired_and_replaced_at_once_are_whole_or_gone() {
    let (folder, index) = empty_folder();
    for round in 0..30 {
        std::thread::scope(|scope| {
            spawn_savers(scope, &index, round, 2);
            for _ in 0..2 {
                scope.spawn(|| retire_set(&index, &RECORD).unwrap());
            }
        });
        let count = files(folder.path()).len();
        if index.exists() {
            assert!(load(&index).starts_with(&format!("{round}-")));
            assert_eq!(count, 3, "round {round}: {:?}", files(folder.path()).into_keys());
        } else {
            assert_eq!(count, 0, "round {round}: {:?}", files(folder.path()).into_keys());
        }
    }
}

/// Mutates the text of an intent: other members, other files with the same marks, truncation, random bytes. Never states
/// the mark of the last file, since none of our intents ever did.
fn mutated(text: &[u8], others: &[PathBuf], random: &mut fastrand::Rng) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(text).unwrap();
    let each = others.iter().map(|path| mark_of(&fs::stat(path).unwrap()));
    let marks: Vec<Value> = each.take(others.len() - 1).map(Value::from).collect();
    let unstated = mark_of(&fs::stat(others.last().unwrap()).unwrap());
    for _ in 0..=random.usize(..3) {
        let other = random.usize(..others.len());
        let members = value["members"].as_array_mut().unwrap();
        let at = random.usize(..=members.len());
        match random.u32(..7) {
            0 => members.insert(at, serde_json::json!([others[other], null])),
            1 => members.insert(at, serde_json::json!([others[other], random.choice(&marks)])),
            2 => members.insert(at, serde_json::json!([others[other], marks[other.min(marks.len() - 1)]])),
            3 if at < members.len() => members[at][0] = others[other].to_str().into(),
            4 if at < members.len() => members[at][1] = random.choice(&marks).unwrap().clone(),
            5 if at < members.len() => drop(members.remove(at)),
            _ => value["version"] = random.u32(..3).into(),
        }
        if !value["members"].is_array() {
            break;
        }
    }
    let mut text = serde_json::to_vec(&value).unwrap();
    match random.u32(..4) {
        0 => text.truncate(random.usize(..text.len())),
        1 => {
            let at = random.usize(..text.len());
            let was = std::mem::replace(&mut text[at], random.u8(..));
            // The marks of files that were created together may differ in one digit only.
            if String::from_utf8_lossy(&text).contains(&unstated) {
                text[at] = was;
            }
        }
        _ => {}
    }
    text
}

#[test]
fn intents_of_killed_saves_that_were_changed_remove_nothing_of_others() {
    let mut random = fastrand::Rng::with_seed(20);
    for _ in 0..50 {
        let folder = tempfile::tempdir().unwrap();
        let (index, elsewhere) = (folder.path().join("index.json"), folder.path().join("elsewhere"));
        save(&index, "live").unwrap();
        let live = files(folder.path()).into_keys();
        std::fs::create_dir(&elsewhere).unwrap();
        // One name without a token, and one with a token.
        let foreign = ["elsewhere/plain.bin".to_owned(), format!("one-{}.bin", "a".repeat(TOKEN_DIGITS))];
        let foreign = foreign.map(|name| folder.path().join(name));
        foreign.iter().for_each(|path| std::fs::write(path, "foreign").unwrap());
        let others: Vec<PathBuf> = live.chain(foreign.clone()).collect();
        for _ in 0..100 {
            let mut new = begin(&index).unwrap();
            let intent = new.intent.take().unwrap();
            let path = intent.path().to_path_buf();
            intent.leave();
            drop(new);
            let text = mutated(&std::fs::read(&path).unwrap(), &others, &mut random);
            std::fs::write(&path, &text).unwrap();
            drop(begin(&index).unwrap());
            let shown = String::from_utf8_lossy(&text);
            assert_eq!(load(&index), "live", "{shown}");
            for path in &foreign {
                let content =
                    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}: {shown}", path.display()));
                assert_eq!(content, b"foreign", "{}: {shown}", path.display());
            }
        }
    }
}
