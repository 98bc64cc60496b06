//! The storages of an archive, and the persistent ids by which a pickle names them.

use super::names::NAME_BYTES_MAX;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pickle::{Graph, NodeId};

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
