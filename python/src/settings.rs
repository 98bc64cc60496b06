//! Parse settings from Python callers, and find the settings file of the environment.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use deepnvme_io::config::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, QUEUE_DEPTH_MAX, WORKERS_MAX};
use deepnvme_io::op::Direction;
use deepnvme_io::size::{self, SIZE_FORMS, SIZE_MAX};
use deepnvme_io::{BackendChoice, Config, DirectMode, Durability, SubmitMode, WindowMode};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};

use crate::error::{self, InvalidArgumentError};

/// Returns the settings file that the environment names.
pub(crate) fn settings_path() -> Option<PathBuf> {
    std::env::var_os("DEEPNVME_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// An argument that has to be a str, as passed. The caller knows its name, and refuses other values by it.
#[derive(Clone, Copy)]
pub(crate) enum Word<'a, 'py> {
    Text(&'a str),
    Other(Borrowed<'a, 'py, PyAny>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Word<'a, 'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(object.extract::<&'a str>().map_or(Self::Other(object), Self::Text))
    }
}

impl<'a> Word<'a, '_> {
    /// Returns the text.
    pub(crate) fn text(self, name: &str) -> PyResult<&'a str> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Other(value) if value.is_instance_of::<PyString>() => Err(InvalidArgumentError::new_err(format!(
                "{name} is {}; it must be a str that UTF-8 can encode",
                shown(&value)
            ))),
            Self::Other(value) => Err(PyTypeError::new_err(format!("{name} is {}; it must be a str", shown(&value)))),
        }
    }

    /// Returns the value that the word stands for.
    fn choose<T: Copy>(self, name: &str, choices: &[(&str, T)]) -> PyResult<T> {
        let wanted = |shown: &str| {
            let words: Vec<String> = choices.iter().map(|(word, _)| format!("'{word}'")).collect();
            let (last, others) = words.split_last().map_or(("", &[][..]), |(last, others)| (last.as_str(), others));
            format!("{name} is {shown}; it must be {} or {last}", others.join(", "))
        };
        match self {
            Self::Text(text) => {
                choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
                    let shown: String = format!("{text:?}").trim_matches('"').chars().take(SHOWN_MAX).collect();
                    InvalidArgumentError::new_err(wanted(&format!("'{shown}'")))
                })
            }
            Self::Other(value) => Err(PyTypeError::new_err(wanted(&shown(&value)))),
        }
    }
}

/// An argument that has to be `True` or `False`, as passed.
#[derive(Clone, Copy)]
pub(crate) enum Flag<'a, 'py> {
    Set(bool),
    Other(Borrowed<'a, 'py, PyAny>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for Flag<'a, 'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(object.cast::<PyBool>().map_or(Self::Other(object), |flag| Self::Set(flag.is_true())))
    }
}

impl Flag<'_, '_> {
    fn get(self, name: &str) -> PyResult<bool> {
        match self {
            Self::Set(flag) => Ok(flag),
            Self::Other(value) => {
                Err(PyTypeError::new_err(format!("{name} is {}; it must be True or False", shown(&value))))
            }
        }
    }
}

/// The settings of `Engine(...)` as passed.
pub(crate) struct RawSettings<'a, 'py> {
    pub(crate) backend: Word<'a, 'py>,
    pub(crate) workers: Option<&'a Bound<'py, PyAny>>,
    pub(crate) queue_depth: Option<&'a Bound<'py, PyAny>>,
    pub(crate) block_bytes: Option<&'a Bound<'py, PyAny>>,
    pub(crate) submit: Word<'a, 'py>,
    pub(crate) window: Word<'a, 'py>,
    pub(crate) direct: Word<'a, 'py>,
    pub(crate) gds: Word<'a, 'py>,
    pub(crate) pool_bytes: Option<&'a Bound<'py, PyAny>>,
    pub(crate) lock_pool: Flag<'a, 'py>,
    pub(crate) register_pool: Flag<'a, 'py>,
}

impl RawSettings<'_, '_> {
    /// Parses the settings. The engine checks their ranges.
    pub(crate) fn parse(&self) -> PyResult<Config> {
        let defaults = Config::default();
        Ok(Config {
            backend: self.backend.choose("backend", &BACKENDS)?,
            workers: small("workers", self.workers, WORKERS_MAX)?.unwrap_or(defaults.workers),
            queue_depth: small("queue_depth", self.queue_depth, QUEUE_DEPTH_MAX)?.unwrap_or(defaults.queue_depth),
            block_bytes: size("block_bytes", self.block_bytes, &(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX))?
                .unwrap_or(defaults.block_bytes),
            submit: self.submit.choose("submit", &SUBMIT_MODES)?,
            window: self.window.choose("window", &WINDOW_MODES)?,
            direct: self.direct.choose("direct", &DIRECT_MODES)?,
            gds: self.gds.choose("gds", &DIRECT_MODES)?,
            pool_bytes: size("pool_bytes", self.pool_bytes, &(BLOCK_BYTES_MIN..=WHOLE_MAX))?,
            lock_pool: self.lock_pool.get("lock_pool")?,
            register_pool: self.register_pool.get("register_pool")?,
        })
    }
}

