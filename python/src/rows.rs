//! The `_RowStore` and `_Gather` classes, which `deepnvme._rows` wraps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use deepnvme_codec::Float8;
use deepnvme_file::VersionedFile;
use deepnvme_io::{Engine, Error as IoError, ErrorKind};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_mem::{ParentOnly, RegionMut};
use deepnvme_rows::ids::{self, IdType};
use deepnvme_rows::{
    BackgroundStore, BlockLayout, ChecksumPlace, Conversion, Counters, Element, Error, PackSource, PackedDescription,
    PackedTensors, PendingGather, RowRange, RowScales, RowStore, ScaleType, Table, TensorPlace, check_room,
};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::checkpoint::{self, CheckpointReader};
use crate::engine::PyEngine;
use crate::error::InvalidArgumentError;
use crate::path::PathArgument;
use crate::settings::Timeout;
use crate::stats::counter_dict;
use crate::streaming::float;
use crate::{default, error, interruptible, tensor_memory, torch};

/// The ranges of a table, each with its file, offset and rows; and the bytes of a row.
type TableArgument = (Vec<(usize, u64, u64)>, usize);
/// The tensors of a packed table, each with its offset and its bytes: blocks, hot rows, checksums.
type PackedTensorsArgument = (TensorPlace, Option<TensorPlace>, Option<TensorPlace>);

/// Where rows are: in ranges of files; or in a packed table, by its description.
#[derive(FromPyObject)]
enum RowsArgument {
    Packed(String, PackedTensorsArgument),
    InPlace(Vec<(usize, u64, u64)>, usize),
}

/// A file: one whose header was read, or a raw one by its path.
#[derive(FromPyObject)]
pub(crate) enum FileArgument<'py> {
    Reader(PyRef<'py, CheckpointReader>),
    Path(Bound<'py, PyAny>),
}

/// Where scales are: behind each row, as their number and the bytes of a row before them; or in a table.
#[derive(FromPyObject)]
enum ScalesArgument {
    BehindRows(usize, usize),
    Table(TableArgument),
}

/// The types before and after a conversion, and a factor.
type ConversionArgument = (String, String, Option<f32>);

/// The ids and their type, the tensor for the rows, and their conversion.
type WantedArgument<'py> = (Bound<'py, PyAny>, (bool, usize), Bound<'py, PyAny>, Option<ConversionArgument>);

/// The arguments of a gather.
struct Wanted {
    rows: Vec<u64>,
    target: RegionMut,
    conversion: Option<Conversion>,
}

/// Read rows of a table on disk, and keep some of them in memory.
#[pyclass(frozen, name = "_RowStore", module = "deepnvme._deepnvme")]
pub(crate) struct PyRowStore {
    opened: ParentOnly<Opened>,
}

/// A store, and what is known of it after it was closed.
struct Opened {
    /// `None` once it was closed: it keeps files open. Calls in progress keep it until they end.
    store: Mutex<Option<Arc<BackgroundStore>>>,
    counters: Arc<Counters>,
    rows: u64,
    memory_bytes: u64,
    cached_rows_max: u64,
}

impl Opened {
    fn new(store: RowStore) -> Self {
        Self {
            counters: Arc::clone(store.counters()),
            rows: store.table().rows(),
            memory_bytes: store.memory_bytes(),
            cached_rows_max: store.cached_rows_max(),
            store: Mutex::new(Some(Arc::new(BackgroundStore::new(store)))),
        }
    }

    fn store(&self) -> MutexGuard<'_, Option<Arc<BackgroundStore>>> {
        ignore_poison(self.store.lock())
    }
}

#[pymethods]
impl PyRowStore {
    #[new]
    #[pyo3(signature = (files, rows, scales, memory_bytes, engine))]
    fn new(
        py: Python<'_>,
        files: Vec<FileArgument<'_>>,
        rows: RowsArgument,
        scales: Option<(ScalesArgument, String)>,
        memory_bytes: u64,
        engine: Option<&Bound<'_, PyEngine>>,
    ) -> PyResult<Self> {
        let engine = default::or_default(py, engine)?;
        let files = open(py, files)?;
        let scales = scales.map(|(place, name)| Ok::<_, PyErr>((place, scale_type(&name)?))).transpose()?;
        let is_read = matches!(rows, RowsArgument::Packed(..)) || matches!(scales, Some((ScalesArgument::Table(_), _)));
        let make = move |should_stop: &(dyn Fn() -> bool + Sync)| {
            let read = |(place, kind)| match place {
                ScalesArgument::BehindRows(groups, row_bytes) => Ok(RowScales::behind_rows(kind, groups, row_bytes)),
                ScalesArgument::Table(scales) => RowScales::read(&engine, &files, &table(scales)?, kind, should_stop),
            };
            let scales = scales.map(read).transpose()?;
            let table = match rows {
                RowsArgument::Packed(text, tensors) => packed_table(&engine, &files, &text, tensors, memory_bytes)?,
                RowsArgument::InPlace(ranges, row_bytes) => table((ranges, row_bytes))?,
            };
            RowStore::new(engine, files, table, scales, memory_bytes)
        };
        // Scales and checksums may be gigabytes.
        let made =
            if is_read { interruptible::run_stoppable_read_only(py, make)? } else { py.detach(|| make(&|| false)) };
        Ok(Self { opened: ParentOnly::new(Opened::new(made.map_err(|error| to_exception(py, &error))?)) })
    }

