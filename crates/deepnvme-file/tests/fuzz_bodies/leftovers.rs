//! The lists by which files are removed: the intent of a killed save, the record of an index, the contents of a private
//! folder. Whatever they say, nothing is removed that they do not prove to be theirs.
//!
//! A list states files by their inode and creation time, which differ in each run. So `PATH0` and `MARK0` in an input
//! stand for those of the first file, and so on.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use deepnvme_file::replace::{Member, PrivateFolder, SetReplacement, Temporary, remove_whole_set};
use deepnvme_format::file_list;
use tempfile::TempDir;

const RECORD: [&str; 2] = ["metadata", "files"];
const FOREIGN: &[u8] = b"foreign";

/// Creates a folder in memory, where syncs take no time. `TMPDIR` names another place, whose owner removes what is left.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if std::env::var_os("TMPDIR").is_none() && memory.is_dir() {
        return tempfile::tempdir_in(memory).unwrap();
    }
    tempfile::tempdir().unwrap()
}

/// Returns what lists call a mark: inode and creation time.
fn mark(path: &Path) -> String {
    let stat = fs::symlink_metadata(path).unwrap();
    let born_ns = stat.created().map_or(0, |time| time.duration_since(UNIX_EPOCH).unwrap().as_nanos());
    format!("{:x}-{born_ns:x}", stat.ino())
}

/// Puts the paths and marks of files into an input.
fn expanded(text: &[u8], files: &[PathBuf]) -> Option<String> {
    let mut text = std::str::from_utf8(text).ok()?.to_owned();
    for (number, path) in files.iter().enumerate() {
        text = text.replace(&format!("PATH{number}"), path.to_str().unwrap());
        if path.exists() {
            text = text.replace(&format!("MARK{number}"), &mark(path));
        }
    }
    Some(text)
}

fn names_in(folder: &Path) -> BTreeSet<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn token_name(folder: &Path, letter: &str) -> PathBuf {
    folder.join(format!("one-{}.bin", letter.repeat(32)))
}

fn begin(index: &Path) -> SetReplacement {
    let member = |name: &str| Member { prefix: index.with_file_name(name), suffix: ".bin".into() };
    SetReplacement::begin(index, &[member("one-"), member("two-")], &RECORD).unwrap()
}

fn write_missing(path: &Path, content: &[u8]) {
    if !path.exists() {
        fs::write(path, content).unwrap();
    }
}

/// One saved set, and foreign files in the same folder.
struct Saved {
    folder: TempDir,
    index: PathBuf,
    members: [PathBuf; 2],
}

impl Saved {
    fn new() -> Self {
        let folder = folder();
        let index = folder.path().join("index.json");
        let new = begin(&index);
        new.members().for_each(|path| fs::write(path, "live").unwrap());
        let members: Vec<PathBuf> = new.names().map(PathBuf::from).collect();
        let name = |at: usize| members[at].file_name().unwrap().to_str().unwrap();
        let value = serde_json::json!({ "metadata": {}, "weight_map": { "a": name(0), "b": name(1) } });
        new.commit(value).unwrap();
        Self { folder, index, members: members.try_into().unwrap() }
    }
}

thread_local! {
    static SAVED: Saved = Saved::new();
    static LISTED: TempDir = folder();
    static PRIVATE: TempDir = folder();
}

