//! The `_Streamer` and `_SparseRowCache` classes, which `deepnvme._stream` wraps.

use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::Engine;
use deepnvme_mem::dlpack::{self, DLDataType, DLManagedTensor};
use deepnvme_mem::{ReservedRange, StreamHandle};
use deepnvme_stream::{
    Conversion, LayerGroup, Piece, RowLocations, RowTensor, SlotClass, SparseRowCache, StoredRange, StreamPlan,
    StreamStats, Streamer,
};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use self::error::to_exception;
pub(crate) use self::stored_tensor::float;
use self::stored_tensor::{RangeArgument, stored_range};
use crate::engine::PyEngine;
use crate::error::{InvalidArgumentError, plain};
use crate::path::PathArgument;
use crate::stats::counter_dict;
use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::{default, memory, tensor_memory};

mod error;
mod stored_tensor;

pub(crate) use stored_tensor::{_packed_tensors, PyStoredTensor};

/// File index, offset in the file, bytes, offset in the slot.
type PieceArgument = (usize, u64, usize, usize);
/// A range of a stored tensor, offset in the slot, type in memory.
type ConversionArgument<'py> = (RangeArgument<'py>, usize, String);
/// File index, offset in the file, bytes.
type FileRangeArgument = (usize, u64, usize);

/// Layer groups that stream through the slots of an arena.
#[pyclass(frozen, name = "_Streamer", module = "deepnvme._deepnvme")]
pub(crate) struct PyStreamer {
    streamer: Streamer,
    pid: u32,
}

#[pymethods]
impl PyStreamer {
    /// Each of ``groups`` is a class and pieces; ``conversions`` lists the conversions of each group. ``classes`` are
    /// slots, prefetch limit, bytes of a slot, and whether the slots share memory.
    #[new]
    #[expect(clippy::needless_pass_by_value, clippy::too_many_arguments, reason = "Python hands it over")]
    #[pyo3(signature = (files, groups, classes, arena, engine, conversions=None, cache_bytes_max=0))]
    fn new(
        py: Python<'_>,
        files: Vec<Bound<'_, PyAny>>,
        groups: Vec<(usize, Vec<PieceArgument>)>,
        classes: Vec<(usize, usize, usize, bool)>,
        arena: &Bound<'_, PyAny>,
        engine: Option<&Bound<'_, PyEngine>>,
        conversions: Option<Vec<Vec<ConversionArgument<'_>>>>,
        cache_bytes_max: u64,
    ) -> PyResult<Self> {
        let (engine, files) = open(py, &files, engine)?;
        let mut converted = conversions.unwrap_or_default();
        converted.resize_with(groups.len(), Vec::new);
        let piece = |(source, offset, bytes, at)| Piece { source, offset, bytes, at };
        let group = |((class, pieces), encoded): ((usize, Vec<PieceArgument>), Vec<ConversionArgument<'_>>)| {
            let conversions = encoded.into_iter().map(|each| conversions_of(py, each)).collect::<PyResult<Vec<_>>>()?;
            let (pieces, conversions) = (pieces.into_iter().map(piece).collect(), conversions.concat());
            Ok::<_, PyErr>(LayerGroup { class, pieces, conversions })
        };
        let groups = groups.into_iter().zip(converted).map(group).collect::<PyResult<Vec<_>>>()?;
        let class =
            |(slots, prefetch, slot_bytes, shares_memory)| SlotClass { slots, prefetch, slot_bytes, shares_memory };
        let classes: Vec<SlotClass> = classes.into_iter().map(class).collect();
        let arena = tensor_memory::target(arena)?;
        let plan = StreamPlan { files, groups, classes, cache_bytes_max };
        let streamer = Streamer::new(engine, plan, arena);
        let streamer = streamer.map_err(|error| to_exception(py, &error))?;
        Ok(Self { streamer, pid: deepnvme_mem::process_id() })
    }

    /// Start to fetch the first layer groups.
    fn warm_up(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process(py)?;
        py.detach(|| self.streamer.warm_up());
        Ok(())
    }

    /// Wait until a layer group is in memory. Returns the offset of its slot in the arena.
    fn acquire(&self, py: Python<'_>, group: usize) -> PyResult<usize> {
        self.check(py, group)?;
        loop {
            let acquired = py.detach(|| self.streamer.acquire(group, Some(SIGNAL_CHECK_INTERVAL)));
            if let Some(at) = acquired.map_err(|error| to_exception(py, &error))? {
                return Ok(at);
            }
            py.check_signals()?;
        }
    }

