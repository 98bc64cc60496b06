//! Verifies checkpoints by their checksums: a file, several files with a list, or the folder of a `Checkpointer`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::history::{self, Listed, ManifestEntry};
use deepnvme_checkpoint::read::{self, CheckpointFile, FileList, FileSet, Reader};
use deepnvme_checkpoint::{Progress, until_stopped};
use deepnvme_file::Target;
use deepnvme_format::set::ChecksumState;
use deepnvme_io::fs::{self, FileKind};
use deepnvme_io::op::Errno;
use deepnvme_io::{Access, Config, DirectMode, Engine, ErrorKind, OpenOptions, display};
use deepnvme_perf::{Error, Result};
use serde::Serialize;

use super::files::{failed, find_files};

/// The endings of checkpoints' names.
const ENDINGS: [&str; 5] = ["safetensors", "pt", "pth", "bin", "ckpt"];
/// Retries when a set is replaced while it is verified.
const REPLACEMENTS_MAX: usize = 100;

/// The verdict on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every byte of its tensors matches its checksums.
    Sound,
    /// Some bytes do not match, or the file contradicts itself.
    Damaged,
    /// It has no checksums, or an unsupported format.
    Unverifiable,
    /// It is missing, or cannot be read.
    Unreadable,
}

/// The part of a file that was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Coverage {
    /// The whole file.
    File,
    /// The bytes of its tensors; names, types and shapes have no checksum.
    Data,
    /// Nothing.
    Nothing,
}

/// The verification of one file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verification {
    /// The file.
    #[serde(serialize_with = "display::serialize")]
    pub path: PathBuf,
    /// The verdict.
    pub verdict: Verdict,
    /// The reason, unless it is sound.
    pub finding: Option<String>,
    /// The part that was verified.
    pub coverage: Coverage,
    /// Bytes that were verified.
    pub bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Verifies several paths. A path that cannot be read is a result among the others, but the error of a single path.
///
/// # Errors
/// As [`verify`].
pub fn verify_all(paths: &[PathBuf], progress: &Progress) -> Result<Vec<Verification>> {
    let mut found = Vec::new();
    for path in paths {
        let began = Instant::now();
        match verify(path, progress) {
            Ok(files) => found.extend(files),
            Err(error) if paths.len() == 1 || matches!(error, Error::Interrupted) => return Err(error),
            Err(error) => found.push(Verification {
                path: path.clone(),
                verdict: Verdict::Unreadable,
                finding: Some(error.to_string()),
                coverage: Coverage::Nothing,
                bytes: 0,
                seconds: began.elapsed().as_secs_f64(),
            }),
        }
    }
    Ok(found)
}

/// Verifies a file, or the files of an index or a list of parts, by their checksums and by the index. In a folder,
/// verifies its model and all other files whose names are those of checkpoints. In the folder of a `Checkpointer`,
/// verifies the manifest and all checkpoints that the manifest lists. A damaged file is a result, not an error.
///
/// # Errors
/// `Interrupted`, or the path does not exist or cannot be read.
pub fn verify(path: &Path, progress: &Progress) -> Result<Vec<Verification>> {
    let verifier = Verifier { engines: Engines::new()?, progress };
    match history::listed(path) {
        Ok(Some(listed)) => verifier.verify_history(path, &listed),
        // Other programs put files of this name next to a model.
        Err(error @ deepnvme_checkpoint::Error::Manifest { .. }) if find_files(path).is_err() => {
            Ok(vec![of_list(&path.join(history::MANIFEST), 0, &error)])
        }
        // A file, a folder without a manifest, or a folder whose verification will report the error.
        Ok(None) | Err(_) if fs::is_folder(path) => verifier.verify_folder(path),
        Ok(None) | Err(_) => verifier.verify_path(path),
    }
}

/// Returns whether a name is that of a checkpoint, and not a private one.
fn is_checkpoint(name: &OsStr) -> bool {
    let name = Path::new(name);
    let ending = name.extension().and_then(OsStr::to_str).unwrap_or_default();
    !name.as_os_str().as_encoded_bytes().starts_with(b".") && ENDINGS.contains(&ending)
}

