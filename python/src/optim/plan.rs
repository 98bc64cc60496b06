//! Plans: what a step changes, and where the state is. A plan lasts as long as the parameters of the param groups.
//!
//! A plan caches no address. Each step asks torch for the addresses, shapes and dtypes of all tensors, with one C call
//! for each, and hands two kinds of parameters to Python. The state of "stale" ones must be initialised or converted.
//! The gradients of "indirect" ones must be copied first: subclasses, sparse gradients, other memory orders.

use std::sync::{Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use deepnvme_optim::Float;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::tensors::float;
use crate::error::InvalidArgumentError;
use crate::memory::Described;
use crate::torch;

/// The format of moments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MomentFormat {
    F32,
    Bf16,
    Q8,
}

/// Remember the parameters of all param groups, and where their state is.
///
/// ``groups`` has their parameters. ``places`` has the number of each one and the position of its first element.
/// ``names`` has the moments of each group in the kernel's order, each followed by its scales if it has some.
/// ``moments`` is their format. With ``in_memory``, the state is in the optimizer's own ``state``; otherwise it is in
/// memory that is passed to ``Kernel.update``.
#[pyclass(frozen, name = "StepPlan", module = "deepnvme._deepnvme")]
pub(crate) struct PyStepPlan {
    pub(super) format: MomentFormat,
    pub(super) is_in_memory: bool,
    groups: Mutex<Vec<GroupPlan>>,
}

pub(super) struct GroupPlan {
    pub(super) members: Vec<Member>,
    pub(super) names: Vec<Py<PyString>>,
    /// Where the state is, if it is passed to `Kernel.update`: in batches that are in memory at once.
    pub(super) batches: Vec<Vec<Placement>>,
}

/// A parameter.
pub(super) struct Member {
    pub(super) param: Py<PyAny>,
    /// Its number among all parameters of the optimizer.
    pub(super) number: u64,
    pub(super) first_index: u64,
    /// Its place in the order of the optimizer's `state`.
    pub(super) slot: usize,
    /// Once Python has initialised its state.
    pub(super) prepared: Option<Prepared>,
}

#[derive(Clone, Copy)]
pub(super) struct Prepared {
    pub(super) float: Float,
    pub(super) elements: usize,
    /// Its shape and memory order.
    pub(super) order_hash: u64,
    /// The number of its next step, if its state does not count steps.
    pub(super) count: Option<u64>,
}

/// Elements of a parameter, and the first byte of each kind of their state.
pub(super) struct Placement {
    pub(super) member: usize,
    pub(super) begin: usize,
    pub(super) end: usize,
    pub(super) offsets: Vec<usize>,
}

type PlacementArgument = (usize, usize, usize, Vec<usize>);

#[pymethods]
impl PyStepPlan {
    #[new]
    #[pyo3(signature = (groups, places, names, *, moments, in_memory))]
    fn new(
        groups: Vec<Vec<Py<PyAny>>>,
        places: Vec<Vec<(u64, u64)>>,
        names: Vec<Vec<Py<PyString>>>,
        moments: &str,
        in_memory: bool,
    ) -> PyResult<Self> {
        let format = match moments {
            "fp32" => MomentFormat::F32,
            "bf16" => MomentFormat::Bf16,
            "8bit" => MomentFormat::Q8,
            _ => return Err(InvalidArgumentError::new_err(format!("moments is '{moments}'"))),
        };
        let group = |((params, places), names): ((Vec<_>, Vec<_>), Vec<_>)| {
            let pairs = params.into_iter().zip(places);
            let members = pairs.map(|(param, (number, first_index))| Member {
                param,
                number,
                first_index,
                slot: 0,
                prepared: None,
            });
            GroupPlan { members: members.collect(), names, batches: Vec::new() }
        };
        let groups = groups.into_iter().zip(places).zip(names).map(group).collect();
        Ok(Self { format, is_in_memory: in_memory, groups: Mutex::new(groups) })
    }

    /// Whether the plan is of these parameters in this order.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn is_of(&self, groups: Vec<Vec<Bound<'_, PyAny>>>) -> bool {
        let own = self.groups();
        own.len() == groups.len()
            && own.iter().zip(&groups).all(|(own, params)| {
                own.members.len() == params.len()
                    && own.members.iter().zip(params).all(|(member, param)| param.is(&member.param))
            })
    }

    /// Note that the state of members of a group is initialised. ``counts`` has the number of the next step of each, or
    /// None if its state counts steps.
    fn prepare(&self, py: Python<'_>, group: usize, members: Vec<usize>, counts: Vec<Option<u64>>) -> PyResult<()> {
        let Some(classes) = torch::plain_classes(py)? else { return Ok(()) };
        let mut groups = self.groups();
        for (member, count) in members.into_iter().zip(counts) {
            let Some(member) = groups.get_mut(group).and_then(|group| group.members.get_mut(member)) else { continue };
            let described = classes.describe(member.param.bind(py));
            member.prepared = described.and_then(|tensor| {
                let (elements, order_hash) = (tensor.elements, tensor.order_hash());
                Some(Prepared { float: float(&tensor)?, elements, order_hash, count })
            });
        }
        Ok(())
    }

    /// Set where the state of a group is. A batch has placements ``(member, begin, end, offsets)``: elements of a
    /// member, and the first byte of each kind of their state in the memory of the batch.
    fn set_batches(&self, group: usize, batches: Vec<Vec<PlacementArgument>>) {
        let placement = |(member, begin, end, offsets)| Placement { member, begin, end, offsets };
        let batches = batches.into_iter().map(|batch| batch.into_iter().map(placement).collect()).collect();
        if let Some(group) = self.groups().get_mut(group) {
            group.batches = batches;
        }
    }
}

impl PyStepPlan {
    pub(super) fn groups(&self) -> MutexGuard<'_, Vec<GroupPlan>> {
        ignore_poison(self.groups.lock())
    }
}

impl Prepared {
    pub(super) fn fits(&self, own: &Described<'_>) -> bool {
        float(own) == Some(self.float) && own.elements == self.elements && own.order_hash() == self.order_hash
    }
}
