//! Weights that pass through bounded memory, as `deepnvme._stream` sees them. `stored` has those that are on disk in another
//! form than in memory.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::{Engine, Target};
use deepnvme_mem::dlpack::{self, DLDataType, DLManagedTensor};
use deepnvme_mem::{Reserved, StreamHandle};
use deepnvme_stream::{Conversion, Part, Piece, Places, SlotClass, Source, StreamStats, Streamer, Unit};
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use self::failure::raise;
use self::stored::{StretchArgument as StoredArgument, float, stretch};
use crate::engine::PyEngine;
use crate::path::Place;
use crate::{default, error, memory};

mod failure;
mod stored;

pub(crate) use stored::{_packed_tensors, PyStored};

/// How often Python may look for a signal while a unit is waited for.
const SLICE: Duration = Duration::from_millis(50);

/// Source, offset in it, bytes, place in the slot.
type PieceArgument = (usize, u64, usize, usize);
/// A stretch of a tensor that becomes other bytes, place in the slot, type there.
type ConversionArgument<'py> = (StoredArgument<'py>, usize, String);
/// Source, offset in it, bytes.
type StretchArgument = (usize, u64, usize);

/// Units that pass through the slots of an arena.
#[pyclass(frozen, name = "_Streamer", module = "deepnvme._deepnvme")]
pub(crate) struct PyStreamer {
    streamer: Streamer,
    pid: u32,
}

#[pymethods]
impl PyStreamer {
    /// ``units`` have a class and pieces each, and may have conversions; ``classes`` slots, how many are fetched ahead, and bytes of a slot.
    #[new]
    #[expect(clippy::needless_pass_by_value, clippy::too_many_arguments, reason = "Python hands it over")]
    #[pyo3(signature = (sources, units, classes, arena, engine, conversions=None, stash_bytes_max=0))]
    fn new(
        py: Python<'_>,
        sources: Vec<Bound<'_, PyAny>>,
        units: Vec<(usize, Vec<PieceArgument>)>,
        classes: Vec<(usize, usize, usize, bool)>,
        arena: &Bound<'_, PyAny>,
        engine: Option<&Bound<'_, PyEngine>>,
        conversions: Option<Vec<Vec<ConversionArgument<'_>>>>,
        stash_bytes_max: u64,
    ) -> PyResult<Self> {
        let (engine, sources) = open(py, &sources, engine)?;
        let mut converted = conversions.unwrap_or_default();
        converted.resize_with(units.len(), Vec::new);
        let piece = |(source, offset, bytes, at)| Piece { source, offset, bytes, at };
        let unit = |((class, pieces), stored): ((usize, Vec<PieceArgument>), Vec<ConversionArgument<'_>>)| {
            let conversions = stored.into_iter().map(|each| arriving(py, each)).collect::<PyResult<Vec<_>>>()?;
            let (pieces, conversions) = (pieces.into_iter().map(piece).collect(), conversions.concat());
            Ok::<_, PyErr>(Unit { class, pieces, conversions })
        };
        let units = units.into_iter().zip(converted).map(unit).collect::<PyResult<Vec<_>>>()?;
        let class = |(slots, ahead, slot_bytes, shares)| SlotClass { slots, ahead, slot_bytes, shares };
        let classes: Vec<SlotClass> = classes.into_iter().map(class).collect();
        let arena = memory::target(arena)?;
        let streamer = Streamer::new(engine, sources, units, &classes, arena, stash_bytes_max);
        let streamer = streamer.map_err(|failure| raise(py, &failure))?;
        Ok(Self { streamer, pid: std::process::id() })
    }

    /// Starts to fetch the first units.
    fn warm_up(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process(py)?;
        py.detach(|| self.streamer.warm_up());
        Ok(())
    }

    /// Waits until a unit is there; where in the arena its slot begins.
    fn acquire(&self, py: Python<'_>, unit: usize) -> PyResult<usize> {
        self.check(py, unit)?;
        loop {
            let acquired = py.detach(|| self.streamer.acquire(unit, Some(SLICE)));
            if let Some(at) = acquired.map_err(|failure| raise(py, &failure))? {
                return Ok(at);
            }
            py.check_signals()?;
        }
    }

