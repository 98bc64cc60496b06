//! A model in several files, as Hugging Face lays it out: a folder, or its index.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_file::{StripeSet, Target};
use deepnvme_format::safetensors::Index;
use deepnvme_format::set::{self, Identity, Replaced, State};
use deepnvme_io::fs::Stat;
use deepnvme_io::op::Errno;
use deepnvme_io::{Engine, Error as IoError, ErrorKind, fs};

use super::Reader;
use crate::error::{Error, Result};

/// What the names of indexes end with.
pub const INDEX_SUFFIX: &str = ".index.json";
/// The list of a distributed checkpoint's files.
pub const SHARDS_LIST: &str = "deepnvme.json";
/// The longest index that is read.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Times that a set may be replaced while its files are being opened.
const REPLACEMENTS_MAX: usize = 100;
/// What a folder is searched for, the best first: one file of that name, or several with an index.
const IN_FOLDER: [&str; 3] = ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors"];

/// One of the files that a path means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// Where it is.
    pub path: PathBuf,
    /// The tensors that an index says are in it (`None`: all).
    pub names: Option<Vec<String>>,
    /// Which file the index means.
    pub identity: Option<Identity>,
}

impl Located {
    /// A file that no index names.
    #[must_use]
    pub fn alone(path: PathBuf) -> Self {
        Self { path, names: None, identity: None }
    }

    /// Opens the file and checks everything that the index claims about it.
    ///
    /// # Errors
    /// As [`Reader::open`] and [`compare`](Self::compare).
    pub fn open(&self, engine: &Engine) -> Result<Reader> {
        let reader = Reader::open(engine, &self.target()?)?;
        self.compare(engine, &reader)?;
        Ok(reader)
    }

    /// The file itself, or the stripe set whose manifest it is.
    ///
    /// # Errors
    /// `Io` for a manifest that cannot be read.
    pub fn target(&self) -> Result<Target> {
        if self.path.as_os_str().as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes()) {
            return Ok(Target::Stripes(StripeSet::from_manifest(&self.path)?));
        }
        Ok(Target::Path(self.path.clone()))
    }

    /// Checks everything that the index claims about the open file: its tensors, its size and its own index.
    ///
    /// # Errors
    /// `Format` where a tensor is missing, `Damaged` where it is another file, `Io`.
    pub fn compare(&self, engine: &Engine, reader: &Reader) -> Result<()> {
        reader.require(self.names.as_deref().unwrap_or_default())?;
        self.identity.map_or(Ok(()), |identity| reader.compare_identity(engine, identity))
    }
}

/// The list of a set's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    /// Where it is.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// What its checksum says of it.
    pub state: State,
}

/// The files that a path means, and their list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// The files, by their names.
    pub files: Vec<Located>,
    /// The list, where there is one.
    pub list: Option<List>,
}

impl Set {
    /// Compares the list with its checksum.
    ///
    /// # Errors
    /// `ChangedList`.
    pub fn check(&self) -> Result<()> {
        match &self.list {
            Some(List { path, state: State::Damaged, .. }) => Err(Error::ChangedList { path: path.clone() }),
            _ => Ok(()),
        }
    }
}

/// What a name was found to mean.
enum Found {
    /// One file.
    File(PathBuf),
    /// An index of several, and its text.
    Index(PathBuf, Vec<u8>),
}

/// The files that a path means: a file, an index, or a folder with one of these. What was saved last under a file's name
/// counts, one file or several with an index.
///
/// # Errors
/// `Io` when there is nothing, `Format` for a damaged index.
pub fn find_set(path: &Path) -> Result<Set> {
    let found = if fs::is_folder(path) {
        in_folder(path)?
    } else if path.as_os_str().as_encoded_bytes().ends_with(INDEX_SUFFIX.as_bytes()) {
        Found::Index(path.to_path_buf(), fs::read_small(path, INDEX_BYTES_MAX)?)
    } else {
        newest(path)?.unwrap_or_else(|| Found::File(path.to_path_buf()))
    };
    match found {
        Found::File(path) => Ok(Set { files: vec![Located::alone(path)], list: None }),
        Found::Index(path, text) => of_index(path, &text),
    }
}

/// What was saved last under a file's name; nothing where there is neither the file nor an index of its name.
///
/// One file comes before an index, as Hugging Face's loaders have it, unless the index states that it replaces that very
/// file. A save of one file removes the index of an earlier save; a save of several leaves the one file where it is. An
/// index that is damaged or cannot be read may have stated that: then it is an error, and never the older file.
fn newest(file: &Path) -> Result<Option<Found>> {
    let mut index = file.to_path_buf().into_os_string();
    index.push(INDEX_SUFFIX);
    let index = PathBuf::from(index);
    // The index first: when it has gone, the one file that took its place is there already.
    let text = match fs::read_small_if_there(&index, INDEX_BYTES_MAX) {
        Ok(text) => text,
        // No index can have that name.
        Err(error) if error.errno() == Some(Errno::NAMETOOLONG.raw_os_error()) => None,
        Err(error) => return Err(error.into()),
    };
    // A link that leads nowhere is there: what it led to may have been saved last.
    let is_absent = matches!(fs::stat_link(file), Err(Errno::NOENT | Errno::NOTDIR));
    let stat = fs::stat(file);
    Ok(match (stat, text) {
        (Ok(stat), Some(text)) if is_replaced_by(&stat, &text) => Some(Found::Index(index, text)),
        (_, Some(text)) if is_absent => Some(Found::Index(index, text)),
        (_, None) if is_absent => None,
        // Opening it says what is wrong, if anything is.
        (_, _) => Some(Found::File(file.to_path_buf())),
    })
}

