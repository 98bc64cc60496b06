//! The parts of a step, from tensors whose storages are held. A part is a parameter slice with its gradient and state.

use std::sync::Arc;

use deepnvme_mem::dlpack::DLDataType;
use deepnvme_optim::{Float, SCALE_ELEMENTS};
use pyo3::prelude::*;

use super::plan::{MomentFormat, Placement, Prepared};
use super::tensors::{Floats, Moment, PartTensors, float};
use crate::memory::PlainClasses;
use crate::memory::{Described, MemoryAccess, StorageHolds, TensorSlice};

/// Parts of a step, and their step counts.
pub(super) struct Parts {
    pub(super) tensors: Vec<PartTensors>,
    /// For each part: the step, and the tensor that counts it.
    pub(super) counts: Vec<Count>,
    /// Parameters that change.
    pub(super) params: Vec<Py<PyAny>>,
    /// Members of the group whose state does not fit, for Python to convert.
    pub(super) stale: Vec<usize>,
}

/// The step count of a parameter.
pub(super) struct Count {
    pub(super) param_number: u64,
    /// Its index in the group.
    pub(super) member: usize,
    pub(super) step: u64,
    /// The tensor that has the count, if there is one.
    pub(super) counter: Option<Py<PyAny>>,
}

impl Count {
    /// Count the step, in the parameter's own state.
    pub(super) fn write(&self, classes: &PlainClasses, py: Python<'_>) {
        let Some(counter) = &self.counter else { return };
        if let Some(counter) = classes.describe(counter.bind(py)).filter(|counter| float(counter) == Some(Float::F32)) {
            counter.write_scalar(self.step as f32);
        }
    }
}

impl Parts {
    /// The parameters that change.
    pub(super) fn params<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyAny>> {
        self.params.iter().map(|param| param.bind(py).clone()).collect()
    }
}

/// A part before the memory of its tensors is known, and their places in a list.
pub(super) struct Candidate {
    pub(super) placement: Placement,
    pub(super) param_number: u64,
    /// The step count of the parameter, if this step is counted already.
    pub(super) counted: Option<u64>,
    /// Position of the parameter's first element among all of the optimizer.
    pub(super) first_index: u64,
    pub(super) prepared: Prepared,
    pub(super) param: Py<PyAny>,
    pub(super) is_whole: bool,
    /// The tensor that counts its steps, and the steps so far.
    pub(super) counter: Option<(Py<PyAny>, u64)>,
    /// Weights, gradient and state.
    pub(super) tensors: std::ops::Range<usize>,
}

/// Finds the memory of tensors whose storages are held.
pub(super) struct Finder<'a> {
    pub(super) classes: &'a PlainClasses,
    pub(super) held: &'a Arc<StorageHolds>,
    pub(super) format: MomentFormat,
}

