//! Turn Python's arguments into a request to the engine, blocking or started.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_io::fs::FileId;
use deepnvme_io::{Access, Engine, Error, ErrorKind, ReadItem, Result, TensorFile, WriteItem, WriteMode, WriteOptions};
use deepnvme_mem::{Region, RegionMut};
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyList, PyString, PyTuple};

use crate::error::InvalidArgumentError;
use crate::memory::{self, AddressRange, check_disjoint, check_disjoint_from};
use crate::once::intern;
use crate::path::PathArgument;
use crate::pending_request::{AnyTransfer, PendingRequest};
use crate::settings::{Word, durability, number};
use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::transfer::PyTransfer;
use crate::{detached_requests, error, reaper, tensor_memory, torch};

/// Upper bound of the memory that a batch item uses until the batch is done.
const ITEM_BYTES: usize = 2 << 10;
/// Batches below this size skip the memory check.
const UNCHECKED_ITEMS_MAX: usize = 1 << 12;

/// An offset in a file, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Offset(pub(crate) u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Offset {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        number("offset", &object).map(Self)
    }
}

/// Whether the call itself waits for the request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlockingMode {
    /// The caller waits, so a small transfer runs best on the caller's thread.
    Blocking,
    /// The caller waits later.
    Async,
}

/// Open the file and submit, without the GIL.
type Submit = Box<dyn FnOnce(&Engine, BlockingMode) -> Result<AnyTransfer> + Send>;

/// A parsed request that is not submitted yet. Submitting it needs no GIL.
pub(crate) struct Request {
    verb: &'static str,
    submit: Submit,
}

impl Request {
    pub(crate) fn read(tensor: &Bound<'_, PyAny>, path: &Bound<'_, PyAny>, offset: Offset) -> PyResult<Self> {
        let (target, path) = (tensor_memory::target(tensor)?, PathArgument::new(path)?);
        torch::mark_modified(std::slice::from_ref(tensor))?;
        let submit = move |engine: &Engine, mode| {
            let file = path.open(Access::Read, engine.config().direct)?;
            let read = if mode == BlockingMode::Blocking { Engine::read_now } else { Engine::read };
            read(engine, &file, offset.0, target).map(AnyTransfer::Read)
        };
        Ok(Self { verb: "read", submit: Box::new(submit) })
    }

    pub(crate) fn write(
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Option<Offset>,
        durability_word: Word<'_, '_>,
    ) -> PyResult<Self> {
        let options = WriteOptions { mode: write_mode(offset.is_none()), durability: durability(durability_word)? };
        let (source, path) = (tensor_memory::source(tensor)?, PathArgument::new(path)?);
        let submit = move |engine: &Engine, mode| {
            let file = path.open(Access::Write, engine.config().direct)?;
            let write = if mode == BlockingMode::Blocking { Engine::write_now } else { Engine::write };
            write(engine, &file, offset.map_or(0, |offset| offset.0), source, options).map(AnyTransfer::Write)
        };
        Ok(Self { verb: "write", submit: Box::new(submit) })
    }

    pub(crate) fn read_batch(items: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (mut tensors, mut written, mut strided) = (Vec::new(), Vec::new(), Vec::new());
        let batch = Batch::<RegionMut>::collect(items, |tensor| {
            let (target, place) = tensor_memory::target_and_place(tensor)?;
            tensors.push(tensor.clone());
            strided.extend(place.filter(|_| !target.is_contiguous()));
            if target.is_contiguous() && !target.is_empty() {
                let bytes = target.len();
                target.region().visit_rows(0, bytes, |rows| written.push(AddressRange::written(rows.address, bytes)));
            }
            Ok(target)
        })?;
        // Two reads into one place at once would leave a mixture.
        check_disjoint_from(&written, strided)?;
        check_disjoint(written)?;
        torch::mark_modified(&tensors)?;
        let submit = move |engine: &Engine, _| {
            let files = open_all(batch.paths, Access::Read, engine)?;
            let items = batch.items.into_iter().map(|(file, offset, target)| {
                let (file, offset) = (Arc::clone(&files[file]), offset.unwrap_or(0));
                ReadItem { file, offset, target }
            });
            engine.read_batch(items.collect()).map(AnyTransfer::ReadBatch)
        };
        Ok(Self { verb: "read_batch", submit: Box::new(submit) })
    }

