//! Parses and validates the header of a file.

use serde_json::value::RawValue;

use super::{Entry, HEADER_BYTES_MAX, LENGTH_BYTES, METADATA, Tensor, byte_count};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::json::Object;
use crate::{DIMS_MAX, JSON_MEMORY_FACTOR};

/// The key of the metadata of packed tensors.
pub const PACKED_KEY: &str = "deepnvme.packed";

/// The header of a file.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// Metadata of the writer, including deepnvme's checksums.
    pub metadata: Vec<(String, String)>,
    /// The tensors in the order of their offsets.
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// Returns whether some tensors are packed: encoded bytes instead of elements.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        self.metadata.iter().any(|(key, _)| key == PACKED_KEY)
    }

    /// Returns the length of the header that the first eight bytes state.
    ///
    /// # Errors
    /// `Corrupt` if it exceeds the file or the format's limit.
    pub fn json_bytes(length: [u8; LENGTH_BYTES as usize], file_bytes: u64) -> Result<u64> {
        let bytes = u64::from_le_bytes(length);
        if bytes > HEADER_BYTES_MAX || bytes > file_bytes.saturating_sub(LENGTH_BYTES) {
            let what = format!(
                "the file has {file_bytes} bytes and states a header of {bytes}; it is not a safetensors file, or it was \
                 truncated"
            );
            return Err(Error::corrupt(0, what));
        }
        Ok(bytes)
    }

    /// Parses the JSON of a header, for a file of `file_bytes`.
    ///
    /// # Errors
    /// `Corrupt` for invalid JSON, and for tensors that overlap, leave gaps or do not end with the file; `Unsupported`
    /// for unknown element types and more than [`DIMS_MAX`] dimensions; `Memory` if there is too little for the header.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<Self> {
        let no_header =
            |error: serde_json::Error| Error::corrupt(LENGTH_BYTES, format!("the header is damaged: {error}"));
        Error::check_memory("the header", json.len(), JSON_MEMORY_FACTOR)?;
        let entries: Object<Box<RawValue>> = serde_json::from_slice(json).map_err(no_header)?;
        let data_offset = LENGTH_BYTES + json.len() as u64;
        let mut header = Self::default();
        for (name, value) in entries.0 {
            if name == METADATA {
                let metadata: Object<String> = serde_json::from_str(value.get()).map_err(no_header)?;
                header.metadata = metadata.0;
                continue;
            }
            let entry: Entry<String> = serde_json::from_str(value.get()).map_err(no_header)?;
            header.tensors.push(tensor(name, entry, data_offset)?);
        }
        header.tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
        let mut at = data_offset;
        for tensor in &header.tensors {
            if tensor.offset != at {
                let what = format!("the tensor {:?} begins there, but the one before it ends at {at}", tensor.name);
                return Err(Error::corrupt(tensor.offset, what));
            }
            at += tensor.bytes;
        }
        if at != file_bytes {
            let what = format!("the tensors end at byte {at} of a file of {file_bytes}; it was truncated or extended");
            return Err(Error::corrupt(at.min(file_bytes), what));
        }
        Ok(header)
    }
}

fn tensor(name: String, entry: Entry<String>, data_offset: u64) -> Result<Tensor> {
    let Some(dtype) = Dtype::from_safetensors(&entry.dtype) else {
        let text = format!(
            "the tensor {name:?} is of type {:?}, which this version of deepnvme does not support",
            entry.dtype
        );
        return Err(Error::unsupported(text));
    };
    let (begin, end) = entry.data_offsets;
    let expected = byte_count(&entry.shape, dtype);
    let bytes = end.checked_sub(begin).filter(|bytes| expected == Some(*bytes));
    let offset = data_offset.checked_add(begin).filter(|offset| offset.checked_add(end - begin.min(end)).is_some());
    let (Some(bytes), Some(offset)) = (bytes, offset) else {
        // A shape may be as long as the header: show a part.
        let shape = &entry.shape[..entry.shape.len().min(DIMS_MAX)];
        let what = format!("the tensor {name:?} of shape {shape:?} does not fit its range from {begin} to {end}");
        return Err(Error::corrupt(LENGTH_BYTES, what));
    };
    let dims = entry.shape.len();
    if dims > DIMS_MAX {
        let text = format!("the tensor {name:?} has {dims} dimensions, which are more than {DIMS_MAX}; reshape it");
        return Err(Error::unsupported(text));
    }
    Ok(Tensor { name, dtype, shape: entry.shape, offset, bytes })
}
