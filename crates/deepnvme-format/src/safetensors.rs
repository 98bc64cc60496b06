//! safetensors: eight bytes of length, a JSON header, the bytes of all tensors without a gap.
//!
//! Format: <https://github.com/huggingface/safetensors>, "Format". The header is padded with spaces, so that the first
//! tensor begins where direct I/O wants it; readers accept that.

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::ALIGNMENT_LARGE;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::json::Object;
use crate::sums::{METADATA_KEY, SideCarRecord, cell_count, encode};

/// The longest header that the format allows.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the header's length.
pub const LENGTH_BYTES: u64 = 8;
const METADATA: &str = "__metadata__";

/// A tensor to be laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<u64>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Where in the file its bytes begin.
    pub offset: u64,
    /// How many those are.
    pub bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A file laid out before its first byte is written.
#[derive(Clone, Debug)]
pub struct Plan {
    metadata: Vec<(String, String)>,
    tensors: Vec<Tensor>,
    data_offset: u64,
    has_sums: bool,
}

impl Plan {
    /// Lays tensors out: those of wide elements first, so that all are aligned to their own width, else in the order given.
    /// With `has_sums` the metadata will hold checksums.
    ///
    /// # Errors
    /// `Invalid` for names that occur twice or mean something else, types that the format does not have, and headers that
    /// are longer than it allows.
    pub fn new(specs: &[TensorSpec], metadata: Vec<(String, String)>, has_sums: bool) -> Result<Self> {
        let mut seen = std::collections::HashSet::with_capacity(specs.len());
        for spec in specs {
            if spec.name == METADATA || !seen.insert(&spec.name) {
                return Err(Error::invalid(format!("the tensor name {:?} is taken", spec.name)));
            }
            if spec.dtype.safetensors_name().is_none() {
                let text =
                    format!("{:?} is of torch.{}, which safetensors does not have", spec.name, spec.dtype.torch_name());
                return Err(Error::invalid(format!("{text}; save it as a .pt file")));
            }
        }
        let mut order: Vec<&TensorSpec> = specs.iter().collect();
        order.sort_by_key(|spec| std::cmp::Reverse(spec.dtype.bytes()));
        let mut at = 0;
        let mut tensors = Vec::with_capacity(specs.len());
        for spec in order {
            let bytes = byte_count(&spec.shape, spec.dtype)
                .ok_or_else(|| Error::invalid(format!("the tensor {:?} is larger than any file", spec.name)))?;
            let TensorSpec { name, dtype, shape } = spec.clone();
            tensors.push(Tensor { name, dtype, shape, offset: at, bytes });
            at += bytes;
        }
        let mut plan = Self { metadata, tensors, data_offset: 0, has_sums };
        let blank: Vec<Vec<u64>> = plan.tensors.iter().map(|tensor| vec![0; cell_count(tensor.bytes)]).collect();
        let header_bytes = LENGTH_BYTES + plan.json(&blank).len() as u64;
        plan.data_offset = header_bytes.next_multiple_of(ALIGNMENT_LARGE);
        if plan.data_offset - LENGTH_BYTES > HEADER_BYTES_MAX {
            return Err(Error::invalid(format!(
                "the header has {header_bytes} bytes; write several files (max_shard_bytes)"
            )));
        }
        for tensor in &mut plan.tensors {
            tensor.offset += plan.data_offset;
        }
        Ok(plan)
    }

    /// The tensors in the order of their offsets.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Where the first tensor begins: all before it is the [`header`](Self::header).
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Bytes of the whole file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.tensors.last().map_or(self.data_offset, |last| last.offset + last.bytes)
    }

    /// Length and header, with the sums of each tensor's cells, in the order of the tensors.
    #[must_use]
    pub fn header(&self, cells: &[Vec<u64>]) -> Vec<u8> {
        let json = self.json(cells);
        let mut bytes = (self.data_offset - LENGTH_BYTES).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(self.data_offset as usize, b' ');
        bytes
    }

    fn json(&self, cells: &[Vec<u64>]) -> String {
        let mut metadata = self.metadata.clone();
        if self.has_sums {
            let record = |(tensor, cells): (&Tensor, &Vec<u64>)| SideCarRecord {
                name: tensor.name.clone(),
                cells: cells.clone(),
            };
            let records: Vec<_> = self.tensors.iter().zip(cells).map(record).collect();
            metadata.push((METADATA_KEY.into(), encode(&records)));
        }
        let mut entries = Vec::with_capacity(self.tensors.len() + 1);
        if !metadata.is_empty() {
            entries.push((METADATA.to_owned(), raw(&Object(metadata))));
        }
        for tensor in &self.tensors {
            let begin = tensor.offset - self.data_offset;
            let entry = Entry {
                dtype: tensor.dtype.safetensors_name().unwrap_or_default().into(),
                shape: tensor.shape.clone(),
                data_offsets: (begin, begin + tensor.bytes),
            };
            entries.push((tensor.name.clone(), raw(&entry)));
        }
        serde_json::to_string(&Object(entries)).unwrap_or_default()
    }
}

