//! Parses the index of a model in several files.

use serde::Deserialize;

use crate::JSON_MEMORY_FACTOR;
use crate::error::{Error, Result};
use crate::file_list::is_file_name;
use crate::json::Object;

/// The index of a model in several files, in Hugging Face's format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// The file of each tensor, by the tensor's name.
    pub weight_map: Vec<(String, String)>,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with a weight_map")]
struct Wire {
    weight_map: Object<String>,
}

impl Index {
    /// Parses `model.safetensors.index.json`.
    ///
    /// # Errors
    /// `Corrupt` for a text that is not an index, or names files outside its folder; `Memory` if there is too little
    /// for the text.
    pub fn parse(json: &[u8]) -> Result<Self> {
        Error::check_memory("the index", json.len(), JSON_MEMORY_FACTOR)?;
        let wire: Wire = serde_json::from_slice(json)
            .map_err(|error| Error::corrupt(0, format!("this is not an index of safetensors files: {error}")))?;
        for (name, file) in &wire.weight_map.0 {
            if !is_file_name(file) {
                return Err(Error::corrupt(
                    0,
                    format!("the file {file:?} of {name:?} is not a file name in this folder"),
                ));
            }
        }
        Ok(Self { weight_map: wire.weight_map.0 })
    }
}
