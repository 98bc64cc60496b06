//! The tensors of an archive, by name.
//!
//! A tensor's name is its path from the root: keys of dicts, indices of lists and attributes of objects, joined by
//! dots. In a flat state dict these are PyTorch's usual names.
//!
//! `walk` follows all references from the root, within limits far beyond any model; `paths` stores paths and spells out
//! names; `reach` finds the containers that have tensors; `storage` parses persistent ids; `tensor` checks a tensor
//! against its storage; `non_tensors` lists everything else.

mod non_tensors;
mod paths;
mod reach;
mod storage;
mod tensor;
mod walk;

pub use non_tensors::{NESTED_TENSOR, NON_TENSORS_MAX, OBJECT, SPARSE_TENSOR, non_tensors, tensor_of_tensors};
pub use paths::{DEPTH_MAX, NAME_BYTES_MAX};
pub use storage::{Storage, storage};
pub use tensor::{Tensor, View, contiguous_strides};
pub use walk::{PickledState, REVISITS_MAX, STATE_BYTES_MAX, STEPS_MAX};

#[cfg(test)]
mod tests;
