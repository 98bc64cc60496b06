//! A tensor, checked against its storage.

use super::storage::Storage;
use crate::DIMS_MAX;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId, Object};
use crate::signs::Signs;

/// The number of arguments that all of torch's rebuild functions share: storage, offset, shape, strides.
pub(super) const FIXED_ARGUMENTS: usize = 4;
const DTYPE_ARGUMENT: usize = 6;

/// The number of arguments of a typed tensor: one that has attributes or a class of its own.
const TYPED_ARGUMENTS: usize = 4;

/// A tensor: a view of a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Path from the root.
    pub name: String,
    /// Whether the name leads to it. A key that is, for example, a float or a tuple has no name of its own.
    pub is_named: bool,
    /// Element type.
    pub dtype: Dtype,
    /// Its elements in the storage.
    pub view: View,
    /// Index of its storage.
    pub storage: usize,
    /// Signs that are flipped relative to the storage.
    pub signs: Signs,
}

impl Tensor {
    /// Returns the bytes of its elements.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.view.elements() * self.dtype.bytes()
    }
}

/// Elements of a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Shape.
    pub shape: Vec<u64>,
    /// Strides, in elements.
    pub strides: Vec<u64>,
    /// Offset in the storage, in elements.
    pub offset: u64,
}

impl View {
    /// Returns the view of all elements of a storage in order, with this shape.
    #[must_use]
    pub fn contiguous(shape: Vec<u64>) -> Self {
        Self { strides: contiguous_strides(&shape), shape, offset: 0 }
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether every element lies in a storage of `elements`, and the bytes of the elements and of the offset stay
    /// within torch's range. An element has `width` bytes. A stride counts only if an element is reached by it.
    fn fits(&self, elements: u64, width: u64) -> bool {
        let most = i64::MAX.unsigned_abs() / width;
        // An empty tensor has sizes as well.
        let count = self.shape.iter().try_fold(1u64, |product, size| product.checked_mul((*size).max(1)));
        if count.is_none_or(|count| count > most) || self.offset > most {
            return false;
        }
        if self.shape.contains(&0) {
            return true;
        }
        let last = self.shape.iter().zip(&self.strides).try_fold(self.offset, |last, (size, stride)| {
            (size - 1).checked_mul(*stride).and_then(|step| last.checked_add(step))
        });
        last.is_some_and(|last| last < elements)
    }
}

/// Returns the strides of a contiguous tensor. As in torch, an empty dimension counts as one element.
#[must_use]
pub fn contiguous_strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// Returns the signs that torch's metadata of a tensor states.
fn signs_of(graph: &Graph, metadata: NodeId) -> Signs {
    let Node::Dict(items) = graph.node(metadata) else { return Signs::default() };
    let has = |name: &str| {
        let found = items.iter().rev().find(|(key, _)| graph.text(*key) == Some(name));
        found.is_some_and(|(_, value)| *graph.node(*value) == Node::Bool(true))
    };
    Signs { is_conj: has("conj"), is_neg: has("neg") }
}

/// A call of one of torch's rebuild functions.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    function: &'a str,
    /// The tuple of arguments.
    tuple: NodeId,
    pub(super) arguments: &'a [NodeId],
}

/// Returns the rebuild call of an object if it is a tensor with a storage, including tensors with attributes or a
/// class of their own.
pub(super) fn call<'a>(graph: &'a Graph, object: &Object) -> Option<Call<'a>> {
    let of = |callable, tuple| {
        let with_storage = ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"];
        let (module, function) = graph.global(callable)?;
        let is_known = module == "torch._utils" && with_storage.contains(&function);
        is_known.then(|| Call { function, tuple, arguments: graph.tuple(tuple).unwrap_or_default() })
    };
    if graph.global(object.callable) == Some(("torch._tensor", "_rebuild_from_type_v2"))
        && let Some(&[function, _, arguments, _]) = graph.tuple(object.arguments)
    {
        return of(function, arguments).filter(|call| call.arguments.len() >= FIXED_ARGUMENTS);
    }
    of(object.callable, object.arguments)
}

/// Returns the attributes of a tensor, if it has any.
pub(super) fn attributes(graph: &Graph, object: &Object, call: &Call<'_>) -> Option<NodeId> {
    let typed = graph.tuple(object.arguments).filter(|_| object.arguments != call.tuple)?;
    typed.get(TYPED_ARGUMENTS - 1).copied()
}

/// A tensor's arguments, not yet compared with its storage.
pub(super) struct Parts {
    /// Persistent id of its storage.
    pub(super) storage: NodeId,
    view: View,
    /// Element type that overrides the storage's.
    dtype: OwnDtype,
    /// Name of that type in the file, for messages.
    type_name: String,
    signs: Signs,
}

