//! Conversion between formats without holding the model in memory. Each piece of the new file is read from the old file
//! when it is due.
//!
//! The data read is compared with the old file's checksums, if it has any, on the way, since the pieces are hashed
//! anyway. So damage that these checksums show never gets valid new checksums.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use deepnvme_file::Target;
use deepnvme_io::{Durability, Engine, Error as IoError, ErrorKind, fs};

use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::read::{CheckpointFile, Reader, find_set, refuse_list_name, retry_if_replaced};
use crate::stoppable::until_stopped;
use crate::write::{Save, SaveOptions, Saved, create, error_of_target};

mod entries;
mod target;

use self::target::UnchangedRecord;

/// The result of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// The new file.
    pub saved: Saved,
    /// Number of tensors in the new file.
    pub tensors: usize,
    /// Omitted non-tensors of the old files: their names and kinds, at most
    /// [`NON_TENSORS_MAX`](deepnvme_format::state::NON_TENSORS_MAX) for each file.
    pub left_out: Vec<(String, &'static str)>,
}

/// Converts `source`, a file, an index or a folder, to the file `target`. The suffix `.safetensors` selects
/// safetensors. Otherwise writes a torch archive of a flat dict. Memory: a few MiB per thread. Non-contiguous tensors
/// of a torch archive also need the largest of their storages.
///
/// # Errors
/// `Format` if either format cannot hold the data, or for two tensors of the same name. `Damaged` or `ChangedList` if
/// the old file or its list does not match its checksums. `NotListed` if it is not the file that its list names.
/// `Changed` if the old file was written to meanwhile. `Interrupted` if `progress` was stopped. Otherwise `Io`: with
/// `InvalidInput` if `target` is one of the source files, under any name, or the name of a list of files. After an
/// error no new file is left.
pub fn convert(
    engine: &Arc<Engine>,
    source: &Path,
    target: &Path,
    options: SaveOptions,
    progress: &Arc<Progress>,
) -> Result<Conversion> {
    refuse_list_name(target)?;
    let (opening, named) = (Arc::clone(engine), source.to_path_buf());
    // Parsing millions of tensor names takes a while.
    let (opened, list) = until_stopped(progress, move || {
        retry_if_replaced(&named, find_set, |set| {
            set.check()?;
            let open = |file: &CheckpointFile| {
                let mut reader = file.open(&opening)?;
                reader.check_metadata()?;
                reader.refuse_packed()?;
                let all: Vec<usize> = (0..reader.extents().len()).collect();
                reader.resolve(&opening, &all)?;
                Ok((Arc::new(reader), file.names.clone()))
            };
            Ok((set.files.iter().map(open).collect::<Result<Vec<_>>>()?, set.list.clone()))
        })
    })?;
    let (readers, listed): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    refuse_source(target, [source].into_iter().chain(list.as_ref().map(|list| &*list.path)), &readers)?;
    entries::refuse_unnamed(&readers)?;
    let entries = entries::of(&readers, &listed);
    refuse_doubles(target, &entries)?;
    let (tensors, left_out) = (entries.len(), entries::others(&readers)?);
    let output = Output { engine, target, durability: options.durability, progress };
    let (save, copied) = if target.extension().is_some_and(|suffix| suffix == "safetensors") {
        target::safetensors(engine, target, &readers, entries, options)?
    } else {
        target::archive(engine, target, &readers, &entries, options)?
    };
    verify_others(&readers, &copied, engine, progress)?;
    let saved = write(save, &readers, &copied, &output)?;
    Ok(Conversion { saved, tensors, left_out })
}

/// Where the new file goes, and how.
struct Output<'a> {
    engine: &'a Arc<Engine>,
    target: &'a Path,
    durability: Durability,
    progress: &'a Arc<Progress>,
}

fn write(save: Save, readers: &[Arc<Reader>], copied: &[UnchangedRecord], output: &Output<'_>) -> Result<Saved> {
    let Output { engine, target, durability, progress } = *output;
    let bytes = save.bytes();
    let (mut replacement, file) = create(engine, &Target::Path(target.to_path_buf()), bytes)?;
    for reader in readers {
        replacement.limit_permissions(reader.file().permissions()?);
    }
    let save = Arc::new(save);
    let shard = Arc::clone(&save).start_shard(Arc::clone(engine), file, 0..bytes, 0, Arc::clone(progress));
    let saved = shard.and_then(|shard| shard.finish(&[])).map_err(|error| match error {
        // Report errors of the old file with its own path.
        Error::Io(io) if readers.iter().any(|reader| io.path() == Some(reader.path())) => Error::Io(io),
        error => error_of_target(error, replacement.target(), bytes),
    })?;
    for UnchangedRecord { record, reader, extent } in copied {
        readers[*reader].compare_checksums(*extent, save.checksums(*record)?)?;
    }
    progress.check()?;
    readers.iter().try_for_each(|reader| reader.check_unchanged())?;
    replacement.commit(durability == Durability::Full)?;
    Ok(saved)
}

/// Verifies extents that are not copied unchanged: their old checksums are not computed on the way.
fn verify_others(
    readers: &[Arc<Reader>],
    copied: &[UnchangedRecord],
    engine: &Engine,
    progress: &Progress,
) -> Result<()> {
    for (index, reader) in readers.iter().enumerate() {
        let mut is_copied = vec![false; reader.extents().len()];
        copied.iter().filter(|copied| copied.reader == index).for_each(|copied| is_copied[copied.extent] = true);
        let others: Vec<usize> = (0..is_copied.len()).filter(|extent| !is_copied[*extent]).collect();
        if !others.is_empty() && reader.is_verifiable() {
            reader.verify_extents(&others, engine, progress)?;
        }
    }
    Ok(())
}

/// Refuses to replace a source file: data that the new file cannot hold would be lost. These are the files of the
/// readers, with all parts of a stripe set and its manifest, and `others`. They may have several names.
fn refuse_source<'a>(target: &Path, mut others: impl Iterator<Item = &'a Path>, readers: &[Arc<Reader>]) -> Result<()> {
    let Ok(new) = fs::stat(target) else { return Ok(()) };
    let is_target = |path: &Path| fs::stat(path).is_ok_and(|stat| stat.identity == new.identity);
    let mut is_source = others.any(is_target);
    for reader in readers {
        is_source |= is_target(reader.path());
        is_source |= reader.file().stats()?.iter().any(|part| part.identity == new.identity);
    }
    if is_source {
        let detail = "this is a file that would be converted; name another file for the result";
        return Err(IoError::new(ErrorKind::InvalidInput, "convert", detail).at_path(target).into());
    }
    Ok(())
}

fn refuse_doubles(target: &Path, entries: &[entries::TensorEntry]) -> Result<()> {
    let mut seen = HashMap::new();
    for entry in entries {
        if seen.insert(entry.tensor.name.as_str(), ()).is_some() {
            let text = format!("two tensors would be called {:?}; convert the files one by one", entry.tensor.name);
            return Err(Error::format(target, deepnvme_format::Error::Invalid(text)));
        }
    }
    Ok(())
}