/// Whether an index counts, and not the one file of its name. One that is damaged does: reading it says so.
fn is_replaced_by(stat: &Stat, text: &[u8]) -> bool {
    match set::state(text) {
        State::Sound => set::replaces(text).is_some_and(|replaced| is_that(stat, replaced)),
        State::Damaged => true,
        // Another program's. A power cut may leave nothing, or zeros, of one that was not saved durably.
        State::Unsealed => serde_json::from_slice::<serde::de::IgnoredAny>(text).is_err(),
    }
}

/// Whether a file is still the one that an index states to replace. Archives keep times in whole seconds.
fn is_that(file: &Stat, replaced: Replaced) -> bool {
    const SECOND: i128 = 1_000_000_000;
    let then = i128::from(replaced.modified_ns);
    file.bytes == replaced.bytes && [then, then - then.rem_euclid(SECOND)].contains(&file.modified_ns)
}

fn of_index(path: PathBuf, text: &[u8]) -> Result<Set> {
    let index = Index::parse(text).map_err(|error| Error::format(&path, error))?;
    let (state, identities) = identities(&path, text)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut files: Vec<Located> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (name, file) in index.weight_map {
        let at = *known.entry(file.clone()).or_insert_with(|| {
            let identity = identities.get(&file).copied();
            files.push(Located { path: folder.join(&file), names: Some(Vec::new()), identity });
            files.len() - 1
        });
        files[at].names.get_or_insert_default().push(name);
    }
    files.sort_by(|left, right| left.path.cmp(&right.path));
    let bytes = text.len() as u64;
    Ok(Set { files, list: Some(List { path, bytes, state }) })
}

/// The files of a distributed checkpoint's folder; nothing if it is none that says which files it has.
///
/// # Errors
/// `Io`, `Format` for a damaged list.
pub fn find_shards(folder: &Path) -> Result<Option<Set>> {
    let path = folder.join(SHARDS_LIST);
    let Some(text) = fs::read_small_if_there(&path, INDEX_BYTES_MAX)? else { return Ok(None) };
    let (state, identities) = identities(&path, &text)?;
    let mut files: Vec<Located> = identities
        .into_iter()
        .map(|(name, identity)| Located { path: folder.join(name), names: None, identity: Some(identity) })
        .collect();
    files.sort_by(|left, right| left.path.cmp(&right.path));
    let is_known = !files.is_empty() || state != State::Unsealed;
    let bytes = text.len() as u64;
    Ok(is_known.then_some(Set { files, list: Some(List { path, bytes, state }) }))
}

/// What a list says of its files. One that was changed says nothing of them.
fn identities(path: &Path, text: &[u8]) -> Result<(State, HashMap<String, Identity>)> {
    let state = set::state(text);
    let files = match state {
        State::Sound => set::files(text).map_err(|error| Error::format(path, error))?,
        State::Damaged | State::Unsealed => Vec::new(),
    };
    Ok((state, files.into_iter().collect()))
}

/// Works on the files that `find` finds for a path. A file that is missing or differs may mean that the set was replaced
/// after its list was read. The work then starts again with the files that `find` finds now.
///
/// # Errors
/// As `find`, and the error of `work` when the set has not changed.
pub fn follow<T>(
    path: &Path,
    find: impl Fn(&Path) -> Result<Set>,
    mut work: impl FnMut(&Set) -> Result<T>,
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

/// Opens the files of [`find_set`], one after the other, as [`follow`] does. The list is compared with its checksum.
///
/// # Errors
/// As [`follow`]; `ChangedList`.
pub fn open_all<T>(path: &Path, open: impl FnMut(&Located) -> Result<T>) -> Result<Vec<T>> {
    open_all_of(path, find_set, open)
}

/// As [`open_all`], with another way to find the files.
///
/// # Errors
/// As [`open_all`].
pub fn open_all_of<T>(
    path: &Path,
    find: impl Fn(&Path) -> Result<Set>,
    mut open: impl FnMut(&Located) -> Result<T>,
) -> Result<Vec<T>> {
    follow(path, find, |set| {
        set.check()?;
        set.files.iter().map(&mut open).collect()
    })
}

fn in_folder(folder: &Path) -> Result<Found> {
    for name in IN_FOLDER {
        if let Some(found) = newest(&folder.join(name))? {
            return Ok(found);
        }
    }
    let text = format!("the folder has none of {}, nor an index of one; name a file in it", IN_FOLDER.join(", "));
    Err(IoError::new(ErrorKind::NotFound, "open", text).at_path(folder).into())
}
