//! Load checkpoints: read a file's index, and its bytes into memory that Python owns.

use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::read::{self, BufferedExtent, Contents, Coverage, LoadBuffer, Reader, Verify};
use deepnvme_format::set;
use deepnvme_io::display;
use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::{build, raise};
use crate::engine::PyEngine;
use crate::path::{PathArgument, file_name};
use crate::{background, default, detached_requests, memory, tensor_memory, threads, torch};

/// Name, type, sizes, strides, first element, index of the storage.
type TensorTuple = (String, &'static str, Vec<u64>, Vec<u64>, u64, usize);
/// Name, bytes, device, offset in the file.
type StorageTuple = (String, u64, String, u64);
/// Offset in the file, length, and the extents in it with their offsets.
type LoadBufferTuple = (u64, u64, Vec<(usize, u64)>);

/// Path, tensors in the file, and the index's size and checksum.
type FileTuple = (std::path::PathBuf, Option<Vec<String>>, Option<(u64, u64)>);

/// Find the files behind a path. Each comes with its tensors, and with the index's size and checksum if a list states
/// them. With ``check``, the list is compared with its own checksum.
#[pyfunction]
pub(crate) fn _find_set(py: Python<'_>, path: &Bound<'_, PyAny>, check: bool) -> PyResult<Vec<FileTuple>> {
    let path = file_name(path)?;
    let find = move || read::find_set(&path).and_then(|set| if check { set.check().map(|()| set) } else { Ok(set) });
    let set = background::run_read_only(py, find)?;
    let tuple = |file: read::CheckpointFile| {
        let identity = file.identity.map(|identity| (identity.bytes, identity.index_crc64));
        (file.path, file.names, identity)
    };
    Ok(set.map_err(|error| raise(py, &error))?.files.into_iter().map(tuple).collect())
}

/// Refuse the name of a list of files for one file.
#[pyfunction]
pub(crate) fn _refuse_list_name(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<()> {
    read::refuse_list_name(&file_name(path)?).map_err(|error| raise(py, &error))
}

/// Check a list against its checksum: ``"sound"``, ``"damaged"`` or ``"unsealed"``.
#[pyfunction]
pub(crate) fn _list_state(text: &[u8]) -> &'static str {
    match set::state(text) {
        set::ChecksumState::Matches => "sound",
        set::ChecksumState::Differs => "damaged",
        set::ChecksumState::Missing => "unsealed",
    }
}

/// An open checkpoint file.
#[pyclass(frozen, name = "_CheckpointReader", module = "deepnvme._deepnvme")]
pub(crate) struct CheckpointReader {
    reader: Arc<Reader>,
    engine: Arc<deepnvme_io::Engine>,
    /// Whether the offset of every extent is certain.
    is_exact: bool,
}

impl CheckpointReader {
    /// Returns the format's reader.
    pub(crate) fn reader(&self) -> &Reader {
        &self.reader
    }
}

#[pymethods]
impl CheckpointReader {
    /// ``names`` are the tensors that an index lists for this file. A missing one is an error.
    #[new]
    #[pyo3(signature = (path, engine, exact, names=None))]
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        engine: Option<&Bound<'_, PyEngine>>,
        exact: bool,
        names: Option<Vec<String>>,
    ) -> PyResult<Self> {
        detached_requests::reap(py);
        let engine = default::or_default(py, engine)?;
        let target = PathArgument::new(path)?
            .named(|number| format!("a checkpoint is loaded by its path, not from descriptor {number}"))?;
        let opening = Arc::clone(&engine);
        let opened = background::run_read_only(py, move || {
            let mut reader = Reader::open(&opening, &target)?;
            reader.require(names.as_deref().unwrap_or_default())?;
            if exact {
                let all: Vec<usize> = (0..reader.extents().len()).collect();
                reader.resolve(&opening, &all)?;
            }
            Ok(reader)
        })?;
        let reader = Arc::new(opened.map_err(|error| raise(py, &error))?);
        let is_exact = exact || matches!(reader.contents(), Contents::Safetensors { .. });
        Ok(Self { reader, engine, is_exact })
    }

    /// ``"torch"`` or ``"safetensors"``.
    #[getter]
    fn format(&self) -> &'static str {
        match self.reader.contents() {
            Contents::Archive { .. } => "torch",
            Contents::Safetensors { .. } => "safetensors",
        }
    }

    #[getter]
    fn has_checksums(&self) -> bool {
        self.reader.has_checksums()
    }

    /// Coverage of the checksums: ``"file"``, ``"data"``, ``"nothing"``, or ``"stale"`` if they belong to another file.
    #[getter]
    fn coverage(&self) -> &'static str {
        match self.reader.coverage() {
            Coverage::File => "file",
            Coverage::Data => "data",
            Coverage::Nothing => "nothing",
            Coverage::Stale => "stale",
        }
    }

    /// Compare the file's index with its checksum. Compare the index's size and checksum with a list's, if given.
    fn check(&self, py: Python<'_>, identity: Option<(u64, u64)>) -> PyResult<()> {
        let Some((bytes, index_crc64)) = identity else {
            return self.reader.check().map_err(|error| raise(py, &error));
        };
        let (reader, engine) = (Arc::clone(&self.reader), Arc::clone(&self.engine));
        let checked = background::run_read_only(py, move || {
            reader.check()?;
            reader.compare_fingerprint(&engine, set::FileFingerprint { bytes, index_crc64 })
        })?;
        checked.map_err(|error| raise(py, &error))
    }

    /// Verify the file's bytes against its checksums: ``"sample"`` or ``"full"``. An archive must be opened with
    /// ``exact``.
    fn verify_tensors(&self, py: Python<'_>, verify: &str) -> PyResult<()> {
        let is_sample = match verify {
            "sample" => true,
            "full" => false,
            other => return Err(PyValueError::new_err(format!("verify is {other:?}; it must be 'sample' or 'full'"))),
        };
        if !self.is_exact {
            let text = format!(
                "{}: this is a torch archive, and a safetensors file is expected",
                display::path(self.reader.path())
            );
            return Err(PyValueError::new_err(text));
        }
        let progress = Arc::new(Progress::default());
        let (reader, engine, seen) = (Arc::clone(&self.reader), Arc::clone(&self.engine), Arc::clone(&progress));
        let work = move || reader.verify_tensors(&engine, is_sample, &seen);
        let stop = || progress.stop();
        background::run_polling(py, work, &mut || Ok(()), &stop)?.map_err(|error| raise(py, &error))
    }

    /// Read bytes of a tensor, starting at ``start``, and verify their checksums. Works on safetensors files only. It
    /// reads the open file, even if its name now refers to another.
    fn read_range(&self, py: Python<'_>, extent: usize, start: u64, target: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_extents([extent].into_iter())?;
        let (record, memory) = (&self.reader.extents()[extent], tensor_memory::target(target)?);
        if !self.is_exact || start.checked_add(memory.len() as u64).is_none_or(|end| end > record.bytes) {
            let (len, bytes) = (memory.len(), record.bytes);
            return Err(PyValueError::new_err(format!(
                "{len} bytes from {start} on are not within the tensor {:?}, which has {bytes} bytes in a safetensors file",
                record.name
            )));
        }
        torch::mark_modified(std::slice::from_ref(target))?;
        let (reader, engine, offset) = (Arc::clone(&self.reader), Arc::clone(&self.engine), record.data_offset + start);
        let filled = memory.region();
        let read = background::run_read_only(py, move || {
            engine.read(reader.file(), offset, memory)?.wait().1?;
            reader.verify_range(&engine, extent, start, &filled)
        })?;
        read.map_err(|error| raise(py, &error))
    }

    /// Return the checksum of the file's index. With the file's size it identifies the file.
    fn index_crc64(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.reader.index_crc64(&self.engine)).map_err(|error| raise(py, &error))
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.reader.file_bytes()
    }

    /// Bytes outside the storages and tensors.
    #[getter]
    fn described_nbytes(&self) -> u64 {
        let stored = self.reader.extents().iter().fold(0, |sum: u64, extent| sum.saturating_add(extent.bytes));
        self.reader.file_bytes().saturating_sub(stored)
    }

    #[getter]
    fn metadata(&self) -> Vec<(String, String)> {
        match self.reader.contents() {
            Contents::Archive { .. } => Vec::new(),
            Contents::Safetensors { header } => header.metadata.clone(),
        }
    }

    fn tensors(&self) -> Vec<TensorTuple> {
        match self.reader.contents() {
            Contents::Archive { state, .. } => {
                let tuple = |tensor: &deepnvme_format::state::Tensor| {
                    let (shape, strides) = (tensor.shape.clone(), tensor.strides.clone());
                    (tensor.name.clone(), tensor.dtype.torch_name(), shape, strides, tensor.offset, tensor.storage)
                };
                state.tensors.iter().map(tuple).collect()
            }
            Contents::Safetensors { header } => {
                let tuple = |(index, tensor): (usize, &deepnvme_format::safetensors::Tensor)| {
                    let mut strides = vec![1; tensor.shape.len()];
                    for at in (1..strides.len()).rev() {
                        strides[at - 1] = strides[at] * tensor.shape[at].max(1);
                    }
                    (tensor.name.clone(), tensor.dtype.torch_name(), tensor.shape.clone(), strides, 0, index)
                };
                header.tensors.iter().enumerate().map(tuple).collect()
            }
        }
    }

    /// List the tensors that differ from their storage by sign: number, conjugate, negative.
    fn signs(&self) -> Vec<(usize, bool, bool)> {
        let Contents::Archive { state, .. } = self.reader.contents() else { return Vec::new() };
        let signed = state.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.signs.are_plain());
        signed.map(|(number, tensor)| (number, tensor.signs.is_conj, tensor.signs.is_neg)).collect()
    }

    /// List the tensors whose names do not lead to them: a key has none.
    fn unnamed(&self) -> Vec<usize> {
        let Contents::Archive { state, .. } = self.reader.contents() else { return Vec::new() };
        state.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.is_named).map(|(number, _)| number).collect()
    }

    fn storages(&self) -> Vec<StorageTuple> {
        let locations: Vec<&str> = match self.reader.contents() {
            Contents::Archive { state, .. } => state.storages.iter().map(|storage| storage.location.as_str()).collect(),
            Contents::Safetensors { .. } => vec!["cpu"; self.reader.extents().len()],
        };
        let tuple = |(extent, location): (&read::Extent, &str)| {
            (extent.name.clone(), extent.bytes, location.to_owned(), extent.data_offset)
        };
        self.reader.extents().iter().zip(locations).map(tuple).collect()
    }

    /// Sizes of these storages, in bytes.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn storage_nbytes(&self, wanted: Vec<usize>) -> PyResult<Vec<u64>> {
        self.check_extents(wanted.iter().copied())?;
        Ok(wanted.iter().map(|index| self.reader.extents()[*index].bytes).collect())
    }

    /// Number of storages, or of tensors in a safetensors file.
    #[getter]
    fn storage_count(&self) -> usize {
        self.reader.extents().len()
    }

    /// Whether objects can be built before their bytes are read. True if no call of the file reads tensor bytes.
    #[getter]
    fn is_plain(&self) -> bool {
        match self.reader.contents() {
            Contents::Archive { graph, .. } => build::is_plain(graph),
            Contents::Safetensors { .. } => true,
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn load_buffers(&self, wanted: Vec<usize>) -> PyResult<Vec<LoadBufferTuple>> {
        self.check_extents(wanted.iter().copied())?;
        let tuple = |buffer: LoadBuffer| {
            let members = buffer.members.iter().map(|member| (member.extent, member.at)).collect();
            (buffer.offset, buffer.bytes, members)
        };
        Ok(self.reader.load_buffers(&wanted).into_iter().map(tuple).collect())
    }

    /// Start reading into the objects, one per load buffer.
    fn start(&self, py: Python<'_>, buffers: Vec<(LoadBufferTuple, Bound<'_, PyAny>)>) -> PyResult<Loading> {
        self.check_extents(buffers.iter().flat_map(|((_, _, members), _)| members.iter().map(|(extent, _)| *extent)))?;
        let _gc_pause = memory::GcPause::new(py);
        let target = |((offset, bytes, members), object): (LoadBufferTuple, Bound<'_, PyAny>)| {
            let target = tensor_memory::target(&object)?;
            if !target.is_contiguous() {
                return Err(PyValueError::new_err("a load buffer must be contiguous memory; pass a contiguous tensor"));
            }
            if target.len() as u64 != bytes {
                return Err(PyValueError::new_err(format!(
                    "a load buffer has {} bytes, and {bytes} are to be read into it; pass one of that size",
                    target.len()
                )));
            }
            let members = members.into_iter().map(|(extent, at)| BufferedExtent { extent, at }).collect();
            Ok((LoadBuffer { offset, bytes, members }, target))
        };
        let objects: Vec<_> = buffers.iter().map(|(_, object)| object.clone()).collect();
        let targets = buffers.into_iter().map(target).collect::<PyResult<Vec<_>>>()?;
        torch::mark_modified(&objects)?;
        let started = py.detach(|| self.reader.start(&self.engine, targets));
        let loading = started.map_err(|error| raise(py, &error))?;
        Ok(Loading { inner: Mutex::new(Some(loading)) })
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    /// Build the objects of an archive. ``storages`` contains one entry per storage, ``None`` for unwanted ones.
    fn build<'py>(
        &self,
        py: Python<'py>,
        factory: &Bound<'py, PyAny>,
        storages: &Bound<'py, PyList>,
        wanted: Option<Vec<String>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.reader.contents() {
            Contents::Archive { graph, state } => {
                let build = || build::build(py, graph, state, factory, storages, wanted.as_deref());
                // If Python cannot allocate an object, PyO3 panics.
                panic::catch_unwind(AssertUnwindSafe(build)).unwrap_or_else(|panicked| {
                    let text = panicked.downcast_ref::<&str>().copied();
                    let text = text.or_else(|| panicked.downcast_ref::<String>().map(String::as_str));
                    match text {
                        Some("Python API call failed") => Err(PyMemoryError::new_err("no memory for an object")),
                        _ => panic::resume_unwind(panicked),
                    }
                })
            }
            Contents::Safetensors { .. } => {
                Err(PyRuntimeError::new_err("a safetensors file contains tensors only, and no objects to build"))
            }
        }
    }
}

