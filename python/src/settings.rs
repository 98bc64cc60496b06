//! Parse settings from Python callers, and find the settings file of the environment.

use std::path::PathBuf;

use deepnvme_io::op::Direction;
use deepnvme_io::size::{self, SIZE_FORMS, SIZE_MAX};
use deepnvme_io::{BackendChoice, Config, DirectMode, Durability, SubmitMode, WindowMode};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};

use crate::error;

/// Returns the settings file that the environment names.
pub(crate) fn settings_path() -> Option<PathBuf> {
    std::env::var_os("DEEPNVME_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The settings of `Engine(...)` as passed.
pub(crate) struct RawSettings<'a, 'py> {
    pub(crate) backend: &'a str,
    pub(crate) workers: Option<&'a Bound<'py, PyAny>>,
    pub(crate) queue_depth: Option<&'a Bound<'py, PyAny>>,
    pub(crate) block_bytes: Option<&'a Bound<'py, PyAny>>,
    pub(crate) submit: &'a str,
    pub(crate) window: &'a str,
    pub(crate) direct: &'a str,
    pub(crate) gds: &'a str,
    pub(crate) pool_bytes: Option<&'a Bound<'py, PyAny>>,
    pub(crate) lock_pool: bool,
    pub(crate) register_pool: bool,
}

impl RawSettings<'_, '_> {
    /// Parses the settings. The engine checks their ranges.
    pub(crate) fn parse(&self) -> PyResult<Config> {
        let defaults = Config::default();
        Ok(Config {
            backend: backend(self.backend)?,
            workers: small("workers", self.workers)?.unwrap_or(defaults.workers),
            queue_depth: small("queue_depth", self.queue_depth)?.unwrap_or(defaults.queue_depth),
            block_bytes: size("block_bytes", self.block_bytes)?.unwrap_or(defaults.block_bytes),
            submit: submit(self.submit)?,
            window: window(self.window)?,
            direct: direct("direct", self.direct)?,
            gds: direct("gds", self.gds)?,
            pool_bytes: size("pool_bytes", self.pool_bytes)?,
            lock_pool: self.lock_pool,
            register_pool: self.register_pool,
        })
    }
}

fn backend(word: &str) -> PyResult<BackendChoice> {
    match word {
        "auto" => Ok(BackendChoice::Auto),
        "io_uring" => Ok(BackendChoice::Uring),
        "aio" => Ok(BackendChoice::Aio),
        "threads" => Ok(BackendChoice::Threads),
        _ => Err(unknown("backend", word, "\"auto\", \"io_uring\", \"aio\" or \"threads\"")),
    }
}

fn submit(word: &str) -> PyResult<SubmitMode> {
    match word {
        "batch" => Ok(SubmitMode::Batch),
        "single" => Ok(SubmitMode::Single),
        _ => Err(unknown("submit", word, "\"batch\" or \"single\"")),
    }
}

fn window(word: &str) -> PyResult<WindowMode> {
    match word {
        "sliding" => Ok(WindowMode::Sliding),
        "drain" => Ok(WindowMode::Drain),
        _ => Err(unknown("window", word, "\"sliding\" or \"drain\"")),
    }
}

fn direct(name: &str, word: &str) -> PyResult<DirectMode> {
    match word {
        "preferred" => Ok(DirectMode::Preferred),
        "required" => Ok(DirectMode::Required),
        "disabled" => Ok(DirectMode::Disabled),
        _ => Err(unknown(name, word, "\"preferred\", \"required\" or \"disabled\"")),
    }
}

/// Parses the direction of an engine that does only one.
pub(crate) fn direction(word: Option<&str>) -> PyResult<Option<Direction>> {
    match word {
        None => Ok(None),
        Some("read") => Ok(Some(Direction::Read)),
        Some("write") => Ok(Some(Direction::Write)),
        Some(other) => Err(unknown("direction", other, "\"read\" or \"write\"")),
    }
}

/// Parses a durability.
pub(crate) fn durability(word: &str) -> PyResult<Durability> {
    match word {
        "none" => Ok(Durability::None),
        "data" => Ok(Durability::Data),
        "full" => Ok(Durability::Full),
        _ => Err(unknown("durability", word, "\"none\", \"data\" or \"full\"")),
    }
}

pub(crate) fn submit_word(mode: SubmitMode) -> &'static str {
    match mode {
        SubmitMode::Batch => "batch",
        SubmitMode::Single => "single",
    }
}

pub(crate) fn window_word(mode: WindowMode) -> &'static str {
    match mode {
        WindowMode::Sliding => "sliding",
        WindowMode::Drain => "drain",
    }
}