/// The start of the names that a `Trainer` of transformers gives its checkpoints, which are folders.
const TRAINER_PREFIX: &str = "checkpoint-";

fn is_of_trainer(name: &OsString) -> bool {
    name.as_encoded_bytes().starts_with(TRAINER_PREFIX.as_bytes())
}

/// An engine for files with direct I/O, and one for the others.
struct Engines {
    direct: Arc<Engine>,
    buffered: Arc<Engine>,
}

impl Engines {
    fn new() -> Result<Self> {
        let engine = |direct| Ok::<_, Error>(Arc::new(Engine::new(Config { direct, ..Config::default() })?));
        Ok(Self { direct: engine(DirectMode::Required)?, buffered: engine(DirectMode::Preferred)? })
    }

    /// Returns the engine for a file. It never takes bytes from the page cache where the file has direct I/O: the copy on
    /// the drive is the one to verify.
    fn of(&self, target: &Target) -> &Arc<Engine> {
        let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Required };
        if deepnvme_file::open(target, options).is_ok() { &self.direct } else { &self.buffered }
    }
}

/// Verifies until it is stopped.
struct Verifier<'a> {
    engines: Engines,
    progress: &'a Progress,
}

impl Verifier<'_> {
    fn verify_history(&self, folder: &Path, listed: &Listed) -> Result<Vec<Verification>> {
        let mut found = Vec::with_capacity(listed.checkpoints.len() + 1);
        if listed.has_checksum {
            found.push(compared(&listed.path, Instant::now(), Ok((listed.bytes, Coverage::File)))?);
        }
        for (entry, path) in &listed.checkpoints {
            let files = self.verify_entry(entry, path);
            let is_sound = files.as_ref().is_ok_and(|files| files.iter().all(|file| file.verdict == Verdict::Sound));
            if is_sound {
                found.extend(files?);
                continue;
            }
            // It may have been renamed or removed since the manifest was read.
            let now = history::listed(folder).map_err(failed)?;
            let now = now.and_then(|now| now.checkpoints.into_iter().find(|(other, _)| other.file == entry.file));
            match now {
                Some((now, at)) if (&now, &at) != (entry, path) => {
                    found.extend(self.verify_entry(&now, &at)?);
                }
                Some(_) => found.extend(files?),
                None => {}
            }
        }
        Ok(found)
    }

    /// Verifies one checkpoint of a `Checkpointer` by the manifest and by its own checksums.
    fn verify_entry(&self, entry: &ManifestEntry, path: &Path) -> Result<Vec<Verification>> {
        let differs = |finding: String| {
            let (path, finding) = (path.to_path_buf(), Some(format!("{}: {finding}", display::path(path))));
            let (verdict, coverage) = (Verdict::Damaged, Coverage::Nothing);
            Ok(vec![Verification { path, verdict, finding, coverage, bytes: 0, seconds: 0.0 }])
        };
        if !deepnvme_io::fs::exists(path).unwrap_or(true) {
            return differs(format!("{} lists it, but it is missing", history::MANIFEST));
        }
        let checked = self.verify_path(path);
        match &checked {
            Err(Error::Engine(error)) if error.kind() == ErrorKind::NotFound => {
                differs(format!("some of its files are missing: {error}"))
            }
            Err(Error::Engine(error)) if is_no_file(error) => {
                differs(format!("{} lists it, but it is not a checkpoint: {error}", history::MANIFEST))
            }
            Ok(files) if files.iter().all(|file| file.verdict != Verdict::Damaged) => {
                if history::is_as_listed(path, &entry.file, entry).map_err(failed)? {
                    checked
                } else {
                    differs(format!("{} lists another checkpoint of that name", history::MANIFEST))
                }
            }
            _ => checked,
        }
    }

    /// Verifies the model of a folder, and its other checkpoints, such as the optimizer's state.
    fn verify_folder(&self, folder: &Path) -> Result<Vec<Verification>> {
        let model = self.verify_path(folder);
        let names = fs::entries(folder).unwrap_or_default();
        let mut others: Vec<PathBuf> =
            names.iter().filter(|name| is_checkpoint(name)).map(|it| folder.join(it)).collect();
        others.retain(|path| fs::stat(path).is_ok_and(|stat| stat.kind == FileKind::File));
        if others.is_empty() {
            return model.map_err(|error| match error {
                // Such as the output folder of a `Trainer`.
                Error::Engine(error) if error.kind() == ErrorKind::NotFound && names.iter().any(is_of_trainer) => {
                    let detail = format!("{}; or name its checkpoints: {TRAINER_PREFIX}*", error.detail());
                    Error::Engine(error.because(detail))
                }
                error => error,
            });
        }
        others.sort();
        let mut found = match model {
            // Without a model, the folder has the other checkpoints only.
            Err(Error::Engine(error)) if error.kind() == ErrorKind::NotFound => Vec::new(),
            found => found?,
        };
        for path in others {
            if found.iter().any(|file| file.path == path) {
                continue;
            }
            let other = self.verify_file(&CheckpointFile::unlisted(path.clone()));
            let is_sound = other.as_ref().is_ok_and(|other| other.verdict == Verdict::Sound);
            // A save that ended meanwhile has removed the shards that it replaced.
            if is_sound || fs::exists(&path).unwrap_or(true) {
                found.push(other?);
            }
        }
        Ok(found)
    }

    /// Verifies a file, or the files of a folder, an index or a list of parts.
    fn verify_path(&self, path: &Path) -> Result<Vec<Verification>> {
        let mut set = find_files(path);
        for _ in 1..REPLACEMENTS_MAX {
            let found = self.verify_set(path, set.clone());
            let is_as_listed = match &found {
                Err(Error::Engine(error)) => error.kind() != ErrorKind::NotFound,
                Err(_) => true,
                Ok(found) => found.iter().all(|file| file.verdict == Verdict::Sound),
            };
            // A missing or different file may belong to a set that was replaced after its list was read.
            let now = if is_as_listed { return found } else { find_files(path) };
            if now.as_ref().ok() == set.as_ref().ok() {
                return found;
            }
            set = now;
        }
        self.verify_set(path, set)
    }

    fn verify_set(&self, path: &Path, set: deepnvme_checkpoint::Result<FileSet>) -> Result<Vec<Verification>> {
        let set = match set {
            Ok(set) => set,
            // An invalid list is a finding about the list.
            Err(error @ deepnvme_checkpoint::Error::Format { .. }) => return Ok(vec![of_list(path, 0, &error)]),
            Err(error) => return Err(failed(error)),
        };
        let mut found = Vec::with_capacity(set.files.len() + 1);
        if let Some(FileList { path, bytes, state }) = &set.list {
            match (state, set.check()) {
                (ChecksumState::Missing, _) => found.push(without_checksum(path)),
                (_, Ok(())) => found.push(compared(path, Instant::now(), Ok((*bytes, Coverage::File)))?),
                // Its files are unknown.
                (_, Err(error)) => return Ok(vec![of_list(path, *bytes, &error)]),
            }
        }
        for file in set.files {
            found.push(self.verify_file(&file)?);
        }
        Ok(found)
    }

    fn verify_file(&self, file: &CheckpointFile) -> Result<Verification> {
        let began = Instant::now();
        let verified = file.target().and_then(|target| {
            let engine = self.engines.of(&target);
            let mut reader = self.opened(engine, target)?;
            file.compare(engine, &reader)?;
            let bytes = reader.verify_all(engine, self.progress)?;
            let coverage = if reader.coverage() == read::Coverage::File { Coverage::File } else { Coverage::Data };
            Ok((bytes, coverage))
        });
        compared(&file.path, began, verified)
    }

    /// Opens a file, interruptibly: reading the names of millions of tensors takes time.
    fn opened(&self, engine: &Arc<Engine>, target: Target) -> deepnvme_checkpoint::Result<Reader> {
        let engine = Arc::clone(engine);
        until_stopped(self.progress, move || Reader::open(&engine, &target))
    }
}

