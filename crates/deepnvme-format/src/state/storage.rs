//! Storages of an archive, and the persistent ids that name them in a pickle.

use super::paths::NAME_BYTES_MAX;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::pickle::{Graph, NodeId};

/// A storage of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Name of its record below `data/`.
    pub key: String,
    /// Length in bytes, according to the pickle.
    pub bytes: u64,
    /// Element type; `None` for an untyped storage.
    pub dtype: Option<Dtype>,
    /// The device it was saved from.
    pub location: String,
}

/// Parses a persistent id.
///
/// # Errors
/// `Corrupt` for an id that does not describe a storage; `Unsupported` for an unknown storage class, and for a key or
/// device that is too long.
pub fn storage(graph: &Graph, id: NodeId) -> Result<Storage> {
    let invalid_id = || Error::corrupt(0, "the pickle has a persistent id that is not a storage");
    let Some(&[kind, class, key, location, elements]) = graph.tuple(id) else { return Err(invalid_id()) };
    let kind = graph.text(kind);
    let (Some("storage"), Some((module, class))) = (kind, graph.global(class)) else { return Err(invalid_id()) };
    let (Some(key), Some(location), Some(elements)) = (graph.text(key), graph.text(location), graph.unsigned(elements))
    else {
        return Err(invalid_id());
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
    let bytes = elements.checked_mul(dtype.map_or(1, Dtype::bytes)).ok_or_else(invalid_id)?;
    // One text may be shared by any number of storages, which copy it.
    if key.len() > NAME_BYTES_MAX || location.len() > NAME_BYTES_MAX {
        let text = format!("the key or the device of a storage has more than {NAME_BYTES_MAX} bytes");
        return Err(Error::unsupported(text));
    }
    Ok(Storage { key: key.to_owned(), bytes, dtype, location: location.to_owned() })
}
