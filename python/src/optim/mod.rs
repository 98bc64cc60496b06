//! `deepnvme._deepnvme.Kernel`: optimizer steps over CPU tensors, without the GIL.
//!
//! `settings` parses an algorithm's settings, and `tensors` turns tensors into slices. For steps of many parameters,
//! `plan` knows the parameters, `step_gradients` their gradients in one step, `parts` finds the memory of all, and
//! `step_record` has the progress.

mod parts;
mod plan;
mod settings;
mod step_gradients;
mod step_record;
mod tensors;

use deepnvme_optim::{
    Error, Kernel, Rounding, Sign, SqrtMode, StepOptions, ThreadPool, accumulate, decode_moment, encode_moment,
    gradient_norm,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::InvalidArgumentError;
use crate::memory::{MemoryAccess, check_disjoint};
use crate::{error, tensor_memory, torch};
use parts::Parts;
pub(crate) use plan::PyStepPlan;
pub(crate) use step_gradients::PyStepGradients;
pub(crate) use step_record::PyStepRecord;
use tensors::{Floats, Moment, PartArgument, PartTensors};

/// Run optimizer steps on threads, for :class:`deepnvme.optim.AdamW` and the others.
///
/// ``sqrt_mode`` selects the rounding of square roots: ``"exact"``, or torch's own rounding on some CPUs,
/// ``"two-step"``, ``"two-step-fused"`` and ``"one-step"``. ``threads=0`` starts one thread per CPU.
#[pyclass(frozen, name = "Kernel", module = "deepnvme._deepnvme")]
pub(crate) struct PyKernel {
    pool: ThreadPool,
    sqrt_mode: SqrtMode,
}

#[pymethods]
impl PyKernel {
    #[new]
    #[pyo3(signature = (*, threads=0, sqrt_mode="exact"))]
    fn new(threads: usize, sqrt_mode: &str) -> PyResult<Self> {
        let sqrt_mode = sqrt_mode_named(sqrt_mode)?;
        if !sqrt_mode.is_available() {
            return Err(InvalidArgumentError::new_err(
                "this CPU has no reciprocal square root estimate; pass sqrt_mode='exact'",
            ));
        }
        Ok(Self { pool: ThreadPool::new(threads).map_err(to_exception)?, sqrt_mode })
    }

    /// The number of threads.
    #[getter]
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The rounding of square roots.
    #[getter]
    fn sqrt_mode(&self) -> &'static str {
        sqrt_mode_name(self.sqrt_mode)
    }

    /// The roundings that this CPU supports.
    #[staticmethod]
    fn sqrt_modes() -> Vec<&'static str> {
        SqrtMode::ALL.into_iter().filter(|mode| mode.is_available()).map(sqrt_mode_name).collect()
    }

    /// Take the square roots of an fp32 tensor in place, as a step does.
    fn sqrt_(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut values = tensor_memory::slice::<f32>(tensor, MemoryAccess::Write)?;
        // SAFETY: this is the only tensor of the work.
        py.detach(|| self.sqrt_mode.apply(unsafe { values.as_mut_slice() }));
        Ok(())
    }

    /// Run one step of an algorithm: ``"adam"``, ``"adamw"``, ``"lion"``, ``"sgd"`` or ``"adagrad"``.
    ///
    /// A part is ``(weights, grad, moments, out, index)``. The step changes ``weights`` and ``moments``, and copies the
    /// new weights to ``out`` unless it is None. Weights and gradients are fp32, bf16 or fp16. A moment is an fp32 or
    /// bf16 tensor, or a pair of codes (uint8) and scales (fp32, one per 128 codes). ``index`` is the position of the
    /// first element, for stochastic rounding. ``record`` receives the positions of all parts as soon as they are
    /// changed. No Python signal is handled between the two.
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    #[pyo3(signature = (
        algorithm, settings, parts, *, step, unscale=1.0, clip=1.0, stochastic=false, seed=0, record=None
    ))]
    fn step(
        &self,
        py: Python<'_>,
        algorithm: &str,
        settings: &Bound<'_, PyDict>,
        parts: Vec<PartArgument<'_>>,
        step: u64,
        unscale: f32,
        clip: f32,
        stochastic: bool,
        seed: u64,
        record: Option<&Bound<'_, PyStepRecord>>,
    ) -> PyResult<()> {
        let first_indices: Vec<u64> = parts.iter().map(|part| part.4).collect();
        let changed: Vec<Bound<'_, PyAny>> =
            parts.iter().flat_map(|part| [Some(part.0.clone()), part.3.clone()]).flatten().collect();
        let record = record.map(Bound::get);
        let kernel = Kernel::new(settings::algorithm(algorithm, settings)?, self.sqrt_mode).map_err(to_exception)?;
        let mut tensors = parts.into_iter().map(PartTensors::new).collect::<PyResult<Vec<_>>>()?;
        check_disjoint(tensors.iter().flat_map(PartTensors::address_ranges).collect())?;
        let rounding = if stochastic { Rounding::Stochastic } else { Rounding::Nearest };
        let step = StepOptions { step, unscale, clip, rounding, seed };
        py.detach(|| {
            let sizes: Vec<usize> = tensors.iter().map(PartTensors::len).collect();
            // SAFETY: `check_disjoint` has succeeded for the tensors of all parts.
            let parts = tensors.iter_mut().map(|tensors| unsafe { tensors.part() }).collect();
            kernel.step(&self.pool, &step, parts)?;
            if let Some(record) = record {
                record.add(first_indices.into_iter().zip(sizes).filter(|(_, len)| *len > 0).map(|(index, _)| index));
            }
            Ok(())
        })
        .map_err(to_exception)?;
        torch::increment_versions(py, &changed)
    }

    /// Run one step for all gradients of a param group, or for those in one ``batch``: its number, and the memory that
    /// has its state.
    ///
    /// Steps are counted in the state. Members whose state is not initialised, or does not fit, are left as they are.
    /// Returns them. ``record`` receives everything else as soon as it is changed and counted. No Python signal is
    /// handled between the two. Members in the record are not changed again.
    #[expect(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "Python hands them over by name")]
    #[pyo3(signature = (
        gradients, group, algorithm, settings, *, unscale, clip, stochastic, seed, record, batch=None
    ))]
    fn update(
        &self,
        py: Python<'_>,
        gradients: &Bound<'_, PyStepGradients>,
        group: usize,
        algorithm: &str,
        settings: &Bound<'_, PyDict>,
        unscale: f32,
        clip: f32,
        stochastic: bool,
        seed: u64,
        record: &Bound<'_, PyStepRecord>,
        batch: Option<(usize, Option<Bound<'_, PyAny>>)>,
    ) -> PyResult<Vec<usize>> {
        let kernel = Kernel::new(settings::algorithm(algorithm, settings)?, self.sqrt_mode).map_err(to_exception)?;
        let record = record.get();
        let batch = batch.as_ref().map(|(batch, memory)| (*batch, memory.as_ref()));
        let parts = gradients.get().parts(py, group, record, batch)?;
        let changed = parts.params(py);
        let Parts { mut tensors, counts, stale, .. } = parts;
        check_disjoint(tensors.iter().flat_map(PartTensors::address_ranges).collect())?;
        let rounding = if stochastic { Rounding::Stochastic } else { Rounding::Nearest };
        let options = |step| StepOptions { step, unscale, clip, rounding, seed };
        py.detach(|| {
            let mut lists: Vec<(StepOptions, Vec<_>)> = Vec::new();
            for (tensors, count) in tensors.iter_mut().zip(&counts) {
                // There are few of them.
                let at = lists.iter().position(|(options, _)| options.step == count.step).unwrap_or_else(|| {
                    // Usually all have the same count.
                    let capacity = if lists.is_empty() { counts.len() } else { 0 };
                    lists.push((options(count.step), Vec::with_capacity(capacity)));
                    lists.len() - 1
                });
                // SAFETY: `check_disjoint` has succeeded for the tensors of all parts.
                lists[at].1.push(unsafe { tensors.part() });
            }
            kernel.step_all(&self.pool, lists)?;
            record.add_counted(counts.iter().map(|count| (count.param_number, count.step)));
            record.add(tensors.iter().map(|part| part.index));
            Ok(())
        })
        .map_err(to_exception)?;
        // First: new objects of Python would start a collection, which would visit all storages.
        drop(tensors);
        if let Some(classes) = torch::plain_classes(py)? {
            counts.iter().for_each(|count| count.write(classes, py));
        }
        torch::increment_versions(py, &changed)?;
        Ok(stale)
    }

    /// Decode a moment into an fp32 tensor. Pass ``squares`` for a second moment, which is unsigned.
    #[staticmethod]
    fn unpack(py: Python<'_>, moment: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>, squares: bool) -> PyResult<()> {
        let (mut moment, mut out) = (Moment::new(moment)?, tensor_memory::slice::<f32>(out, MemoryAccess::Write)?);
        check_disjoint(moment.address_ranges().into_iter().chain([out.address_range()]).collect())?;
        py.detach(|| {
            // SAFETY: `check_disjoint` has succeeded for the moment and `out`.
            let (mut moment, out) = unsafe { (moment.moment(), out.as_mut_slice()) };
            decode_moment(&mut moment, sign(squares), out)
        })
        .map_err(to_exception)
    }

    /// Encode an fp32 tensor as a moment, rounding to nearest. A tensor from ``unpack`` is encoded exactly.
    #[staticmethod]
    fn pack(py: Python<'_>, values: &Bound<'_, PyAny>, moment: &Bound<'_, PyAny>, squares: bool) -> PyResult<()> {
        let (values, mut moment) = (tensor_memory::slice::<f32>(values, MemoryAccess::Read)?, Moment::new(moment)?);
        check_disjoint(moment.address_ranges().into_iter().chain([values.address_range()]).collect())?;
        py.detach(|| {
            // SAFETY: `check_disjoint` has succeeded for the moment and the values.
            let (values, mut moment) = unsafe { (values.as_slice(), moment.moment()) };
            encode_moment(values, sign(squares), &mut moment)
        })
        .map_err(to_exception)
    }

    /// Add ``new`` to ``sum`` in fp32, rounded to the type of ``sum``.
    fn accumulate(&self, py: Python<'_>, sum: &Bound<'_, PyAny>, new: &Bound<'_, PyAny>) -> PyResult<()> {
        let (mut sum, new) = (Floats::new(sum, MemoryAccess::Write)?, Floats::new(new, MemoryAccess::Read)?);
        check_disjoint(vec![sum.address_range(), new.address_range()])?;
        py.detach(|| {
            // SAFETY: `check_disjoint` has succeeded for both tensors.
            let (sum, new) = unsafe { (sum.numbers_mut(), new.numbers()) };
            accumulate(&self.pool, sum, new)
        })
        .map_err(to_exception)
    }

    /// Sum the squares of all elements, each multiplied by ``unscale``. Returns the sum, and whether all are finite.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    #[pyo3(signature = (grads, *, unscale=1.0))]
    fn measure(&self, py: Python<'_>, grads: Vec<Bound<'_, PyAny>>, unscale: f32) -> PyResult<(f64, bool)> {
        let grads = grads.iter().map(|grad| Floats::new(grad, MemoryAccess::Read)).collect::<PyResult<Vec<_>>>()?;
        let measured = py.detach(|| {
            // SAFETY: this work changes no tensor.
            let grads: Vec<_> = grads.iter().map(|grad| unsafe { grad.numbers() }).collect();
            gradient_norm(&self.pool, unscale, &grads)
        });
        Ok((measured.squares, measured.is_finite))
    }

    /// As ``measure``, for all gradients of a step: those that were gathered, and ``others``, which are
    /// ``(group, member, gradient)``.
    #[expect(clippy::needless_pass_by_value, reason = "Python hands it over")]
    fn measure_all(
        &self,
        py: Python<'_>,
        gradients: &Bound<'_, PyStepGradients>,
        others: Vec<PlacedGradient<'_>>,
        unscale: f32,
    ) -> PyResult<(f64, bool)> {
        let mut grads = gradients.get().grads(py)?;
        for (group, member, grad) in &others {
            grads.push(((*group, *member), Floats::new(grad, MemoryAccess::Read)?));
        }
        // The order of additions is that of the parameters.
        grads.sort_by_key(|(place, _)| *place);
        let measured = py.detach(|| {
            // SAFETY: this work changes no tensor.
            let grads: Vec<_> = grads.iter().map(|(_, grad)| unsafe { grad.numbers() }).collect();
            gradient_norm(&self.pool, unscale, &grads)
        });
        Ok((measured.squares, measured.is_finite))
    }
}

