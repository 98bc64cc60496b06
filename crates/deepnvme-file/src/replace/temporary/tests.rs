//! Names that prove a file's identity, and names that do not.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// Returns all files of a folder with their bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.clone(), std::fs::read(&path).unwrap_or_default())).collect()
}

/// Abandons a temporary as a killed process does.
fn abandon(temporary: Temporary) -> PathBuf {
    let path = temporary.path().to_path_buf();
    fs::unlock(temporary.file()).unwrap();
    std::mem::forget(temporary);
    path
}

/// Asserts that no temporary of this target stays in its folder.
fn assert_removed(target: &Path) {
    remove_leftovers(target);
    assert!(files(target.parent().unwrap()).is_empty());
}

#[test]
fn a_name_states_which_file_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("file");
    let temporary = Temporary::new(&target).unwrap();
    let stat = fs::stat_link(temporary.path()).unwrap();
    let name = temporary.path().file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with(&format!(".file{TEMPORARY_MARKER}{:x}-", stat.identity.inode)), "{name}");
    assert!(UNPROVEN_MARKER.starts_with(TEMPORARY_MARKER));
    assert!(is_proof(OsStr::new(name), &prefix(&target), &stat));
    assert_eq!(stat.mode, 0o600);
    assert_ne!(Temporary::new(&target).unwrap().path(), temporary.path());
    drop(temporary);
    assert!(files(folder.path()).is_empty());
}

#[test]
fn a_temporary_is_removed_from_a_folder_that_was_renamed() {
    let above = tempfile::tempdir().unwrap();
    let (old, new) = (above.path().join("old"), above.path().join("new"));
    std::fs::create_dir(&old).unwrap();
    let temporary = Temporary::new(&old.join("file")).unwrap();
    std::fs::rename(&old, &new).unwrap();
    // A foreign file under the name of the temporary.
    std::fs::create_dir(&old).unwrap();
    std::fs::write(temporary.path(), b"foreign").unwrap();
    drop(temporary);
    assert!(files(&new).is_empty());
    assert_eq!(files(&old).into_values().collect::<Vec<_>>(), [b"foreign"]);
}

#[test]
fn a_copy_of_a_temporary_never_gets_the_name() {
    let above = tempfile::tempdir().unwrap();
    let (old, new) = (above.path().join("old"), above.path().join("new"));
    for is_new in [false, true] {
        std::fs::create_dir(&old).unwrap();
        let target = old.join("file");
        let mut temporary = Temporary::new(&target).unwrap();
        temporary.fill(b"whole").unwrap();
        std::fs::rename(&old, &new).unwrap();
        std::fs::create_dir(&old).unwrap();
        std::fs::copy(new.join(temporary.path().file_name().unwrap()), temporary.path()).unwrap();
        let renamed = if is_new { temporary.rename_new(&target) } else { temporary.rename(&target) };
        assert_eq!(renamed, Err(MOVED));
        assert!(!target.exists() && temporary.path().exists());
        drop(temporary);
        assert!(files(&new).is_empty(), "the file is removed where it lies now");
        std::fs::remove_dir(&new).unwrap();
        std::fs::remove_dir_all(&old).unwrap();
    }
}

#[test]
fn a_caller_may_replace_a_temporary_under_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("file");
    let mut temporary = Temporary::new(&target).unwrap();
    std::fs::write(folder.path().join("other"), b"whole").unwrap();
    std::fs::rename(folder.path().join("other"), temporary.path()).unwrap();
    assert_eq!(temporary.rename(&target), Ok(()));
    assert_eq!(files(folder.path()).into_values().collect::<Vec<_>>(), [b"whole"]);
}

#[test]
fn names_prove_the_file_without_o_tmpfile() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("file");
    let (path, file, identity) = named(folder.path(), &prefix(&target)).unwrap();
    assert_eq!(fs::stat_link(&path).unwrap().identity, identity);
    remove_leftovers(&target);
    assert_eq!(files(folder.path()).len(), 1, "it is locked");
    drop(file);
    assert_removed(&target);
}

