//! The world, and saves of sets and checkpoints in it.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;

use deepnvme_checkpoint::history::{History, Holder, ManifestEntry, PARTS_LIST, Part, SHARDS_LIST};
use deepnvme_file::replace::{Member, SetReplacement, UNPROVEN_MARKER};
use deepnvme_file::{Replacement, Target};
use deepnvme_format::checksums::checksums_of;
use deepnvme_format::file_list::FILES_KEY;
use deepnvme_io::Result;
use deepnvme_io::fs::{self, OFlags};
use deepnvme_simulation::scenario::Context;
use deepnvme_simulation::world::tree::{Losses, NameLosses};
use deepnvme_simulation::world::{FaultTrigger, Setup};
use serde_json::{Value, json};

pub(crate) const FOLDER: &str = "/d0";
/// Members of sets are on another disk than their index: a sync of one does not cover the other.
pub(crate) const MEMBERS: &str = "/d1";
/// Calls from the middle of a save to a little after its end.
pub(crate) const LATE_CALLS: Range<u64> = 28..72;

/// Lose everything that is not durable.
pub(crate) const LOSSES: Losses = Losses { kept_per_mille: 0, names: NameLosses::Any };

pub(crate) fn setup(has_unnamed: bool) -> Setup {
    Setup {
        disks: 2,
        has_unnamed,
        has_locks: true,
        has_birth_times: true,
        has_direct: false,
        failing_per_mille: 0,
        losses: LOSSES,
        power_cut_at: None,
        killed: None,
        fault_trigger: FaultTrigger::Steps,
    }
}

/// Lists the names in both folders. Leaves out files that could neither get a name that states their inode
/// nor be removed.
pub(crate) fn names() -> Vec<String> {
    let names = [FOLDER, MEMBERS].map(|folder| fs::entries(Path::new(folder)).unwrap());
    let names = names.into_iter().flatten().map(|name| name.into_string().unwrap());
    names.filter(|name| !name.contains(UNPROVEN_MARKER)).collect()
}

pub(crate) fn write(path: &Path, text: &str, is_new: bool) -> Result<()> {
    let flags = if is_new { OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL } else { OFlags::WRONLY };
    let written = fs::open(path, flags, 0o600).and_then(|file| {
        fs::write_all(file.as_fd(), text.as_bytes())?;
        fs::sync(file.as_fd())
    });
    written.map_err(|errno| deepnvme_io::Error::os("write", errno).at_path(path))
}

pub(crate) fn begin() -> Result<SetReplacement> {
    let member = |name: &str| Member { prefix: Path::new(MEMBERS).join(name), suffix: ".bin".into() };
    SetReplacement::begin(&Path::new(FOLDER).join("index.json"), &[member("one-"), member("two-")], &["files"])
}

pub(crate) fn commit(new: SetReplacement, text: &str) -> Result<()> {
    for member in new.members() {
        write(member, text, false)?;
    }
    let names = new.names().map(|path| format!("..{}", path.to_str().unwrap()));
    let map: serde_json::Map<String, Value> = names.map(|name| (name.clone(), name.into())).collect();
    new.commit(json!({"weight_map": map})).map(drop)
}

pub(crate) fn set_text() -> String {
    let index: Value =
        serde_json::from_slice(&fs::read_small(&Path::new(FOLDER).join("index.json"), 1 << 20).unwrap()).unwrap();
    let members = index["weight_map"].as_object().unwrap().keys();
    let texts: Vec<_> = members.map(|name| fs::read_small(&Path::new(FOLDER).join(name), 1 << 20).unwrap()).collect();
    assert!(texts.len() == 2 && texts[0] == texts[1], "{texts:?}");
    String::from_utf8(texts[0].clone()).unwrap()
}

pub(crate) fn save(history: &History, step: u64, text: &str) -> deepnvme_checkpoint::Result<()> {
    history.claim(&Holder::new("a test".into(), "group".into()), true)?;
    let name = history.reserve(step, ".pt", &[])?;
    let saved = (|| {
        let new = Replacement::new(&Target::Path(history.folder().join(&name)))?;
        write(&new.temporary().path(), text, false)?;
        history.commit(entry(&name, step, text, Vec::new()), Some(new), &[]).map(drop)
    })();
    if saved.is_err() {
        history.release_name(&name);
    }
    saved
}

pub(crate) fn entry(name: &str, step: u64, text: &str, parts: Vec<Part>) -> ManifestEntry {
    ManifestEntry {
        file: name.to_owned(),
        step,
        nbytes: text.len() as u64,
        index_nbytes: text.len() as u64,
        index_crc64: crc64(text),
        parts,
        ..ManifestEntry::default()
    }
}

pub(crate) fn crc64(text: &str) -> String {
    format!("{:016x}", checksums_of(text.as_bytes()).crc64)
}

/// Saves a checkpoint of one part and its list.
pub(crate) fn save_part(history: &History, step: u64, text: &str) {
    history.claim(&Holder::new("a test".into(), "group".into()), true).unwrap();
    let list = history.reserve(step, &format!(".pt{PARTS_LIST}"), &[]).unwrap();
    let file = format!("{}.part-00-of-01", list.strip_suffix(PARTS_LIST).unwrap());
    write(&history.folder().join(&file), text, true).unwrap();
    write(&history.folder().join(&list), &json!({"parts": [file]}).to_string(), true).unwrap();
    let part =
        Part { file, nbytes: text.len() as u64, host: "here".into(), head_crc64: Some(crc64(text)), written_ns: None };
    history.commit(entry(&list, step, text, vec![part]), None, &[]).unwrap();
}

/// Saves a checkpoint of one shard in a folder.
pub(crate) fn save_shard(history: &History, step: u64, text: &str) {
    const SHARD: &str = "shard-00000-0123456789abcdef.safetensors";
    history.claim(&Holder::new("a test".into(), "group".into()), true).unwrap();
    let name = history.reserve(step, "", &[]).unwrap();
    let folder = history.folder().join(&name);
    fs::make_folder(&folder, 0o700).unwrap();
    let header_bytes = (text.len() as u64).to_le_bytes();
    let shard = [header_bytes.as_slice(), text.as_bytes()].concat();
    let file = fs::open(&folder.join(SHARD), OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, 0o600).unwrap();
    fs::write_all(file.as_fd(), &shard).unwrap();
    let fingerprint = json!({"bytes": shard.len(), "index_crc64": format!("{:016x}", checksums_of(&shard).crc64)});
    let index = json!({"entries": {"a": {"bytes": [SHARD, "a"]}}, FILES_KEY: {SHARD: fingerprint}}).to_string();
    write(&folder.join(SHARDS_LIST), &index, true).unwrap();
    history.commit(entry(&name, step, &index, Vec::new()), None, &[]).unwrap();
}

/// Returns the text of each committed checkpoint.
pub(crate) fn committed_texts() -> Vec<String> {
    let manifest = History::new(FOLDER.into(), Some(1), true).read().unwrap();
    let text = |entry: &ManifestEntry| {
        let names = std::iter::once(&entry.file).chain(entry.pending.get(&entry.file));
        let found = names.filter_map(|name| fs::read_small(&Path::new(FOLDER).join(name), 1 << 20).ok()).next();
        String::from_utf8(found.unwrap_or_else(|| panic!("{} is committed, but its file is missing", entry.file)))
            .unwrap()
    };
    manifest.checkpoints.iter().map(text).collect()
}

/// Cuts the power, and restarts. The losses of the setup decide which non-durable changes remain.
pub(crate) fn cut_power(context: &Context) {
    context.world.cut_power();
    context.world.restart().unwrap();
}
