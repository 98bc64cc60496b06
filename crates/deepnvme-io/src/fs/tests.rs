//! Tests of the file system calls.

use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use super::*;

#[test]
fn files_links_and_folders_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let (file, live, dangling) =
        (folder.path().join("file"), folder.path().join("live"), folder.path().join("dangling"));
    std::fs::write(&file, "1234").unwrap();
    symlink(&file, &live).unwrap();
    symlink("nowhere", &dangling).unwrap();
    let found = stat(&file).unwrap();
    assert_eq!((found.kind, found.bytes, found.links), (FileKind::File, 4, 1));
    assert_eq!(stat(&live).unwrap().identity, found.identity);
    assert_eq!(stat_link(&live).unwrap().kind, FileKind::Link);
    assert_eq!(stat(folder.path()).unwrap().kind, FileKind::Folder);
    assert_eq!((exists(&live), exists(&dangling)), (Ok(true), Ok(false)));
    let mut names = entries(folder.path()).unwrap();
    names.sort();
    assert_eq!(names, ["dangling", "file", "live"]);
}

#[test]
fn an_error_while_listing_is_not_the_end_of_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let (removed, file) = (folder.path().join("removed"), folder.path().join("file"));
    std::fs::create_dir(&removed).unwrap();
    let opened = open_folder(&removed).unwrap();
    std::fs::remove_dir(&removed).unwrap();
    assert_eq!(kernel::names_in(opened), Err(Errno::NOENT), "the C library says that it is empty");
    std::fs::write(&file, "").unwrap();
    assert_eq!(kernel::names_in(open(&file, OFlags::RDONLY, 0).unwrap()), Err(Errno::NOTDIR));
}

#[test]
fn the_two_ways_to_ask_agree() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "12345").unwrap();
    let file = open(&path, OFlags::RDONLY, 0).unwrap();
    let (new, old) = (stat_of(file.as_fd()).unwrap(), kernel::by_fstat(file.as_fd()).unwrap());
    assert_eq!(Stat { born_ns: None, direct_alignment: None, ..new }, old);
}

#[test]
fn only_small_regular_files_are_read_and_nothing_waits() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, file, link) = (folder.path().join("pipe"), folder.path().join("file"), folder.path().join("link"));
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600), 0)
        .unwrap();
    std::fs::write(&file, vec![7; 1000]).unwrap();
    symlink("/dev/zero", &link).unwrap();
    let began = Instant::now();
    assert_eq!(read_small(&file, 1000).unwrap(), vec![7; 1000]);
    for (path, part) in [(&pipe, "a pipe"), (&link, "a character device")] {
        let error = read_small(path, 1000).unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::InvalidInput, Some(path.as_path())));
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(read_small(&file, 999).unwrap_err().to_string().contains("1000 bytes"));
    assert_eq!(read_small(folder.path(), 999).unwrap_err().errno(), Some(Errno::ISDIR.raw_os_error()));
    assert!(read_small(Path::new("/proc/self/maps"), 10).is_err(), "a file that says it is empty is bounded as well");
    assert!(!read_small(Path::new("/proc/self/status"), 1 << 20).unwrap().is_empty());
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn folders_are_made_with_those_above_them() {
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("a/b/c");
    make_folders(&deep).unwrap();
    make_folders(&deep).unwrap();
    assert!(is_folder(&deep));
    std::fs::write(folder.path().join("file"), "").unwrap();
    let error = make_folders(&folder.path().join("file/deeper")).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::NOTDIR.raw_os_error()));
    assert_eq!(error.path(), Some(folder.path().join("file/deeper").as_path()));
    let (link, deeper) = (folder.path().join("link"), folder.path().join("link/deeper"));
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    for path in [&link, &deeper] {
        let error = make_folders(path).unwrap_err();
        assert_eq!((error.kind(), error.path()), (ErrorKind::NotFound, Some(link.as_path())), "{error}");
    }
}