    fn gather(&self, py: Python<'_>, wanted: WantedArgument<'_>) -> PyResult<()> {
        let (store, wanted) = (self.store(py)?, self.wanted(py, wanted)?);
        let gathered = interruptible::with_signals(py, |should_stop| {
            store.store().gather(&wanted.rows, &wanted.target, wanted.conversion, should_stop)
        })?;
        gathered.map_err(|error| to_exception(py, &error))
    }

    fn start_gather(&self, py: Python<'_>, wanted: WantedArgument<'_>) -> PyResult<PyGather> {
        let (store, wanted) = (self.store(py)?, self.wanted(py, wanted)?);
        let started = py.detach(|| store.start_gather(wanted.rows, wanted.target, wanted.conversion));
        started.map(|gather| PyGather { gather }).map_err(|error| to_exception(py, &error))
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        id_type: (bool, usize),
        deadline_s: Option<f64>,
    ) -> PyResult<()> {
        let store = self.store(py)?;
        let rows = self.rows(py, ids, id_type)?;
        let deadline = deadline_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let deadline = deadline.and_then(|after| Instant::now().checked_add(after));
        py.detach(|| store.start_prefetch(rows, deadline)).map_err(|error| to_exception(py, &error))
    }

    fn keep(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, id_type: (bool, usize)) -> PyResult<()> {
        let (store, rows) = (self.store(py)?, self.rows(py, ids, id_type)?);
        let kept = interruptible::with_signals(py, |should_stop| store.store().keep(&rows, should_stop))?;
        kept.map_err(|error| to_exception(py, &error))
    }

    fn verify(&self, py: Python<'_>) -> PyResult<u64> {
        let store = self.store(py)?;
        let verified = interruptible::with_signals(py, |should_stop| store.store().verify(&|_| {}, should_stop))?;
        verified.map_err(|error| to_exception(py, &error))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let opened = self.opened(py)?;
        let stats = opened.counters.values();
        let counters = counter_dict!(
            py,
            stats,
            rows,
            hits,
            rows_read,
            reads,
            bytes_read,
            rows_joined,
            rows_shared,
            rows_prefetched,
            rows_not_prefetched,
        )?;
        counters.set_item("memory_bytes", opened.memory_bytes)?;
        counters.set_item("cached_rows_max", opened.cached_rows_max)?;
        Ok(counters)
    }

    fn close(&self, py: Python<'_>) {
        let store = self.opened.get().and_then(|opened| opened.store().take());
        if let Some(store) = store {
            py.detach(|| {
                store.close();
                drop(store);
            });
        }
    }
}

impl PyRowStore {
    fn opened(&self, py: Python<'_>) -> PyResult<&Opened> {
        let forked = || {
            let message = "the table belongs to the parent process; open it again in this one";
            error::plain(py, "ClosedError", message.into())
        };
        self.opened.get().ok_or_else(forked)
    }

    fn store(&self, py: Python<'_>) -> PyResult<Arc<BackgroundStore>> {
        let store = self.opened(py)?.store().clone();
        store.ok_or_else(|| to_exception(py, &Error::Closed))
    }

    fn wanted(&self, py: Python<'_>, (ids, id_type, out, conversion): WantedArgument<'_>) -> PyResult<Wanted> {
        let rows = self.rows(py, &ids, id_type)?;
        let conversion = conversion.map(parse_conversion).transpose()?;
        let target = tensor_memory::target(&out)?;
        torch::mark_modified(std::slice::from_ref(&out))?;
        Ok(Wanted { rows, target, conversion })
    }

    fn rows(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, (is_signed, bytes): (bool, usize)) -> PyResult<Vec<u64>> {
        let rows = self.opened(py)?.rows;
        let source = tensor_memory::source(ids)?;
        let kind = if is_signed { IdType::Signed(bytes) } else { IdType::Unsigned(bytes) };
        // An allocation that fails aborts the process.
        check_room(source.len() as u64 * 3, "give fewer ids at a time").map_err(|error| to_exception(py, &error))?;
        let decoded = py.detach(|| {
            let mut bytes = vec![0; source.len()];
            source.copy_to_slice(0, &mut bytes);
            ids::decode(&bytes, kind, rows)
        });
        decoded.map_err(|error| to_exception(py, &error))
    }
}

