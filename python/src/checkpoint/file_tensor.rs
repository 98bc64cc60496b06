//! A tensor of a checkpoint file, in either format.

use std::borrow::Cow;

use deepnvme_checkpoint::read::FileMetadata;
use deepnvme_format::Dtype;
use deepnvme_format::state::contiguous_strides;

/// A tensor as its file describes it.
pub(super) struct FileTensor<'a> {
    pub(super) name: &'a str,
    /// Whether the name is a path to it in the state. False below a key that has no name, such as a float.
    pub(super) is_named: bool,
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [u64],
    /// In elements.
    pub(super) strides: Cow<'a, [u64]>,
    /// Offset of its first element in the storage, in elements.
    pub(super) storage_offset: u64,
    pub(super) storage: usize,
    /// Whether its values are those of its storage, neither conjugate nor negative.
    pub(super) has_plain_signs: bool,
}

impl<'a> FileTensor<'a> {
    /// Returns the number of tensors.
    pub(super) fn count(contents: &FileMetadata) -> usize {
        match contents {
            FileMetadata::Archive { state, .. } => state.tensors.len(),
            FileMetadata::Safetensors { header } => header.tensors.len(),
        }
    }

    /// Returns the tensor of a number below [`count`](Self::count).
    pub(super) fn new(contents: &'a FileMetadata, number: usize) -> Self {
        match contents {
            FileMetadata::Archive { state, .. } => {
                let tensor = &state.tensors[number];
                Self {
                    name: &tensor.name,
                    is_named: tensor.is_named,
                    dtype: tensor.dtype,
                    shape: &tensor.view.shape,
                    strides: Cow::Borrowed(&tensor.view.strides),
                    storage_offset: tensor.view.offset,
                    storage: tensor.storage,
                    has_plain_signs: tensor.signs.are_plain(),
                }
            }
            FileMetadata::Safetensors { header } => {
                let tensor = &header.tensors[number];
                Self {
                    name: &tensor.name,
                    is_named: true,
                    dtype: tensor.dtype,
                    shape: &tensor.shape,
                    strides: Cow::Owned(contiguous_strides(&tensor.shape)),
                    storage_offset: 0,
                    storage: number,
                    has_plain_signs: true,
                }
            }
        }
    }
}
