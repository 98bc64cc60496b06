//! The progress of a step: changed parameter slices and counted parameters.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

/// The parameter slices that a step has changed, by the position of their first element, and the counted parameters.
#[pyclass(frozen, name = "StepRecord", module = "deepnvme._deepnvme")]
#[derive(Default)]
pub(crate) struct PyStepRecord {
    changed: Mutex<HashSet<u64>>,
    counts: Mutex<HashMap<u64, u64>>,
}

impl PyStepRecord {
    fn changed(&self) -> MutexGuard<'_, HashSet<u64>> {
        ignore_poison(self.changed.lock())
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        ignore_poison(self.counts.lock())
    }

    pub(super) fn has_changed(&self, first_index: u64) -> bool {
        self.changed().contains(&first_index)
    }

    pub(super) fn count(&self, number: u64) -> Option<u64> {
        self.counts().get(&number).copied()
    }

    pub(super) fn add_counted(&self, counts: impl Iterator<Item = (u64, u64)>) {
        self.counts().extend(counts);
    }

    pub(super) fn add(&self, first_indices: impl Iterator<Item = u64>) {
        self.changed().extend(first_indices);
    }
}

#[pymethods]
impl PyStepRecord {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __contains__(&self, first_index: u64) -> bool {
        self.has_changed(first_index)
    }

    /// Return the step count of a parameter, by its number; None if this step is not counted yet.
    fn count_of(&self, number: u64) -> Option<u64> {
        self.count(number)
    }

    /// Note the step count of a parameter.
    fn note_count(&self, number: u64, count: u64) {
        self.counts().insert(number, count);
    }

    /// Whether nothing was changed or counted yet.
    #[getter]
    pub(super) fn is_empty(&self) -> bool {
        self.changed().is_empty() && self.counts().is_empty()
    }

    fn __len__(&self) -> usize {
        self.changed().len()
    }
}