    /// Whoever acquired a unit needs it no more, when the work that ``stream`` has been given is done: of torch's, or the
    /// default one.
    #[pyo3(signature = (unit, stream=None))]
    fn release(&self, py: Python<'_>, unit: usize, stream: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        self.check(py, unit)?;
        let stream = stream.map_or(Ok(StreamHandle::DEFAULT), memory::stream)?;
        // The next units are fetched then, whose files are looked at.
        Ok(py.detach(|| self.streamer.release(unit, stream)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.check_process(py)?;
        figures(py, &py.detach(|| self.streamer.stats()))
    }

    /// Bytes of memory beside the arena that conversions may take.
    #[getter]
    fn conversion_bytes_max(&self) -> u64 {
        self.streamer.conversion_bytes_max()
    }

    /// Bytes of memory beside the arena that have, or will have, what is on disk.
    #[getter]
    fn stash_bytes(&self) -> u64 {
        self.streamer.stash_bytes()
    }

    /// Fetches nothing more, and waits for what is on its way.
    fn close(&self, py: Python<'_>) {
        if self.pid == std::process::id() {
            py.detach(|| self.streamer.close());
        }
    }
}

impl PyStreamer {
    fn check(&self, py: Python<'_>, unit: usize) -> PyResult<()> {
        self.check_process(py)?;
        let units = self.streamer.units().len();
        if unit < units { Ok(()) } else { Err(PyValueError::new_err(format!("there is no unit {unit}, only {units}"))) }
    }

    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        check_process(py, self.pid)
    }
}

/// Items that are picked by index, in memory of a bound.
#[pyclass(frozen, name = "_Picker", module = "deepnvme._deepnvme")]
pub(crate) struct PyPicker {
    picker: deepnvme_stream::Picker,
    memory: Reserved,
    pid: u32,
}

/// The first item of a part and how many it has, where it begins in memory, bytes of its items, bytes, and where in the files those are: one source and offset where
/// they lie one behind the other, or the stretches of each.
type PartArgument<'py> = (usize, usize, usize, usize, usize, PlacesArgument<'py>);

#[derive(FromPyObject)]
enum PlacesArgument<'py> {
    /// Stretches in another form, and the type in memory.
    Stored((Vec<StoredArgument<'py>>, String)),
    Rows((usize, u64)),
    Each(Vec<Vec<StretchArgument>>),
}

impl PlacesArgument<'_> {
    fn places(self, py: Python<'_>) -> PyResult<Places> {
        Ok(match self {
            Self::Rows((source, offset)) => Places::Rows { source, offset },
            Self::Each(each) => Places::Each(each),
            Self::Stored((stretches, to)) => {
                let stretches = stretches.into_iter().map(|each| stretch(py, each)).collect::<PyResult<_>>()?;
                Places::Stored { stretches, to: float(&to)? }
            }
        })
    }
}

#[pymethods]
impl PyPicker {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[pyo3(signature = (sources, parts, nbytes, bytes_max, engine))]
    fn new(
        py: Python<'_>,
        sources: Vec<Bound<'_, PyAny>>,
        parts: Vec<PartArgument<'_>>,
        nbytes: usize,
        bytes_max: u64,
        engine: Option<&Bound<'_, PyEngine>>,
    ) -> PyResult<Self> {
        let (engine, sources) = open(py, &sources, engine)?;
        let part = |(first, items, at, item_bytes, bytes, places): PartArgument<'_>| {
            Ok::<_, PyErr>(Part { first, items, at, item_bytes, bytes, places: places.places(py)? })
        };
        let parts: Vec<Part> = parts.into_iter().map(part).collect::<PyResult<_>>()?;
        if nbytes == 0 {
            return Err(PyValueError::new_err("nothing can be picked from a tensor of 0 bytes"));
        }
        let piece_bytes = parts.iter().map(|part| part.item_bytes).min().unwrap_or(0);
        let memory = Reserved::new(nbytes, piece_bytes).map_err(|failure| {
            let errno = failure.raw_os_error();
            PyOSError::new_err((errno, format!("{nbytes} bytes of addresses are not to be had (ulimit -v)")))
        })?;
        let picker = deepnvme_stream::Picker::new(engine, sources, parts, memory.clone(), bytes_max);
        let picker = picker.map_err(|failure| raise(py, &failure))?;
        Ok(Self { picker, memory, pid: std::process::id() })
    }

    /// All the memory, as a DLPack capsule: what was not picked reads as zeros.
    fn capsule<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let whole = self.memory.region_mut(0..self.memory.len());
        let tensor = dlpack::export::<DLManagedTensor>(whole, &[self.memory.len()], DLDataType::U8)?;
        memory::capsule(py, tensor)
    }

    /// Waits until these items are in memory, where they stay until they are released.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn pick(&self, py: Python<'_>, items: Vec<usize>) -> PyResult<()> {
        check_process(py, self.pid)?;
        py.detach(|| self.picker.pick(&items)).map_err(|failure| raise(py, &failure))
    }

    /// Whoever picked these items needs them no more.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn release(&self, py: Python<'_>, items: Vec<usize>) -> PyResult<()> {
        check_process(py, self.pid)?;
        py.detach(|| self.picker.release(&items));
        Ok(())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        check_process(py, self.pid)?;
        figures(py, &py.detach(|| self.picker.stats()))
    }
}

