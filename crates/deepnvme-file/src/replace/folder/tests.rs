//! Folders that appear complete, and cleanup of those that do not.

use super::*;
use deepnvme_io::fs::crash;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn make(target: &Path) -> Result<()> {
    let mut folder = PrivateFolder::new(target)?;
    std::fs::write(folder.add(Path::new("one"))?, "1").unwrap();
    fs::make_folder(&folder.add(Path::new("sub"))?, 0o700).map_err(|errno| Error::os("make", errno))?;
    std::fs::write(folder.add(Path::new("sub/two"))?, "2").unwrap();
    folder.commit()
}

/// Abandons a private folder as a killed process does. Returns its path.
fn abandon(folder: PrivateFolder) -> PathBuf {
    let path = folder.path().to_path_buf();
    fs::unlock(folder.folder.as_fd()).unwrap();
    std::mem::forget(folder);
    path
}

#[test]
fn a_folder_appears_as_a_whole() {
    let above = tempfile::tempdir().unwrap();
    let target = above.path().join("model");
    make(&target).unwrap();
    assert_eq!((names(above.path()), names(&target)), (vec!["model".into()], vec!["one".into(), "sub".into()]));
    assert!(make(&target).is_err(), "the name is taken");
    assert_eq!(names(above.path()), ["model"]);
}

#[test]
fn a_private_folder_is_removed_from_a_folder_that_was_renamed() {
    let above = tempfile::tempdir().unwrap();
    let (old, new) = (above.path().join("old"), above.path().join("new"));
    std::fs::create_dir(&old).unwrap();
    let mut folder = PrivateFolder::new(&old.join("model")).unwrap();
    std::fs::write(folder.add(Path::new("one")).unwrap(), "1").unwrap();
    std::fs::rename(&old, &new).unwrap();
    drop(folder);
    assert_eq!(names(&new), [""; 0]);
}

#[test]
fn an_empty_folder_stays_until_the_new_one_is_in_its_place_and_passes_its_permissions_on() {
    use std::os::unix::fs::PermissionsExt;
    crash::at_each_step(|steps| {
        let above = tempfile::tempdir().unwrap();
        let target = above.path().join("model");
        std::fs::create_dir(&target).unwrap();
        std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o750)).unwrap();
        let (made, log) = crash::after(steps, || make(&target));
        let mode = std::fs::metadata(&target).unwrap_or_else(|error| panic!("after {log:?}: {error}")).permissions();
        assert_eq!(mode.mode() & 0o7777, 0o750, "after {log:?}");
        made.is_ok() && log.len() < steps
    });
}

#[test]
fn a_process_that_stops_at_any_step_leaves_nothing_that_the_next_one_does_not_remove() {
    let steps = crash::at_each_step(|steps| {
        let above = tempfile::tempdir().unwrap();
        let target = above.path().join("model");
        let (made, log) = crash::after(steps, || make(&target));
        if target.exists() {
            assert_eq!(std::fs::read(target.join("sub/two")).unwrap(), b"2", "after {log:?}");
        } else {
            make(&target).unwrap_or_else(|error| panic!("after {log:?}: {error}"));
            // A folder whose writer was killed before it was renamed to a name that states its inode is empty, and stays.
            let left: Vec<_> = names(above.path()).into_iter().filter(|name| !name.contains("-new-")).collect();
            assert_eq!(left, ["model"], "after {log:?}");
        }
        made.is_ok() && log.len() < steps
    });
    assert!(steps > 10);
}

#[test]
fn foreign_files_in_a_leftover_folder_stay() {
    let above = tempfile::tempdir().unwrap();
    let target = above.path().join("model");
    let mut folder = PrivateFolder::new(&target).unwrap();
    let (own, foreign) = (folder.add(Path::new("own")).unwrap(), folder.path().join("foreign"));
    std::fs::write(&own, "own").unwrap();
    std::fs::write(&foreign, "foreign").unwrap();
    let private = abandon(folder);
    // Planted names in the form of private folders.
    let planted = above.path().join(".model.deepnvme-tmp-12-0-0123456789abcdef");
    std::fs::create_dir(&planted).unwrap();
    std::fs::write(planted.join(CONTENTS), "x\0").unwrap();
    std::fs::write(planted.join("x"), "x").unwrap();
    remove_leftover_folders(&target);
    assert!(!own.exists() && planted.join("x").exists());
    assert_eq!(std::fs::read(&foreign).unwrap(), b"foreign");
    std::fs::remove_file(foreign).unwrap();
    remove_leftover_folders(&target);
    assert!(!private.exists());
}

#[test]
fn names_that_lead_out_are_refused() {
    let above = tempfile::tempdir().unwrap();
    let mut folder = PrivateFolder::new(&above.path().join("model")).unwrap();
    for name in ["", "..", "../x", "/etc/passwd", "a/../../b", CONTENTS] {
        assert_eq!(folder.add(Path::new(name)).unwrap_err().kind(), ErrorKind::InvalidInput, "{name}");
    }
    drop(folder);
    assert!(names(above.path()).is_empty());
}

#[test]
fn changed_lists_of_leftover_folders_remove_nothing_elsewhere() {
    let mut random = fastrand::Rng::with_seed(20);
    let above = tempfile::tempdir().unwrap();
    let (target, outside) = (above.path().join("model"), above.path().join("outside"));
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("foreign"), "foreign").unwrap();
    std::os::unix::fs::symlink(&outside, above.path().join("link")).unwrap();
    let absolute = outside.join("foreign");
    let names = [
        "one",
        "sub",
        "sub/two",
        "sub/foreign",
        "../outside/foreign",
        "../outside",
        "sub/../../outside/foreign",
        "",
        ".",
        "..",
        CONTENTS,
    ];
    let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).chain([absolute.as_os_str().as_bytes()]).collect();
    for _ in 0..5000 {
        let mut folder = PrivateFolder::new(&target).unwrap();
        std::fs::write(folder.add(Path::new("one")).unwrap(), "1").unwrap();
        // A folder that became a link to a foreign folder.
        std::os::unix::fs::symlink(&outside, folder.add(Path::new("sub")).unwrap()).unwrap();
        let mut list: Vec<u8> = Vec::new();
        for _ in 0..random.usize(..6) {
            list.extend_from_slice(random.choice(&names).unwrap());
            list.push(if random.u32(..8) == 0 { random.u8(..) } else { 0 });
        }
        let path = folder.path().to_path_buf();
        std::fs::write(path.join(CONTENTS), &list).unwrap();
        abandon(folder);
        remove_leftover_folders(&target);
        let shown = String::from_utf8_lossy(&list);
        assert_eq!(std::fs::read(outside.join("foreign")).ok().as_deref(), Some(&b"foreign"[..]), "{shown}");
        let _ = std::fs::remove_dir_all(path);
    }
}