/// An intent of a killed save, which the next save finds. It may remove number 2, the file of the killed save, if it
/// states that. Numbers 0 and 1 are in use, 3 has no name of a member, and 4 has one but no mark in any input.
pub(crate) fn intent(text: &[u8]) {
    SAVED.with(|Saved { folder, index, members: [first, second] }| {
        let folder = folder.path();
        let (killed, plain, foreign) = (token_name(folder, "a"), folder.join("plain.bin"), token_name(folder, "f"));
        write_missing(&killed, b"killed");
        write_missing(&plain, FOREIGN);
        write_missing(&foreign, FOREIGN);
        let files = [first, second, &killed, &plain].map(Clone::clone);
        let (killed_mark, index_text, before) = (mark(&killed), fs::read(index).unwrap(), names_in(folder));
        let Some(text) = expanded(text, &files) else { return };
        let text = text.replace("PATH4", foreign.to_str().unwrap());
        // Only the maker of a file knows its mark.
        if text.contains(&mark(&foreign)) {
            return;
        }
        let left = Temporary::new(index).unwrap();
        left.fill(text.as_bytes()).unwrap();
        deepnvme_io::fs::unlock(left.file()).unwrap();
        drop(begin(index));
        drop(left);
        let mut after = names_in(folder);
        assert!(!after.insert(killed) || text.contains(&killed_mark), "{text}");
        assert_eq!(after, before, "{text}");
        assert_eq!(fs::read(index).unwrap(), index_text);
        assert!([first, second].iter().all(|path| fs::read(path).unwrap() == b"live"));
        assert!([plain, foreign].iter().all(|path| fs::read(path).unwrap() == FOREIGN));
    });
}

/// The record of an index: which files a removal of the whole set takes. Number 0 is the index, 1 and 2 are its files,
/// and 3 has no name of a member. A blank checksum is filled in, since nothing is removed for other checksums.
pub(crate) fn record(text: &[u8]) {
    LISTED.with(|folder| {
        let folder = folder.path();
        let files =
            [folder.join("index.json"), token_name(folder, "b"), token_name(folder, "c"), folder.join("plain.bin")];
        files.iter().for_each(|path| write_missing(path, FOREIGN));
        let [index, first, second, plain] = &files;
        let marks = [index, first, second].map(|path| mark(path));
        let Some(text) = expanded(text, &files) else { return };
        let text = text.replace("FOLDER", &mark(folder));
        let text = file_list::write_checksum(&text).unwrap_or(text);
        // The same inode as before, so its mark is right.
        fs::write(index, &text).unwrap();
        remove_whole_set(index, &RECORD);
        assert!(fs::read(plain).unwrap() == FOREIGN, "{text}");
        for (path, mark) in [index, first, second].into_iter().zip(&marks) {
            assert!(path.exists() || text.contains(mark), "{} is gone: {text}", path.display());
        }
        assert!(names_in(folder).iter().all(|path| files.contains(path)));
    });
}

/// The contents of a private folder, which goes with exactly the listed files.
pub(crate) fn contents(list: &[u8]) {
    PRIVATE.with(|above| {
        let outside = above.path().join("outside");
        fs::create_dir_all(&outside).unwrap();
        let (foreign, target) = (outside.join("foreign"), above.path().join("new"));
        write_missing(&foreign, FOREIGN);
        let new = PrivateFolder::new(&target).unwrap();
        let path = new.path().to_path_buf();
        fs::create_dir(path.join("sub")).unwrap();
        symlink(&outside, path.join("link")).unwrap();
        let parts =
            r#"{"format":"deepnvme-stripes","version":1,"stripe_bytes":1048576,"parts":["../outside/foreign"]}"#;
        let files = ["a", "sub/b", "x.stripes.json"];
        files.iter().for_each(|name| fs::write(path.join(name), parts).unwrap());
        fs::write(path.join(".deepnvme-contents"), list).unwrap();
        // As the next process does after this one was killed.
        drop(new);
        assert!(fs::read(&foreign).unwrap() == FOREIGN && names_in(&outside).len() == 1);
        let listed = |name: &str| {
            let names = list.split(|byte| *byte == 0).map(|name| Path::new(OsStr::from_bytes(name)));
            names.into_iter().any(|one| one.components().eq(Path::new(name).components()))
        };
        for name in files.into_iter().filter(|name| !listed(name)) {
            assert!(path.join(name).exists(), "{name} is gone");
        }
        if path.exists() {
            fs::remove_dir_all(&path).unwrap();
        }
        assert_eq!(names_in(above.path()).into_iter().collect::<Vec<_>>(), [outside]);
    });
}