/// Bytes of all that is worth a place in a stash of these units, and of what they become.
#[pyfunction]
pub(crate) fn _stash_bytes_wanted(
    py: Python<'_>,
    conversions: Vec<Vec<ConversionArgument<'_>>>,
) -> PyResult<(u64, u64)> {
    let unit = |stored: Vec<ConversionArgument<'_>>| {
        let conversions = stored.into_iter().map(|each| arriving(py, each)).collect::<PyResult<Vec<_>>>()?;
        Ok::<_, PyErr>(Unit { conversions: conversions.concat(), ..Unit::default() })
    };
    let units = conversions.into_iter().map(unit).collect::<PyResult<Vec<_>>>()?;
    Ok(deepnvme_stream::stash_bytes_wanted(&units))
}

/// What memory comes in where pieces of that size are picked.
#[pyfunction]
pub(crate) fn _picked_page_bytes(piece_bytes: usize) -> usize {
    Reserved::page_bytes_for(piece_bytes)
}

/// What brings a stretch into a slot.
fn arriving(py: Python<'_>, (argument, at, to): ConversionArgument<'_>) -> PyResult<Vec<Conversion>> {
    let deepnvme_stream::Stretch { stored, start, bytes } = stretch(py, argument)?;
    stored.conversions(start..start + bytes, at, float(&to)?).map_err(|failure| raise(py, &failure))
}

fn check_process(py: Python<'_>, pid: u32) -> PyResult<()> {
    if pid == std::process::id() {
        return Ok(());
    }
    let message = "the weights are streamed by the process before the fork; open the model again in this one";
    Err(error::plain(py, "ClosedError", message.into()))
}

fn open(
    py: Python<'_>,
    sources: &[Bound<'_, PyAny>],
    engine: Option<&Bound<'_, PyEngine>>,
) -> PyResult<(Arc<Engine>, Vec<Source>)> {
    let engine = default::or_default(py, engine)?;
    let source = |place: &Bound<'_, PyAny>| {
        let target = match Place::new(place)? {
            Place::Path(path) => Target::Path(path),
            Place::Stripes(set) => Target::Stripes(set),
            Place::Descriptor(number) => {
                return Err(PyTypeError::new_err(format!("weights stream from a path, not from descriptor {number}")));
            }
        };
        Source::open(target).map_err(|failure| raise(py, &failure))
    };
    Ok((engine, sources.iter().map(source).collect::<PyResult<Vec<_>>>()?))
}

fn figures<'py>(py: Python<'py>, stats: &StreamStats) -> PyResult<Bound<'py, PyDict>> {
    let figures = PyDict::new(py);
    figures.set_item("bytes_read", stats.bytes_read)?;
    figures.set_item("fetches", stats.fetches)?;
    figures.set_item("fetches_ahead", stats.fetches_ahead)?;
    figures.set_item("hits", stats.hits)?;
    figures.set_item("waits", stats.waits)?;
    figures.set_item("stalled_s", stats.stalled.as_secs_f64())?;
    figures.set_item("disk_busy_s", stats.disk_busy.as_secs_f64())?;
    figures.set_item("converting_s", stats.converting.as_secs_f64())?;
    Ok(figures)
}
