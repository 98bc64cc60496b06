//! What there is to convert: the tensors of all files of the source.

use std::sync::Arc;

use deepnvme_format::Dtype;

use crate::error::Result;
use crate::read::{Contents, Reader};

/// A tensor of the source: a view of one of its extents.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// In elements.
    pub(super) strides: Vec<u64>,
    /// In elements.
    pub(super) offset: u64,
    pub(super) reader: usize,
    pub(super) extent: usize,
}

impl Entry {
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    /// Whether its elements lie side by side, in order.
    pub(super) fn is_contiguous(&self) -> bool {
        let expected = contiguous(&self.shape);
        let mut dims = self.shape.iter().zip(&self.strides).zip(&expected);
        self.bytes() == 0 || dims.all(|((size, stride), expected)| *size == 1 || stride == expected)
    }
}

/// The strides of elements that lie side by side.
pub(super) fn contiguous(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        // Of an empty tensor they are what torch has: those of one that has an element.
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// The tensors, in the order of the files and what is in them. One that is in several places of an archive is there under
/// each name.
pub(super) fn of(readers: &[Arc<Reader>]) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for (index, reader) in readers.iter().enumerate() {
        match reader.contents() {
            Contents::Archive { state, .. } => entries.extend(state.tensors.iter().map(|tensor| Entry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                strides: tensor.strides.clone(),
                offset: tensor.offset,
                reader: index,
                extent: tensor.storage,
            })),
            Contents::Safetensors { header } => {
                entries.extend(header.tensors.iter().enumerate().map(|(extent, tensor)| Entry {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    strides: contiguous(&tensor.shape),
                    offset: 0,
                    reader: index,
                    extent,
                }));
            }
        }
    }
    Ok(entries)
}

/// What is no tensor, by its name.
pub(super) fn others(readers: &[Arc<Reader>]) -> Vec<(String, &'static str)> {
    let others = readers.iter().filter_map(|reader| match reader.contents() {
        Contents::Archive { graph, .. } => Some(deepnvme_format::state::others(graph)),
        Contents::Safetensors { .. } => None,
    });
    others.flatten().collect()
}