    /// Release a layer group once the work queued on ``stream`` (torch's, or the default one) is done. Returns False if
    /// it was not held.
    #[pyo3(signature = (group, stream=None))]
    fn release(&self, py: Python<'_>, group: usize, stream: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        self.check(py, group)?;
        let stream = stream.map_or(Ok(StreamHandle::DEFAULT), memory::stream)?;
        // This may start fetches, which check the files.
        Ok(py.detach(|| self.streamer.release(group, stream)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py)?;
        counters(py, &py.detach(|| self.streamer.stats()))
    }

    /// Maximum memory for conversions, in addition to the arena.
    #[getter]
    fn conversion_bytes_max(&self) -> u64 {
        self.streamer.conversion_bytes_max()
    }

    /// Memory of the compressed-weight cache.
    #[getter]
    fn cache_bytes(&self) -> u64 {
        self.streamer.cache_bytes()
    }

    /// Stop fetching, and wait for fetches in flight.
    fn close(&self, py: Python<'_>) {
        if self.pid == deepnvme_mem::process_id() {
            py.detach(|| self.streamer.close());
        }
    }
}

impl PyStreamer {
    fn check(&self, py: Python<'_>, group: usize) -> PyResult<()> {
        self.check_process(py)?;
        let groups = self.streamer.groups().len();
        if group < groups {
            Ok(())
        } else {
            Err(InvalidArgumentError::new_err(format!("there is no group {group}, only {groups}")))
        }
    }

    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.pid)
    }
}

/// Fetch rows on demand into bounded memory.
#[pyclass(frozen, name = "_SparseRowCache", module = "deepnvme._deepnvme")]
pub(crate) struct PySparseRowCache {
    cache: SparseRowCache,
    memory: ReservedRange,
    pid: u32,
}

/// First row, rows, offset in memory, bytes of a row, bytes of the tensor, and locations of its rows in the files.
type TensorArgument<'py> = (usize, usize, usize, usize, usize, LocationsArgument<'py>);

#[derive(FromPyObject)]
enum LocationsArgument<'py> {
    /// Ranges of stored tensors, and the type in memory.
    Converted((Vec<RangeArgument<'py>>, String)),
    Contiguous((usize, u64)),
    PerRow(Vec<Vec<FileRangeArgument>>),
}

impl LocationsArgument<'_> {
    fn locations(self, py: Python<'_>) -> PyResult<RowLocations> {
        Ok(match self {
            Self::Contiguous((source, offset)) => RowLocations::Contiguous { source, offset },
            Self::PerRow(each) => RowLocations::PerRow(each),
            Self::Converted((ranges, to)) => {
                let ranges = ranges.into_iter().map(|each| stored_range(py, each)).collect::<PyResult<_>>()?;
                RowLocations::Converted { ranges, to: float(&to)? }
            }
        })
    }
}

#[pymethods]
impl PySparseRowCache {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[pyo3(signature = (files, tensors, nbytes, bytes_max, engine))]
    fn new(
        py: Python<'_>,
        files: Vec<Bound<'_, PyAny>>,
        tensors: Vec<TensorArgument<'_>>,
        nbytes: usize,
        bytes_max: u64,
        engine: Option<&Bound<'_, PyEngine>>,
    ) -> PyResult<Self> {
        let (engine, files) = open(py, &files, engine)?;
        let tensor = |(first_row, rows, at, row_bytes, bytes, locations): TensorArgument<'_>| {
            let locations = locations.locations(py)?;
            Ok::<_, PyErr>(RowTensor { first_row, rows, at, row_bytes, bytes, locations })
        };
        let tensors: Vec<RowTensor> = tensors.into_iter().map(tensor).collect::<PyResult<_>>()?;
        if nbytes == 0 {
            return Err(InvalidArgumentError::new_err("a tensor of 0 bytes has no rows"));
        }
        let row_bytes = tensors.iter().map(|tensor| tensor.row_bytes).min().unwrap_or(0);
        let memory = ReservedRange::new(nbytes, row_bytes).map_err(|error| {
            let errno = error.raw_os_error();
            PyOSError::new_err((errno, format!("cannot reserve {nbytes} bytes of address space (see ulimit -v)")))
        })?;
        let cache = SparseRowCache::new(engine, files, tensors, memory.clone(), bytes_max);
        let cache = cache.map_err(|error| to_exception(py, &error))?;
        Ok(Self { cache, memory, pid: deepnvme_mem::process_id() })
    }

    /// Export the whole memory as a DLPack capsule. Rows that were never fetched read as zeros.
    fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let whole = self.memory.region_mut(0..self.memory.bytes());
        let tensor = dlpack::export::<DLManagedTensor>(whole, &[self.memory.bytes()], DLDataType::U8)?;
        memory::capsule(py, tensor)
    }

    /// Wait until these rows are in memory. They stay there until they are released.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn acquire(&self, py: Python<'_>, rows: Vec<usize>) -> PyResult<()> {
        check_process(py, self.pid)?;
        py.detach(|| self.cache.acquire(&rows)).map_err(|error| to_exception(py, &error))
    }

    /// Whether a row of the tensors that contain ``row`` was used while it was not in memory. Each use is found once.
    fn was_missing_row_used(&self, py: Python<'_>, row: usize) -> PyResult<bool> {
        check_process(py, self.pid)?;
        Ok(py.detach(|| self.cache.was_missing_row_used(row))?)
    }

    /// Release these rows.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn release(&self, py: Python<'_>, rows: Vec<usize>) -> PyResult<()> {
        check_process(py, self.pid)?;
        py.detach(|| self.cache.release(&rows));
        Ok(())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        check_process(py, self.pid)?;
        counters(py, &py.detach(|| self.cache.stats()))
    }
}

