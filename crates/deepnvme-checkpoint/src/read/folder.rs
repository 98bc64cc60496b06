//! A model in several files in the layout of Hugging Face: a folder, or its index.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_file::{StripeSet, Target};
use deepnvme_format::Error as FormatError;
use deepnvme_format::file_list::{self, FileFingerprint, Replaced, SealState};
use deepnvme_format::safetensors::Index;
use deepnvme_io::fs::Stat;
use deepnvme_io::op::Errno;
use deepnvme_io::{Engine, Error as IoError, ErrorKind, display, fs};

use super::Reader;
use crate::error::{Error, PACKED_MODEL, Result};
use crate::history::{self, MANIFEST};

/// Suffix of an index's name.
pub const INDEX_SUFFIX: &str = ".index.json";
/// The name of a model whose tensors are packed.
pub const PACKED_NAME: &str = "packed.safetensors";
/// The name of the file list of a distributed checkpoint.
pub const SHARDS_LIST: &str = "deepnvme.json";
/// Maximum size of an index.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// How often a set may be replaced while its files are being opened.
const REPLACEMENTS_MAX: usize = 100;
/// Names to search for in a folder, in order of preference: a file, or its index.
const IN_FOLDER: [&str; 3] = ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors"];

/// One of the files that a path refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointFile {
    /// Path of the file.
    pub path: PathBuf,
    /// The tensors that the index assigns to the file (`None`: all).
    pub names: Option<Vec<String>>,
    /// The fingerprint of the file according to the index.
    pub fingerprint: Option<FileFingerprint>,
    /// The tensors of the file that are pickled values, according to the list of a distributed checkpoint.
    pub values: Vec<String>,
}

impl CheckpointFile {
    /// Creates a file that no index lists.
    #[must_use]
    pub fn unlisted(path: PathBuf) -> Self {
        Self { path, names: None, fingerprint: None, values: Vec::new() }
    }

    /// Opens the file and checks every claim of the index about it.
    ///
    /// # Errors
    /// As [`Reader::open`] and [`compare`](Self::compare).
    pub fn open(&self, engine: &Engine) -> Result<Reader> {
        let reader = Reader::open(engine, &self.target()?)?;
        self.compare(engine, &reader)?;
        Ok(reader)
    }

    /// Returns the file itself, or the stripe set if the path is a manifest.
    ///
    /// # Errors
    /// `Io` if the manifest cannot be read.
    pub fn target(&self) -> Result<Target> {
        if self.path.as_os_str().as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes()) {
            return Ok(Target::Stripes(StripeSet::from_manifest(&self.path)?));
        }
        Ok(Target::Path(self.path.clone()))
    }

    /// Checks every claim of the index about the open file: its tensors, its size and its own index.
    ///
    /// # Errors
    /// `Format` if a tensor is missing, `NotListed` if it is another file, or `Io`.
    pub fn compare(&self, engine: &Engine, reader: &Reader) -> Result<()> {
        reader.require(self.names.as_deref().unwrap_or_default())?;
        self.fingerprint.map_or(Ok(()), |fingerprint| reader.compare_fingerprint(engine, fingerprint))
    }
}

/// The file list of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileList {
    /// Path of the list.
    pub path: PathBuf,
    /// Size of the list.
    pub bytes: u64,
    /// Whether the list matches its checksum.
    pub state: SealState,
}

/// The files that a path refers to, and their list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSet {
    /// The files, sorted by name.
    pub files: Vec<CheckpointFile>,
    /// The list, if there is one.
    pub list: Option<FileList>,
}

impl FileSet {
    /// Returns the set of one file that no list names.
    #[must_use]
    pub fn single(path: PathBuf) -> Self {
        Self { files: vec![CheckpointFile::unlisted(path)], list: None }
    }

    /// Compares the list with its checksum.
    ///
    /// # Errors
    /// `ChangedList`.
    pub fn check(&self) -> Result<()> {
        match &self.list {
            Some(FileList { path, state: SealState::Damaged, .. }) => Err(Error::ChangedList { path: path.clone() }),
            _ => Ok(()),
        }
    }
}

/// The files found for a name.
enum Found {
    /// One file.
    File(PathBuf),
    /// An index of several files, and its text.
    Index(PathBuf, Vec<u8>),
}

impl Found {
    fn into_set(self) -> Result<FileSet> {
        match self {
            Self::File(path) => Ok(FileSet::single(path)),
            Self::Index(path, text) => of_index(path, &text),
        }
    }
}

