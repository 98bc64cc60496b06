//! The files of a checkpoint path, and the conversion of errors.

use std::path::Path;

use deepnvme_checkpoint::read::{CheckpointFile, FileSet, find_set, find_shards};
use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_perf::Error;
use deepnvme_stream::pack::{PACKED_NAME, PLAIN_NAME};

/// Finds the files of a model, a checkpoint or a packed model.
pub(super) fn find_files(path: &Path) -> deepnvme_checkpoint::Result<FileSet> {
    if !deepnvme_io::fs::is_folder(path) {
        return find_set(path);
    }
    if let Some(shards) = find_shards(path)? {
        return Ok(shards);
    }
    // A packed model is one file, or parts and their list.
    let lists = [PACKED_NAME, PLAIN_NAME].map(|name| format!("{name}{MANIFEST_SUFFIX}"));
    match lists
        .into_iter()
        .chain([PACKED_NAME.to_owned()])
        .map(|name| path.join(name))
        .find(|path| deepnvme_io::fs::exists(path).unwrap_or(false))
    {
        Some(path) => Ok(FileSet { files: vec![CheckpointFile::unlisted(path)], list: None }),
        None => find_set(path),
    }
}

/// Converts an error of the checkpoint library.
pub(crate) fn failed(error: deepnvme_checkpoint::Error) -> Error {
    match error {
        deepnvme_checkpoint::Error::Io(error) => Error::Engine(error),
        deepnvme_checkpoint::Error::Interrupted => Error::Interrupted,
        other => Error::failed(other.to_string()),
    }
}
