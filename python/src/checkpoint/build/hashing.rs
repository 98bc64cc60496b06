//! What it costs to put keys into dicts and sets, counted before Python does it.
//!
//! Whoever makes a file chooses its keys, and Python's hashes of numbers and tuples are known to all. Keys can be chosen so
//! that each is compared with all before it, or passes all their places: sixty thousand of them take a minute, in which
//! Python does not look for Ctrl-C. So the search is done here first, in a table like Python's, and each step is counted.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyFrozenSet, PyInt, PyTuple};

use crate::error;

/// The steps that the keys of any file may take.
const STEPS_FREE: u64 = 1 << 24;
/// The steps that each byte of a file besides those of its tensors adds: an ordinary key takes two or three, and has as many bytes.
const STEPS_PER_BYTE: u64 = 8;
/// The most steps that all keys of a file take together, however long it is.
const STEPS_MAX: u64 = 1 << 28;
/// After so many steps Python may look for Ctrl-C.
const STEPS_PER_LOOK: u64 = 1 << 20;
/// Up to so many keys, every one may meet every other.
const FEW: usize = 8;
/// The steps of an integer that is longer than a machine word.
const LONG_INT_STEPS: u64 = 64;

/// Which table of Python's it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Dict,
    Set,
}

/// The steps that a load has spent on keys so far.
#[pyclass(frozen, name = "_HashCosts", module = "deepnvme._deepnvme")]
pub(crate) struct HashCosts {
    steps: AtomicU64,
    /// Of the file: it knows how long that is.
    reader: Py<PyAny>,
    /// The limit, once somebody has come near to one.
    most: OnceLock<u64>,
}

#[pymethods]
impl HashCosts {
    #[new]
    fn new(reader: Py<PyAny>) -> Self {
        Self { steps: AtomicU64::new(0), reader, most: OnceLock::new() }
    }

    /// Counts what a dict, or a set, of these keys costs; raises where that is too much.
    #[pyo3(name = "charge")]
    fn charge_all(&self, keys: &Bound<'_, PyAny>, is_set: bool) -> PyResult<()> {
        let keys = keys.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        self.charge(keys.iter(), if is_set { Kind::Set } else { Kind::Dict })
    }
}

impl HashCosts {
    /// Counts what a table of these keys costs.
    ///
    /// # Errors
    /// `UnsafeFileError` beyond the limit; what hashing a key raises; what a signal does.
    pub(super) fn charge<'a, 'py: 'a>(
        &self,
        keys: impl ExactSizeIterator<Item = &'a Bound<'py, PyAny>>,
        kind: Kind,
    ) -> PyResult<()> {
        let count = keys.len();
        let mut table = Table::new(kind, self);
        for key in keys {
            let weight = weight(key, STEPS_MAX);
            self.count(key.py(), weight)?;
            if count > FEW {
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
        if after > STEPS_FREE && after > self.most(py)? {
            let text = format!(
                "the keys of the file were chosen so that dicts or sets of them take more than {} steps; it was made to \
                 take for ever",
                self.most(py)?
            );
            return Err(error::plain(py, "UnsafeFileError", text));
        }
        if before / STEPS_PER_LOOK != after / STEPS_PER_LOOK { py.check_signals() } else { Ok(()) }
    }

    /// The limit for this file: honest keys take steps in proportion to the bytes that describe them.
    fn most(&self, py: Python<'_>) -> PyResult<u64> {
        if let Some(most) = self.most.get() {
            return Ok(*most);
        }
        let described: u64 = self.reader.getattr(py, intern!(py, "described_nbytes"))?.extract(py)?;
        Ok(*self.most.get_or_init(|| STEPS_MAX.min(STEPS_FREE + described.saturating_mul(STEPS_PER_BYTE))))
    }
}

/// The steps of hashing a key, or of comparing it with another: one for each object that is looked at, up to a limit.
fn weight(key: &Bound<'_, PyAny>, most: u64) -> u64 {
    let mut sum = 1;
    if let Ok(tuple) = key.cast::<PyTuple>() {
        for element in tuple.iter_borrowed() {
            if sum > most {
                return sum;
            }
            sum = sum.saturating_add(weight(&element, most - sum));
        }
    } else if let Ok(set) = key.cast::<PyFrozenSet>() {
        sum += set.len() as u64;
    } else if key.cast::<PyInt>().is_ok() && key.extract::<i64>().is_err() {
        sum = LONG_INT_STEPS;
    }
    sum
}

/// A table as CPython has them (`Objects/dictobject.c`, `Objects/setobject.c`).
struct Table<'t, 'a, 'py> {
    kind: Kind,
    costs: &'t HashCosts,
    /// Hash, key, and its weight, in the order of insertion.
    keys: Vec<(u64, &'a Bound<'py, PyAny>, u64)>,
    /// Numbers of keys, from one on.
    slots: Vec<u32>,
}

/// How many places behind the first a set looks at before it goes elsewhere.
const LINEAR_PROBES: usize = 9;
const PERTURB_SHIFT: u32 = 5;
const SLOTS_MIN: usize = 8;
/// From this number of elements on, sets grow by less.
const LARGE_SET: usize = 50_000;

impl<'t, 'a, 'py> Table<'t, 'a, 'py> {
    fn new(kind: Kind, costs: &'t HashCosts) -> Self {
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
            Kind::Dict => (used >= slots * 2 / 3, used * 3),
            Kind::Set => (used * 5 >= (slots - 1) * 3, used * if used > LARGE_SET { 2 } else { 4 } + 1),
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

    /// The free slot for a hash; `None` where the key is there already.
    fn find(&self, hash: u64, key: Option<(&Bound<'py, PyAny>, u64)>) -> PyResult<Option<usize>> {
        let mask = self.slots.len() - 1;
        let (mut perturb, mut at) = (hash, hash as usize & mask);
        let mut steps = 0;
        loop {
            let more = if self.kind == Kind::Set && at + LINEAR_PROBES <= mask { LINEAR_PROBES } else { 0 };
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