#[test]
fn names_of_every_length_and_kind_fit() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["x".repeat(255), "\u{1F600}".repeat(63), "\u{e9}".repeat(127)] {
        let target = folder.path().join(&name);
        let temporary = Temporary::new(&target).unwrap();
        assert!(temporary.path().to_str().is_some(), "whole characters only");
        abandon(temporary);
        assert_removed(&target);
    }
}

#[test]
fn only_leftovers_of_a_killed_writer_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("file");
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let leftover = abandon(Temporary::new(&target).unwrap());
    let proof = leftover.file_name().unwrap().to_str().unwrap().to_owned();
    let living = Temporary::new(&target).unwrap();
    // A copy, an old form of names, nearly valid names, and the temporary of another file.
    put(&format!("{}1", &proof[..proof.len() - 1]), b"another random end, and another inode");
    for name in [".file.deepnvme-tmp-1-1", ".file.deepnvme-tmp-", ".file.deepnvme-tmp-12-0-0123456789abcdef", "file"] {
        put(name, name.as_bytes());
    }
    let long = format!("{proof}0");
    std::fs::hard_link(&leftover, folder.path().join(&long)).unwrap();
    let other = abandon(Temporary::new(&folder.path().join("file2")).unwrap());
    symlink(&leftover, folder.path().join(".file.deepnvme-tmp-link")).unwrap();
    std::fs::create_dir(folder.path().join(".file.deepnvme-tmp-1-2")).unwrap();
    let before = files(folder.path());
    remove_leftovers(&target);
    assert_eq!(files(folder.path()), before, "a file with a second name is somebody's");
    std::fs::remove_file(folder.path().join(&long)).unwrap();
    remove_leftovers(&target);
    let gone: Vec<_> = before.keys().filter(|path| !files(folder.path()).contains_key(*path)).collect();
    assert_eq!(
        gone,
        [&leftover, &folder.path().join(long)]
            .into_iter()
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect::<Vec<_>>()
    );
    assert!(living.path().exists() && other.exists());
}

#[test]
fn a_name_that_is_another_file_by_now_is_not_removed_by_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("file");
    let temporary = Temporary::new(&target).unwrap();
    let path = temporary.path().to_path_buf();
    std::fs::rename(&path, folder.path().join("moved")).unwrap();
    std::fs::write(&path, "somebody else's").unwrap();
    drop(temporary);
    assert_eq!(std::fs::read(&path).unwrap(), b"somebody else's");
}

#[test]
fn only_the_permissions_proper_are_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("file");
    std::fs::write(&target, "").unwrap();
    for (old, new) in [(0o4755, 0o755), (0o2750, 0o750), (0o640, 0o640)] {
        std::fs::set_permissions(&target, std::fs::Permissions::from_mode(old)).unwrap();
        let temporary = Temporary::new(&target).unwrap();
        temporary.take_mode_of(&target).unwrap();
        assert_eq!(fs::stat_of(temporary.file()).unwrap().mode, new);
    }
}

#[test]
fn links_are_resolved_by_the_kernel_and_only_files_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "").unwrap();
    symlink("file", at("live")).unwrap();
    symlink("live", at("twice")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    symlink("loop", at("loop")).unwrap();
    symlink("/dev/null", at("null")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let real = std::fs::canonicalize(at("file")).unwrap();
    for name in ["live", "twice"] {
        assert_eq!(resolve(&at(name)).unwrap(), real);
    }
    assert_eq!(resolve(&at("new")).unwrap(), at("new"));
    for (name, kind, part) in [
        ("dangling", ErrorKind::NotFound, "leads nowhere"),
        ("loop", ErrorKind::Io, "circle"),
        ("null", ErrorKind::InvalidInput, "a character device"),
        ("pipe", ErrorKind::InvalidInput, "a pipe"),
    ] {
        let error = resolve(&at(name)).unwrap_err();
        assert_eq!((error.kind(), error.path()), (kind, Some(at(name).as_path())), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(resolve(folder.path()).unwrap_err().errno(), Some(Errno::ISDIR.raw_os_error()));
    assert!(resolve(Path::new("/dev/null")).is_err());
}