/// Returns whether the path is not a file: a pipe, a socket, or a loop of links.
fn is_no_file(error: &deepnvme_io::Error) -> bool {
    let errno = error.errno().map(Errno::from_raw_os_error);
    error.kind() == ErrorKind::InvalidInput || matches!(errno, Some(Errno::LOOP | Errno::NXIO))
}

/// Reports the damage of a list of files.
fn of_list(path: &Path, bytes: u64, error: &deepnvme_checkpoint::Error) -> Verification {
    let verdict = verdict(error).unwrap_or(Verdict::Damaged);
    let (path, finding) = (path.to_path_buf(), Some(error.to_string()));
    Verification { path, verdict, finding, coverage: Coverage::Nothing, bytes, seconds: 0.0 }
}

/// Reports a list without a checksum, written by another program: a missing entry cannot be detected.
fn without_checksum(path: &Path) -> Verification {
    let finding =
        "the list of files has no checksum, so it may lack tensors. deepnvme.save writes lists with a checksum";
    let (path, finding) = (path.to_path_buf(), Some(format!("{}: {finding}", display::path(path))));
    let (verdict, coverage) = (Verdict::Unverifiable, Coverage::Nothing);
    Verification { path, verdict, finding, coverage, bytes: 0, seconds: 0.0 }
}

