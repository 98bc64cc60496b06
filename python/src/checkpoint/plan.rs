//! Plan a save: find the memory of Python objects and lay out the file.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::write::{DataSource, Record, Save, SaveOptions, Staging, error_of_target};
use deepnvme_file::Target;
use deepnvme_format::archive::STORAGES;
use deepnvme_io::{Engine, OpenOptions};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::save::{Destination, Saving, start};
use super::shard::SaveShard;
use super::tensor_sources::{self, NamedTensor};
use super::to_exception;
use crate::engine::PyEngine;
use crate::error::InvalidArgumentError;
use crate::once::intern;
use crate::path::PathArgument;
use crate::settings::{self, Word};
use crate::threads::{SIGNAL_CHECK_INTERVAL, UntilTaken};
use crate::{default, detached_requests, memory, tensor_memory};

/// Save options, as the package's own code passes them.
pub(crate) struct SaveArguments<'py> {
    engine: Option<Bound<'py, PyEngine>>,
    durability: String,
    checksums: bool,
    staging: Option<Bound<'py, SaveStaging>>,
}

impl<'py> FromPyObject<'_, 'py> for SaveArguments<'py> {
    type Error = PyErr;

    fn extract(options: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = options.py();
        Ok(Self {
            engine: options.get_item(intern!(py, "engine"))?.extract()?,
            durability: options.get_item(intern!(py, "durability"))?.extract()?,
            checksums: options.get_item(intern!(py, "checksums"))?.extract()?,
            staging: options.get_item(intern!(py, "staging"))?.extract()?,
        })
    }
}

