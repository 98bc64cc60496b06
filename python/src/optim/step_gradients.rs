//! The gradients of a step, and the memory of everything that it changes with them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use deepnvme_optim::Float;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyWeakrefMethods, PyWeakrefReference};

use super::parts::{Candidate, Count, Finder, Parts};
use super::plan::{Member, Placement, Prepared, PyStepPlan};
use super::step_record::PyStepRecord;
use super::tensors::{Floats, float};
use crate::error::InvalidArgumentError;
use crate::memory::PlainClasses;
use crate::memory::{GcPause, MemoryAccess, StorageHolds};
use crate::once::intern;
use crate::torch;

/// Members that are looked at together, so that what torch knows about their tensors stays in the CPU's cache.
const AT_ONCE: usize = 256;
/// The name of fp32 copies of shorter weights in an optimizer's state.
const MASTER: &str = "master";
/// The name of step counts there.
const STEP: &str = "step";

/// The gradients of one step that it can use as they are in memory; ``indirect`` lists the others.
///
/// They stay alive until ``release``. Then only weak references are left, for ``is_same``.
#[pyclass(frozen, name = "StepGradients", module = "deepnvme._deepnvme")]
pub(crate) struct PyStepGradients {
    plan: Py<PyStepPlan>,
    /// Members of each group whose gradients a step cannot use as they are in memory.
    #[pyo3(get)]
    indirect: Vec<Vec<usize>>,
    /// The number of the others in each group.
    #[pyo3(get)]
    counts: Vec<usize>,
    /// The optimizer's state, in its order, by the address of the parameter.
    state: Mutex<Vec<(usize, Py<PyDict>)>>,
    noted: Mutex<Vec<Vec<Noted>>>,
}

/// A gradient.
struct Noted {
    member: usize,
    grad: Reference,
    version: u64,
}

enum Reference {
    Strong(Py<PyAny>),
    Weak(Py<PyWeakrefReference>),
}

#[pymethods]
impl PyStepGradients {
    /// Note the gradients of all parameters of a plan. ``state`` is the optimizer's.
    #[new]
    fn new(plan: &Bound<'_, PyStepPlan>, state: &Bound<'_, PyDict>) -> PyResult<Self> {
        let py = plan.py();
        let classes = torch::plain_classes(py)?;
        let params: Vec<Vec<Py<PyAny>>> = {
            let groups = plan.get().groups();
            groups.iter().map(|group| group.members.iter().map(|one| one.param.clone_ref(py)).collect()).collect()
        };
        let _no_collection = GcPause::new(py);
        let (mut noted, mut indirect) = (Vec::new(), Vec::new());
        for params in params {
            let (mut plain, mut others) = (Vec::with_capacity(params.len()), Vec::new());
            for (member, param) in params.into_iter().enumerate() {
                let param = param.into_bound(py);
                let grad = param.getattr(intern!(py, "grad"))?;
                if grad.is_none() {
                    continue;
                }
                if is_plain(classes, &param, &grad)? {
                    let version = grad.getattr(intern!(py, "_version"))?.extract()?;
                    plain.push(Noted { member, grad: Reference::Strong(grad.unbind()), version });
                } else {
                    others.push(member);
                }
            }
            noted.push(plain);
            indirect.push(others);
        }
        let counts = noted.iter().map(Vec::len).collect();
        let plan = plan.clone().unbind();
        let gradients = Self { plan, indirect, counts, state: Mutex::default(), noted: noted.into() };
        gradients.refresh(py, state)?;
        Ok(gradients)
    }

    /// List the members of a group whose gradients were noted, but whose state is not known to be initialised.
    fn stale(&self, py: Python<'_>, group: usize) -> PyResult<Vec<usize>> {
        let Some(classes) = torch::plain_classes(py)? else { return Ok(Vec::new()) };
        let _no_collection = GcPause::new(py);
        let (groups, noted, state) = (self.plan.get().groups(), self.noted(), self.state());
        let (Some(group), Some(noted)) = (groups.get(group), noted.get(group)) else { return Ok(Vec::new()) };
        let is_stale = |member: &Member| -> PyResult<bool> {
            let Some(own) = classes.describe(member.param.bind(py)) else { return Ok(true) };
            let fits = member.prepared.is_some_and(|prepared| prepared.fits(&own));
            let Some(state) = state_of(&state, member).filter(|_| fits) else { return Ok(true) };
            // Python takes over state that the program has put there.
            let mut is_given = false;
            for name in &group.names {
                is_given |= state.bind(py).contains(name)?;
            }
            Ok(is_given || state.bind(py).contains(intern!(py, MASTER))?)
        };
        let mut stale = Vec::new();
        for one in noted {
            if is_stale(&group.members[one.member])? {
                stale.push(one.member);
            }
        }
        Ok(stale)
    }