fn compared(
    path: &Path,
    began: Instant,
    verified: deepnvme_checkpoint::Result<(u64, Coverage)>,
) -> Result<Verification> {
    let (bytes, coverage, verdict, finding) = match verified {
        Ok((bytes, coverage)) => (bytes, coverage, Verdict::Sound, None),
        Err(error) => match verdict(&error) {
            Some(verdict) => (0, Coverage::Nothing, verdict, Some(finding(path, &error))),
            None => return Err(failed(error)),
        },
    };
    let seconds = began.elapsed().as_secs_f64();
    Ok(Verification { path: path.to_path_buf(), verdict, finding, coverage, bytes, seconds })
}

/// Returns the text of an error. The remedy of a load without checksums is an argument that the command does not have.
fn finding(path: &Path, error: &deepnvme_checkpoint::Error) -> String {
    match error {
        deepnvme_checkpoint::Error::NoChecksums { is_stale: false, .. } => {
            let path = display::path(path);
            format!("{path}: the file has no checksums, so nothing can be compared; save or convert it with deepnvme")
        }
        _ => error.to_string(),
    }
}

/// Returns the verdict that an error implies; `None` if the error says nothing about the file's bytes.
fn verdict(error: &deepnvme_checkpoint::Error) -> Option<Verdict> {
    use deepnvme_checkpoint::Error as Failure;
    use deepnvme_format::Error as Finding;
    match error {
        // A list of parts.
        Failure::Io(error) if error.kind() == ErrorKind::Corrupt => Some(Verdict::Damaged),
        Failure::Io(_) | Failure::Panicked(_) | Failure::Interrupted => None,
        Failure::Locked { .. } | Failure::Changed { .. } => None,
        Failure::Format { source: Finding::Memory { .. }, .. } => None,
        Failure::NoChecksums { .. } | Failure::Format { source: Finding::Unsupported(_), .. } => {
            Some(Verdict::Unverifiable)
        }
        Failure::Format { .. }
        | Failure::Damaged { .. }
        | Failure::NotListed { .. }
        | Failure::ChangedList { .. }
        | Failure::HeaderLength { .. }
        | Failure::Manifest { .. } => Some(Verdict::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drive_is_read_where_that_is_possible() {
        let engines = Engines::new().unwrap();
        let in_memory = tempfile::Builder::new().tempfile_in("/dev/shm");
        let on_disk = tempfile::NamedTempFile::new().unwrap();
        let has_direct = |path: &Path| {
            let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Required };
            deepnvme_io::TensorFile::open(path, options).is_ok()
        };
        for file in in_memory.into_iter().chain([on_disk]) {
            let engine = engines.of(&Target::Path(file.path().to_path_buf()));
            assert_eq!(engine.config().direct == DirectMode::Required, has_direct(file.path()));
        }
        let missing = engines.of(&Target::Path("missing.pt".into()));
        assert_eq!(missing.config().direct, DirectMode::Preferred);
    }
}
