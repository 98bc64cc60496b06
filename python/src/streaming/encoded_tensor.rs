//! The `_EncodedTensor` class: a tensor whose form on disk differs from memory.

use std::sync::Arc;

use deepnvme_checkpoint::read::FileMetadata;
use deepnvme_codec::Float;
use deepnvme_stream::pack;
use deepnvme_stream::{EncodedRange, EncodedTensor, Form};
use pyo3::prelude::*;

use super::error::to_exception;
use crate::checkpoint::{self, CheckpointReader};
use crate::error::InvalidArgumentError;

/// An encoded tensor. Two are equal if they are the same object.
#[pyclass(frozen, name = "_EncodedTensor", module = "deepnvme._deepnvme")]
pub(crate) struct PyEncodedTensor {
    pub(crate) tensor: Arc<EncodedTensor>,
}

/// A range of a tensor: an encoded tensor, first decoded byte and bytes; or file index, offset, bytes and type.
#[derive(FromPyObject)]
pub(crate) enum EncodedArgument<'py> {
    Encoded((PyRef<'py, PyEncodedTensor>, usize, usize)),
    Plain((usize, u64, usize, String)),
}

/// Name, type, shape, encoded tensor.
type PackedTuple = (String, &'static str, Vec<u64>, PyEncodedTensor);

/// List the encoded tensors of a file. ``file`` is the caller's index of the file.
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
        let encoded = PyEncodedTensor { tensor: Arc::new(tensor.encoded) };
        (tensor.name, tensor.dtype.torch_name(), tensor.shape, encoded)
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

pub(crate) fn encoded_range(py: Python<'_>, argument: EncodedArgument<'_>) -> PyResult<EncodedRange> {
    let range = match argument {
        EncodedArgument::Encoded((encoded, start, bytes)) => {
            EncodedRange { tensor: Arc::clone(&encoded.tensor), start, bytes }
        }
        EncodedArgument::Plain((source, offset, bytes, name)) => {
            let tensor = EncodedTensor { source, float: float(&name)?, form: Form::Plain { offset } };
            EncodedRange { tensor: Arc::new(tensor), start: 0, bytes }
        }
    };
    let end = range.start.checked_add(range.bytes);
    let end = end.ok_or_else(|| InvalidArgumentError::new_err("a range exceeds the address space"))?;
    range.tensor.conversions(end..end, 0, range.tensor.float).map_err(|error| to_exception(py, &error))?;
    Ok(range)
}