/// A gather in flight.
#[pyclass(frozen, name = "_Gather", module = "deepnvme._deepnvme")]
pub(crate) struct PyGather {
    gather: PendingGather,
}

#[pymethods]
impl PyGather {
    /// Wait. Returns whether the gather is done, and raises its error.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<Timeout>) -> PyResult<bool> {
        // Durations that overflow mean no limit.
        let limit = timeout.and_then(|timeout| Duration::try_from_secs_f64(timeout.0).ok());
        let waited = interruptible::with_signals(py, |should_stop| self.gather.wait(limit, should_stop))?;
        let is_done = waited.map_err(|error| to_exception(py, &error))?;
        match self.gather.result() {
            Some(Err(error)) if is_done => Err(to_exception(py, &error)),
            _ => Ok(is_done),
        }
    }

    fn is_done(&self) -> bool {
        self.gather.is_done()
    }

    fn cancel(&self) {
        self.gather.cancel();
    }
}

/// Packs a table into a file, and returns the table's id.
#[expect(clippy::too_many_arguments, reason = "only the package calls it")]
#[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
#[pyfunction]
#[pyo3(signature = (files, rows, scales, hot, description, memory_bytes, target, report, engine))]
pub(crate) fn _pack_rows(
    py: Python<'_>,
    files: Vec<FileArgument<'_>>,
    rows: TableArgument,
    scales: Option<TableArgument>,
    hot: Vec<u32>,
    description: String,
    memory_bytes: u64,
    target: &Bound<'_, PyAny>,
    report: Option<Py<PyAny>>,
    engine: Option<&Bound<'_, PyEngine>>,
) -> PyResult<u64> {
    let engine = default::or_default(py, engine)?;
    let files = open(py, files)?;
    let target = PathArgument::new(target)?
        .named(|number| format!("a packed table is written to a path, not to descriptor {number}"))?;
    let packed = Arc::new(AtomicU64::new(0));
    let done = Arc::clone(&packed);
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&is_stopped);
    let work = move || {
        let (rows, scales) = (table(rows)?, scales.map(table).transpose()?);
        let row_bytes = rows.row_bytes() + scales.as_ref().map_or(0, Table::row_bytes);
        // Before a file is replaced that could then not be opened.
        let layout = BlockLayout::plan(row_bytes);
        let bytes_min = RowStore::packed_bytes_min(&layout, rows.rows(), hot.len() as u64);
        if memory_bytes < bytes_min {
            return Err(Error::Memory { memory: memory_bytes, row_bytes, bytes_min });
        }
        let source =
            PackSource { files: &files, rows: &rows, scales: scales.as_ref(), hot: &hot, description: &description };
        deepnvme_rows::pack(&engine, source, &target, &mut |rows| {
            done.store(rows, Ordering::Relaxed);
            !stopped.load(Ordering::Relaxed)
        })
    };
    let mut poll = || match &report {
        Some(report) => report.call1(py, (packed.load(Ordering::Relaxed),)).map(drop),
        None => Ok(()),
    };
    let id = interruptible::run_polling(py, work, &mut poll, &|| is_stopped.store(true, Ordering::Relaxed), None)?;
    id.map_err(|error| to_exception(py, &error))
}

/// Number of rows; shape, type and scales of a row; bytes of a row with its scales, rows and bytes of a block, whether
/// the checksums are in a list; the number of hot rows; the first row of each table; and the id.
type Described = (u64, Vec<u64>, String, Option<(u64, String)>, (usize, usize, usize, bool), u64, Vec<u64>, u64);

/// Parses the description of a packed table in the file `name`, which has these tensors.
#[pyfunction]
#[pyo3(signature = (name, text, tensors))]
pub(crate) fn _parse_packed_rows(
    py: Python<'_>,
    name: &str,
    text: &str,
    tensors: PackedTensorsArgument,
) -> PyResult<Described> {
    let described = PackedDescription::parse(text, packed_tensors(tensors)).map_err(|error| {
        let class = if matches!(error, Error::Unsupported(_)) { "UnsupportedError" } else { "CorruptFileError" };
        error::plain(py, class, format!("{name}: {error}"))
    })?;
    let BlockLayout { row_bytes, rows_per_block, block_bytes, checksums } = described.layout;
    let blocks = (row_bytes, rows_per_block, block_bytes, checksums == ChecksumPlace::List);
    let hot_rows = described.hot.map_or(0, |(count, _)| count);
    let PackedDescription { rows, row_shape, dtype, scales, first_rows, id, .. } = described;
    Ok((rows, row_shape, dtype, scales, blocks, hot_rows, first_rows, id))
}