    /// Whether a batch has elements that this step is yet to change.
    fn is_due(&self, group: usize, batch: usize, record: &Bound<'_, PyStepRecord>) -> bool {
        let (groups, noted) = (self.plan.get().groups(), self.noted());
        let (Some(group), Some(noted)) = (groups.get(group), noted.get(group)) else { return false };
        let Some(batch) = group.batches.get(batch) else { return false };
        batch.iter().any(|placement| {
            let index = group.members[placement.member].first_index + placement.begin as u64;
            find(noted, placement.member).is_some() && !record.get().has_changed(index)
        })
    }

    /// Look up the state of all parameters again.
    fn refresh(&self, py: Python<'_>, state: &Bound<'_, PyDict>) -> PyResult<()> {
        let mut found = Vec::with_capacity(state.len());
        for (param, one) in state.iter() {
            // A value that is no dict counts as an empty one: its state is then found to be missing.
            let one = one.cast_into::<PyDict>().unwrap_or_else(|_| PyDict::new(py));
            found.push((param.as_ptr() as usize, one.unbind()));
        }
        {
            let mut groups = self.plan.get().groups();
            let members = || groups.iter().flat_map(|group| &group.members);
            if members().any(|member| state_of(&found, member).is_none()) {
                let slots: std::collections::HashMap<usize, usize> =
                    found.iter().enumerate().map(|(slot, (param, _))| (*param, slot)).collect();
                for member in groups.iter_mut().flat_map(|group| &mut group.members) {
                    member.slot = slots.get(&(member.param.as_ptr() as usize)).copied().unwrap_or(0);
                }
            }
        }
        // The old one is dropped without the lock.
        let old = std::mem::replace(&mut *self.state(), found);
        drop(old);
        Ok(())
    }

    /// Whether all gradients that still exist are the ones that were noted, and unchanged.
    fn is_same(&self, py: Python<'_>) -> PyResult<bool> {
        let noted: Vec<(Py<PyAny>, Option<Py<PyAny>>, u64)> = {
            let (groups, noted) = (self.plan.get().groups(), self.noted());
            let pairs =
                groups.iter().zip(noted.iter()).flat_map(|(group, noted)| noted.iter().map(move |one| (group, one)));
            let known = pairs.map(|(group, one)| {
                let grad = match &one.grad {
                    Reference::Strong(grad) => Some(grad.clone_ref(py)),
                    Reference::Weak(grad) => grad.bind(py).upgrade().map(Bound::unbind),
                };
                (group.members[one.member].param.clone_ref(py), grad, one.version)
            });
            known.collect()
        };
        for (param, grad, version) in noted {
            let now = param.bind(py).getattr(intern!(py, "grad"))?;
            if now.is_none() {
                continue;
            }
            let is_known = grad.is_some_and(|grad| now.is(&grad));
            if !is_known || now.getattr(intern!(py, "_version"))?.extract::<u64>()? != version {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Stop keeping gradients alive.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let mut dropped = Vec::new();
        {
            let mut noted = self.noted();
            for one in noted.iter_mut().flatten() {
                if let Reference::Strong(grad) = &one.grad {
                    let weak = PyWeakrefReference::new(grad.bind(py))?.unbind();
                    dropped.push(std::mem::replace(&mut one.grad, Reference::Weak(weak)));
                }
            }
        }
        drop(dropped);
        drop(std::mem::take(&mut *self.state()));
        Ok(())
    }
}

impl PyStepGradients {
    fn noted(&self) -> MutexGuard<'_, Vec<Vec<Noted>>> {
        ignore_poison(self.noted.lock())
    }

    fn state(&self) -> MutexGuard<'_, Vec<(usize, Py<PyDict>)>> {
        ignore_poison(self.state.lock())
    }

    /// Find the memory of all gradients, with the group and member of each.
    pub(super) fn grads(&self, py: Python<'_>) -> PyResult<Vec<((usize, usize), Floats)>> {
        let Some(classes) = torch::plain_classes(py)? else { return Ok(Vec::new()) };
        let _no_collection = GcPause::new(py);
        let (mut places, mut objects) = (Vec::new(), Vec::new());
        for (group, noted) in self.noted().iter().enumerate() {
            for one in noted {
                if let Reference::Strong(grad) = &one.grad {
                    places.push((group, one.member));
                    objects.push(grad.bind(py).clone());
                }
            }
        }
        let held = Arc::new(StorageHolds::new(py, &objects)?);
        let grads = objects.iter().map(|grad| {
            let found = classes.describe(grad).and_then(|grad| Floats::held(&grad, &held, MemoryAccess::Read));
            found.ok_or_else(|| InvalidArgumentError::new_err("a gradient was changed during the step"))
        });
        places.into_iter().zip(grads).map(|(place, grad)| Ok((place, grad?))).collect()
    }