pub(crate) fn direct_word(mode: DirectMode) -> &'static str {
    match mode {
        DirectMode::Preferred => "preferred",
        DirectMode::Required => "required",
        DirectMode::Disabled => "disabled",
    }
}

fn unknown(name: &str, word: &str, words: &str) -> PyErr {
    let text = format!("{name} is {word:?}; it must be {words}");
    Python::attach(|py| error::plain(py, "InvalidArgumentError", text))
}

/// Largest allowed whole number: no file or memory has more bytes.
const WHOLE_MAX: u64 = SIZE_MAX;
/// Maximum characters of a rejected value in an error.
const SHOWN_MAX: usize = 100;

/// Parses a non-negative whole number from any Python integer.
pub(crate) fn whole(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    value.map(|value| number(name, value)).transpose()
}

/// Parses a whole number that a caller passed. Errors name the argument and its range.
pub(crate) fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    integer(value, 0, || format!("{name} is {}; it must be a whole number between 0 and {WHOLE_MAX}", shown(value)))
}

/// Parses a number of bytes: any Python integer, or text such as `"4GB"`. The engine checks its range.
pub(crate) fn size(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    value.map(|value| bytes(name, value, 0)).transpose()
}

/// Parses a number of bytes, at least `low`. Errors name the argument, and say which forms are accepted.
pub(crate) fn bytes(name: &str, value: &Bound<'_, PyAny>, low: u64) -> PyResult<u64> {
    let range = format!("between {low} and {WHOLE_MAX}");
    let detail = || format!("{name} is {}; it must be {SIZE_FORMS}, or a number of bytes {range}", shown(value));
    match value.cast::<PyString>() {
        Ok(text) => size::parse(&text.to_string_lossy())
            .filter(|bytes| *bytes >= low)
            .ok_or_else(|| error::plain(value.py(), "InvalidArgumentError", detail())),
        Err(_) => integer(value, low, detail),
    }
}

/// Parses any Python integer of at least `low`. A `bool` is none.
fn integer(value: &Bound<'_, PyAny>, low: u64, detail: impl Fn() -> String) -> PyResult<u64> {
    let py = value.py();
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(detail()));
    }
    match value.extract::<u64>() {
        Ok(number) if (low..=WHOLE_MAX).contains(&number) => Ok(number),
        Err(error) if error.is_instance_of::<PyTypeError>(py) => Err(PyTypeError::new_err(detail())),
        Err(error) if !error.is_instance_of::<PyOverflowError>(py) => Err(error),
        _ => Err(error::plain(py, "InvalidArgumentError", detail())),
    }
}

/// Parse a size, at least 1, for the functions that are written in Python.
#[pyfunction]
pub(crate) fn _parse_bytes(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    bytes(name, value, 1)
}

/// Formats the caller's value, shortened. Python refuses to print numbers of thousands of digits, and a `__repr__` may
/// fail.
fn shown(value: &Bound<'_, PyAny>) -> String {
    match value.repr().map(|text| text.to_string_lossy().into_owned()) {
        Ok(text) if text.chars().count() <= SHOWN_MAX => text,
        Ok(text) => text.chars().take(SHOWN_MAX).chain("...".chars()).collect(),
        Err(_) if value.is_instance_of::<PyInt>() => "a number of thousands of digits".into(),
        Err(_) => {
            value.get_type().name().map_or_else(|_| "an object".into(), |name| format!("an object of type {name}"))
        }
    }
}

/// Like `whole`, for 32-bit settings. Larger numbers saturate, and the engine refuses them by name.
fn small(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u32>> {
    Ok(whole(name, value)?.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
}
