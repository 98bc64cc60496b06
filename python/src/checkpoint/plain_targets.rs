//! Targets of a load that a read can fill as they are, found with one C call a tensor. For ten thousand tensors, asking
//! Python about each of their properties takes longer than reading their bytes.

use std::collections::{HashMap, HashSet};

use deepnvme_checkpoint::read::LoadBuffer;
use deepnvme_mem::{Strided, TensorPlace, first_shared};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use super::dlpack_types;
use super::file_tensor::FileTensor;
use crate::memory::PlainTensor;
use crate::torch;

/// A tensor: its name, the address of its first element, shape, strides in bytes, and the bytes of an element.
type View = (String, usize, Vec<usize>, Vec<isize>, usize);

/// Contiguous tensors in host memory or on GPUs, by name. None shares memory with another.
#[pyclass(frozen, name = "_PlainTargets", module = "deepnvme._deepnvme")]
pub(crate) struct PlainTargets {
    by_name: HashMap<String, (Py<PyAny>, PlainTensor)>,
    /// Start, end and name, in the order of the addresses.
    ranges: Vec<(usize, usize, String)>,
}

#[pymethods]
impl PlainTargets {
    /// Take those of ``targets`` that are plain, and share memory with no other plain one.
    #[new]
    fn new(targets: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut found = Vec::with_capacity(targets.len());
        for (name, target) in targets {
            let Ok(name) = name.cast_into::<PyString>() else { continue };
            if let Some(plain) = torch::plain(&target)?.filter(|plain| !plain.addresses.is_empty()) {
                found.push((name.to_str()?.to_owned(), target.unbind(), plain));
            }
        }
        found.sort_by_key(|(_, _, plain)| plain.addresses.start);
        let (mut by_name, mut ranges) = (HashMap::with_capacity(found.len()), Vec::with_capacity(found.len()));
        for (name, target, plain) in alone(found, |(_, _, plain)| (plain.addresses.start, plain.addresses.end)) {
            ranges.push((plain.addresses.start, plain.addresses.end, name.clone()));
            by_name.insert(name, (target, plain));
        }
        Ok(Self { by_name, ranges })
    }

    /// Return the names of two tensors that share memory, among these targets and ``views``. A view is a name, the
    /// address of its first element, its shape, its strides in bytes and the bytes of an element. It replaces the
    /// target of its name. A tensor that shares memory with itself is named twice.
    fn first_shared(&self, py: Python<'_>, views: Vec<View>) -> PyResult<Option<(String, String)>> {
        let (mut names, mut places) = (Vec::with_capacity(views.len()), Vec::with_capacity(views.len()));
        for (name, address, shape, stride_bytes, item_bytes) in views {
            names.push(name);
            places.push(TensorPlace { address, layout: Strided::new(shape, stride_bytes, item_bytes)? });
        }
        let viewed: HashSet<String> = names.iter().cloned().collect();
        for (start, end, name) in self.ranges.iter().filter(|(_, _, name)| !viewed.contains(name)) {
            names.push(name.clone());
            places.push(TensorPlace { address: *start, layout: Strided::contiguous(vec![end - start], 1)? });
        }
        let shared = py.detach(|| first_shared(&places));
        Ok(shared.map(|(one, other)| (names[one].clone(), names[other].clone())))
    }
}

impl PlainTargets {
    /// Return the target that the bytes of a storage fill exactly, in their order.
    pub(super) fn find(&self, py: Python<'_>, tensor: &FileTensor<'_>, storage_bytes: u64) -> Option<Py<PyAny>> {
        let (target, plain) = self.by_name.get(tensor.name)?;
        let is_whole =
            tensor.storage_offset == 0 && tensor.has_plain_signs && plain.addresses.len() as u64 == storage_bytes;
        let is_same = plain.shape == tensor.shape && Some(plain.dtype) == dlpack_types::of_torch(tensor.dtype);
        (is_whole && is_same && is_row_major(tensor)).then(|| target.clone_ref(py))
    }
}

/// Reads into targets as they are.
#[pyclass(frozen, name = "_DirectReads", module = "deepnvme._deepnvme")]
pub(crate) struct DirectReads {
    pub(super) reads: Vec<(LoadBuffer, Py<PyAny>)>,
}

#[pymethods]
impl DirectReads {
    fn __len__(&self) -> usize {
        self.reads.len()
    }
}

fn is_row_major(tensor: &FileTensor<'_>) -> bool {
    let mut expected = 1;
    tensor.shape.iter().zip(tensor.strides.iter()).rev().all(|(extent, stride)| {
        let fits = *extent == 1 || *stride == expected;
        expected *= extent;
        fits
    })
}

/// Return those of sorted ranges that no other one overlaps.
fn alone<T>(sorted: Vec<T>, range: impl Fn(&T) -> (usize, usize)) -> Vec<T> {
    let mut alone: Vec<T> = Vec::with_capacity(sorted.len());
    // The end of all ranges so far, and whether the last one of `alone` ends there.
    let (mut end, mut is_last_alone) = (0, false);
    for item in sorted {
        let (start, its_end) = range(&item);
        let is_free = start >= end;
        if is_free {
            alone.push(item);
        } else if is_last_alone {
            alone.pop();
        }
        is_last_alone = is_free;
        end = end.max(its_end);
    }
    alone
}
