//! What is said of a model in several files.

use serde::Deserialize;

use crate::JSON_ROOM;
use crate::error::{Error, Result};
use crate::json::Object;
use crate::set::is_file_name;

/// The index of a model in several files, as Hugging Face lays it out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Which file each tensor is in, by the tensor's name.
    pub weight_map: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Wire {
    weight_map: Object<String>,
}

impl Index {
    /// Reads `model.safetensors.index.json`.
    ///
    /// # Errors
    /// `Corrupt` for text that is no index, or names files outside its own folder.
    pub fn parse(json: &[u8]) -> Result<Self> {
        Error::unless_there_is_room("the index", json.len(), JSON_ROOM)?;
        let wire: Wire = serde_json::from_slice(json)
            .map_err(|error| Error::corrupt(0, format!("this is no index of safetensors files: {error}")))?;
        for (name, file) in &wire.weight_map.0 {
            if !is_file_name(file) {
                return Err(Error::corrupt(
                    0,
                    format!("{name:?} is said to be in {file:?}, which is no file of this folder"),
                ));
            }
        }
        Ok(Self { weight_map: wire.weight_map.0 })
    }
}