    pub(crate) fn write_batch(items: &Bound<'_, PyAny>, durability_word: Word<'_, '_>) -> PyResult<Self> {
        let durability = durability(durability_word)?;
        let batch = Batch::<Region>::collect(items, tensor_memory::source)?;
        let without_offset = batch.items.iter().filter(|(_, offset, _)| offset.is_none()).count();
        if without_offset != 0 && without_offset != batch.items.len() {
            return Err(InvalidArgumentError::new_err(format!(
                "{without_offset} of {} items have no offset; give each one an offset (to change that range of its \
                 file), or none (to make each file exactly its tensor)",
                batch.items.len()
            )));
        }
        let options = WriteOptions { mode: write_mode(without_offset > 0), durability };
        let submit = move |engine: &Engine, _| {
            let files = deduplicated(open_all(batch.paths, Access::Write, engine)?)?;
            let items = batch.items.into_iter().map(|(file, offset, source)| {
                let (file, offset) = (Arc::clone(&files[file]), offset.unwrap_or(0));
                WriteItem { file, offset, source }
            });
            engine.write_batch(items.collect(), options).map(AnyTransfer::WriteBatch)
        };
        Ok(Self { verb: "write_batch", submit: Box::new(submit) })
    }

    /// Submits the request and waits until it is done.
    pub(crate) fn run(self, py: Python<'_>, engine: &Engine) -> PyResult<u64> {
        detached_requests::reap(py);
        // Most requests finish within the first slice, and release the GIL only once.
        let request = py.detach(|| {
            let request = PendingRequest::new((self.submit)(engine, BlockingMode::Blocking)?);
            request.wait_ignoring_signals(SIGNAL_CHECK_INTERVAL);
            Ok(request)
        });
        wait_or_cancel(py, error::check(py, request)?)
    }

    /// Submits the request and returns while it is in flight.
    pub(crate) fn start(self, py: Python<'_>, engine: &Engine) -> PyResult<PyTransfer> {
        detached_requests::reap(py);
        let request = py.detach(|| (self.submit)(engine, BlockingMode::Async).map(PendingRequest::new));
        Ok(PyTransfer::new(self.verb, error::check(py, request)?))
    }
}

/// Waits for a request, and cancels it if interrupted.
pub(crate) fn wait_or_cancel(py: Python<'_>, request: PendingRequest) -> PyResult<u64> {
    if let Err(interrupt) = py.check_signals().and_then(|()| request.wait(py, None)) {
        if !request.cancel_and_wait(py) {
            reaper::detach(Arc::new(request));
        }
        return Err(interrupt);
    }
    match request.result() {
        Some(result) => error::check(py, result),
        None => Err(error::plain(py, "Error", "the request ended without a result".into())),
    }
}

fn write_mode(is_whole_file: bool) -> WriteMode {
    if is_whole_file { WriteMode::WholeFile } else { WriteMode::InPlace }
}

fn open_all(paths: Vec<PathArgument>, access: Access, engine: &Engine) -> Result<Vec<Arc<TensorFile>>> {
    paths.into_iter().map(|path| path.open(access, engine.config().direct)).collect()
}

/// Replaces files that are one file under two names by the first, so that ranges of it are compared.
fn deduplicated(files: Vec<Arc<TensorFile>>) -> Result<Vec<Arc<TensorFile>>> {
    let mut known: HashMap<FileId, (usize, Arc<TensorFile>)> = HashMap::with_capacity(files.len());
    let mut once = Vec::with_capacity(files.len());
    for file in files {
        let stats = file.stats()?;
        let first = stats.iter().find_map(|stat| known.get(&stat.identity).cloned());
        match first {
            Some((1, first)) if stats.len() == 1 => once.push(first),
            Some((_, first)) => {
                let detail =
                    format!("it shares a file with {}; write them one after the other", first.path().display());
                return Err(Error::new(ErrorKind::InvalidInput, "write", detail).at_path(file.path()));
            }
            None => {
                known.extend(stats.iter().map(|stat| (stat.identity, (stats.len(), Arc::clone(&file)))));
                once.push(file);
            }
        }
    }
    Ok(once)
}

/// The items of a batch, with each file named once.
struct Batch<R> {
    paths: Vec<PathArgument>,
    items: Vec<(usize, Option<u64>, R)>,
}

