//! Properties that hold for any bytes: of a checkpoint manifest, of the index of a distributed checkpoint, and of the
//! lock file.
#![allow(dead_code, unreachable_pub, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use std::path::{Component, Path};

use deepnvme_checkpoint::history::{Holder, Manifest, SHARDS_LIST, listed_parts, listed_shards};
use deepnvme_checkpoint::read::{find_set, find_shards};
use deepnvme_format::file_list;
use tempfile::TempDir;

thread_local! {
    static FOLDER: TempDir = folder();
}

/// Creates a folder in memory. `TMPDIR` names another place, whose owner removes what is left.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if std::env::var_os("TMPDIR").is_none() && memory.is_dir() {
        return tempfile::tempdir_in(memory).unwrap();
    }
    tempfile::tempdir().unwrap()
}

/// Parses `manifest.json`.
pub fn history(text: &[u8]) {
    let Ok(manifest) = Manifest::parse(text) else { return };
    for entry in manifest.checkpoints.iter().chain(&manifest.retired) {
        for name in entry.names() {
            // A file in the folder itself, with a checkpoint's name.
            let parts: Vec<Component<'_>> = Path::new(name).components().collect();
            assert!(matches!(parts[..], [Component::Normal(part)] if part == name) && !name.contains('\0'), "{name:?}");
            assert!(name.starts_with("step-") || name.starts_with(".step-"), "{name:?}");
            assert!(manifest.names().contains(name));
        }
    }
    assert_eq!(Manifest::parse(manifest.text().as_bytes()).unwrap(), manifest);
}

/// Parses `deepnvme.json` as commands and the history of checkpoints do; the loader is in Python. Reads the same text as
/// the index of a sharded model. A blank checksum is filled in, since other checksums are rejected early.
pub fn shards(text: &[u8]) {
    let sealed = std::str::from_utf8(text).ok().and_then(|text| file_list::write_checksum(text).ok());
    let text = sealed.as_deref().map_or(text, str::as_bytes);
    for name in listed_shards(text).into_iter().flatten() {
        assert!(name.starts_with("shard-") && name.ends_with(".safetensors"), "{name:?}");
        assert_eq!(Path::new(&name).file_name(), Some(name.as_ref()));
    }
    drop(listed_parts(text));
    FOLDER.with(|folder| {
        let (folder, index) = (folder.path(), folder.path().join("model.safetensors.index.json"));
        std::fs::write(folder.join(SHARDS_LIST), text).unwrap();
        std::fs::write(&index, text).unwrap();
        let found = [find_shards(folder).ok().flatten(), find_set(&index).ok()];
        for set in found.into_iter().flatten() {
            assert!(set.list.as_ref().is_some_and(|list| list.bytes == text.len() as u64));
            for (at, file) in set.files.iter().enumerate() {
                assert_eq!(file.path.parent(), Some(folder), "{:?}", file.path);
                assert!(at == 0 || set.files[at - 1].path < file.path);
            }
        }
    });
}

/// Parses the lock file of a folder.
pub fn lock(text: &[u8]) {
    let Some(holder) = Holder::parse(text) else { return };
    assert_eq!(Holder::parse(holder.text().as_bytes()), Some(holder));
}