const BACKENDS: [(&str, BackendChoice); 4] = [
    ("auto", BackendChoice::Auto),
    ("io_uring", BackendChoice::Uring),
    ("aio", BackendChoice::Aio),
    ("threads", BackendChoice::Threads),
];
const SUBMIT_MODES: [(&str, SubmitMode); 2] = [("batch", SubmitMode::Batch), ("single", SubmitMode::Single)];
const WINDOW_MODES: [(&str, WindowMode); 2] = [("sliding", WindowMode::Sliding), ("drain", WindowMode::Drain)];
const DIRECT_MODES: [(&str, DirectMode); 3] =
    [("preferred", DirectMode::Preferred), ("required", DirectMode::Required), ("disabled", DirectMode::Disabled)];
const DIRECTIONS: [(&str, Direction); 2] = [("read", Direction::Read), ("write", Direction::Write)];
const DURABILITIES: [(&str, Durability); 3] =
    [("none", Durability::None), ("data", Durability::Data), ("full", Durability::Full)];

/// Parses the direction of an engine that does only one.
pub(crate) fn direction(word: Option<Word<'_, '_>>) -> PyResult<Option<Direction>> {
    word.map(|word| word.choose("direction", &DIRECTIONS)).transpose()
}

/// Parses a durability.
pub(crate) fn durability(word: Word<'_, '_>) -> PyResult<Durability> {
    word.choose("durability", &DURABILITIES)
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

/// Largest allowed whole number: no file or memory has more bytes.
const WHOLE_MAX: u64 = SIZE_MAX;
/// Maximum characters of a rejected value in an error.
const SHOWN_MAX: usize = 100;

/// Parses a whole number that a caller passed. Errors name the argument and its range.
pub(crate) fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let detail = || {
        // The maximum helps only if the number exceeds it.
        let is_too_large = value.is_instance_of::<PyInt>() && value.gt(0).unwrap_or(false);
        let range = if is_too_large { format!("between 0 and {WHOLE_MAX}") } else { "of at least 0".into() };
        format!("{name} is {}; it must be a whole number {range}", shown(value))
    };
    integer(value, 0, detail)
}

/// Parses a number of bytes: any Python integer, or text such as `"4GB"`. The engine checks `wanted`; errors about
/// other values name it.
pub(crate) fn size(
    name: &str,
    value: Option<&Bound<'_, PyAny>>,
    wanted: &RangeInclusive<u64>,
) -> PyResult<Option<u64>> {
    value.map(|value| bytes(name, value, 0, wanted)).transpose()
}

/// Parses a number of bytes, at least `low`. Errors name the argument, and say which forms are accepted.
fn bytes(name: &str, value: &Bound<'_, PyAny>, low: u64, wanted: &RangeInclusive<u64>) -> PyResult<u64> {
    let detail = || {
        let (low, high) = (wanted.start(), wanted.end());
        let range = format!("between {low} and {high}");
        format!("{name} is {}; it must be {SIZE_FORMS}, or a number of bytes {range}", shown(value))
    };
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
    bytes(name, value, 1, &(1..=WHOLE_MAX))
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

/// Parses a whole number up to `high`. The engine checks the range; errors about other values name it.
fn small(name: &str, value: Option<&Bound<'_, PyAny>>, high: u32) -> PyResult<Option<u32>> {
    let detail = |value| format!("{name} is {}; it must be a whole number between 1 and {high}", shown(value));
    let parsed = value.map(|value| integer(value, 0, || detail(value))).transpose()?;
    Ok(parsed.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
}

/// An argument that limits a wait, in seconds.
#[derive(Clone, Copy)]
pub(crate) struct Timeout(pub(crate) f64);

impl<'a, 'py> FromPyObject<'a, 'py> for Timeout {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let refused =
            || format!("timeout is {}; it must be seconds of at least 0, or None to wait forever", shown(&object));
        match object.extract::<f64>() {
            _ if object.is_instance_of::<PyBool>() => Err(PyTypeError::new_err(refused())),
            Ok(seconds) if seconds >= 0.0 => Ok(Self(seconds)),
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => Err(PyTypeError::new_err(refused())),
            Err(error) if !error.is_instance_of::<PyOverflowError>(object.py()) => Err(error),
            // An integer that no float holds.
            Err(_) if object.gt(0)? => Ok(Self(f64::INFINITY)),
            _ => Err(InvalidArgumentError::new_err(refused())),
        }
    }
}