enum OwnDtype {
    OfStorage,
    Named(Option<Dtype>),
}

pub(super) fn parts(graph: &Graph, call: &Call<'_>, name: &str) -> Result<Parts> {
    let wrong = |what: &str| Error::corrupt(0, format!("the tensor {name:?} {what}"));
    let arguments = call.arguments;
    let &[storage, offset, shape, strides, ..] = arguments else { return Err(wrong("has too few arguments")) };
    let Node::Persistent(storage) = graph.node(storage) else { return Err(wrong("has no storage")) };
    let (Some(offset), Some(shape), Some(strides)) =
        (graph.unsigned(offset), graph.dimensions(shape), graph.dimensions(strides))
    else {
        let is_long = |id| graph.tuple(id).is_some_and(|numbers| numbers.len() > DIMS_MAX);
        if is_long(shape) || is_long(strides) {
            let text = format!("the tensor {name:?} has more than {DIMS_MAX} dimensions; reshape it");
            return Err(Error::unsupported(text));
        }
        return Err(wrong("has a shape that is not a tuple of numbers"));
    };
    if shape.len() != strides.len() {
        return Err(wrong("has another number of strides than dimensions"));
    }
    let signs = match call.function {
        "_rebuild_tensor_v2" => arguments.get(DTYPE_ARGUMENT),
        "_rebuild_tensor_v3" => arguments.get(DTYPE_ARGUMENT + 1),
        _ => None,
    };
    let signs = signs.map_or_else(Signs::default, |metadata| signs_of(graph, *metadata));
    let mut type_name = String::new();
    let dtype = match call.function {
        "_rebuild_tensor_v3" => {
            let global = arguments.get(DTYPE_ARGUMENT).and_then(|dtype| graph.global(*dtype));
            let name = global.filter(|(module, _)| *module == "torch").map(|(_, name)| name);
            type_name = name.map_or_else(String::new, |name| format!(": torch.{name}"));
            OwnDtype::Named(name.and_then(Dtype::from_torch))
        }
        _ => OwnDtype::OfStorage,
    };
    Ok(Parts { storage: *storage, view: View { shape, strides, offset }, dtype, type_name, signs })
}

impl Parts {
    /// Returns the tensor if it lies inside its storage.
    pub(super) fn of(self, name: String, storage: &Storage, index: usize) -> Result<Tensor> {
        let dtype = match self.dtype {
            OwnDtype::OfStorage => storage.dtype,
            OwnDtype::Named(dtype) => dtype,
        };
        let Some(dtype) = dtype else {
            let text =
                format!("the tensor {name:?} has an element type that this version of deepnvme does not support");
            return Err(Error::unsupported(format!("{text}{}", self.type_name)));
        };
        if dtype.elements_share_bytes() {
            let text = format!("the tensor {name:?} is of type {}, whose elements share bytes", dtype.torch_name());
            return Err(Error::unsupported(format!("{text}; convert it first: tensor.dequantize()")));
        }
        let Self { view, signs, .. } = self;
        if !view.fits(storage.bytes / dtype.bytes(), dtype.bytes()) {
            return Err(Error::corrupt(0, format!("the tensor {name:?} exceeds its storage")));
        }
        Ok(Tensor { name, is_named: true, dtype, view, storage: index, signs })
    }
}

#[cfg(test)]
mod tests {
    use super::View;

    #[test]
    fn views_stay_within_their_storage() {
        for (shape, strides, offset, elements, is_within) in [
            (&[2, 3][..], &[3, 1][..], 0, 6, true),
            (&[2, 3], &[3, 1], 1, 6, false),
            (&[], &[], 5, 6, true),
            (&[], &[], 6, 6, false),
            (&[0, 7], &[7, 1], 100, 0, true),
            (&[4], &[0], 5, 6, true),
            (&[u64::MAX], &[u64::MAX], 0, 6, false),
            (&[u64::MAX, 0, 3], &[1, 1, 1], 0, 6, false),
            (&[2], &[u64::MAX], 1, 6, false),
            // As many elements as torch can count, and more bytes than that.
            (&[1 << 62], &[0], 0, 6, false),
            (&[1 << 59], &[0], 0, 6, true),
            (&[0], &[1], 1 << 61, 6, false),
        ] {
            let view = View { shape: shape.to_vec(), strides: strides.to_vec(), offset };
            assert_eq!(view.fits(elements, 8), is_within, "{view:?}");
        }
    }
}
