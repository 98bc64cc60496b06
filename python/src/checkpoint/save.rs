//! Saving: memory out of Python objects, and a thread that writes the file.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use deepnvme_checkpoint::write::{Record, SaveOptions, Saved, Staging, Tensor, save_archive, save_safetensors};
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_format::Dtype;
use deepnvme_format::archive::STORAGES;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::{Engine, Target};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::load::look;
use super::raise;
use crate::engine::PyEngine;
use crate::path::Place;
use crate::{default, error, memory, orphans, settings};

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

/// Starts to write a torch archive: records by name, storages by their keys, more records.
#[pyfunction]
#[pyo3(signature = (path, before, storages, after, options))]
pub(crate) fn _start_archive(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    before: Vec<(String, Bound<'_, PyAny>)>,
    storages: Vec<Bound<'_, PyAny>>,
    after: Vec<(String, Bound<'_, PyAny>)>,
    options: Options<'_>,
) -> PyResult<Saving> {
    let _uncollected = memory::Uncollected::new(py);
    let record = |(name, object): (String, Bound<'_, PyAny>)| Ok(Record { name, memory: memory::source(&object)? });
    let mut records = before.into_iter().map(record).collect::<PyResult<Vec<_>>>()?;
    for (key, storage) in storages.into_iter().enumerate() {
        records.push(Record { name: format!("{STORAGES}{key}"), memory: memory::storage(&storage)? });
    }
    records.extend(after.into_iter().map(record).collect::<PyResult<Vec<_>>>()?);
    let target = target(path)?;
    start(py, options, move |engine, options, progress| save_archive(engine, &target, records, options, progress))
}

/// Name, type, sizes and object of a tensor.
type TensorArgument<'py> = (String, String, Vec<u64>, Bound<'py, PyAny>);

/// Starts to write a safetensors file.
#[pyfunction]
#[pyo3(signature = (path, tensors, metadata, options))]
pub(crate) fn _start_safetensors(
    py: Python<'_>,
    path: &Bound<'_, PyAny>,
    tensors: Vec<TensorArgument<'_>>,
    metadata: Vec<(String, String)>,
    options: Options<'_>,
) -> PyResult<Saving> {
    let _uncollected = memory::Uncollected::new(py);
    let tensor = |(name, dtype, shape, object): TensorArgument<'_>| {
        let known = Dtype::from_torch(&dtype);
        let dtype = known.ok_or_else(|| PyValueError::new_err(format!("{name:?}: torch.{dtype} is not known")))?;
        Ok(Tensor { spec: TensorSpec { name, dtype, shape }, memory: memory::source(&object)? })
    };
    let tensors = tensors.into_iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
    let target = target(path)?;
    start(py, options, move |engine, options, progress| {
        save_safetensors(engine, &target, tensors, metadata, options, progress)
    })
}

fn start(
    py: Python<'_>,
    options: Options<'_>,
    write: impl FnOnce(&Engine, SaveOptions, &Progress) -> Result<Saved> + Send + 'static,
) -> PyResult<Saving> {
    orphans::sweep(py);
    let engine = default::or_default(py, options.engine.as_ref())?;
    let staging = options.staging.map(|staging| staging.get().inner.clone());
    let durability = settings::durability(&options.durability)?;
    let options = SaveOptions { durability, has_sums: options.checksums, staging };
    let shared = Arc::new(Shared { progress: Progress::default(), outcome: Mutex::new(None), over: Condvar::new() });
    let seen = Arc::clone(&shared);
    std::thread::spawn(move || {
        // Whatever happens, whoever waits is told: also when the work panics.
        let _told = Told(&seen);
        let saved = write(&engine, options, &seen.progress);
        *seen.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
    });
    Ok(Saving { shared })
}

/// What the thread that saves and those who wait for it share.
struct Shared {
    progress: Progress,
    outcome: Mutex<Option<Result<Saved>>>,
    over: Condvar,
}

struct Told<'a>(&'a Shared);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        let mut outcome = self.0.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if outcome.is_none() {
            let detail = "the thread that saved has panicked; report this as a bug";
            let panicked = deepnvme_io::Error::new(deepnvme_io::ErrorKind::Io, "save", detail);
            *outcome = Some(Err(Error::Io(panicked)));
        }
        self.0.progress.mark_filled();
        self.0.over.notify_all();
    }
}

