//! Verifies checkpoints by their checksums: a file, several files with a list, or the folder of a `Checkpointer`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use deepnvme_checkpoint::history;
use deepnvme_checkpoint::read::{self, CheckpointFile, FileList, FileSet, Reader};
use deepnvme_checkpoint::{Progress, until_stopped};
use deepnvme_file::Target;
use deepnvme_format::file_list::SealState;
use deepnvme_io::fs;
use deepnvme_io::{Access, Config, DirectMode, Engine, ErrorKind, OpenOptions, display};
use deepnvme_perf::{Error, Result};
use serde::Serialize;

use super::files::{failed, find_any, find_files};
use super::names::{NamedCheckpoint, checkpoints_by_name, names_in, without_checkpoint};

/// Retries when a set is replaced while it is verified.
pub(super) const REPLACEMENTS_MAX: usize = 100;

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

impl Verdict {
    /// Returns its name in all output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sound => "sound",
            Self::Damaged => "damaged",
            Self::Unverifiable => "unverifiable",
            Self::Unreadable => "unreadable",
        }
    }
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
    /// The kernel's error number, if it is unreadable.
    pub errno: Option<i32>,
    /// The part that was compared and found sound: nothing unless the verdict is sound.
    pub coverage: Coverage,
    /// Bytes that were compared and found sound: 0 unless the verdict is sound.
    pub bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Verifies several paths. A path that cannot be read is a result among the others.
///
/// # Errors
/// `Interrupted`.
pub fn verify_all(paths: &[PathBuf], progress: &Progress) -> Result<Vec<Verification>> {
    let mut found = Vec::new();
    for path in paths {
        let began = Instant::now();
        match verify(path, progress) {
            Ok(files) => found.extend(files),
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => found.push(Verification {
                seconds: began.elapsed().as_secs_f64(),
                errno: match &error {
                    Error::Engine(error) => error.errno(),
                    _ => None,
                },
                ..unverified(path, Verdict::Unreadable, error.to_string())
            }),
        }
    }
    Ok(found)
}

/// Verifies a file, or the files of an index or a list of parts, by their checksums and by the index. In a folder,
/// verifies its model and all other files whose names are those of checkpoints. In the folder of a `Checkpointer`,
/// verifies the manifest, all checkpoints that it lists, and the other checkpoints of the folder. A damaged file is a result, not an error.
///
/// # Errors
/// `Interrupted`, or the path does not exist or cannot be read.
pub fn verify(path: &Path, progress: &Progress) -> Result<Vec<Verification>> {
    let verifier = Verifier { engines: Engines::new()?, progress };
    match history::listed(path) {
        Ok(Some(listed)) => verifier.verify_history(path, &listed),
        // Other programs put files of this name next to a model.
        Err(error @ deepnvme_checkpoint::Error::Manifest { .. }) if find_files(path).is_err() => {
            Ok(vec![of_list(&path.join(history::MANIFEST), &error)])
        }
        // A file, a folder without a manifest, or a folder whose verification will report the error.
        Ok(None) | Err(_) if fs::is_folder(path) => verifier.verify_folder(path),
        Ok(None) | Err(_) => Ok(verifier.verify_path(path)?.unwrap_or_default()),
    }
}

/// An engine for files with direct I/O, and one for the others.
pub(super) struct Engines {
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
    pub(super) fn of(&self, target: &Target) -> &Arc<Engine> {
        let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Required };
        if deepnvme_file::open(target, options).is_ok() { &self.direct } else { &self.buffered }
    }
}

pub(super) fn is_sound(files: &Result<Vec<Verification>>) -> bool {
    files.as_ref().is_ok_and(|files| files.iter().all(|file| file.verdict == Verdict::Sound))
}

/// Verifies until it is stopped.
pub(super) struct Verifier<'a> {
    pub(super) engines: Engines,
    pub(super) progress: &'a Progress,
}

