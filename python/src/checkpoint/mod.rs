//! Checkpoint files, as `deepnvme._checkpoint` uses them. `save` and `load` move the bytes; `build` builds objects from
//! a pickle's graph. Python decides which calls are allowed: see `deepnvme._checkpoint.safe_unpickler`.

use deepnvme_checkpoint::Error;
use pyo3::prelude::*;

use crate::error;

mod build;
mod dlpack_types;
mod file_tensor;
mod history;
mod lists;
mod load;
mod new_file;
mod pickle;
mod plain_targets;
mod plan;
mod reflink_target;
mod save;
mod shard;
mod tensor_sources;

pub(crate) use build::HashCosts;
pub(crate) use history::{_checkpoint_paths, NewFolder, PyHistory};
pub(crate) use lists::{_find_set, _list_state, _refuse_list_name};
pub(crate) use load::{CheckpointReader, Loading};
pub(crate) use new_file::NewFile;
pub(crate) use pickle::{_check_pickle, _pickle_plain};
pub(crate) use plain_targets::{DirectReads, PlainTargets};
pub(crate) use plan::{_plan_archive, _plan_safetensors, SavePlan, SaveStaging};
pub(crate) use reflink_target::PyReflinkTarget;
pub(crate) use save::{_crc64, _crc64_of_all, Saving};
pub(crate) use shard::{_shard_ranges, SaveShard};
pub(crate) use tensor_sources::_not_plain;

/// Converts a format error to the exception that Python code expects.
pub(crate) fn format_error(py: Python<'_>, path: &std::path::Path, source: deepnvme_format::Error) -> PyErr {
    to_exception(py, &Error::Format { path: path.to_path_buf(), source })
}

/// Converts the error of a save or load to the exception that Python code expects.
pub(crate) fn to_exception(py: Python<'_>, error: &Error) -> PyErr {
    let class = match error {
        Error::Io(error) => return error::to_exception(py, error),
        Error::Format { source: deepnvme_format::Error::Invalid(_), .. } => "InvalidArgumentError",
        Error::Format { source: deepnvme_format::Error::Unsupported(_), .. } => "UnsupportedError",
        Error::Format { source: deepnvme_format::Error::Memory { .. }, .. } => "OutOfMemoryError",
        Error::Format { .. } => "CorruptFileError",
        Error::Damaged { .. } | Error::NotListed { .. } | Error::ChangedList { .. } => "ChecksumError",
        Error::NoChecksums { .. } => "InvalidArgumentError",
        Error::HeaderLength { .. } => "MovedError",
        Error::Panicked(_) => "Error",
        Error::Changed { .. } => "ChangedFileError",
        Error::Interrupted => "CancelledError",
        Error::Locked { .. } => "LockedError",
        Error::Manifest { .. } => "CorruptFileError",
    };
    // Their remedy is a load without verification.
    let option = match error {
        Error::Damaged { .. } | Error::ChangedList { .. } | Error::NoChecksums { .. } => " (verify='off')",
        _ => "",
    };
    let raised = error::plain(py, class, format!("{error}{option}"));
    let place = match error {
        Error::Format { path, source: deepnvme_format::Error::Corrupt { offset, .. } } => Some((path, Some(*offset))),
        Error::Format { path, .. } | Error::NoChecksums { path, .. } => Some((path, None)),
        Error::HeaderLength { path, .. } | Error::Changed { path } => Some((path, None)),
        Error::Damaged { path, offset, .. } => Some((path, Some(*offset))),
        Error::Locked { path, .. } | Error::Manifest { path, .. } => Some((path, None)),
        Error::ChangedList { path } | Error::NotListed { path } => Some((path, None)),
        Error::Io(_) | Error::Panicked(_) | Error::Interrupted => None,
    };
    let Some((path, offset)) = place else { return raised };
    let value = raised.value(py);
    let named = value.setattr("filename", path.as_os_str()).and_then(|()| value.setattr("offset", offset));
    named.err().unwrap_or(raised)
}
