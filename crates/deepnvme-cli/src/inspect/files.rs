//! The files of a checkpoint path, and the conversion of errors.

use std::path::Path;

use deepnvme_checkpoint::read::{FileSet, find_model, find_set, find_shards};
use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_io::fs;
use deepnvme_perf::Error;
use deepnvme_stream::pack::{PACKED_NAME, PLAIN_NAME};

/// Finds the files of a model, a checkpoint or a packed model.
pub(super) fn find_files(path: &Path) -> deepnvme_checkpoint::Result<FileSet> {
    match find_any(path)? {
        Some(set) => Ok(set),
        // Says what the folder lacks.
        None => find_set(path),
    }
}

/// Finds the files as [`find_files`], or `None` for a folder that has none.
pub(super) fn find_any(path: &Path) -> deepnvme_checkpoint::Result<Option<FileSet>> {
    if !fs::is_folder(path) {
        return find_set(path).map(Some);
    }
    if let Some(shards) = find_shards(path)? {
        return Ok(Some(shards));
    }
    // A packed model is one file, or parts and their list.
    let lists = [PACKED_NAME, PLAIN_NAME].map(|name| format!("{name}{MANIFEST_SUFFIX}"));
    let packed = lists.into_iter().chain([PACKED_NAME.to_owned()]).map(|name| path.join(name));
    match packed.into_iter().find(|path| !fs::is_absent(path)) {
        Some(path) => Ok(Some(FileSet::single(path))),
        None => find_model(path),
    }
}

/// Converts an error of the checkpoint library.
pub(crate) fn failed(error: deepnvme_checkpoint::Error) -> Error {
    match error {
        deepnvme_checkpoint::Error::Io(error) => Error::Engine(error),
        deepnvme_checkpoint::Error::Interrupted => Error::Interrupted,
        other => Error::Library(Box::new(other)),
    }
}