/// Return the bytes that an unlimited compressed-weight cache would take for these layer groups, and their decoded
/// bytes.
#[pyfunction]
pub(crate) fn _cacheable_bytes(py: Python<'_>, conversions: Vec<Vec<ConversionArgument<'_>>>) -> PyResult<(u64, u64)> {
    let group = |encoded: Vec<ConversionArgument<'_>>| {
        let conversions = encoded.into_iter().map(|each| conversions_of(py, each)).collect::<PyResult<Vec<_>>>()?;
        Ok::<_, PyErr>(LayerGroup { conversions: conversions.concat(), ..LayerGroup::default() })
    };
    let groups = conversions.into_iter().map(group).collect::<PyResult<Vec<_>>>()?;
    Ok(deepnvme_stream::cacheable_bytes(&groups))
}

/// Whether ``_SparseRowCache.was_missing_row_used`` finds uses on this system.
#[pyfunction]
pub(crate) fn _sees_used_pages() -> bool {
    deepnvme_mem::sees_used_pages()
}

/// Return the page size of memory for rows of this size.
#[pyfunction]
pub(crate) fn _row_page_bytes(row_bytes: usize) -> usize {
    ReservedRange::page_bytes_for(row_bytes)
}

/// Returns the conversions that load a stored range into a slot.
fn conversions_of(py: Python<'_>, (argument, at, to): ConversionArgument<'_>) -> PyResult<Vec<Conversion>> {
    let StoredRange { tensor, start, bytes } = stored_range(py, argument)?;
    tensor.conversions(start..start + bytes, at, float(&to)?).map_err(|error| to_exception(py, &error))
}

fn check_process(py: Python<'_>, pid: u32) -> PyResult<()> {
    if pid == deepnvme_mem::process_id() {
        return Ok(());
    }
    let message = "the model belongs to the parent process; open the model again in this one";
    Err(plain(py, "ClosedError", message.into()))
}

fn open(
    py: Python<'_>,
    files: &[Bound<'_, PyAny>],
    engine: Option<&Bound<'_, PyEngine>>,
) -> PyResult<(Arc<Engine>, Vec<VersionedFile>)> {
    let engine = default::or_default(py, engine)?;
    let open_file = |path: &Bound<'_, PyAny>| {
        let target = PathArgument::new(path)?
            .named(|number| format!("weights are streamed from a path, not from descriptor {number}"))?;
        VersionedFile::open(target).map_err(|error| crate::error::to_exception(py, &error))
    };
    Ok((engine, files.iter().map(open_file).collect::<PyResult<Vec<_>>>()?))
}

fn counters<'py>(py: Python<'py>, stats: &StreamStats) -> PyResult<Bound<'py, PyDict>> {
    let counters = counter_dict!(py, stats, bytes_read, fetches, fetches_ahead, hits, waits)?;
    counters.set_item("stalled_s", stats.stalled.as_secs_f64())?;
    counters.set_item("disk_busy_s", stats.disk_busy.as_secs_f64())?;
    counters.set_item("converting_s", stats.converting.as_secs_f64())?;
    Ok(counters)
}