/// As JSON. What is made here always has some.
fn raw(value: &impl Serialize) -> Box<RawValue> {
    to_raw_value(value).unwrap_or_default()
}

fn byte_count(shape: &[u64], dtype: Dtype) -> Option<u64> {
    let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
    elements.checked_mul(dtype.bytes()).filter(|bytes| *bytes <= i64::MAX.unsigned_abs())
}

/// What a file's header says.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// Texts that the writer has added, our own sums included.
    pub metadata: Vec<(String, String)>,
    /// The tensors in the order of their offsets.
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// How long the header is that these first eight bytes announce.
    ///
    /// # Errors
    /// `Corrupt` when it would not fit into the file, or is longer than the format allows.
    pub fn json_bytes(length: [u8; LENGTH_BYTES as usize], file_bytes: u64) -> Result<u64> {
        let bytes = u64::from_le_bytes(length);
        if bytes > HEADER_BYTES_MAX || bytes > file_bytes.saturating_sub(LENGTH_BYTES) {
            let what = format!(
                "a header of {bytes} bytes is announced in a file of {file_bytes}; this is no safetensors file, or it was cut"
            );
            return Err(Error::corrupt(0, what));
        }
        Ok(bytes)
    }

    /// Reads the JSON of a header in a file of that size.
    ///
    /// # Errors
    /// `Corrupt` for text that is no header, and for tensors that overlap, leave gaps or lie outside the file.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<Self> {
        let no_header =
            |error: serde_json::Error| Error::corrupt(LENGTH_BYTES, format!("the header is damaged: {error}"));
        let entries: Object<Box<RawValue>> = serde_json::from_slice(json).map_err(no_header)?;
        let data_offset = LENGTH_BYTES + json.len() as u64;
        let mut header = Self::default();
        for (name, value) in entries.0 {
            if name == METADATA {
                let metadata: Object<String> = serde_json::from_str(value.get()).map_err(no_header)?;
                header.metadata = metadata.0;
                continue;
            }
            let entry: Entry = serde_json::from_str(value.get()).map_err(no_header)?;
            header.tensors.push(tensor(name, entry, data_offset)?);
        }
        header.tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
        let mut at = data_offset;
        for tensor in &header.tensors {
            if tensor.offset != at {
                let what = format!("the tensor {:?} begins there, and the one before it ends at {at}", tensor.name);
                return Err(Error::corrupt(tensor.offset, what));
            }
            at += tensor.bytes;
        }
        if at != file_bytes {
            let what =
                format!("the tensors end at byte {at} of a file of {file_bytes}; it was cut, or something was added");
            return Err(Error::corrupt(at.min(file_bytes), what));
        }
        Ok(header)
    }
}

fn tensor(name: String, entry: Entry, data_offset: u64) -> Result<Tensor> {
    let Some(dtype) = Dtype::from_safetensors(&entry.dtype) else {
        let text =
            format!("the tensor {name:?} is of type {:?}, which this version of deepnvme does not know", entry.dtype);
        return Err(Error::unsupported(text));
    };
    let (begin, end) = entry.data_offsets;
    let bytes = end.checked_sub(begin).filter(|bytes| byte_count(&entry.shape, dtype) == Some(*bytes));
    let offset = data_offset.checked_add(begin).filter(|offset| offset.checked_add(end - begin.min(end)).is_some());
    let (Some(bytes), Some(offset)) = (bytes, offset) else {
        let what = format!("the tensor {name:?} of shape {:?} is said to lie from {begin} to {end}", entry.shape);
        return Err(Error::corrupt(LENGTH_BYTES, what));
    };
    Ok(Tensor { name, dtype, shape: entry.shape, offset, bytes })
}

/// The index of a model in several files, as Hugging Face lays it out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Which file each tensor is in, by the tensor's name.
    pub weight_map: Vec<(String, String)>,
    /// Bytes of all tensors, where the writer said so.
    pub total_bytes: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct IndexWire {
    #[serde(default)]
    metadata: serde_json::Map<String, serde_json::Value>,
    weight_map: Object<String>,
}