/// A save that is under way, or over.
#[pyclass(frozen, name = "_Saving", module = "deepnvme._deepnvme")]
pub(crate) struct Saving {
    shared: Arc<Shared>,
}

#[pymethods]
impl Saving {
    /// Whether it is over, well or not.
    #[getter]
    fn done(&self) -> bool {
        self.shared.outcome.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Bytes written, and in all.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        self.shared.progress.bytes()
    }

    /// Waits until the tensors may change.
    fn wait_filled(&self, py: Python<'_>) -> PyResult<()> {
        while !py.detach(|| self.shared.progress.wait_filled(SLICE)) {
            py.check_signals()?;
        }
        Ok(())
    }

    /// Waits until the file has its name; its size, and where its index is, how long, and of which sum.
    #[pyo3(signature = (progress, stop_on_signal))]
    fn wait(
        &self,
        py: Python<'_>,
        progress: Option<&Bound<'_, PyAny>>,
        stop_on_signal: bool,
    ) -> PyResult<(u64, u64, u64, u64)> {
        let mut look = look(progress, &self.shared.progress);
        let mut raised = None;
        let outcome = loop {
            if let Some(outcome) = py.detach(|| self.wait_slice()) {
                break outcome;
            }
            let looked = py.check_signals().and_then(|()| if raised.is_none() { look() } else { Ok(()) });
            if let Err(signal) = looked {
                if !stop_on_signal {
                    return Err(signal);
                }
                self.shared.progress.stop();
                raised = Some(signal);
            }
        };
        if let Some(signal) = raised {
            return Err(signal);
        }
        let saved = outcome.map_err(|error| raise(py, &error))?;
        look()?;
        Ok((saved.bytes, saved.index_offset, saved.index_bytes, saved.index_crc64))
    }

    /// Has it end soon; ``wait`` then raises.
    fn stop(&self) {
        self.shared.progress.stop();
    }
}

impl Saving {
    fn wait_slice(&self) -> Option<Result<Saved>> {
        let outcome = self.shared.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.shared.over.wait_timeout_while(outcome, SLICE, |outcome| outcome.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

/// Memory that takes the bytes of saves before the disk does.
#[pyclass(frozen, name = "_SaveStaging", module = "deepnvme._deepnvme")]
pub(crate) struct SaveStaging {
    inner: Staging,
}

#[pymethods]
impl SaveStaging {
    #[new]
    fn new(py: Python<'_>, nbytes: u64) -> PyResult<Self> {
        let inner = py.detach(|| Staging::new(nbytes)).map_err(|error| raise(py, &error))?;
        Ok(Self { inner })
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }
}

/// The CRC-64/NVME of a stretch of a file.
#[pyfunction]
pub(crate) fn _crc64(py: Python<'_>, path: &Bound<'_, PyAny>, offset: u64, nbytes: u64) -> PyResult<u64> {
    let path = crate::path::file_name(path)?;
    let read = py.detach(|| {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = std::fs::File::open(&path)?;
        file.seek(SeekFrom::Start(offset))?;
        let mut hasher = deepnvme_format::sums::Hasher::default();
        let (mut left, mut chunk) = (nbytes, vec![0; 1 << 20]);
        while left > 0 {
            let now = left.min(chunk.len() as u64) as usize;
            file.read_exact(&mut chunk[..now])?;
            hasher.update(&chunk[..now]);
            left -= now as u64;
        }
        Ok::<u64, std::io::Error>(hasher.finish().crc64)
    });
    read.map_err(|failure| error::plain(py, "CorruptFileError", format!("{}: {failure}", path.display())))
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