    /// Find the memory of what this step is yet to change in a group, or in one batch of it.
    pub(super) fn parts(
        &self,
        py: Python<'_>,
        group: usize,
        record: &PyStepRecord,
        batch: Option<(usize, Option<&Bound<'_, PyAny>>)>,
    ) -> PyResult<Parts> {
        let mut parts = Parts { tensors: Vec::new(), counts: Vec::new(), params: Vec::new(), stale: Vec::new() };
        let Some(classes) = torch::plain_classes(py)? else { return Ok(parts) };
        // A collection could run code that changes tensors.
        let _no_collection = GcPause::new(py);
        let format = self.plan.get().format;
        let memory = match batch.and_then(|(_, memory)| memory) {
            Some(memory) => {
                let held = Arc::new(StorageHolds::new(py, std::slice::from_ref(memory))?);
                let found = classes.describe(memory).and_then(|found| found.slice::<u8>(&held, MemoryAccess::Write));
                let refused =
                    || InvalidArgumentError::new_err("the memory of a batch must be a contiguous uint8 tensor");
                Some(found.ok_or_else(refused)?)
            }
            None => None,
        };
        let batch = batch.map(|(batch, _)| batch);
        let count = self.count(group, batch);
        parts.tensors.reserve(count);
        parts.counts.reserve(count);
        parts.params.reserve(count);
        for begin in (0..count).step_by(AT_ONCE) {
            let mut objects = Vec::with_capacity(5 * AT_ONCE);
            let range = begin..count.min(begin + AT_ONCE);
            let wanted = WantedParts { group, batch, range, record };
            let candidates = self.candidates(py, wanted, classes, &mut objects, &mut parts.stale)?;
            let held = Arc::new(StorageHolds::new(py, &objects)?);
            let finder = Finder { classes, held: &held, format };
            for candidate in candidates {
                let found = finder.part(&candidate, &objects[candidate.tensors.clone()], memory.as_ref());
                let Some(tensors) = found else {
                    parts.stale.push(candidate.placement.member);
                    continue;
                };
                // As `int(tensor.item()) + 1` in Python.
                let next = candidate.counter.as_ref().map(|(_, steps)| steps + 1);
                let step = candidate.counted.or(candidate.prepared.count).or(next).unwrap_or(1);
                parts.tensors.push(tensors);
                let counter = candidate.counter.map(|(counter, _)| counter);
                parts.counts.push(Count {
                    param_number: candidate.param_number,
                    member: candidate.placement.member,
                    step,
                    counter,
                });
                parts.params.push(candidate.param);
            }
        }
        // If parameters share a counter, each of them counts in it, one after the other. That is left to Python.
        let counters =
            parts.counts.iter().filter_map(|one| Some((one.counter.as_ref()?.as_ptr() as usize, one.param_number)));
        if are_shared(counters.collect()) {
            parts.stale.extend(parts.counts.drain(..).map(|one| one.member));
            parts.tensors.clear();
            parts.params.clear();
        }
        Ok(parts)
    }

    /// Return the number of parts of a group, or of one batch of it.
    fn count(&self, group: usize, batch: Option<usize>) -> usize {
        let (groups, noted) = (self.plan.get().groups(), self.noted());
        match batch {
            None => noted.get(group).map_or(0, Vec::len),
            Some(batch) => groups.get(group).and_then(|group| group.batches.get(batch)).map_or(0, Vec::len),
        }
    }

    /// List some of the parts, and add their tensors to `objects`. Members that do not fit go to `stale`.
    fn candidates<'py>(
        &self,
        py: Python<'py>,
        wanted: WantedParts<'_>,
        classes: &PlainClasses,
        objects: &mut Vec<Bound<'py, PyAny>>,
        stale: &mut Vec<usize>,
    ) -> PyResult<Vec<Candidate>> {
        let WantedParts { group, batch, range, record } = wanted;
        let plan = self.plan.get();
        let (groups, noted, state) = (plan.groups(), self.noted(), self.state());
        let (Some(group), Some(noted)) = (groups.get(group), noted.get(group)) else { return Ok(Vec::new()) };
        let is_new = record.is_empty();
        let mut candidates = Vec::with_capacity(range.len());
        let mut add = |one: &Noted, placement: Option<&Placement>| -> PyResult<()> {
            let member = &group.members[one.member];
            let begin = placement.map_or(0, |placement| placement.begin);
            let Reference::Strong(grad) = &one.grad else { return Ok(()) };
            if !is_new && record.has_changed(member.first_index + begin as u64) {
                return Ok(());
            }
            let at = objects.len();
            objects.extend([member.param.bind(py).clone(), grad.bind(py).clone()]);
            let mut fits = None;
            if let (Some(prepared), Some(state)) = (member.prepared, state_of(&state, member)) {
                let names = if plan.is_in_memory { group.names.as_slice() } else { &[] };
                let wanted = WantedState { classes, names, prepared, is_in_memory: plan.is_in_memory };
                fits = wanted.find(state.bind(py), objects)?.map(|counter| (prepared, counter));
            }
            let Some((prepared, counter)) = fits else {
                objects.truncate(at);
                stale.push(one.member);
                return Ok(());
            };
            candidates.push(Candidate {
                placement: Placement {
                    member: one.member,
                    begin,
                    end: placement.map_or(prepared.elements, |placement| placement.end),
                    offsets: placement.map_or_else(Vec::new, |placement| placement.offsets.clone()),
                },
                param_number: member.number,
                counted: if is_new { None } else { record.count(member.number) },
                first_index: member.first_index,
                prepared,
                param: member.param.clone_ref(py),
                is_whole: placement.is_none(),
                counter,
                tensors: at..objects.len(),
            });
            Ok(())
        };
        match batch {
            None => noted.get(range).into_iter().flatten().try_for_each(|one| add(one, None))?,
            Some(batch) => {
                let placements = group.batches.get(batch).and_then(|batch| batch.get(range));
                for placement in placements.into_iter().flatten() {
                    if let Some(one) = find(noted, placement.member) {
                        add(one, Some(placement))?;
                    }
                }
            }
        }
        Ok(candidates)
    }
}

