//! What checkpoint files hold, whether they are what was saved, and the same in another format.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::read::{self, Contents, List, Located, Reader, Set, find_set, find_shards};
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_checkpoint::{Progress, until_stopped};
use deepnvme_format::Dtype;
use deepnvme_format::set::State;
use deepnvme_io::stripe::MANIFEST_SUFFIX;
use deepnvme_io::{Config, Engine, ErrorKind, StripeSet, Target, shown};
use serde::Serialize;

use crate::error::{Error, Result};

pub mod text;

/// Times that a set may be replaced while it is being looked at.
const REPLACEMENTS_MAX: usize = 100;

/// What one file holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// The file.
    #[serde(serialize_with = "shown::serialize")]
    pub path: PathBuf,
    /// `torch` or `safetensors`.
    pub format: &'static str,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Bytes of the tensors' storages; those that tensors share count once.
    pub tensor_bytes: u64,
    /// Whether it has checksums of its own, and can be verified by them.
    pub has_checksums: bool,
    /// Whether it has checksums that were made for another file, and copied into this one.
    pub has_stale_checksums: bool,
    /// Texts in a safetensors header, but for our own.
    pub metadata: Vec<(String, String)>,
    /// The tensors, in the order of the file's objects.
    pub tensors: Vec<Tensor>,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// The way to it.
    pub name: String,
    /// torch's name for the type of its elements.
    pub dtype: &'static str,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Bytes of its elements.
    pub bytes: u64,
    /// Where in the file its elements begin.
    pub offset: u64,
    /// Whether other tensors lie in the same storage.
    pub is_shared: bool,
}

/// What the comparison of a file with its checksums says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every byte of its tensors is as it was saved.
    Sound,
    /// Some are not, or the file contradicts itself.
    Damaged,
    /// It has no checksums, or is of a format that is not read: nobody can say.
    Unverifiable,
}

/// What of a file was compared with its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Coverage {
    /// Every byte of it.
    File,
    /// The bytes of its tensors; names, types and shapes have no checksum.
    Data,
    /// Nothing.
    Nothing,
}

/// How the comparison of one file with its checksums ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verification {
    /// The file.
    #[serde(serialize_with = "shown::serialize")]
    pub path: PathBuf,
    /// What it is.
    pub verdict: Verdict,
    /// Why, unless it is sound.
    pub finding: Option<String>,
    /// What of it was compared.
    pub coverage: Coverage,
    /// Bytes that were compared.
    pub bytes: u64,
    /// How long that took.
    pub seconds: f64,
}

/// What the file, or the files of the folder or index, hold.
///
/// # Errors
/// `Interrupted`, and what is wrong with the first one that cannot be read.
pub fn inspect(path: &Path, progress: &Progress) -> Result<Vec<Inspection>> {
    let engine = Engine::new(Config { workers: 1, ..Config::default() })?;
    let path = path.to_path_buf();
    until_stopped(progress, move || read::open_all(&path, |file| inspect_file(&engine, file))).map_err(failed)
}

fn inspect_file(engine: &Engine, file: &Located) -> deepnvme_checkpoint::Result<Inspection> {
    let reader = file.open(engine)?;
    let (format, metadata, tensors) = match reader.contents() {
        Contents::Archive { state, .. } => {
            let mut users = vec![0; state.storages.len()];
            state.tensors.iter().for_each(|tensor| users[tensor.storage] += 1);
            let tensor = |tensor: &deepnvme_format::state::Tensor| Tensor {
                name: tensor.name.clone(),
                dtype: tensor.dtype.torch_name(),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes(),
                offset: reader.extents()[tensor.storage].data_offset + tensor.offset * tensor.dtype.bytes(),
                is_shared: users[tensor.storage] > 1,
            };
            ("torch", Vec::new(), state.tensors.iter().map(tensor).collect())
        }
        Contents::Safetensors { header } => {
            let tensor = |tensor: &deepnvme_format::safetensors::Tensor| Tensor {
                name: tensor.name.clone(),
                dtype: Dtype::torch_name(tensor.dtype),
                shape: tensor.shape.clone(),
                bytes: tensor.bytes,
                offset: tensor.offset,
                is_shared: false,
            };
            let own = |(key, _): &&(String, String)| key != deepnvme_format::sums::METADATA_KEY;
            let metadata = header.metadata.iter().filter(own).cloned().collect();
            ("safetensors", metadata, header.tensors.iter().map(tensor).collect())
        }
    };
    Ok(Inspection {
        path: file.path.clone(),
        format,
        file_bytes: reader.file_bytes(),
        tensor_bytes: reader.extents().iter().map(|extent| extent.bytes).sum(),
        has_checksums: reader.has_sums(),
        has_stale_checksums: reader.coverage() == read::Coverage::Stale,
        metadata,
        tensors,
    })
}

