//! What a tensor says of itself, compared with what its storage has.

use super::{Storage, Tensor};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId, Object};

/// The arguments that all of torch's functions begin with: storage, offset, sizes, strides.
pub(super) const FIXED_ARGUMENTS: usize = 4;
const DTYPE_ARGUMENT: usize = 6;

/// Whether an object is a tensor with a storage, by torch's own functions.
pub(super) fn is_tensor(graph: &Graph, object: &Object) -> bool {
    let with_storage = ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"];
    let global = graph.global(object.callable);
    global.is_some_and(|(module, function)| module == "torch._utils" && with_storage.contains(&function))
}

/// A tensor's arguments, read but not yet believed.
pub(super) struct Parts {
    /// The persistent id of its storage.
    pub(super) storage: NodeId,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
    /// The type that it has in spite of its storage's.
    dtype: OwnDtype,
}

enum OwnDtype {
    OfStorage,
    Named(Option<Dtype>),
}

pub(super) fn parts(graph: &Graph, object: &Object, name: &str) -> Result<Parts> {
    let wrong = |what: &str| Error::corrupt(0, format!("the tensor {name:?} {what}"));
    let arguments = graph.tuple(object.arguments).unwrap_or_default();
    let &[storage, offset, shape, strides, ..] = arguments else { return Err(wrong("has too few arguments")) };
    let Node::Persistent(storage) = graph.node(storage) else { return Err(wrong("has no storage")) };
    let (Some(offset), Some(shape), Some(strides)) =
        (graph.unsigned(offset), graph.dimensions(shape), graph.dimensions(strides))
    else {
        return Err(wrong("has a shape that is no row of numbers"));
    };
    if shape.len() != strides.len() {
        return Err(wrong("has as many strides as it has not sizes"));
    }
    let dtype = match graph.global(object.callable) {
        Some((_, "_rebuild_tensor_v3")) => {
            let global = arguments.get(DTYPE_ARGUMENT).and_then(|dtype| graph.global(*dtype));
            let name = global.filter(|(module, _)| *module == "torch").map(|(_, name)| name);
            OwnDtype::Named(name.and_then(Dtype::from_torch))
        }
        _ => OwnDtype::OfStorage,
    };
    Ok(Parts { storage: *storage, offset, shape, strides, dtype })
}

impl Parts {
    /// The tensor, if all of it lies in its storage.
    pub(super) fn of(self, name: String, storage: &Storage, index: usize) -> Result<Tensor> {
        let dtype = match self.dtype {
            OwnDtype::OfStorage => storage.dtype,
            OwnDtype::Named(dtype) => dtype,
        };
        let Some(dtype) = dtype else {
            let text = format!("the tensor {name:?} has an element type that this version of deepnvme does not know");
            return Err(Error::unsupported(format!("{text}; read the file with torch.load")));
        };
        let Self { offset, shape, strides, .. } = self;
        if !fits(&shape, &strides, offset, storage.bytes / dtype.bytes(), dtype.bytes()) {
            return Err(Error::corrupt(0, format!("the tensor {name:?} reaches beyond its storage")));
        }
        Ok(Tensor { name, dtype, shape, strides, offset, storage: index })
    }
}

/// Whether every element of a view lies in a storage of that many, and whether those who multiply sizes, strides or the
/// offset with `width`, the bytes of an element, stay within what torch can count.
fn fits(shape: &[u64], strides: &[u64], offset: u64, elements: u64, width: u64) -> bool {
    let most = i64::MAX.unsigned_abs() / width;
    // What has no elements has sizes all the same.
    let count = shape.iter().try_fold(1u64, |product, size| product.checked_mul((*size).max(1)));
    if count.is_none_or(|count| count > most) || offset > most {
        return false;
    }
    if shape.contains(&0) {
        return true;
    }
    let last = shape.iter().zip(strides).try_fold(offset, |last, (size, stride)| {
        (size - 1).checked_mul(*stride).and_then(|step| last.checked_add(step))
    });
    last.is_some_and(|last| last < elements)
}

#[cfg(test)]
mod tests {
    use super::fits;

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
            assert_eq!(fits(shape, strides, offset, elements, 8), is_within, "{shape:?} {strides:?} {offset}");
        }
    }
}
