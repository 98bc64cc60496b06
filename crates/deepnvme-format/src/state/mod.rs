//! The tensors of an archive, by name.
//!
//! A tensor's name is the way to it from the root: the keys of dicts, the indices of lists, the attributes of objects,
//! joined by dots. A flat state dict therefore gives the names that PyTorch users know.
//!
//! `walk` goes all ways from the root, each within limits that no model comes near; `names` keeps them, and spells them
//! out for tensors; `storage` reads what an id outside the pickle says, `tensor` compares what a tensor says with what its
//! storage has.

mod names;
mod others;
mod storage;
mod tensor;
mod walk;

pub use names::{DEPTH_MAX, NAME_BYTES_MAX};
pub use others::{OTHERS_MAX, others};
pub use storage::{Storage, storage};
pub use tensor::{Signs, Tensor};
pub use walk::{STATE_BYTES_MAX, STEPS_MAX, State};

#[cfg(test)]
mod tests;