/// Finds the files that a path refers to: a file, an index, or a folder that contains one. Under a file's name, the
/// latest save counts, whether it is one file or several with an index.
///
/// # Errors
/// `Io` if a folder has no such file or an index cannot be read, or `Format` for an index that cannot be parsed and a
/// folder with a packed model. A single file is not opened here, so it may be missing.
pub fn find_set(path: &Path) -> Result<FileSet> {
    if fs::is_folder(path) {
        return find_model(path)?.ok_or_else(|| no_model(path));
    }
    let found = if path.as_os_str().as_encoded_bytes().ends_with(INDEX_SUFFIX.as_bytes()) {
        Found::Index(path.to_path_buf(), fs::read_small(path, INDEX_BYTES_MAX)?)
    } else {
        newest(path)?.unwrap_or_else(|| Found::File(path.to_path_buf()))
    };
    found.into_set()
}

/// Finds the files of a folder's model. Returns `None` if the folder has none.
///
/// # Errors
/// As [`find_set`].
pub fn find_model(folder: &Path) -> Result<Option<FileSet>> {
    for name in IN_FOLDER {
        if let Some(found) = newest(&folder.join(name))? {
            return found.into_set().map(Some);
        }
    }
    Ok(None)
}

/// Refuses a name by which [`find_set`] finds several files. A single file under it would hide them, and could not be
/// loaded.
///
/// # Errors
/// `InvalidInput`.
pub fn refuse_list_name(target: &Path) -> Result<()> {
    let name = target.file_name().unwrap_or_default().as_encoded_bytes();
    let remedy = if name.ends_with(MANIFEST_SUFFIX.as_bytes()) {
        "to write to the stripe set, pass the StripeSet itself"
    } else if name.ends_with(INDEX_SUFFIX.as_bytes()) {
        "leave out .index.json"
    } else if name == SHARDS_LIST.as_bytes() {
        "a distributed checkpoint is saved under its folder's name"
    } else {
        return Ok(());
    };
    let detail = format!("this is the name of a list of files, not of one; {remedy}, or choose another name");
    Err(IoError::new(ErrorKind::InvalidInput, "save", detail).at_path(target).into())
}

/// Finds the latest save under a file's name. Returns `None` if neither the file nor its index exists.
///
/// A single file takes precedence over an index, as in Hugging Face's loaders, unless the index states that it replaces
/// that very file. A save of one file removes the index of an earlier save. A save of several files keeps the single
/// file. A damaged or unreadable index may have replaced the file, so it is an error, never a reason to load the older
/// file.
fn newest(file: &Path) -> Result<Option<Found>> {
    let mut index = file.to_path_buf().into_os_string();
    index.push(INDEX_SUFFIX);
    let index = PathBuf::from(index);
    // Read the index first: if it is gone, the single file that replaced it already exists.
    let text = match fs::read_small_if_there(&index, INDEX_BYTES_MAX) {
        Ok(text) => text,
        // No index can have that name.
        Err(error) if error.errno() == Some(Errno::NAMETOOLONG.raw_os_error()) => None,
        Err(error) => return Err(error.into()),
    };
    // A dangling link counts as present: its target may be the latest save.
    let is_absent = fs::is_absent(file);
    let stat = fs::stat(file);
    Ok(match (stat, text) {
        (Ok(stat), Some(text)) if is_replaced_by(&stat, &text) => Some(Found::Index(index, text)),
        (_, Some(text)) if is_absent => Some(Found::Index(index, text)),
        (_, None) if is_absent => None,
        // Opening the file reports any error.
        (_, _) => Some(Found::File(file.to_path_buf())),
    })
}

/// Returns whether an index takes precedence over the single file. A damaged index does, so that reading it fails.
fn is_replaced_by(stat: &Stat, text: &[u8]) -> bool {
    match file_list::seal_state(text) {
        SealState::Sealed => file_list::replaces(text).is_some_and(|replaced| is_that(stat, replaced)),
        SealState::Damaged => true,
        // Another program's index. If it was not saved durably, a power cut may leave it empty or zeroed.
        SealState::Unsealed => serde_json::from_slice::<serde::de::IgnoredAny>(text).is_err(),
    }
}

/// Returns whether this is still the file that the index replaced. Some archivers round times to whole seconds.
fn is_that(file: &Stat, replaced: Replaced) -> bool {
    const SECOND: i128 = 1_000_000_000;
    let then = i128::from(replaced.modified_ns);
    file.bytes == replaced.bytes && [then, then - then.rem_euclid(SECOND)].contains(&file.modified_ns)
}

