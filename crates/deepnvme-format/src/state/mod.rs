//! The tensors of an archive, by name.
//!
//! A tensor's name is the way to it from the root: the keys of dicts, the indices of lists, the attributes of objects,
//! joined by dots. A flat state dict therefore gives the names that PyTorch users know.
//!
//! `walk` goes all ways from the root, each within limits that no model comes near; `names` keeps them, and spells them
//! out for tensors; `tensor` compares what a tensor says with what its storage has.

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pickle::{Graph, Node, NodeId};

mod names;
mod others;
mod tensor;
mod walk;

pub use names::{DEPTH_MAX, NAME_BYTES_MAX};
pub use others::{OTHERS_MAX, others};
pub use walk::{STATE_BYTES_MAX, STEPS_MAX};

/// A storage that an archive holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The name of its record below `data/`.
    pub key: String,
    /// How many bytes the pickle says that it has.
    pub bytes: u64,
    /// The type of its elements; `None` for an untyped storage.
    pub dtype: Option<Dtype>,
    /// The device that it was on.
    pub location: String,
}

/// A tensor: a view of a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The way to it.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Its strides, in elements.
    pub strides: Vec<u64>,
    /// Where it begins in its storage, in elements.
    pub offset: u64,
    /// Which of the storages it views.
    pub storage: usize,
    /// Which of its signs are the opposite of those in the storage.
    pub signs: Signs,
}

/// What torch does lazily to the elements of a tensor: they are what the storage has with other signs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Signs {
    /// Whether the tensor is the complex conjugate.
    pub is_conj: bool,
    /// Whether the tensor is the negative.
    pub is_neg: bool,
}

impl Signs {
    /// Whether the elements are what the storage has.
    #[must_use]
    pub fn are_plain(self) -> bool {
        !(self.is_conj || self.is_neg)
    }

    /// Reads what torch notes of a tensor.
    fn of(graph: &Graph, metadata: NodeId) -> Self {
        let Node::Dict(items) = graph.node(metadata) else { return Self::default() };
        let has = |name: &str| {
            let found = items.iter().rev().find(|(key, _)| graph.text(*key) == Some(name));
            found.is_some_and(|(_, value)| *graph.node(*value) == Node::Bool(true))
        };
        Self { is_conj: has("conj"), is_neg: has("neg") }
    }
}

impl Tensor {
    /// Bytes of its elements.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }
}

/// What an archive holds.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The storages, in the order in which the pickle names them.
    pub storages: Vec<Storage>,
    /// The tensors, in the order of the containers that they are in. One that is in several places is there several times.
    pub tensors: Vec<Tensor>,
}

impl State {
    /// Walks a graph.
    ///
    /// # Errors
    /// `Corrupt` for tensors that reach beyond their storage; `Unsupported` for element types that are not known, and for
    /// graphs beyond [`DEPTH_MAX`], [`NAME_BYTES_MAX`], [`STEPS_MAX`] or [`STATE_BYTES_MAX`].
    pub fn of(graph: &Graph) -> Result<Self> {
        walk::Walk::new(graph, walk::Limits::default()).run()
    }
}

/// What a persistent id says of a storage.
///
/// # Errors
/// `Corrupt` for an id that is none of a storage.
pub fn storage(graph: &Graph, id: NodeId) -> Result<Storage> {
    let wrong = || Error::corrupt(0, "the pickle refers to something outside that is no storage");
    let Some(&[kind, class, key, location, elements]) = graph.tuple(id) else { return Err(wrong()) };
    let kind = graph.text(kind);
    let (Some("storage"), Some((module, class))) = (kind, graph.global(class)) else { return Err(wrong()) };
    let (Some(key), Some(location), Some(elements)) = (graph.text(key), graph.text(location), graph.unsigned(elements))
    else {
        return Err(wrong());
    };
    let dtype = match (module, class) {
        ("torch.storage" | "torch", "UntypedStorage") => None,
        (_, class) => match Dtype::from_storage_class(class) {
            Some(dtype) => Some(dtype),
            None => {
                let text = format!("the storage class {module}.{class} is not known; read the file with torch.load");
                return Err(Error::unsupported(text));
            }
        },
    };
    let bytes = elements.checked_mul(dtype.map_or(1, Dtype::bytes)).ok_or_else(wrong)?;
    // One text may serve any number of storages, which have a copy each.
    if key.len() > NAME_BYTES_MAX || location.len() > NAME_BYTES_MAX {
        let text = format!("the key or the device of a storage has more than {NAME_BYTES_MAX} bytes");
        return Err(Error::unsupported(text));
    }
    Ok(Storage { key: key.to_owned(), bytes, dtype, location: location.to_owned() })
}

#[cfg(test)]
mod tests;
