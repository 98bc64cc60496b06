//! Count the cost of adding keys to dicts and sets before Python pays it.
//!
//! The file chooses its keys, and Python's hashes of numbers and tuples are public. Hostile keys can collide with all
//! earlier keys or probe all their slots. Sixty thousand of them take a minute, in which Python ignores Ctrl-C. The
//! search therefore runs here first, in a table like Python's, and counts each step.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::{PyFrozenSet, PyInt, PyTuple};

use crate::error;
use crate::once::intern;

/// Steps that the keys of any file may take.
const FREE_STEPS: u64 = 1 << 24;
/// Steps allowed for each byte outside the tensors. An ordinary key takes two or three steps, and at least as many
/// bytes.
const STEPS_PER_BYTE: u64 = 8;
/// Limit of steps for all keys of a file, whatever its length.
const STEPS_MAX: u64 = 1 << 28;
/// Steps between checks for Ctrl-C.
const STEPS_PER_CHECK: u64 = 1 << 20;
/// With at most this many keys, all may collide.
const FEW_KEYS: usize = 8;
/// Steps for an integer longer than a machine word.
const LONG_INT_STEPS: u64 = 64;

/// The kind of Python table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TableKind {
    Dict,
    Set,
}

/// Count the steps that a load has spent on keys.
#[pyclass(frozen, name = "_HashCosts", module = "deepnvme._deepnvme")]
pub(crate) struct HashCosts {
    steps: AtomicU64,
    /// The file's reader, which knows the file's length.
    reader: Py<PyAny>,
    /// The file's limit, computed when a load first exceeds the free steps.
    steps_max: OnceLock<u64>,
}

#[pymethods]
impl HashCosts {
    #[new]
    fn new(reader: Py<PyAny>) -> Self {
        Self { steps: AtomicU64::new(0), reader, steps_max: OnceLock::new() }
    }

    /// Count the cost of a dict or set with these keys. Raises beyond the limit.
    #[pyo3(name = "charge")]
    fn charge_all(&self, keys: &Bound<'_, PyAny>, is_set: bool) -> PyResult<()> {
        let keys = keys.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        self.charge(keys.iter(), if is_set { TableKind::Set } else { TableKind::Dict })
    }
}

impl HashCosts {
    /// Counts the cost of a table with these keys.
    ///
    /// # Errors
    /// `UnsafeFileError` beyond the limit, any exception from hashing a key, or any exception from a signal.
    pub(super) fn charge<'a, 'py: 'a>(
        &self,
        keys: impl ExactSizeIterator<Item = &'a Bound<'py, PyAny>>,
        kind: TableKind,
    ) -> PyResult<()> {
        let count = keys.len();
        let mut table = Table::new(kind, self);
        for key in keys {
            let weight = weight(key, STEPS_MAX);
            self.count(key.py(), weight)?;
            if count > FEW_KEYS {
                table.insert(key, weight)?;
            } else {
                self.count(key.py(), weight * count as u64)?;
            }
        }
        Ok(())
    }

    fn count(&self, py: Python<'_>, steps: u64) -> PyResult<()> {
        let before = self.steps.fetch_add(steps, Ordering::Relaxed);
        let after = before.saturating_add(steps);
        if after > FREE_STEPS && after > self.steps_max(py)? {
            let text = format!(
                "the keys of the file were chosen so that dicts or sets of them take more than {} steps; it was made to \
                 take forever",
                self.steps_max(py)?
            );
            return Err(error::plain(py, "UnsafeFileError", text));
        }
        if before / STEPS_PER_CHECK != after / STEPS_PER_CHECK { py.check_signals() } else { Ok(()) }
    }

    /// Returns this file's limit. Honest keys take steps in proportion to the bytes that describe them.
    fn steps_max(&self, py: Python<'_>) -> PyResult<u64> {
        if let Some(steps_max) = self.steps_max.get() {
            return Ok(*steps_max);
        }
        let described: u64 = self.reader.getattr(py, intern!(py, "described_nbytes"))?.extract(py)?;
        Ok(*self.steps_max.get_or_init(|| STEPS_MAX.min(FREE_STEPS + described.saturating_mul(STEPS_PER_BYTE))))
    }
}

