//! The `_StoredTensor` class: a tensor on disk, plain or packed.

use std::sync::Arc;

use deepnvme_checkpoint::read::FileMetadata;
use deepnvme_codec::Float;
use deepnvme_stream::pack;
use deepnvme_stream::{Form, StoredRange, StoredTensor};
use pyo3::prelude::*;

use super::error::to_exception;
use crate::checkpoint::{self, CheckpointReader};
use crate::error::InvalidArgumentError;

/// A tensor on disk. Two are equal if they are the same object.
#[pyclass(frozen, name = "_StoredTensor", module = "deepnvme._deepnvme")]
pub(crate) struct PyStoredTensor {
    pub(crate) tensor: Arc<StoredTensor>,
}

/// A range of a stored tensor: the tensor, first decoded byte and bytes; for a plain one, file index, offset, bytes and
/// type.
#[derive(FromPyObject)]
pub(crate) enum RangeArgument<'py> {
    Stored((PyRef<'py, PyStoredTensor>, usize, usize)),
    Plain((usize, u64, usize, String)),
}

/// Name, type, shape, stored tensor.
type PackedTuple = (String, &'static str, Vec<u64>, PyStoredTensor);

/// List the packed tensors of a file. ``file`` is the caller's index of the file.
#[pyfunction]
pub(crate) fn _packed_tensors(
    py: Python<'_>,
    reader: &Bound<'_, CheckpointReader>,
    file: usize,
) -> PyResult<Vec<PackedTuple>> {
    let reader = reader.get().reader();
    let FileMetadata::Safetensors { header } = reader.file_metadata() else { return Ok(Vec::new()) };
    let packed = pack::tensors(header, file);
    let packed = packed.map_err(|error| checkpoint::format_error(py, reader.path(), error))?;
    let tuple = |tensor: pack::PackedTensor| {
        let stored = PyStoredTensor { tensor: Arc::new(tensor.stored) };
        (tensor.name, tensor.dtype.torch_name(), tensor.shape, stored)
    };
    Ok(packed.into_iter().map(tuple).collect())
}

/// Returns the type of this torch name.
pub(crate) fn float(name: &str) -> PyResult<Float> {
    match name {
        "bfloat16" => Ok(Float::Bf16),
        "float16" => Ok(Float::F16),
        "float32" => Ok(Float::F32),
        _ => Err(InvalidArgumentError::new_err(format!(
            "weights of type {name} cannot be converted; use bfloat16, float16 or float32"
        ))),
    }
}

pub(crate) fn stored_range(py: Python<'_>, argument: RangeArgument<'_>) -> PyResult<StoredRange> {
    let range = match argument {
        RangeArgument::Stored((stored, start, bytes)) => {
            StoredRange { tensor: Arc::clone(&stored.tensor), start, bytes }
        }
        RangeArgument::Plain((source, offset, bytes, name)) => {
            let tensor = StoredTensor { source, float: float(&name)?, form: Form::Plain { offset } };
            StoredRange { tensor: Arc::new(tensor), start: 0, bytes }
        }
    };
    let end = range.start.checked_add(range.bytes);
    let end = end.ok_or_else(|| InvalidArgumentError::new_err("a range exceeds the address space"))?;
    range.tensor.check_end(end).map_err(|error| to_exception(py, &error))?;
    Ok(range)
}
