//! Tensors that are on disk in another form than in memory, as `deepnvme._stream` sees them.

use std::sync::Arc;

use deepnvme_checkpoint::read::Contents;
use deepnvme_codec::Float;
use deepnvme_stream::pack;
use deepnvme_stream::{Form, Stored, Stretch};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::failure::raise;
use crate::checkpoint::{self, CheckpointReader};

/// A tensor in parts that are decoded by themselves. Two are equal where they are the same object.
#[pyclass(frozen, name = "_Stored", module = "deepnvme._deepnvme")]
pub(crate) struct PyStored {
    pub(crate) stored: Arc<Stored>,
}

/// A stretch of a tensor: its bytes as they are decoded, from there on, so many; or those of a file, and their type.
#[derive(FromPyObject)]
pub(crate) enum StretchArgument<'py> {
    Stored((PyRef<'py, PyStored>, usize, usize)),
    Plain((usize, u64, usize, String)),
}

/// Name, type, sizes, parts.
type PackedAnswer = (String, &'static str, Vec<u64>, PyStored);

/// The tensors of a file that are in another form; ``source`` is the number that the caller has for it.
#[pyfunction]
pub(crate) fn _packed_tensors(
    py: Python<'_>,
    reader: &Bound<'_, CheckpointReader>,
    source: usize,
) -> PyResult<Vec<PackedAnswer>> {
    let reader = reader.get().reader();
    let Contents::Safetensors { header } = reader.contents() else { return Ok(Vec::new()) };
    let packed = pack::tensors(header, source);
    let packed = packed.map_err(|error| checkpoint::misread(py, reader.path(), error))?;
    let answer = |tensor: pack::PackedTensor| {
        let stored = PyStored { stored: Arc::new(tensor.stored) };
        (tensor.name, tensor.dtype.torch_name(), tensor.shape, stored)
    };
    Ok(packed.into_iter().map(answer).collect())
}

/// The type that torch calls so.
pub(crate) fn float(name: &str) -> PyResult<Float> {
    match name {
        "bfloat16" => Ok(Float::Bf16),
        "float16" => Ok(Float::F16),
        "float32" => Ok(Float::F32),
        _ => Err(PyValueError::new_err(format!("weights of {name} are not converted on arrival"))),
    }
}

pub(crate) fn stretch(py: Python<'_>, argument: StretchArgument<'_>) -> PyResult<Stretch> {
    let stretch = match argument {
        StretchArgument::Stored((stored, start, bytes)) => Stretch { stored: Arc::clone(&stored.stored), start, bytes },
        StretchArgument::Plain((source, offset, bytes, name)) => {
            let stored = Stored { source, float: float(&name)?, form: Form::Plain { offset } };
            Stretch { stored: Arc::new(stored), start: 0, bytes }
        }
    };
    let end = stretch.start.checked_add(stretch.bytes);
    let end = end.ok_or_else(|| PyValueError::new_err("a stretch is longer than memory"))?;
    stretch.stored.conversions(end..end, 0, stretch.stored.float).map_err(|failure| raise(py, &failure))?;
    Ok(stretch)
}