/// Returns the steps to hash a key or to compare it: one for each object visited, and more for a long integer. It stops
/// counting soon after `steps_max`.
fn weight(key: &Bound<'_, PyAny>, steps_max: u64) -> u64 {
    let mut sum = 1;
    if let Ok(tuple) = key.cast::<PyTuple>() {
        for element in tuple.iter_borrowed() {
            if sum > steps_max {
                return sum;
            }
            sum = sum.saturating_add(weight(&element, steps_max - sum));
        }
    } else if let Ok(set) = key.cast::<PyFrozenSet>() {
        sum += set.len() as u64;
    } else if key.cast::<PyInt>().is_ok() && key.extract::<i64>().is_err() {
        sum = LONG_INT_STEPS;
    }
    sum
}

/// A table that probes as CPython does (`Objects/dictobject.c`, `Objects/setobject.c`).
struct Table<'t, 'a, 'py> {
    kind: TableKind,
    costs: &'t HashCosts,
    /// Hash, key and weight, in insertion order.
    keys: Vec<(u64, &'a Bound<'py, PyAny>, u64)>,
    /// Key numbers, starting at 1; 0 marks a free slot.
    slots: Vec<u32>,
}

/// Slots that a set probes linearly before it jumps.
const LINEAR_PROBES: usize = 9;
const PERTURB_SHIFT: u32 = 5;
const SLOTS_MIN: usize = 8;
/// Sets of more elements than this grow more slowly.
const LARGE_SET: usize = 50_000;

impl<'t, 'a, 'py> Table<'t, 'a, 'py> {
    fn new(kind: TableKind, costs: &'t HashCosts) -> Self {
        Self { kind, costs, keys: Vec::new(), slots: Vec::new() }
    }

    fn insert(&mut self, key: &'a Bound<'py, PyAny>, weight: u64) -> PyResult<()> {
        if self.slots.is_empty() {
            self.slots.resize(SLOTS_MIN, 0);
        }
        let hash = key.hash()?.cast_unsigned() as u64;
        let Some(slot) = self.find(hash, Some((key, weight)))? else { return Ok(()) };
        self.keys.push((hash, key, weight));
        self.slots[slot] = self.keys.len() as u32;
        let (used, slots) = (self.keys.len(), self.slots.len());
        let (is_full, wanted) = match self.kind {
            TableKind::Dict => (used >= slots * 2 / 3, used * 3),
            TableKind::Set => (used * 5 >= (slots - 1) * 3, used * if used > LARGE_SET { 2 } else { 4 } + 1),
        };
        if is_full { self.grow(wanted) } else { Ok(()) }
    }

    fn grow(&mut self, wanted: usize) -> PyResult<()> {
        self.slots.clear();
        self.slots.resize(wanted.next_power_of_two().max(SLOTS_MIN), 0);
        for index in 0..self.keys.len() {
            if let Some(slot) = self.find(self.keys[index].0, None)? {
                self.slots[slot] = index as u32 + 1;
            }
        }
        Ok(())
    }

    /// Finds the free slot for a hash; `None` if the key is present.
    fn find(&self, hash: u64, key: Option<(&Bound<'py, PyAny>, u64)>) -> PyResult<Option<usize>> {
        let mask = self.slots.len() - 1;
        let (mut perturb, mut at) = (hash, hash as usize & mask);
        let mut steps = 0;
        loop {
            let more = if self.kind == TableKind::Set && at + LINEAR_PROBES <= mask { LINEAR_PROBES } else { 0 };
            for slot in at..=at + more {
                let number = self.slots[slot];
                if number == 0 {
                    if steps > 0 {
                        self.count(steps)?;
                    }
                    return Ok(Some(slot));
                }
                steps += 1;
                let (other_hash, other, _) = &self.keys[number as usize - 1];
                if let Some((key, weight)) = key
                    && *other_hash == hash
                {
                    if key.is(*other) || self.is_equal(key, other, weight + steps)? {
                        return Ok(None);
                    }
                    steps = 0;
                }
            }
            perturb >>= PERTURB_SHIFT;
            at = at.wrapping_mul(5).wrapping_add(perturb as usize).wrapping_add(1) & mask;
        }
    }

    fn is_equal(&self, key: &Bound<'py, PyAny>, other: &Bound<'py, PyAny>, steps: u64) -> PyResult<bool> {
        self.count(steps)?;
        key.eq(other)
    }

    fn count(&self, steps: u64) -> PyResult<()> {
        let py = match self.keys.first() {
            Some((_, key, _)) => key.py(),
            None => return Ok(()),
        };
        self.costs.count(py, steps)
    }
}
