//! File lists of checkpoints.

use deepnvme_checkpoint::read;
use deepnvme_format::file_list;
use pyo3::prelude::*;

use super::to_exception;
use crate::interruptible;
use crate::path::file_name;

/// Path, tensors in the file, and the file's size with the checksum of its index.
type FileTuple = (std::path::PathBuf, Option<Vec<String>>, Option<(u64, u64)>);

/// Find the files behind a path. Each comes with its tensors, and with its size and the checksum of its index, if a
/// list states them. With ``check``, the list is compared with its own checksum.
#[pyfunction]
pub(crate) fn _find_set(py: Python<'_>, path: &Bound<'_, PyAny>, check: bool) -> PyResult<Vec<FileTuple>> {
    let path = file_name(path)?;
    let find = move || read::find_set(&path).and_then(|set| if check { set.check().map(|()| set) } else { Ok(set) });
    let set = interruptible::run_read_only(py, find)?;
    let tuple = |file: read::CheckpointFile| {
        let fingerprint = file.fingerprint.map(|fingerprint| (fingerprint.bytes, fingerprint.index_crc64));
        (file.path, file.names, fingerprint)
    };
    Ok(set.map_err(|error| to_exception(py, &error))?.files.into_iter().map(tuple).collect())
}

/// Raise if the path has the name of an index or a manifest: a single file there could not be loaded.
#[pyfunction]
pub(crate) fn _refuse_list_name(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<()> {
    read::refuse_list_name(&file_name(path)?).map_err(|error| to_exception(py, &error))
}

/// Check a list against its checksum: ``"sealed"``, ``"damaged"`` or ``"unsealed"``.
#[pyfunction]
pub(crate) fn _list_state(text: &[u8]) -> &'static str {
    match file_list::seal_state(text) {
        file_list::SealState::Sealed => "sealed",
        file_list::SealState::Damaged => "damaged",
        file_list::SealState::Unsealed => "unsealed",
    }
}