fn of_index(path: PathBuf, text: &[u8]) -> Result<FileSet> {
    let index = Index::parse(text).map_err(|error| Error::format(&path, error))?;
    let (state, fingerprints) = fingerprints(&path, text)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut files: Vec<CheckpointFile> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (name, file) in index.weight_map {
        let at = *known.entry(file.clone()).or_insert_with(|| {
            let fingerprint = fingerprints.get(&file).copied();
            let (path, names) = (folder.join(&file), Some(Vec::new()));
            files.push(CheckpointFile { path, names, fingerprint, values: Vec::new() });
            files.len() - 1
        });
        files[at].names.get_or_insert_default().push(name);
    }
    files.sort_by(|left, right| left.path.cmp(&right.path));
    let bytes = text.len() as u64;
    Ok(FileSet { files, list: Some(FileList { path, bytes, state }) })
}

/// Finds the files of a distributed checkpoint's folder. Returns `None` if the folder has no list of its files.
///
/// # Errors
/// `Io`, or `Format` for a damaged list.
pub fn find_shards(folder: &Path) -> Result<Option<FileSet>> {
    let path = folder.join(SHARDS_LIST);
    let Some(text) = fs::read_small_if_there(&path, INDEX_BYTES_MAX)? else { return Ok(None) };
    let (mut state, fingerprints) = fingerprints(&path, &text)?;
    // Cut so short that no checksum is left.
    if state == SealState::Unsealed && serde_json::from_slice::<serde::de::IgnoredAny>(&text).is_err() {
        state = SealState::Damaged;
    }
    let mut values = pickled_values(&text);
    let mut files: Vec<CheckpointFile> = fingerprints
        .into_iter()
        .map(|(name, fingerprint)| CheckpointFile {
            path: folder.join(&name),
            names: None,
            fingerprint: Some(fingerprint),
            values: values.remove(&name).unwrap_or_default(),
        })
        .collect();
    files.sort_by(|left, right| left.path.cmp(&right.path));
    let is_known = !files.is_empty() || state != SealState::Unsealed;
    let bytes = text.len() as u64;
    Ok(is_known.then_some(FileSet { files, list: Some(FileList { path, bytes, state }) }))
}

/// Returns the names of pickled values in each file of a distributed checkpoint. An entry that is none is skipped: the
/// names only tell values from tensors.
fn pickled_values(text: &[u8]) -> HashMap<String, Vec<String>> {
    #[derive(serde::Deserialize)]
    struct List {
        entries: HashMap<String, Entry>,
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        /// The file, and the name in it.
        bytes: Option<(String, String)>,
    }
    let mut values: HashMap<String, Vec<String>> = HashMap::new();
    let entries = serde_json::from_slice::<List>(text).map(|list| list.entries).unwrap_or_default();
    for (file, name) in entries.into_values().filter_map(|entry| entry.bytes) {
        values.entry(file).or_default().push(name);
    }
    values
}

/// Reads the fingerprints of files from a list. A list without a valid checksum yields none.
fn fingerprints(path: &Path, text: &[u8]) -> Result<(SealState, HashMap<String, FileFingerprint>)> {
    let state = file_list::seal_state(text);
    let files = match state {
        SealState::Sealed => file_list::files(text).map_err(|error| Error::format(path, error))?,
        SealState::Damaged | SealState::Unsealed => Vec::new(),
    };
    Ok((state, files.into_iter().collect()))
}

/// Calls `work` with the files that `find` finds for a path. If a file is missing or differs, the set may have been
/// replaced after its list was read. Then retries with the files that `find` finds now.
///
/// # Errors
/// As `find`, the error of `work` when the set has not changed, or `Io` with `Busy` if the set changes again and again.
pub fn retry_if_replaced<T>(
    path: &Path,
    find: impl Fn(&Path) -> Result<FileSet>,
    mut work: impl FnMut(&FileSet) -> Result<T>,
) -> Result<T> {
    let mut set = find(path)?;
    for _ in 0..REPLACEMENTS_MAX {
        match work(&set) {
            Err(error) if may_be_replaced(&error) => {
                let now = find(path)?;
                if now == set {
                    return Err(error);
                }
                set = now;
            }
            worked => return worked,
        }
    }
    let text = "its files were replaced again and again while they were being opened; open it again";
    Err(IoError::new(ErrorKind::Busy, "open", text).at_path(path).into())
}