impl CheckpointReader {
    fn check_extents(&self, mut extents: impl Iterator<Item = usize>) -> PyResult<()> {
        let count = self.reader.extents().len();
        match extents.find(|extent| *extent >= count) {
            Some(extent) => Err(PyValueError::new_err(format!(
                "storage {extent} does not exist: the file has {count}, counted from 0"
            ))),
            None => Ok(()),
        }
    }
}

/// A load in flight.
#[pyclass(frozen, name = "_Loading", module = "deepnvme._deepnvme")]
pub(crate) struct Loading {
    inner: Mutex<Option<read::Loading>>,
}

#[pymethods]
impl Loading {
    /// Return whether all disk reads have completed.
    fn is_done(&self) -> bool {
        let inner = ignore_poison(self.inner.lock());
        inner.as_ref().is_none_or(read::Loading::is_done)
    }

    /// Wait for all bytes, and verify their checksums.
    #[pyo3(signature = (verify, progress))]
    fn finish(&self, py: Python<'_>, verify: &str, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let verify = match verify {
            "off" => Verify::Off,
            "sample" => Verify::Sample,
            "auto" => Verify::Auto,
            "full" => Verify::Full,
            other => {
                return Err(PyValueError::new_err(format!(
                    "verify is {other:?}; it must be 'auto', 'off', 'sample' or 'full'"
                )));
            }
        };
        let Some(loading) = ignore_poison(self.inner.lock()).take() else {
            return Err(PyRuntimeError::new_err("the load has been finished already"));
        };
        let shared = Arc::new(Progress::default());
        let seen = Arc::clone(&shared);
        let mut report_progress = progress_callback(progress, &shared);
        let stop = || shared.stop();
        let finished = background::run_polling(py, move || loading.finish(verify, &seen), &mut report_progress, &stop)?;
        finished.map_err(|error| raise(py, &error))?;
        report_progress()
    }
}

impl Drop for Loading {
    /// A separate thread cancels the reads in flight: dropping the last reference must not block.
    fn drop(&mut self) {
        if let Some(loading) = ignore_poison(self.inner.get_mut()).take() {
            threads::drop_in_background(loading);
        }
    }
}

/// Reports completed and total bytes to a callback.
pub(super) fn progress_callback<'a>(
    callback: Option<&'a Bound<'_, PyAny>>,
    progress: &'a Progress,
) -> impl FnMut() -> PyResult<()> + use<'a> {
    let callback = callback.map(|callback| callback.clone().unbind());
    move || match &callback {
        Some(callback) => Python::attach(|py| callback.call1(py, progress.bytes()).map(drop)),
        None => Ok(()),
    }
}