/// A gradient with its group and member.
type PlacedGradient<'py> = (usize, usize, Bound<'py, PyAny>);

fn sign(squares: bool) -> Sign {
    if squares { Sign::Unsigned } else { Sign::Signed }
}

fn sqrt_mode_named(name: &str) -> PyResult<SqrtMode> {
    SqrtMode::ALL.into_iter().find(|mode| sqrt_mode_name(*mode) == name).ok_or_else(|| {
        let known = SqrtMode::ALL.map(sqrt_mode_name).join("', '");
        InvalidArgumentError::new_err(format!("sqrt_mode is '{name}'; it must be one of '{known}'"))
    })
}

fn sqrt_mode_name(mode: SqrtMode) -> &'static str {
    match mode {
        SqrtMode::Exact => "exact",
        SqrtMode::TwoStep => "two-step",
        SqrtMode::TwoStepFused => "two-step-fused",
        SqrtMode::OneStep => "one-step",
    }
}

#[expect(clippy::needless_pass_by_value, reason = "so that `map_err` takes it by name")]
fn to_exception(error: Error) -> PyErr {
    match error {
        Error::Threads { .. } => Python::attach(|py| error::plain(py, "Error", error.to_string())),
        _ => InvalidArgumentError::new_err(error.to_string()),
    }
}
