//! Saving: memory out of Python objects, and a thread that writes the file.

use std::sync::Arc;

use deepnvme_checkpoint::write::{Record, SaveOptions, Tensor, save_archive, save_safetensors};
use deepnvme_checkpoint::{Progress, Result};
use deepnvme_format::Dtype;
use deepnvme_format::archive::STORAGES;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::{Engine, Target};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::raise;
use crate::engine::PyEngine;
use crate::path::Place;
use crate::{background, default, memory, orphans, settings};

/// Writes a torch archive: records by name, storages by their keys, more records; returns its size.
#[pyfunction]
#[pyo3(signature = (path, before, storages, after, engine, durability, checksums, progress))]
#[expect(clippy::too_many_arguments, reason = "the package's own code is its only caller")]
pub(crate) fn _save_archive(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    before: Vec<(String, Bound<'_, PyAny>)>,
    storages: Vec<Bound<'_, PyAny>>,
    after: Vec<(String, Bound<'_, PyAny>)>,
    engine: Option<&Bound<'_, PyEngine>>,
    durability: &str,
    checksums: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let _uncollected = memory::Uncollected::new(py);
    let record = |(name, object): (String, Bound<'_, PyAny>)| Ok(Record { name, memory: memory::source(&object)? });
    let mut records = before.into_iter().map(record).collect::<PyResult<Vec<_>>>()?;
    for (key, storage) in storages.into_iter().enumerate() {
        records.push(Record { name: format!("{STORAGES}{key}"), memory: memory::storage(&storage)? });
    }
    records.extend(after.into_iter().map(record).collect::<PyResult<Vec<_>>>()?);
    let (target, options) = (target(path)?, options(durability, checksums)?);
    let write = move |engine: &Engine, progress: &Progress| save_archive(engine, &target, records, options, progress);
    run(py, engine, progress, write)
}

/// Name, type, sizes and object of a tensor.
type TensorArgument<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);

/// Writes a safetensors file; returns its size.
#[pyfunction]
#[pyo3(signature = (path, tensors, metadata, engine, durability, checksums, progress))]
#[expect(clippy::too_many_arguments, reason = "the package's own code is its only caller")]
pub(crate) fn _save_safetensors(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    tensors: Vec<TensorArgument<'_>>,
    metadata: Vec<(String, String)>,
    engine: Option<&Bound<'_, PyEngine>>,
    durability: &str,
    checksums: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    let _uncollected = memory::Uncollected::new(py);
    let tensor = |(name, dtype, shape, object): TensorArgument<'_>| {
        let known = Dtype::from_torch(&dtype);
        let dtype = known.ok_or_else(|| PyValueError::new_err(format!("{name:?}: torch.{dtype} is not known")))?;
        Ok(Tensor { spec: TensorSpec { name, dtype, shape }, memory: memory::source(&object)? })
    };
    let tensors = tensors.into_iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
    let (target, options) = (target(path)?, options(durability, checksums)?);
    let write = move |engine: &Engine, progress: &Progress| {
        save_safetensors(engine, &target, tensors, metadata, options, progress)
    };
    run(py, engine, progress, write)
}

fn run(
    py: Python<'_>,
    engine: Option<&Bound<'_, PyEngine>>,
    callback: Option<&Bound<'_, PyAny>>,
    write: impl FnOnce(&Engine, &Progress) -> Result<u64> + Send + 'static,
) -> PyResult<u64> {
    orphans::sweep(py);
    let engine = default::or_default(py, engine)?;
    let progress = Arc::new(Progress::default());
    let shared = Arc::clone(&progress);
    let mut look = super::load::look(callback, &progress);
    let stop = || progress.stop();
    let saved = background::watch(py, move || write(&engine, &shared), &mut look, &stop)?;
    look()?;
    saved.map_err(|error| raise(py, &error))
}

fn options(durability: &str, has_sums: bool) -> PyResult<SaveOptions> {
    Ok(SaveOptions { durability: settings::durability(durability)?, has_sums })
}

fn target(path: &Bound<'_, PyAny>) -> PyResult<Target> {
    match Place::new(path)? {
        Place::Path(path) => Ok(Target::Path(path)),
        Place::Stripes(set) => Ok(Target::Stripes(set)),
        Place::Descriptor(number) => Err(PyTypeError::new_err(format!(
            "a checkpoint gets its name when it is whole, so that it needs a path, and {number} is a descriptor"
        ))),
    }
}