impl<R> Batch<R> {
    fn collect<'py>(
        items: &Bound<'py, PyAny>,
        mut region: impl FnMut(&Bound<'py, PyAny>) -> PyResult<R>,
    ) -> PyResult<Self> {
        let mut known: HashMap<PathArgument, usize> = HashMap::new();
        let _gc_pause = memory::GcPause::new(items.py());
        // Trust the length of lists only: it is always right.
        let count = items.cast::<PyList>().map_or(0, PyListMethods::len);
        let mut batch = Self { paths: Vec::new(), items: Vec::with_capacity(count) };
        // Neighbours mostly pass the same path object, which needs no second parsing.
        let mut last: Option<(Bound<'_, PyAny>, usize)> = None;
        check_memory(count)?;
        for (index, item) in iterate(items)?.enumerate() {
            if index >= count && index.is_power_of_two() {
                check_memory(index)?;
            }
            let (path, offset, tensor) =
                item_fields(&item?).map_err(|error| with_item_index(items.py(), index, error))?;
            let file = match &last {
                Some((same, file)) if same.is(&path) => *file,
                _ => {
                    let argument =
                        PathArgument::new(&path).map_err(|error| with_item_index(items.py(), index, error))?;
                    *known.entry(argument).or_insert_with_key(|argument| {
                        batch.paths.push(argument.clone());
                        batch.paths.len() - 1
                    })
                }
            };
            let region = region(&tensor).map_err(|error| with_item_index(items.py(), index, error))?;
            batch.items.push((file, offset.map(|offset| offset.0), region));
            last = Some((path, file));
        }
        Ok(batch)
    }
}

/// Refuses more items than memory allows: a later allocation failure would end the process.
fn check_memory(items: usize) -> PyResult<()> {
    let is_there = items < UNCHECKED_ITEMS_MAX || deepnvme_mem::check_memory(items.saturating_mul(ITEM_BYTES)).is_ok();
    if is_there {
        Ok(())
    } else {
        Err(PyMemoryError::new_err(format!("there is no memory for a batch of {items} items")))
    }
}

/// Iterates over the items. A tensor would yield its rows, all created at once by torch, a string its characters, and a
/// dict its keys: these are refused as mistakes, and so are arrays and buffers.
fn iterate<'py>(items: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyIterator>> {
    let py = items.py();
    let is_one = items.is_instance_of::<PyString>()
        || items.is_instance_of::<PyDict>()
        || items.hasattr(intern!(py, "__dlpack__"))?
        || items.hasattr(intern!(py, "__array__"))?
        || memory::is_buffer(items);
    if !is_one && let Ok(items) = items.try_iter() {
        return Ok(items);
    }
    let class = items.get_type();
    Err(PyTypeError::new_err(format!("items must be a list of tuples (path, offset, tensor), not {}", class.name()?)))
}

type ItemFields<'py> = (Bound<'py, PyAny>, Option<Offset>, Bound<'py, PyAny>);

fn item_fields<'py>(item: &Bound<'py, PyAny>) -> PyResult<ItemFields<'py>> {
    let Ok(tuple) = item.cast::<PyTuple>() else {
        return Err(PyTypeError::new_err(format!(
            "an item is a tuple (path, offset, tensor), not {}",
            item.get_type().name()?
        )));
    };
    if tuple.len() != 3 {
        return Err(InvalidArgumentError::new_err(format!(
            "an item is a tuple (path, offset, tensor), not one of {} elements",
            tuple.len()
        )));
    }
    let first = tuple.get_item(0)?;
    if first.hasattr(intern!(item.py(), "data_ptr"))? {
        let text = "an item is a tuple (path, offset, tensor); the first element is a tensor";
        return Err(PyTypeError::new_err(text));
    }
    Ok((first, tuple.get_item(1)?.extract()?, tuple.get_item(2)?))
}

/// Adds the item's index to the error.
fn with_item_index(py: Python<'_>, index: usize, error: PyErr) -> PyErr {
    let is_plain = error.is_instance_of::<PyTypeError>(py) || error.is_instance_of::<PyValueError>(py);
    if !is_plain {
        return error;
    }
    PyErr::from_type(error.get_type(py), format!("item {index}: {}", error.value(py)))
}