/// Whether a step can use a gradient as it is in memory.
fn is_plain(classes: Option<&PlainClasses>, param: &Bound<'_, PyAny>, grad: &Bound<'_, PyAny>) -> PyResult<bool> {
    let Some(classes) = classes else { return Ok(false) };
    let (Some(own), Some(new)) = (classes.describe(param), classes.describe(grad)) else { return Ok(false) };
    if own.elements == 0 || float(&own).is_none() || own.dtype != new.dtype || !own.has_order_of(&new) {
        return Ok(false);
    }
    if !own.is_dense() {
        return Ok(false);
    }
    // Lazy negation: the imaginary part of a lazy conjugate. Those of several elements have gaps.
    let is_neg = |tensor: &Bound<'_, PyAny>| tensor.call_method0(intern!(tensor.py(), "is_neg"))?.is_truthy();
    Ok(own.elements > 1 || !(is_neg(param)? || is_neg(grad)?))
}

/// Some parts of a group, or of one batch of it, that a step is yet to change.
struct WantedParts<'a> {
    group: usize,
    batch: Option<usize>,
    /// Their positions in the group or the batch.
    range: Range<usize>,
    record: &'a PyStepRecord,
}

/// The state of a parameter that a step needs.
struct WantedState<'a> {
    classes: &'a PlainClasses,
    names: &'a [Py<PyString>],
    prepared: Prepared,
    is_in_memory: bool,
}

/// A tensor that counts steps, and the steps so far.
type Counter = (Py<PyAny>, u64);

impl WantedState<'_> {
    /// Add the tensors of state to a list, and return the counter, if steps are counted. `None` if something is
    /// missing.
    #[expect(clippy::option_option, reason = "nothing is wanted, or it is missing")]
    fn find<'py>(
        &self,
        state: &Bound<'py, PyDict>,
        objects: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Option<Counter>>> {
        let py = state.py();
        let mut counter = None;
        if self.prepared.count.is_none() {
            let Some(found) = state.get_item(intern!(py, STEP))? else { return Ok(None) };
            let steps = self.classes.describe(&found).filter(|found| float(found) == Some(Float::F32));
            let Some(steps) = steps.and_then(|steps| steps.read_scalar::<f32>()) else { return Ok(None) };
            counter = Some((found.unbind(), steps as u64));
        }
        let has_master = self.is_in_memory && self.prepared.float != Float::F32;
        let names = self.names.iter().map(|name| name.bind(py)).chain(has_master.then(|| intern!(py, MASTER)));
        for name in names {
            let Some(found) = state.get_item(name)? else { return Ok(None) };
            objects.push(found);
        }
        Ok(Some(counter))
    }
}

/// Whether two parameters have the same counter.
fn are_shared(mut counters: Vec<(usize, u64)>) -> bool {
    counters.sort_unstable();
    counters.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].1 != pair[1].1)
}

fn find(noted: &[Noted], member: usize) -> Option<&Noted> {
    // Usually all members have gradients.
    if let Some(one) = noted.get(member).filter(|one| one.member == member) {
        return Some(one);
    }
    noted.binary_search_by_key(&member, |one| one.member).ok().map(|at| &noted[at])
}

fn state_of<'a>(state: &'a [(usize, Py<PyDict>)], member: &Member) -> Option<&'a Py<PyDict>> {
    state.get(member.slot).filter(|(param, _)| *param == member.param.as_ptr() as usize).map(|(_, state)| state)
}