impl Finder<'_> {
    /// Return the part. `None` if a tensor does not fit.
    pub(super) fn part(
        &self,
        candidate: &Candidate,
        tensors: &[Bound<'_, PyAny>],
        memory: Option<&TensorSlice<u8>>,
    ) -> Option<PartTensors> {
        let Candidate { prepared, placement: Placement { begin, end, offsets, .. }, .. } = candidate;
        let (param, grad) = (self.classes.describe(tensors.first()?)?, self.classes.describe(tensors.get(1)?)?);
        if !prepared.fits(&param) || param.dtype != grad.dtype || !param.has_order_of(&grad) {
            return None;
        }
        let mut weights = Floats::held(&param, self.held, MemoryAccess::Write)?;
        let mut grad = Floats::held(&grad, self.held, MemoryAccess::Read)?;
        if !candidate.is_whole {
            (weights, grad) = (weights.part(*begin, *end)?, grad.part(*begin, *end)?);
        }
        let rest = tensors.iter().skip(2);
        let has_master = prepared.float != Float::F32;
        let (moments, master) = if candidate.is_whole {
            self.state_of(&param, rest, has_master)?
        } else {
            self.state_in(memory, offsets, end - begin, has_master)?
        };
        let index = candidate.first_index + *begin as u64;
        Some(match master {
            None => PartTensors { weights, grad, moments, out: None, index },
            Some(master) => PartTensors { weights: master, grad, moments, out: Some(weights), index },
        })
    }

    /// Find the moments, and the master weights if there are some, among tensors.
    fn state_of<'a, 'py: 'a>(
        &self,
        param: &Described<'_>,
        mut tensors: impl ExactSizeIterator<Item = &'a Bound<'py, PyAny>>,
        has_master: bool,
    ) -> Option<(Vec<Moment>, Option<Floats>)> {
        let mut moments = Vec::with_capacity(tensors.len());
        while tensors.len() > usize::from(has_master) {
            let moment = self.classes.describe(tensors.next()?)?;
            let scales = if self.format == MomentFormat::Q8 { Some(tensors.next()?) } else { None };
            moments.push(self.moment(param, &moment, scales)?);
        }
        let Some(master) = tensors.next() else { return Some((moments, None)) };
        let master = self.classes.describe(master)?;
        let fits = float(&master) == Some(Float::F32) && param.has_order_of(&master);
        let master = Floats::held(&master, self.held, MemoryAccess::Write).filter(|_| fits)?;
        Some((moments, Some(master)))
    }

    /// Find the moments, and the master weights if there are some, in the memory of a batch.
    fn state_in(
        &self,
        memory: Option<&TensorSlice<u8>>,
        offsets: &[usize],
        count: usize,
        has_master: bool,
    ) -> Option<(Vec<Moment>, Option<Floats>)> {
        let Some(memory) = memory else { return (offsets.is_empty() && !has_master).then(|| (Vec::new(), None)) };
        let (moments, master) = offsets.split_at(offsets.len().checked_sub(usize::from(has_master))?);
        let moments = moments.iter().map(|offset| self.moment_at(memory, *offset, count)).collect::<Option<_>>()?;
        match master.first() {
            Some(offset) => Some((moments, Some(Floats::F32(memory.cast_part(*offset, count)?)))),
            None => Some((moments, None)),
        }
    }

    fn moment(
        &self,
        param: &Described<'_>,
        moment: &Described<'_>,
        scales: Option<&Bound<'_, PyAny>>,
    ) -> Option<Moment> {
        if !param.has_order_of(moment) {
            return None;
        }
        let (held, write) = (self.held, MemoryAccess::Write);
        match (self.format, float(moment), scales) {
            (MomentFormat::F32, Some(Float::F32), _) => moment.slice(held, write).map(Moment::F32),
            (MomentFormat::Bf16, Some(Float::Bf16), _) => moment.slice(held, write).map(Moment::Bf16),
            (MomentFormat::Q8, _, Some(scales)) if moment.dtype == DLDataType::U8 => {
                let scales = self.classes.describe(scales)?;
                let fits =
                    float(&scales) == Some(Float::F32) && scales.elements == param.elements.div_ceil(SCALE_ELEMENTS);
                let scales = scales.slice(held, write).filter(|_| fits)?;
                Some(Moment::Q8(moment.slice(held, write)?, scales))
            }
            _ => None,
        }
    }

    /// Find a moment in the memory of its batch. `StateFormat` in Python defines where scales are.
    fn moment_at(&self, memory: &TensorSlice<u8>, offset: usize, count: usize) -> Option<Moment> {
        match self.format {
            MomentFormat::F32 => memory.cast_part(offset, count).map(Moment::F32),
            MomentFormat::Bf16 => memory.cast_part(offset, count).map(Moment::Bf16),
            MomentFormat::Q8 => {
                let scales = offset.checked_add(count.checked_next_multiple_of(4)?)?;
                let scales = memory.cast_part(scales, count.div_ceil(SCALE_ELEMENTS))?;
                Some(Moment::Q8(memory.cast_part(offset, count)?, scales))
            }
        }
    }
}
