//! The memory of the tensors of a save. That of plain tensors is found with a few C calls each: for ten thousand
//! tensors, asking Python about each of their properties takes a quarter of the save.

use std::sync::Arc;

use deepnvme_checkpoint::write::{DataSource, Tensor};
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::Engine;
use deepnvme_mem::dlpack::DLDevice;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use super::dlpack_types;
use crate::error::InvalidArgumentError;
use crate::memory::{DeviceStream, PlainClasses, StorageHolds, held_region};
use crate::once::intern;
use crate::{tensor_memory, torch};

/// A tensor and its name.
pub(super) type NamedTensor<'py> = (String, Bound<'py, PyAny>);

/// Return the indices of pairs that are not a UTF-8 name and a plain tensor. A plain tensor has torch's own class, is
/// contiguous, in host memory, real, and not lazily negated.
#[pyfunction]
pub(crate) fn _not_plain(pairs: &Bound<'_, PyList>) -> PyResult<Vec<usize>> {
    let Some(classes) = torch::plain_classes(pairs.py())? else { return Ok((0..pairs.len()).collect()) };
    let mut others = Vec::new();
    for (index, pair) in pairs.iter().enumerate() {
        let pair = pair.cast_into::<PyTuple>()?;
        let (name, tensor) = (pair.get_borrowed_item(0)?, pair.get_item(1)?);
        let has_name = name.cast::<PyString>().is_ok_and(|name| name.to_str().is_ok());
        let is_plain = has_name
            && classes.describe(&tensor).is_some_and(|found| found.plain().is_some())
            && !torch::is_lazy_negative(&tensor)?;
        if !is_plain {
            others.push(index);
        }
    }
    Ok(others)
}

/// Finds the memory of tensors, and keeps it in place.
pub(super) fn find(py: Python<'_>, engine: &Engine, named: Vec<NamedTensor<'_>>) -> PyResult<Vec<Tensor>> {
    let mut plain = Vec::with_capacity(named.len());
    for (_, object) in &named {
        if torch::plain(object)?.is_some() {
            plain.push(object.clone());
        }
    }
    let held = Arc::new(StorageHolds::new(py, &plain)?);
    let classes = torch::plain_classes(py)?;
    let mut plain = plain.into_iter().peekable();
    let source = |(name, object): NamedTensor<'_>| {
        let is_plain = plain.next_if(|next| next.is(&object)).is_some();
        // Described again: only the held storage is sure to stay.
        let found = classes.filter(|_| is_plain).and_then(|classes| held_source(engine, classes, &object, &held));
        let tensor = match found {
            Some((dtype, shape, data)) => Tensor { spec: TensorSpec { name, dtype, shape }, data },
            None => by_attributes(engine, name, &object)?,
        };
        Ok(tensor)
    };
    named.into_iter().map(source).collect()
}

/// Returns the type, shape and memory of a plain tensor; `None` for anything else, or if its storage was resized.
fn held_source(
    engine: &Engine,
    classes: &PlainClasses,
    object: &Bound<'_, PyAny>,
    held: &Arc<StorageHolds>,
) -> Option<(Dtype, Vec<u64>, DataSource)> {
    let plain = classes.describe_anywhere(object)?.plain()?;
    let dtype = dlpack_types::to_torch(plain.dtype)?;
    let device_stream = if plain.device.device_type == DLDevice::CPU {
        DeviceStream::HOST
    } else {
        classes.device_stream_of(plain.device, object.py())?
    };
    let memory = held_region(&plain.addresses, device_stream, held)?;
    Some((dtype, plain.shape, DataSource::memory(engine, memory)))
}

/// Finds the memory of any tensor by its attributes.
fn by_attributes(engine: &Engine, name: String, object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = object.py();
    let of_torch = object.getattr(intern!(py, "dtype"))?.str()?;
    let of_torch = of_torch.to_str()?;
    let dtype = Dtype::from_torch(of_torch.strip_prefix("torch.").unwrap_or(of_torch)).ok_or_else(|| {
        let remedy = match of_torch.strip_prefix("torch.").and_then(of_few_bits) {
            Some(whole) => format!("save tensor.view(torch.{whole}), which has its bytes"),
            None => "save the state as a .pt file, or convert it".to_owned(),
        };
        let text = format!("{name:?}: safetensors has no {of_torch}; {remedy}");
        InvalidArgumentError::new_err(text)
    })?;
    let shape = object.getattr(intern!(py, "shape"))?.extract()?;
    let data = signed_source(engine, object, dtype).map_err(|error| with_tensor_name(py, &name, error))?;
    Ok(Tensor { spec: TensorSpec { name, dtype, shape }, data })
}

/// Returns the type of whole bytes for an integer type of fewer bits, which torch loads in no file.
fn of_few_bits(of_torch: &str) -> Option<&'static str> {
    let whole = if of_torch.starts_with("uint") { "uint8" } else { "int8" };
    let bits = of_torch.trim_start_matches('u').strip_prefix("int")?;
    matches!(bits, "1" | "2" | "3" | "4" | "5" | "6" | "7").then_some(whole)
}

/// Returns the memory of a tensor. A lazy conjugate or negative gets its signs while the file is written.
fn signed_source(engine: &Engine, object: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<DataSource> {
    let (stored, signs) = torch::stored(object, dtype)?;
    let source = DataSource::memory(engine, tensor_memory::source(&stored)?);
    match source.with_signs(dtype, signs) {
        Ok(signed) => Ok(signed),
        // A lazy negative of a type without a sign bit: torch computes it.
        Err(_) => Ok(DataSource::memory(engine, tensor_memory::source(object)?)),
    }
}

/// Names the refused tensor in the error.
fn with_tensor_name(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyTypeError>(py) {
        return PyTypeError::new_err(format!("{name:?}: {}", error.value(py)));
    }
    error
}