/// Compares the file, or the files of the folder, index or list of parts, with their checksums, and each with what the
/// index says of it. A file that is damaged is a value, too.
///
/// # Errors
/// `Interrupted`, or that there is no such file.
pub fn verify(path: &Path, progress: &Progress) -> Result<Vec<Verification>> {
    let engine = Arc::new(Engine::new(Config::default())?);
    let mut set = set_of(path);
    for _ in 1..REPLACEMENTS_MAX {
        let found = verify_set(&engine, path, set.clone(), progress);
        let is_as_listed = match &found {
            Err(Error::Engine(error)) => error.kind() != ErrorKind::NotFound,
            Err(_) => true,
            Ok(found) => found.iter().all(|file| file.verdict == Verdict::Sound),
        };
        // What is missing, or another one, may be of a set that has been replaced since its list was read.
        let now = if is_as_listed { return found } else { set_of(path) };
        if now.as_ref().ok() == set.as_ref().ok() {
            return found;
        }
        set = now;
    }
    verify_set(&engine, path, set, progress)
}

/// The files that are to be verified.
fn set_of(path: &Path) -> deepnvme_checkpoint::Result<Set> {
    let shards = if deepnvme_io::fs::is_folder(path) { find_shards(path)? } else { None };
    shards.map_or_else(|| find_set(path), Ok)
}

fn verify_set(
    engine: &Arc<Engine>,
    path: &Path,
    set: deepnvme_checkpoint::Result<Set>,
    progress: &Progress,
) -> Result<Vec<Verification>> {
    let set = match set {
        Ok(set) => set,
        // A list that is none is a finding about the list.
        Err(error @ deepnvme_checkpoint::Error::Format { .. }) => return Ok(vec![of_list(path, 0, &error)]),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::with_capacity(set.files.len() + 1);
    if let Some(List { path, bytes, state: State::Sound | State::Damaged }) = &set.list {
        match set.check() {
            Ok(()) => found.push(compared(path, Instant::now(), Ok((*bytes, Coverage::File)))?),
            // Nobody knows which files it means.
            Err(error) => return Ok(vec![of_list(path, *bytes, &error)]),
        }
    }
    for file in set.files {
        found.push(verify_file(engine, &file, progress)?);
    }
    Ok(found)
}

/// What is wrong with a list of files.
fn of_list(path: &Path, bytes: u64, error: &deepnvme_checkpoint::Error) -> Verification {
    let verdict = verdict(error).unwrap_or(Verdict::Damaged);
    let (path, finding) = (path.to_path_buf(), Some(error.to_string()));
    Verification { path, verdict, finding, coverage: Coverage::Nothing, bytes, seconds: 0.0 }
}

fn verify_file(engine: &Arc<Engine>, file: &Located, progress: &Progress) -> Result<Verification> {
    let began = Instant::now();
    let audited = opened(engine, &file.path, progress).and_then(|mut reader| {
        if let Some(identity) = file.identity {
            reader.compare_identity(engine, identity)?;
        }
        let bytes = reader.audit(engine, progress)?;
        let coverage = if reader.coverage() == read::Coverage::File { Coverage::File } else { Coverage::Data };
        Ok((bytes, coverage))
    });
    compared(&file.path, began, audited)
}

/// What a file holds, unless somebody asks to stop first: the names of millions of tensors take their time.
fn opened(engine: &Arc<Engine>, path: &Path, progress: &Progress) -> deepnvme_checkpoint::Result<Reader> {
    let (engine, target) = (Arc::clone(engine), target_of(path)?);
    until_stopped(progress, move || Reader::open(&engine, &target))
}

/// The file of that name, or the one that a list of parts means.
fn target_of(path: &Path) -> deepnvme_checkpoint::Result<Target> {
    if path.as_os_str().as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes()) {
        return Ok(Target::Stripes(StripeSet::from_manifest(path)?));
    }
    Ok(Target::Path(path.to_path_buf()))
}