fn may_be_replaced(error: &Error) -> bool {
    match error {
        Error::Io(error) => error.kind() == ErrorKind::NotFound,
        Error::Damaged { .. } | Error::ChangedList { .. } | Error::Format { .. } => true,
        _ => false,
    }
}

/// Opens the files of [`find_set`] one after the other, retrying like [`retry_if_replaced`]. Verifies the list's
/// checksum.
///
/// # Errors
/// As [`retry_if_replaced`]; `ChangedList`.
pub fn open_all<T>(path: &Path, open: impl FnMut(&CheckpointFile) -> Result<T>) -> Result<Vec<T>> {
    open_all_of(path, find_set, open)
}

/// Like [`open_all`], with a custom `find`.
///
/// # Errors
/// As [`open_all`].
pub fn open_all_of<T>(
    path: &Path,
    find: impl Fn(&Path) -> Result<FileSet>,
    mut open: impl FnMut(&CheckpointFile) -> Result<T>,
) -> Result<Vec<T>> {
    retry_if_replaced(path, find, |set| {
        set.check()?;
        set.files.iter().map(&mut open).collect()
    })
}

/// Endings of files. A missing path with one of them is no model of the Hub.
const FILE_ENDINGS: [&str; 6] = [".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json"];

/// Says how to get a model whose name in the Hugging Face Hub was passed in place of a path.
pub(super) fn with_hub_hint(error: IoError) -> IoError {
    let Some(path) = error.path().filter(|_| error.kind() == ErrorKind::NotFound) else { return error };
    let Some((owner, model)) = path.to_str().and_then(|name| name.split_once('/')) else { return error };
    let is_name = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_alphanumeric())
            && part.chars().all(|one| one.is_ascii_alphanumeric() || "-_.".contains(one))
    };
    let is_file = FILE_ENDINGS.iter().any(|ending| model.ends_with(ending)) || !fs::is_absent(Path::new(owner));
    if is_file || !is_name(owner) || !is_name(model) {
        return error;
    }
    let detail = format!(
        "{}; if this is a model of the Hugging Face Hub: nothing is downloaded here; run `hf download {owner}/{model}`, \
         and pass the folder that it prints",
        error.detail()
    );
    error.because(detail)
}

fn no_model(folder: &Path) -> Error {
    if !fs::is_absent(&folder.join(SHARDS_LIST)) {
        let is_of_checkpointer = folder.parent().is_some_and(|parent| !fs::is_absent(&parent.join(MANIFEST)));
        let way = match is_of_checkpointer {
            true => "deepnvme.Checkpointer(...).restore(into=...)",
            false => "dcp.load and DeepnvmeReader",
        };
        let text = format!("this is a sharded checkpoint ({SHARDS_LIST}): load it with {way}");
        return IoError::new(ErrorKind::NotFound, "open", text).at_path(folder).into();
    }
    if [PACKED_NAME.to_owned(), format!("{PACKED_NAME}{MANIFEST_SUFFIX}")]
        .iter()
        .any(|name| !fs::is_absent(&folder.join(name)))
    {
        // Not `NotFound`: the model exists, so a program must not take it for absent.
        return Error::format(folder, FormatError::Unsupported(format!("this is {PACKED_MODEL}")));
    }
    // The folder of a `Checkpointer`, which keeps several checkpoints.
    let newest = || history::listed(folder).ok().flatten()?.checkpoints.pop();
    let remedy = match fs::exists(&folder.join(MANIFEST)) {
        Ok(true) => {
            let newest = newest().map_or_else(String::new, |(_, path)| format!(", such as {}", display::path(&path)));
            format!("restore one with deepnvme.Checkpointer(folder).restore(), or name a checkpoint in it{newest}")
        }
        _ => stripe_manifest(folder).map_or_else(
            || "name a file in it".to_owned(),
            |manifest| format!("name a file in it, or the manifest of its stripe set: {}", display::path(&manifest)),
        ),
    };
    let text = format!("the folder has none of {}, nor an index of one; {remedy}", IN_FOLDER.join(", "));
    IoError::new(ErrorKind::NotFound, "open", text).at_path(folder).into()
}

/// Returns the first stripe manifest of a folder, by name. Only an error names it, so an unreadable folder has none.
fn stripe_manifest(folder: &Path) -> Option<PathBuf> {
    let names = fs::entries(folder).ok()?;
    let name = names.into_iter().filter(|name| name.as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes())).min()?;
    Some(folder.join(name))
}