/// Plan a torch archive: records by name, storages by their keys, more records.
#[pyfunction]
#[pyo3(signature = (path, before, storages, after, options))]
pub(crate) fn _plan_archive(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    before: Vec<(String, Bound<'_, PyAny>)>,
    storages: Vec<Bound<'_, PyAny>>,
    after: Vec<(String, Bound<'_, PyAny>)>,
    options: SaveArguments<'_>,
) -> PyResult<SavePlan> {
    let _gc_pause = memory::GcPause::new(py);
    let engine = default::or_default(py, options.engine.as_ref())?;
    let source = |memory| DataSource::memory(&engine, memory);
    let record =
        |(name, object): (String, Bound<'_, PyAny>)| Ok(Record { name, data: source(tensor_memory::source(&object)?) });
    let mut records = before.into_iter().map(record).collect::<PyResult<Vec<_>>>()?;
    for (key, memory) in tensor_memory::storages(py, storages)?.into_iter().enumerate() {
        records.push(Record { name: format!("{STORAGES}{key}"), data: source(memory) });
    }
    records.extend(after.into_iter().map(record).collect::<PyResult<Vec<_>>>()?);
    SavePlan::new(py, path, &engine, options, |target, options| Save::archive(&target.path(), records, options))
}

/// Plan a safetensors file.
#[pyfunction]
#[pyo3(signature = (path, tensors, metadata, options))]
pub(crate) fn _plan_safetensors(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    tensors: Vec<NamedTensor<'_>>,
    metadata: Vec<(String, String)>,
    options: SaveArguments<'_>,
) -> PyResult<SavePlan> {
    let _gc_pause = memory::GcPause::new(py);
    let engine = default::or_default(py, options.engine.as_ref())?;
    let tensors = tensor_sources::find(py, &engine, tensors)?;
    SavePlan::new(py, path, &engine, options, |target, options| {
        Save::safetensors(&target.path(), tensors, metadata, options)
    })
}

/// A planned file, written as a whole or in shards by several processes.
#[pyclass(frozen, name = "_SavePlan", module = "deepnvme._deepnvme")]
pub(crate) struct SavePlan {
    engine: Arc<Engine>,
    target: Target,
    nbytes: u64,
    progress: Arc<Progress>,
    /// The save, until it is started.
    save: UntilTaken<Save>,
}

impl SavePlan {
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        engine: &Arc<Engine>,
        options: SaveArguments<'_>,
        plan: impl FnOnce(&Target, SaveOptions) -> deepnvme_checkpoint::Result<Save>,
    ) -> PyResult<Self> {
        detached_requests::reap(py);
        let engine = Arc::clone(engine);
        let target = target(path)?;
        let staging = options.staging.and_then(|staging| staging.get().inner.with(py, |inner| inner.clone()));
        let durability = settings::durability(Word::Text(&options.durability))?;
        let options = SaveOptions { durability, has_checksums: options.checksums, staging };
        let save = plan(&target, options).map_err(|error| to_exception(py, &error))?;
        Ok(Self { engine, target, nbytes: save.bytes(), progress: Arc::default(), save: UntilTaken::new(save) })
    }

    fn take(&self, py: Python<'_>) -> PyResult<Save> {
        self.save.take(py).ok_or_else(|| PyRuntimeError::new_err("the file is being written already"))
    }
}

#[pymethods]
impl SavePlan {
    /// Bytes of the file.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// A number that is equal in all processes that can write a shard of this file.
    #[getter]
    fn layout_crc64(&self, py: Python<'_>) -> PyResult<u64> {
        let crc64 = self.save.with(py, |save| save.layout_crc64());
        crc64.ok_or_else(|| PyRuntimeError::new_err("the file is being written already"))
    }

    /// Bytes of the shard: written, total.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        self.progress.bytes()
    }

    /// Start writing the whole file. With ``private`` it keeps its private name for the caller to take.
    #[pyo3(signature = (private=false))]
    fn start(&self, py: Python<'_>, private: bool) -> PyResult<Saving> {
        // The process may change its working folder before the thread opens the file.
        let target = self.target.absolute();
        let destination = if private { Destination::Private(target) } else { Destination::Replace(target) };
        start(py, self.take(py)?, Arc::clone(&self.engine), destination)
    }

    /// Start writing the whole file into an existing file, such as a member of a ``_SetReplacement``.
    fn start_into(&self, py: Python<'_>, file: PathBuf) -> PyResult<Saving> {
        let file = std::path::absolute(&file).unwrap_or(file);
        start(py, self.take(py)?, Arc::clone(&self.engine), Destination::Into(file, self.target.path()))
    }

    /// Write the bytes from ``start`` to ``stop`` that need nothing from other processes. The first byte of ``file`` is
    /// byte ``base`` of the whole.
    #[pyo3(signature = (file, start, stop, base))]
    fn start_shard(&self, py: Python<'_>, file: PathBuf, start: u64, stop: u64, base: u64) -> PyResult<SaveShard> {
        let range: Range<u64> = start..stop;
        if base > start || start > stop || stop > self.nbytes {
            return Err(InvalidArgumentError::new_err(format!(
                "{start} to {stop} is not a shard of {} bytes",
                self.nbytes
            )));
        }
        let save = Arc::new(self.take(py)?);
        let options = OpenOptions::to_fill(self.engine.config().direct);
        let (engine, progress) = (Arc::clone(&self.engine), Arc::clone(&self.progress));
        let written = py.detach(|| {
            let file = deepnvme_file::open(&Target::Path(file), options)?;
            save.start_shard(engine, file, range, base, progress)
        });
        let shard =
            written.map_err(|error| to_exception(py, &error_of_target(error, &self.target.path(), self.nbytes)))?;
        Ok(SaveShard::new(shard, self.target.path(), self.nbytes))
    }

    /// Wait until the tensors may change: the shard is written or has failed.
    fn wait_filled(&self, py: Python<'_>) -> PyResult<()> {
        while !py.detach(|| self.progress.wait_filled(SIGNAL_CHECK_INTERVAL)) {
            py.check_signals()?;
        }
        Ok(())
    }

    /// Declare that the tensors are no longer read. Release those of a file that was never started.
    fn release_tensors(&self, py: Python<'_>) {
        drop(self.save.take(py));
        self.progress.mark_filled();
    }

    /// Stop writing the shard soon, with an exception.
    fn stop(&self) {
        self.progress.stop();
    }
}

/// Memory that buffers the bytes of saves before the disk takes them.
#[pyclass(frozen, name = "_SaveStaging", module = "deepnvme._deepnvme")]
pub(crate) struct SaveStaging {
    /// Releasing gigabytes of pinned memory takes long, so it happens without the GIL.
    inner: UntilTaken<Staging>,
    nbytes: u64,
}

#[pymethods]
impl SaveStaging {
    #[new]
    fn new(py: Python<'_>, nbytes: u64) -> PyResult<Self> {
        let inner = py.detach(|| Staging::new(nbytes)).map_err(|error| to_exception(py, &error))?;
        Ok(Self { nbytes: inner.bytes(), inner: UntilTaken::new(inner) })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

fn target(path: &Bound<'_, PyAny>) -> PyResult<Target> {
    PathArgument::new(path)?.named(|number| {
        format!("a checkpoint gets its name when it is whole, so that it needs a path, and {number} is a descriptor")
    })
}