impl Verifier<'_> {
    /// Verifies the model of a folder, and its other checkpoints, such as the optimizer's state.
    fn verify_folder(&self, folder: &Path) -> Result<Vec<Verification>> {
        let names = names_in(folder)?;
        let others = checkpoints_by_name(folder, &names);
        let model = self.verify_path(folder)?;
        if model.is_none() && others.is_empty() {
            return match find_files(folder) {
                Ok(set) => self.verify_set(folder, &set),
                Err(error) => Err(failed(without_checkpoint(error, &names))),
            };
        }
        let mut found = model.unwrap_or_default();
        self.verify_others(others, &mut found)?;
        Ok(found)
    }

    /// Verifies the other checkpoints of a folder, except for those that were verified.
    pub(super) fn verify_others(&self, others: Vec<NamedCheckpoint>, found: &mut Vec<Verification>) -> Result<()> {
        let mut paths: HashSet<PathBuf> = found.iter().map(|file| file.path.clone()).collect();
        for NamedCheckpoint { entry, path } in others {
            self.progress.check().map_err(failed)?;
            if paths.contains(&path) {
                continue;
            }
            let other = match self.verify_path(&path) {
                Err(Error::Engine(error)) => vec![of_unread(&path, &error)],
                verified => verified?.unwrap_or_default(),
            };
            let is_sound = other.iter().all(|other| other.verdict == Verdict::Sound);
            // A save that ended meanwhile has removed the files that it replaced.
            if is_sound || !fs::is_absent(&entry) {
                found.extend(other.into_iter().filter(|other| paths.insert(other.path.clone())));
            }
        }
        Ok(())
    }

    /// Verifies a file, or the files of a folder, an index or a list of parts. Returns `None` for a folder without a
    /// model.
    pub(super) fn verify_path(&self, path: &Path) -> Result<Option<Vec<Verification>>> {
        let mut set = find_any(path);
        let mut replacements = 0;
        loop {
            let found = match &set {
                Ok(None) => return Ok(None),
                Ok(Some(set)) => self.verify_set(path, set),
                // An invalid list is a finding about the list.
                Err(error @ deepnvme_checkpoint::Error::Format { .. }) => Ok(vec![of_list(path, error)]),
                Err(_) => return set.map(|_| None).map_err(failed),
            };
            if is_sound(&found) || matches!(found, Err(Error::Interrupted)) || replacements == REPLACEMENTS_MAX {
                return found.map(Some);
            }
            // A missing or different file may belong to a set that was replaced after its list was read.
            let now = find_any(path);
            if now.as_ref().ok() == set.as_ref().ok() {
                return found.map(Some);
            }
            set = now;
            replacements += 1;
        }
    }

    fn verify_set(&self, path: &Path, set: &FileSet) -> Result<Vec<Verification>> {
        let mut found = Vec::with_capacity(set.files.len() + 1);
        if let Some(FileList { path, bytes, state }) = &set.list {
            match (state, set.check()) {
                (SealState::Unsealed, _) => found.push(without_checksum(path)),
                (_, Ok(())) => found.push(compared(path, Instant::now(), Ok((*bytes, Coverage::File)))?),
                // Its files are unknown.
                (_, Err(error)) => return Ok(vec![of_list(path, &error)]),
            }
        }
        for file in &set.files {
            found.push(match (self.verify_file(file), &set.list) {
                (Err(Error::Engine(error)), Some(list)) if error.kind() == ErrorKind::NotFound => {
                    of_missing(&file.path, &list.path, &error)
                }
                // A file that the caller did not name is a result.
                (Err(Error::Engine(error)), _) if file.path != path => of_unread(&file.path, &error),
                (verified, _) => verified?,
            });
        }
        Ok(found)
    }

    fn verify_file(&self, file: &CheckpointFile) -> Result<Verification> {
        let began = Instant::now();
        let compare = |engine: &Engine, reader: &Reader| file.compare(engine, reader);
        let verified = file.target().and_then(|target| self.verify_target(target, compare));
        if matches!(verified, Err(deepnvme_checkpoint::Error::NoChecksums { is_stale: false, .. }))
            && let Some(verification) = self.verify_packed_rows(file, began)?
        {
            return Ok(verification);
        }
        compared(&file.path, began, verified)
    }

    /// Verifies an open file, and calls `compare` before.
    pub(super) fn verify_target(
        &self,
        target: Target,
        compare: impl Fn(&Engine, &Reader) -> deepnvme_checkpoint::Result<()>,
    ) -> deepnvme_checkpoint::Result<(u64, Coverage)> {
        let engine = self.engines.of(&target);
        let mut reader = self.opened(engine, target)?;
        compare(engine, &reader)?;
        let bytes = reader.verify_all(engine, self.progress)?;
        let coverage = if reader.coverage() == read::Coverage::File { Coverage::File } else { Coverage::Data };
        Ok((bytes, coverage))
    }

    /// Opens a file, interruptibly: reading the names of millions of tensors takes time.
    pub(super) fn opened(&self, engine: &Arc<Engine>, target: Target) -> deepnvme_checkpoint::Result<Reader> {
        let engine = Arc::clone(engine);
        until_stopped(self.progress, move || Reader::open(&engine, &target))
    }
}

/// Reports a file that could not be read.
fn of_unread(path: &Path, error: &deepnvme_io::Error) -> Verification {
    Verification { errno: error.errno(), ..unverified(path, Verdict::Unreadable, error.to_string()) }
}

/// Reports that a file of a list, or a part of that file, is missing.
fn of_missing(path: &Path, list: &Path, error: &deepnvme_io::Error) -> Verification {
    let name = display::path(path);
    let finding = if fs::is_absent(path) {
        let list = display::text(&list.file_name().unwrap_or_default().to_string_lossy()).to_string();
        format!("{name}: {list} lists it, but it is missing")
    } else {
        format!("{name}: some of its files are missing: {error}")
    };
    unverified(path, Verdict::Damaged, finding)
}

pub(super) fn unverified(path: &Path, verdict: Verdict, finding: String) -> Verification {
    let (path, finding) = (path.to_path_buf(), Some(finding));
    Verification { path, verdict, finding, errno: None, coverage: Coverage::Nothing, bytes: 0, seconds: 0.0 }
}

/// Reports the damage of a list of files.
fn of_list(path: &Path, error: &deepnvme_checkpoint::Error) -> Verification {
    unverified(path, verdict(error).unwrap_or(Verdict::Damaged), finding(path, error))
}

/// Reports a list without a checksum, written by another program: a missing entry cannot be detected.
fn without_checksum(path: &Path) -> Verification {
    let finding =
        "the list of files has no checksum, so it may lack tensors. deepnvme.save writes lists with a checksum";
    unverified(path, Verdict::Unverifiable, format!("{}: {finding}", display::path(path)))
}

pub(super) fn compared(
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
    Ok(Verification { path: path.to_path_buf(), verdict, finding, errno: None, coverage, bytes, seconds })
}

/// Returns the text of an error.
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
