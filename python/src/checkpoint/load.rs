//! Load checkpoints: read a file's index, and its bytes into memory that Python owns.

use std::collections::HashSet;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};

use deepnvme_checkpoint::Progress;
use deepnvme_checkpoint::read::{self, BufferedExtent, Coverage, FileMetadata, LoadBuffer, Reader, Verify};
use deepnvme_format::file_list;
use deepnvme_io::display;
use deepnvme_mem::RegionMut;
use deepnvme_mem::sync::ignore_poison;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PySet};

use super::file_tensor::FileTensor;
use super::plain_targets::{DirectReads, PlainTargets};
use super::{build, to_exception};
use crate::engine::PyEngine;
use crate::error::InvalidArgumentError;
use crate::path::PathArgument;
use crate::pending_request::CANCEL_TIMEOUT;
use crate::{default, detached_requests, interruptible, memory, tensor_memory, threads, torch};

/// Name, type, sizes, strides, first element, index of the storage.
type TensorTuple = (String, &'static str, Vec<u64>, Vec<u64>, u64, usize);
/// Name, bytes, device, offset in the file.
type StorageTuple = (String, u64, String, u64);
/// Offset in the file, length, and the extents in it with their offsets.
type LoadBufferTuple = (u64, u64, Vec<(usize, u64)>);

/// An open checkpoint file.
#[pyclass(frozen, name = "_CheckpointReader", module = "deepnvme._deepnvme")]
pub(crate) struct CheckpointReader {
    reader: Arc<Reader>,
    engine: Arc<deepnvme_io::Engine>,
}

impl CheckpointReader {
    /// Returns the format's reader.
    pub(crate) fn reader(&self) -> &Reader {
        &self.reader
    }
}

#[pymethods]
impl CheckpointReader {
    /// ``names`` are the tensors that an index lists for this file. A missing one is an error. ``exact`` reads the
    /// header of each record of an archive, to be certain of its offset. With ``unless_covered``, it does so only if no
    /// checksums cover the headers: reads compare covered ones. ``complete`` verifies everything that no load of the
    /// tensors reads.
    #[new]
    #[pyo3(signature = (path, engine, exact, names=None, *, unless_covered=false, complete=false))]
    fn new(
        py: Python<'_>,
        path: &Bound<'_, PyAny>,
        engine: Option<&Bound<'_, PyEngine>>,
        exact: bool,
        names: Option<Vec<String>>,
        unless_covered: bool,
        complete: bool,
    ) -> PyResult<Self> {
        detached_requests::reap(py);
        let engine = default::or_default(py, engine)?;
        let target = PathArgument::new(path)?
            .named(|number| format!("a checkpoint is loaded by its path, not from descriptor {number}"))?;
        let opening = Arc::clone(&engine);
        let opened = interruptible::run_read_only(py, move || {
            let mut reader = Reader::open(&opening, &target)?;
            reader.require(names.as_deref().unwrap_or_default())?;
            if complete {
                reader.verify_others(&opening)?;
            }
            if exact && !reader.has_exact_offsets() && !(unless_covered && reader.covers_headers()) {
                let all: Vec<usize> = (0..reader.extents().len()).collect();
                reader.resolve(&opening, &all)?;
            }
            Ok(reader)
        })?;
        let reader = Arc::new(opened.map_err(|error| to_exception(py, &error))?);
        Ok(Self { reader, engine })
    }

    /// ``"torch"`` or ``"safetensors"``.
    #[getter]
    fn format(&self) -> &'static str {
        match self.reader.file_metadata() {
            FileMetadata::Archive { .. } => "torch",
            FileMetadata::Safetensors { .. } => "safetensors",
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

    /// Refuse a packed model.
    fn refuse_packed(&self, py: Python<'_>) -> PyResult<()> {
        self.reader.refuse_packed().map_err(|error| to_exception(py, &error))
    }

    /// Compare the file's index with its checksum. ``fingerprint`` is the size of the file and the checksum of its
    /// index, as a list states them; they are compared if given.
    fn check(&self, py: Python<'_>, fingerprint: Option<(u64, u64)>) -> PyResult<()> {
        let Some((bytes, index_crc64)) = fingerprint else {
            return self.reader.check_metadata().map_err(|error| to_exception(py, &error));
        };
        let (reader, engine) = (Arc::clone(&self.reader), Arc::clone(&self.engine));
        let checked = interruptible::run_read_only(py, move || {
            reader.check_metadata()?;
            reader.compare_fingerprint(&engine, file_list::FileFingerprint { bytes, index_crc64 })
        })?;
        checked.map_err(|error| to_exception(py, &error))
    }

    /// Verify the file's bytes against its checksums: ``"sample"`` or ``"full"``. An archive must be opened with
    /// ``exact``.
    fn verify_tensors(&self, py: Python<'_>, verify: &str) -> PyResult<()> {
        let is_sample = match verify {
            "sample" => true,
            "full" => false,
            other => {
                return Err(InvalidArgumentError::new_err(format!(
                    "verify is {other:?}; it must be 'sample' or 'full'"
                )));
            }
        };
        if !self.reader.has_exact_offsets() {
            let text = format!(
                "{}: this is a torch archive, and a safetensors file is expected",
                display::path(self.reader.path())
            );
            return Err(InvalidArgumentError::new_err(text));
        }
        let progress = Arc::new(Progress::default());
        let (reader, engine, seen) = (Arc::clone(&self.reader), Arc::clone(&self.engine), Arc::clone(&progress));
        let work = move || reader.verify_tensors(&engine, is_sample, &seen);
        let stop = || progress.stop();
        interruptible::run_polling(py, work, &mut || Ok(()), &stop, Some(CANCEL_TIMEOUT))?
            .map_err(|error| to_exception(py, &error))
    }

    /// Read bytes of a tensor, starting at ``start``, and verify their checksums. An archive must be opened with
    /// ``exact``. It reads the open file, even if its name now refers to another.
    fn read_range(&self, py: Python<'_>, extent: usize, start: u64, target: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_extents([extent].into_iter())?;
        let (record, memory) = (&self.reader.extents()[extent], tensor_memory::target(target)?);
        if !self.reader.has_exact_offsets()
            || start.checked_add(memory.len() as u64).is_none_or(|end| end > record.bytes)
        {
            let (len, bytes) = (memory.len(), record.bytes);
            return Err(InvalidArgumentError::new_err(format!(
                "{len} bytes from {start} on are not within the tensor {:?}, which has {bytes} bytes in a safetensors file",
                record.name
            )));
        }
        torch::mark_modified(std::slice::from_ref(target))?;
        let (reader, engine, offset) = (Arc::clone(&self.reader), Arc::clone(&self.engine), record.data_offset + start);
        let filled = memory.region();
        let read = interruptible::run_read_only(py, move || {
            let read = engine.read(reader.file(), offset, memory).and_then(|transfer| transfer.wait().1);
            let verified = read.map_err(Into::into).and_then(|_| reader.verify_range(&engine, extent, start, &filled));
            reader.after_read(verified)
        })?;
        read.map_err(|error| to_exception(py, &error))
    }

    /// Return the checksum of the file's index. With the file's size it identifies the file.
    fn index_crc64(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.reader.index_crc64(&self.engine)).map_err(|error| to_exception(py, &error))
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
        match self.reader.file_metadata() {
            FileMetadata::Archive { .. } => Vec::new(),
            FileMetadata::Safetensors { header } => header.metadata.clone(),
        }
    }

    /// List the tensors, or those of these numbers.
    #[pyo3(signature = (numbers=None))]
    fn tensors(&self, numbers: Option<Vec<usize>>) -> PyResult<Vec<TensorTuple>> {
        let tuple = |tensor: FileTensor<'_>| {
            let FileTensor { name, dtype, shape, strides, storage_offset, storage, .. } = tensor;
            (name.to_owned(), dtype.torch_name(), shape.to_vec(), strides.into_owned(), storage_offset, storage)
        };
        let count = FileTensor::count(self.reader.file_metadata());
        match numbers {
            None => Ok((0..count).map(|number| tuple(FileTensor::new(self.reader.file_metadata(), number))).collect()),
            Some(numbers) => numbers
                .into_iter()
                .map(|number| match number < count {
                    true => Ok(tuple(FileTensor::new(self.reader.file_metadata(), number))),
                    false => Err(InvalidArgumentError::new_err(format!(
                        "tensor {number} does not exist: the file has {count}"
                    ))),
                })
                .collect(),
        }
    }

    /// List the tensors that differ from their storage by sign: number, conjugate, negative.
    fn signs(&self) -> Vec<(usize, bool, bool)> {
        let FileMetadata::Archive { state, .. } = self.reader.file_metadata() else { return Vec::new() };
        let signed = state.tensors.iter().enumerate().filter(|(_, tensor)| !tensor.signs.are_plain());
        signed.map(|(number, tensor)| (number, tensor.signs.is_conj, tensor.signs.is_neg)).collect()
    }

    fn storages(&self) -> Vec<StorageTuple> {
        let locations: Vec<&str> = match self.reader.file_metadata() {
            FileMetadata::Archive { state, .. } => {
                state.storages.iter().map(|storage| storage.location.as_str()).collect()
            }
            FileMetadata::Safetensors { .. } => vec!["cpu"; self.reader.extents().len()],
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
        match self.reader.file_metadata() {
            FileMetadata::Archive { graph, .. } => build::is_plain(graph),
            FileMetadata::Safetensors { .. } => true,
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
    fn start<'py>(&self, py: Python<'py>, buffers: Vec<(LoadBufferTuple, Bound<'py, PyAny>)>) -> PyResult<Loading> {
        self.check_extents(buffers.iter().flat_map(|((_, _, members), _)| members.iter().map(|(extent, _)| *extent)))?;
        let read = |((offset, bytes, members), object): (LoadBufferTuple, Bound<'py, PyAny>)| {
            let members = members.into_iter().map(|(extent, at)| BufferedExtent { extent, at }).collect();
            (LoadBuffer { offset, bytes, members }, object)
        };
        self.start_reads(py, buffers.into_iter().map(read).collect())
    }

    /// Choose the tensors of the file that can be read straight into ``targets``. Their names are taken out of
    /// ``missing``. ``names`` are the tensors that count, or ``None`` for all. Returns the reads, and the numbers of
    /// the other tensors in ``missing``. If the name of such a number is no longer in ``missing``, the file contains it
    /// twice.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn direct_reads(
        &self,
        targets: &PlainTargets,
        missing: &Bound<'_, PySet>,
        names: Option<Vec<String>>,
    ) -> PyResult<(DirectReads, Vec<usize>)> {
        let names: Option<HashSet<&str>> = names.as_ref().map(|names| names.iter().map(String::as_str).collect());
        let (mut reads, mut rest, mut met) = (Vec::new(), Vec::new(), HashSet::new());
        for number in 0..FileTensor::count(self.reader.file_metadata()) {
            let tensor = FileTensor::new(self.reader.file_metadata(), number);
            let is_wanted = tensor.is_named && names.as_ref().is_none_or(|names| names.contains(tensor.name));
            if met.contains(tensor.name) {
                rest.push(number);
            } else if is_wanted && missing.contains(tensor.name)? {
                let extent = &self.reader.extents()[tensor.storage];
                match targets.find(missing.py(), &tensor, extent.bytes) {
                    Some(target) => {
                        met.insert(tensor.name);
                        missing.discard(tensor.name)?;
                        let members = vec![BufferedExtent { extent: tensor.storage, at: 0 }];
                        reads.push((LoadBuffer { offset: extent.data_offset, bytes: extent.bytes, members }, target));
                    }
                    None => rest.push(number),
                }
            }
        }
        Ok((DirectReads { reads }, rest))
    }

    /// Start the reads of ``direct_reads``.
    fn start_direct(&self, py: Python<'_>, reads: &DirectReads) -> PyResult<Loading> {
        let read = |(buffer, target): &(LoadBuffer, Py<PyAny>)| (buffer.clone(), target.bind(py).clone());
        self.start_reads(py, reads.reads.iter().map(read).collect())
    }

    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    /// Build the objects of an archive. ``storages`` contains one entry per storage, ``None`` for unwanted ones.
    fn build<'py>(
        &self,
        factory: &Bound<'py, PyAny>,
        storages: &Bound<'py, PyList>,
        wanted: Option<Vec<String>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.reader.file_metadata() {
            FileMetadata::Archive { graph, state } => {
                let build = || build::build(graph, state, factory, storages, wanted.as_deref());
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
            FileMetadata::Safetensors { .. } => {
                Err(PyRuntimeError::new_err("a safetensors file contains tensors only, and no objects to build"))
            }
        }
    }
}

impl CheckpointReader {
    /// Start reads, in the order of the file. The first ones are in flight while the memory of the next is looked up.
    fn start_reads(&self, py: Python<'_>, mut reads: Vec<(LoadBuffer, Bound<'_, PyAny>)>) -> PyResult<Loading> {
        reads.sort_by_key(|(buffer, _)| buffer.offset);
        let _gc_pause = memory::GcPause::new(py);
        torch::mark_modified(&reads.iter().map(|(_, object)| object.clone()).collect::<Vec<_>>())?;
        let loading = Loading { inner: Mutex::new(Some(self.reader.empty_load(&self.engine))) };
        let (mut group, mut group_bytes) = (Vec::new(), 0);
        for (buffer, object) in reads {
            let bytes = buffer.bytes;
            if group_bytes > 0 && group_bytes + bytes > read::REQUEST_BYTES {
                loading.add(py, &self.engine, std::mem::take(&mut group))?;
                group_bytes = 0;
            }
            let target = load_target(&object, bytes)?;
            group.push((buffer, target));
            group_bytes += bytes;
        }
        loading.add(py, &self.engine, group)?;
        Ok(loading)
    }

    fn check_extents(&self, mut extents: impl Iterator<Item = usize>) -> PyResult<()> {
        let count = self.reader.extents().len();
        match extents.find(|extent| *extent >= count) {
            Some(extent) => Err(InvalidArgumentError::new_err(format!(
                "storage {extent} does not exist: the file has {count}, counted from 0"
            ))),
            None => Ok(()),
        }
    }
}

/// Return the memory of a load buffer.
fn load_target(object: &Bound<'_, PyAny>, bytes: u64) -> PyResult<RegionMut> {
    let target = tensor_memory::target(object)?;
    if !target.is_contiguous() {
        return Err(InvalidArgumentError::new_err("a load buffer must be contiguous memory; pass a contiguous tensor"));
    }
    if target.len() as u64 != bytes {
        return Err(InvalidArgumentError::new_err(format!(
            "a load buffer has {} bytes, and {bytes} are to be read into it; pass one of that size",
            target.len()
        )));
    }
    Ok(target)
}

/// A load in flight.
#[pyclass(frozen, name = "_Loading", module = "deepnvme._deepnvme")]
pub(crate) struct Loading {
    inner: Mutex<Option<read::Loading>>,
}

impl Loading {
    fn add(&self, py: Python<'_>, engine: &deepnvme_io::Engine, group: Vec<(LoadBuffer, RegionMut)>) -> PyResult<()> {
        let added = py.detach(|| match ignore_poison(self.inner.lock()).as_mut() {
            Some(loading) => loading.add(engine, group),
            None => Ok(()),
        });
        added.map_err(|error| to_exception(py, &error))
    }
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
                return Err(InvalidArgumentError::new_err(format!(
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
        let finish = move || loading.finish(verify, &seen);
        let finished = interruptible::run_polling(py, finish, &mut report_progress, &stop, Some(CANCEL_TIMEOUT))?;
        finished.map_err(|error| to_exception(py, &error))?;
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
