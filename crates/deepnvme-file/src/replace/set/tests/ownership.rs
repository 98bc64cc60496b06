//! Which files an index owns: not those of another name of it, and none that somebody has changed or that lie
//! elsewhere.

use std::time::Duration;

use super::*;

/// Returns a folder, and the path of an index in a folder below it.
fn folder_below() -> (TempDir, PathBuf) {
    let above = tempfile::tempdir().unwrap();
    let folder = above.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    (above, folder.join("index.json"))
}

/// Edits the metadata of an index in place, so that it stays the recorded one.
fn edit(index: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&std::fs::read(index).unwrap()).unwrap();
    change(&mut value["metadata"]);
    std::fs::write(index, value.to_string()).unwrap();
}

#[test]
fn an_index_under_another_name_owns_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (index, linked) = (folder.path().join("index.json"), folder.path().join("linked.json"));
    let other = folder.path().join("copy");
    std::fs::create_dir(&other).unwrap();
    save(&index, "one").unwrap();
    for link in [&linked, &other.join("index.json")] {
        std::fs::hard_link(&index, link).unwrap();
        save(link, "other").unwrap();
        assert_eq!((load(link), load(&index)), ("other".into(), "one".into()));
        assert_eq!(retire_set(link, &RECORD).unwrap(), Retired::Removed { kept: Vec::new() });
        std::fs::hard_link(&index, link).unwrap();
        assert_eq!(retire_set(link, &RECORD).unwrap(), Retired::Foreign);
        remove_whole_set(link, &RECORD);
        assert_eq!(load(&index), "one");
    }
    // The index itself still owns its members.
    save(&index, "two").unwrap();
    assert_eq!(load(&index), "two");
    std::fs::remove_file(&linked).unwrap();
    std::fs::remove_dir_all(&other).unwrap();
    assert_eq!(files(folder.path()).len(), 3);
}

#[test]
fn a_member_that_somebody_has_written_to_stays() {
    let (folder, index) = saved_set("old");
    let members = members(&index);
    // As long as before, in place, and later than the clock of files has ticked.
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(&members[0], "his").unwrap();
    let new = begin(&index).unwrap();
    fill(&new, "new");
    let value = value(&new, "new");
    assert_eq!(new.commit(value).unwrap(), [std::fs::canonicalize(&members[0]).unwrap()]);
    save(&index, "newer").unwrap();
    assert_eq!(load(&index), "newer");
    assert_eq!(std::fs::read_to_string(&members[0]).unwrap(), "his");
    assert!(!members[1].exists());
    assert_eq!(files(folder.path()).len(), 4);
    let text = std::fs::read_to_string(&index).unwrap();
    assert!(!text.contains(members[0].file_name().unwrap().to_str().unwrap()), "forgotten: {text}");
}

#[test]
fn members_have_private_names_until_they_are_whole() {
    let (folder, index) = empty_folder();
    let new = begin(&index).unwrap();
    fill(&new, "new");
    let is_private = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with('.');
    assert!(files(folder.path()).keys().all(is_private));
    let value = value(&new, "new");
    new.commit(value).unwrap();
    assert!(!files(folder.path()).keys().any(is_private));
}

#[test]
fn a_record_that_leads_out_of_the_folder_owns_nothing_there() {
    let (above, index) = folder_below();
    for name in ["thesis.txt".to_owned(), format!("one-{}.bin", "a".repeat(32))] {
        let theirs = above.path().join(&name);
        std::fs::write(&theirs, "theirs").unwrap();
        let mark = written_mark(&fs::stat(&theirs).unwrap());
        for (key, path) in [("replaces", format!("../{name}")), ("members", format!("../{name}"))] {
            save(&index, "old").unwrap();
            edit(&index, |metadata| metadata["files"][key] = serde_json::json!([[path, mark]]));
            save(&index, "new").unwrap();
            assert_eq!(std::fs::read_to_string(&theirs).unwrap(), "theirs", "{key}");
        }
    }
    let plain = above.path().join("thesis.txt");
    let mark = written_mark(&fs::stat(&plain).unwrap());
    save(&index, "old").unwrap();
    edit(&index, |metadata| metadata["files"]["replaces"] = serde_json::json!([[plain, mark]]));
    save(&index, "new").unwrap();
    assert!(plain.exists());
}

#[test]
fn an_index_that_does_not_match_its_checksum_owns_nothing() {
    let (above, index) = folder_below();
    // Its name has the form of a member's.
    let theirs = above.path().join(format!("one-{}.bin", "a".repeat(32)));
    std::fs::write(&theirs, "theirs").unwrap();
    let mark = written_mark(&fs::stat(&theirs).unwrap());
    for has_checksum in [true, false] {
        save(&index, "old").unwrap();
        let members = members(&index);
        edit(&index, |metadata| {
            metadata["files"]["replaces"] = serde_json::json!([[theirs, mark]]);
            if !has_checksum {
                metadata.as_object_mut().unwrap().remove(file_list::CHECKSUM_KEY);
            }
        });
        save(&index, "new").unwrap();
        assert_eq!(load(&index), "new");
        assert!(theirs.exists() && members.iter().all(|member| member.exists()), "{has_checksum}");
    }
}

/// Found by the fuzz target `intent`.
#[test]
fn an_index_that_never_got_its_name_owns_no_file_without_a_token() {
    let (folder, index) = empty_folder();
    let names = [format!("one-{}.bin", "a".repeat(TOKEN_DIGITS)), "plain.bin".into()];
    let [own, plain] = names.map(|name| folder.path().join(name));
    let members = [&own, &plain].map(|path| {
        std::fs::write(path, "text").unwrap();
        serde_json::json!([path, mark_of(&fs::stat(path).unwrap())])
    });
    let killed = Temporary::new(&index).unwrap();
    let record = serde_json::json!({"index": "", "token": "", "members": members});
    killed.fill(serde_json::json!({"metadata": {"files": record}}).to_string().as_bytes()).unwrap();
    killed.leave();
    drop(begin(&index).unwrap());
    assert_eq!(files(folder.path()).into_keys().collect::<Vec<_>>(), [plain]);
}