fn compared(
    path: &Path,
    began: Instant,
    audited: deepnvme_checkpoint::Result<(u64, Coverage)>,
) -> Result<Verification> {
    let (bytes, coverage, verdict, finding) = match audited {
        Ok((bytes, coverage)) => (bytes, coverage, Verdict::Sound, None),
        Err(error) => match verdict(&error) {
            Some(verdict) => (0, Coverage::Nothing, verdict, Some(error.to_string())),
            None => return Err(failed(error)),
        },
    };
    let seconds = began.elapsed().as_secs_f64();
    Ok(Verification { path: path.to_path_buf(), verdict, finding, coverage, bytes, seconds })
}

/// What a failure says of the file; nothing if the file was not read.
fn verdict(error: &deepnvme_checkpoint::Error) -> Option<Verdict> {
    use deepnvme_checkpoint::Error as Failure;
    use deepnvme_format::Error as Finding;
    match error {
        Failure::Io(_) | Failure::Panicked(_) | Failure::Interrupted | Failure::Locked { .. } => None,
        Failure::Format { source: Finding::Memory { .. }, .. } => None,
        Failure::NoSums { .. } | Failure::Format { source: Finding::Unsupported(_), .. } => Some(Verdict::Unverifiable),
        Failure::Format { .. } | Failure::Damaged { .. } | Failure::Moved { .. } | Failure::Manifest { .. } => {
            Some(Verdict::Damaged)
        }
    }
}

/// What a conversion made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conversion {
    /// What was read.
    #[serde(serialize_with = "shown::serialize")]
    pub source: PathBuf,
    /// What was written.
    #[serde(serialize_with = "shown::serialize")]
    pub target: PathBuf,
    /// Bytes of it.
    pub file_bytes: u64,
    /// How many tensors it has.
    pub tensors: usize,
    /// What is in the source and is no tensor: the names, and what each is.
    pub left_out: Vec<(String, &'static str)>,
    /// How long it took.
    pub seconds: f64,
}

/// Writes the tensors of a file, an index or a folder in the format that the target's name means.
///
/// # Errors
/// `Interrupted`, and whatever is wrong with the source or the target; then there is no new file.
pub fn convert(source: &Path, target: &Path, progress: &Arc<Progress>) -> Result<Conversion> {
    let began = Instant::now();
    let engine = Arc::new(Engine::new(Config::default())?);
    let converted = deepnvme_checkpoint::convert(&engine, source, target, SaveOptions::default(), progress);
    let deepnvme_checkpoint::Conversion { saved, tensors, left_out } = converted.map_err(failed)?;
    let (source, target, file_bytes) = (source.to_path_buf(), target.to_path_buf(), saved.bytes);
    Ok(Conversion { source, target, file_bytes, tensors, left_out, seconds: began.elapsed().as_secs_f64() })
}

pub(crate) fn failed(error: deepnvme_checkpoint::Error) -> Error {
    match error {
        deepnvme_checkpoint::Error::Io(error) => Error::Engine(error),
        deepnvme_checkpoint::Error::Interrupted => Error::Interrupted,
        other => Error::failed(other.to_string()),
    }
}