/// Returns the bytes that a gather of one row reads, from a packed table with rows of this size.
#[pyfunction]
pub(crate) fn _packed_block_bytes(row_bytes: usize) -> usize {
    BlockLayout::plan(row_bytes).block_bytes
}

fn open(py: Python<'_>, files: Vec<FileArgument<'_>>) -> PyResult<Vec<VersionedFile>> {
    let open = |file: FileArgument<'_>| match file {
        FileArgument::Reader(reader) => {
            let versioned = VersionedFile::of_open(Arc::clone(reader.reader().file()));
            let versioned = versioned.map_err(|error| error::to_exception(py, &error))?;
            // The versions are those that the file had before its header was read.
            reader.reader().check_unchanged().map_err(|error| checkpoint::to_exception(py, &error))?;
            Ok(versioned)
        }
        FileArgument::Path(path) => {
            let target = PathArgument::new(&path)?
                .named(|number| format!("rows are read from a path, not from descriptor {number}"))?;
            VersionedFile::open(target).map_err(|error| error::to_exception(py, &error))
        }
    };
    files.into_iter().map(open).collect()
}

fn table((ranges, row_bytes): TableArgument) -> Result<Table, Error> {
    let ranges = ranges.into_iter().map(|(file, offset, rows)| RowRange { file, offset, rows }).collect();
    Table::new(ranges, row_bytes)
}

fn packed_tensors((rows, hot, checksums): PackedTensorsArgument) -> PackedTensors {
    PackedTensors { rows, hot, checksums }
}

fn packed_table(
    engine: &Arc<Engine>,
    files: &[VersionedFile],
    text: &str,
    tensors: PackedTensorsArgument,
    memory: u64,
) -> Result<Table, Error> {
    let [file] = files else {
        return Err(Error::Invalid("a packed table is one file".into()));
    };
    let described = PackedDescription::parse(text, packed_tensors(tensors))?;
    let hot_rows = described.hot.map_or(0, |(count, _)| count);
    let bytes_min = RowStore::packed_bytes_min(&described.layout, described.rows, hot_rows);
    if memory < bytes_min {
        return Err(Error::Memory { memory, row_bytes: described.layout.row_bytes, bytes_min });
    }
    // Whatever the file says of its rows, the caller has not said it.
    described.open(file, engine).map_err(|error| match error {
        Error::Invalid(why) => {
            let detail = format!("this cannot be a packed table ({why}); pack the table again");
            Error::Io(IoError::new(ErrorKind::Corrupt, "open", detail).at_path(file.file().path()))
        }
        other => other,
    })
}

fn parse_conversion((from, to, scale): ConversionArgument) -> PyResult<Conversion> {
    let from = match &*from {
        "float8_e4m3fn" => Element::Float8(Float8::E4m3fn),
        "float8_e5m2" => Element::Float8(Float8::E5m2),
        "int8" => Element::Int8,
        name => Element::Float(float(name)?),
    };
    Ok(Conversion { from, to: float(&to)?, scale })
}

fn scale_type(name: &str) -> PyResult<ScaleType> {
    if name == "float8_e8m0fnu" { Ok(ScaleType::E8m0fnu) } else { float(name).map(ScaleType::Float) }
}

/// Converts an error to its Python exception.
fn to_exception(py: Python<'_>, error: &Error) -> PyErr {
    match error {
        Error::Io(error) => error::to_exception(py, error),
        Error::Changed { path, .. } => error::plain_of_file(py, "ChangedFileError", error.to_string(), path),
        Error::Checksum { path, offset, .. } => {
            let raised = error::plain_of_file(py, "ChecksumError", error.to_string(), path);
            let set = raised.value(py).setattr("offset", offset);
            set.err().unwrap_or(raised)
        }
        Error::NoSuchRow { .. } => PyIndexError::new_err(error.to_string()),
        Error::Damaged(_) => error::plain(py, "CorruptFileError", error.to_string()),
        Error::Unsupported(_) => error::plain(py, "UnsupportedError", error.to_string()),
        Error::Invalid(_) => InvalidArgumentError::new_err(error.to_string()),
        Error::Memory { bytes_min, .. } => {
            let raised = InvalidArgumentError::new_err(error.to_string());
            let set = raised.value(py).setattr("memory_bytes_min", bytes_min);
            set.err().unwrap_or(raised)
        }
        Error::Interrupted => error::plain(py, "CancelledError", error.to_string()),
        Error::Closed => error::plain(py, "ClosedError", error.to_string()),
    }
}
