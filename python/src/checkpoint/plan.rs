//! What is to be saved: memory out of Python objects, and the plan of the file.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::write::{Origin, Record, Save, SaveOptions, Staging, Tensor, named};
use deepnvme_file::Target;
use deepnvme_format::Dtype;
use deepnvme_format::archive::STORAGES;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::{Engine, OpenOptions};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;

use super::raise;
use super::save::{Saving, Way, start};
use super::share::SaveShare;
use crate::engine::PyEngine;
use crate::path::Place;
use crate::threads::Ending;
use crate::{default, memory, orphans, settings};

/// How often Python may look for a signal.
const SLICE: Duration = Duration::from_millis(50);

/// How a file is saved, as the package's own code says it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options<'py> {
    engine: Option<Bound<'py, PyEngine>>,
    durability: String,
    checksums: bool,
    staging: Option<Bound<'py, SaveStaging>>,
}

/// Plans a torch archive: records by name, storages by their keys, more records.
#[pyfunction]
#[pyo3(signature = (path, before, storages, after, options))]
pub(crate) fn _plan_archive(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    before: Vec<(String, Bound<'_, PyAny>)>,
    storages: Vec<Bound<'_, PyAny>>,
    after: Vec<(String, Bound<'_, PyAny>)>,
    options: Options<'_>,
) -> PyResult<SavePlan> {
    let _uncollected = memory::Uncollected::new(py);
    let engine = default::or_default(py, options.engine.as_ref())?;
    let bytes = |memory| Origin::memory(&engine, memory);
    let record =
        |(name, object): (String, Bound<'_, PyAny>)| Ok(Record { name, bytes: bytes(memory::source(&object)?) });
    let mut records = before.into_iter().map(record).collect::<PyResult<Vec<_>>>()?;
    for (key, storage) in storages.into_iter().enumerate() {
        records.push(Record { name: format!("{STORAGES}{key}"), bytes: bytes(memory::storage(&storage)?) });
    }
    records.extend(after.into_iter().map(record).collect::<PyResult<Vec<_>>>()?);
    SavePlan::new(py, path, &engine, options, |target, options| Save::archive(&target.path(), records, options))
}

/// Name, type, sizes and object of a tensor.
type TensorArgument<'py> = (String, PyBackedStr, Vec<u64>, Bound<'py, PyAny>);

/// Plans a safetensors file.
#[pyfunction]
#[pyo3(signature = (path, tensors, metadata, options))]
pub(crate) fn _plan_safetensors(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    tensors: Vec<TensorArgument<'_>>,
    metadata: Vec<(String, String)>,
    options: Options<'_>,
) -> PyResult<SavePlan> {
    let _uncollected = memory::Uncollected::new(py);
    let engine = default::or_default(py, options.engine.as_ref())?;
    let tensor = |(name, dtype, shape, object): TensorArgument<'_>| {
        let known = Dtype::from_torch(&dtype);
        let dtype = known.ok_or_else(|| PyValueError::new_err(format!("{name:?}: torch.{dtype} is not known")))?;
        let memory = memory::source(&object).map_err(|error| named_tensor(py, &name, error))?;
        Ok(Tensor { spec: TensorSpec { name, dtype, shape }, bytes: Origin::memory(&engine, memory) })
    };
    let tensors = tensors.into_iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
    SavePlan::new(py, path, &engine, options, |target, options| {
        Save::safetensors(&target.path(), tensors, metadata, options)
    })
}

/// Says which tensor is refused.
fn named_tensor(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyTypeError>(py) {
        return PyTypeError::new_err(format!("{name:?}: {}", error.value(py)));
    }
    error
}

/// A file that is planned: written as a whole, or in shares by several processes.
#[pyclass(frozen, name = "_SavePlan", module = "deepnvme._deepnvme")]
pub(crate) struct SavePlan {
    engine: Arc<Engine>,
    target: Target,
    nbytes: u64,
    progress: Arc<Progress>,
    /// Until somebody writes it.
    save: Ending<Save>,
}

impl SavePlan {
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        engine: &Arc<Engine>,
        options: Options<'_>,
        plan: impl FnOnce(&Target, SaveOptions) -> deepnvme_checkpoint::Result<Save>,
    ) -> PyResult<Self> {
        orphans::sweep(py);
        let engine = Arc::clone(engine);
        let target = target(path)?;
        let staging = options.staging.and_then(|staging| staging.get().inner.with(py, |inner| inner.clone()));
        let durability = settings::durability(&options.durability)?;
        let options = SaveOptions { durability, has_sums: options.checksums, staging };
        let save = plan(&target, options).map_err(|error| raise(py, &error))?;
        Ok(Self { engine, target, nbytes: save.bytes(), progress: Arc::default(), save: Ending::new(save) })
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

    /// The same in all processes that can write a share of the same file.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> PyResult<u64> {
        let fingerprint = self.save.with(py, |save| save.fingerprint());
        fingerprint.ok_or_else(|| PyRuntimeError::new_err("the file is being written already"))
    }

    /// Bytes of the share that are written, and in all.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        self.progress.bytes()
    }

    /// Starts to write the whole file; with ``private`` it keeps its private name, for whoever takes it.
    #[pyo3(signature = (private=false))]
    fn start(&self, py: Python<'_>, private: bool) -> PyResult<Saving> {
        // The process may change its folder before the thread has opened it.
        let target = self.target.absolute();
        let way = if private { Way::Private(target) } else { Way::Replace(target) };
        start(py, self.take(py)?, Arc::clone(&self.engine), way)
    }

    /// Starts to write the whole file into one that is there, such as a member of a ``_SetReplacement``.
    fn start_into(&self, py: Python<'_>, file: PathBuf) -> PyResult<Saving> {
        let file = std::path::absolute(&file).unwrap_or(file);
        start(py, self.take(py)?, Arc::clone(&self.engine), Way::Into(file))
    }

    /// Writes what can be written at once of the bytes from ``start`` to ``stop`` into ``file``, whose first byte is the
    /// byte ``base``.
    #[pyo3(signature = (file, start, stop, base))]
    fn share(&self, py: Python<'_>, file: PathBuf, start: u64, stop: u64, base: u64) -> PyResult<SaveShare> {
        let range: Range<u64> = start..stop;
        if base > start || start > stop || stop > self.nbytes {
            return Err(PyValueError::new_err(format!("{start} to {stop} is no share of {} bytes", self.nbytes)));
        }
        let save = Arc::new(self.take(py)?);
        let options = OpenOptions::to_fill(self.engine.config().direct);
        let (engine, progress) = (Arc::clone(&self.engine), Arc::clone(&self.progress));
        let written = py.detach(|| {
            let file = deepnvme_file::open(&Target::Path(file), options)?;
            save.share(engine, file, range, base, progress)
        });
        let share = written.map_err(|error| raise(py, &named(error, &self.target.path(), self.nbytes)))?;
        Ok(SaveShare::new(share, self.target.path(), self.nbytes))
    }

    /// Waits until the tensors may change: the share is written, or has failed.
    fn wait_filled(&self, py: Python<'_>) -> PyResult<()> {
        while !py.detach(|| self.progress.wait_filled(SLICE)) {
            py.check_signals()?;
        }
        Ok(())
    }

    /// Says that nobody will look at the tensors any more.
    fn give_back(&self) {
        self.progress.mark_filled();
    }

    /// Has the writing of the share end soon, with an exception.
    fn stop(&self) {
        self.progress.stop();
    }
}

/// Memory that takes the bytes of saves before the disk does.
#[pyclass(frozen, name = "_SaveStaging", module = "deepnvme._deepnvme")]
pub(crate) struct SaveStaging {
    /// To let go of gigabytes of locked memory takes long.
    inner: Ending<Staging>,
    nbytes: u64,
}

#[pymethods]
impl SaveStaging {
    #[new]
    fn new(py: Python<'_>, nbytes: u64) -> PyResult<Self> {
        let inner = py.detach(|| Staging::new(nbytes)).map_err(|error| raise(py, &error))?;
        Ok(Self { nbytes: inner.bytes(), inner: Ending::new(inner) })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }
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