impl Index {
    /// Reads `model.safetensors.index.json`.
    ///
    /// # Errors
    /// `Corrupt` for text that is no index, or names files outside its own folder.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let wire: IndexWire = serde_json::from_slice(json)
            .map_err(|error| Error::corrupt(0, format!("this is no index of safetensors files: {error}")))?;
        for (name, file) in &wire.weight_map.0 {
            if file.is_empty() || file.contains(['/', '\0']) || file == "." || file == ".." {
                return Err(Error::corrupt(
                    0,
                    format!("{name:?} is said to be in {file:?}, which is no file of this folder"),
                ));
            }
        }
        let total_bytes = wire.metadata.get("total_size").and_then(serde_json::Value::as_u64);
        Ok(Self { weight_map: wire.weight_map.0, total_bytes })
    }

    /// The text of the index.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut metadata = serde_json::Map::new();
        if let Some(total) = self.total_bytes {
            metadata.insert("total_size".into(), total.into());
        }
        let wire = IndexWire { metadata, weight_map: Object(self.weight_map.clone()) };
        serde_json::to_string_pretty(&wire).unwrap_or_default() + "\n"
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dtypes() -> impl Strategy<Value = Dtype> {
        prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::U8), Just(Dtype::I64), Just(Dtype::F8E4m3fn)]
    }

    proptest! {
        #[test]
        fn what_was_planned_is_read(
            specs in proptest::collection::btree_map("[a-z.\"\\\\ä]{1,8}", (dtypes(), proptest::collection::vec(0..9u64, 0..4)), 0..12),
            has_sums: bool,
        ) {
            let specs: Vec<_> =
                specs.into_iter().map(|(name, (dtype, shape))| TensorSpec { name, dtype, shape }).collect();
            let plan = Plan::new(&specs, vec![("format".into(), "pt".into())], has_sums).unwrap();
            let cells: Vec<_> =
                plan.tensors().iter().map(|tensor| vec![u64::MAX; cell_count(tensor.bytes)]).collect();
            let bytes = plan.header(&cells);
            prop_assert_eq!(bytes.len() as u64, plan.data_offset());
            prop_assert_eq!(plan.data_offset() % ALIGNMENT_LARGE, 0);
            let length = Header::json_bytes(bytes[..8].try_into().unwrap(), plan.file_bytes()).unwrap();
            let header = Header::parse(&bytes[8..8 + length as usize], plan.file_bytes()).unwrap();
            let key = |tensor: &Tensor| (tensor.offset, tensor.bytes, tensor.name.clone());
            let sorted = |tensors: &[Tensor]| { let mut all: Vec<_> = tensors.iter().map(key).collect(); all.sort(); all };
            prop_assert_eq!(sorted(&header.tensors), sorted(plan.tensors()));
            prop_assert_eq!(&header.metadata[0], &("format".to_owned(), "pt".to_owned()));
            prop_assert_eq!(header.metadata.len(), 1 + usize::from(has_sums));
            for tensor in plan.tensors() {
                prop_assert_eq!(tensor.offset % tensor.dtype.bytes(), 0);
            }
        }

        #[test]
        fn anything_is_an_error_or_a_header(json in "[\\[\\]{}\":,a-z0-9_]{0,80}", file_bytes: u64) {
            let _ = Header::parse(json.as_bytes(), file_bytes);
            let _ = Index::parse(json.as_bytes());
        }
    }

    #[test]
    fn lies_are_refused() {
        let entry = |begin: u64, end: u64| {
            format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end.saturating_sub(begin))
        };
        for (json, file_bytes, word) in [
            (format!(r#"{{"a":{}}}"#, entry(0, 4)), 0, "cut"),
            (format!(r#"{{"a":{}}}"#, entry(1, 4)), 4, "begins there"),
            (format!(r#"{{"a":{},"b":{}}}"#, entry(0, 4), entry(2, 6)), 6, "begins there"),
            (format!(r#"{{"a":{},"a":{}}}"#, entry(0, 4), entry(4, 6)), 6, "twice"),
            (r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}}"#.into(), 4, "is said to lie"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#.into(), 4, "is said to lie"),
            (
                r#"{"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#.into(),
                0,
                "is said to lie",
            ),
            (r#"{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,4]}}"#.into(), 4, "X9"),
            ("[1]".into(), 0, "damaged"),
        ] {
            let error = Header::parse(json.as_bytes(), file_bytes + LENGTH_BYTES + json.len() as u64).unwrap_err();
            assert!(error.to_string().contains(word), "{json}: {error}");
        }
        Header::json_bytes(u64::MAX.to_le_bytes(), 1000).unwrap_err();
        Header::json_bytes(993u64.to_le_bytes(), 1000).unwrap_err();
        assert_eq!(Header::json_bytes(992u64.to_le_bytes(), 1000), Ok(992));
    }

    #[test]
    fn an_index_names_files_of_its_own_folder() {
        let index = Index {
            weight_map: vec![("b".into(), "m-1.safetensors".into()), ("a".into(), "m-2.safetensors".into())],
            total_bytes: Some(5),
        };
        assert_eq!(Index::parse(index.to_json().as_bytes()), Ok(index));
        for file in ["../x", "/etc/passwd", "", "..", "a/b"] {
            let json = format!(r#"{{"weight_map":{{"a":{file:?}}}}}"#);
            assert!(Index::parse(json.as_bytes()).is_err(), "{file}");
        }
    }
}
