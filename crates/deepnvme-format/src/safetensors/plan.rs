//! Lays out a file before its first byte is written.

use serde::Serialize;

use super::{Entry, HEADER_BYTES_MAX, LENGTH_BYTES, METADATA, Tensor, TensorSpec, byte_count};
use crate::checksums::{self, Frame, METADATA_KEY, encode, text_bytes};
use crate::error::{Error, Result};
use crate::json::Entries;
use crate::{ALIGNMENT_LARGE, DIMS_MAX, FILE_BYTES_MAX};

/// The minimum number of spaces after the JSON of a header. Other writers pad with at most seven: a file of theirs
/// with copied checksums cannot look like a damaged file of deepnvme.
pub const PADDING_BYTES_MIN: u64 = 8;

/// The layout of a file, computed before its first byte is written.
#[derive(Clone, Debug)]
pub struct SafetensorsPlan {
    metadata: Vec<(String, String)>,
    tensors: Vec<Tensor>,
    order: Vec<usize>,
    data_offset: u64,
    has_checksums: bool,
}

impl SafetensorsPlan {
    /// Lays tensors out, wide elements first so that all are aligned to their element size, otherwise in the given
    /// order. With `has_checksums` the metadata will contain checksums. Checksums in `metadata` belong to another file
    /// and are dropped.
    ///
    /// # Errors
    /// `Invalid` for duplicate or reserved names, duplicate keys of `metadata`, types that the format lacks, too many
    /// dimensions, and a header or file that exceeds its limit.
    pub fn new(specs: Vec<TensorSpec>, metadata: Vec<(String, String)>, has_checksums: bool) -> Result<Self> {
        let mut ordered: Vec<(usize, TensorSpec)> = specs.into_iter().enumerate().collect();
        ordered.sort_by_key(|(_, spec)| std::cmp::Reverse(spec.dtype.bytes()));
        Self::of(ordered, metadata, has_checksums)
    }

    /// Lays tensors out in the given order, regardless of alignment.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_order(specs: Vec<TensorSpec>, metadata: Vec<(String, String)>, has_checksums: bool) -> Result<Self> {
        Self::of(specs.into_iter().enumerate().collect(), metadata, has_checksums)
    }

    fn of(ordered: Vec<(usize, TensorSpec)>, metadata: Vec<(String, String)>, has_checksums: bool) -> Result<Self> {
        let metadata: Vec<_> = metadata.into_iter().filter(|(key, _)| key != METADATA_KEY).collect();
        let mut keys = std::collections::HashSet::with_capacity(metadata.len());
        if let Some((twice, _)) = metadata.iter().find(|(key, _)| !keys.insert(key)) {
            return Err(Error::invalid(format!("the metadata key {twice:?} occurs twice")));
        }
        let mut seen = std::collections::HashSet::with_capacity(ordered.len());
        for (_, spec) in &ordered {
            if spec.name == METADATA {
                let text = format!("safetensors files have {METADATA:?} for other things; rename this tensor");
                return Err(Error::invalid(text));
            }
            if !seen.insert(&spec.name) {
                return Err(Error::invalid(format!("two tensors are called {:?}; rename one of them", spec.name)));
            }
            if spec.shape.len() > DIMS_MAX {
                let text = format!("{:?} has more than {DIMS_MAX} dimensions; reshape it", spec.name);
                return Err(Error::invalid(text));
            }
            if spec.dtype.safetensors_name().is_none() {
                let text = format!(
                    "{:?} is of type torch.{}, which safetensors does not support",
                    spec.name,
                    spec.dtype.torch_name()
                );
                return Err(Error::invalid(format!("{text}; save it as a .pt file")));
            }
        }
        let mut at: u64 = 0;
        let (mut tensors, mut order) = (Vec::with_capacity(ordered.len()), Vec::with_capacity(ordered.len()));
        for (index, TensorSpec { name, dtype, shape }) in ordered {
            let too_large =
                |name| Error::invalid(format!("with the tensor {name:?} the file exceeds the maximum size"));
            let Some(bytes) = byte_count(&shape, dtype) else { return Err(too_large(name)) };
            let Some(end) = at.checked_add(bytes).filter(|end| *end <= FILE_BYTES_MAX) else {
                return Err(too_large(name));
            };
            tensors.push(Tensor { name, dtype, shape, offset: at, bytes });
            order.push(index);
            at = end;
        }
        let mut plan = Self { metadata, tensors, order, data_offset: 0, has_checksums };
        let sums_bytes: u64 =
            plan.tensors.iter().filter(|_| has_checksums).map(|tensor| text_bytes(tensor.bytes)).sum();
        let bare_bytes = plan.json(&vec![&[][..]; plan.tensors.len()]).len() as u64;
        let header_bytes = LENGTH_BYTES + bare_bytes + sums_bytes + PADDING_BYTES_MIN;
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

    /// Returns the tensors in the order of their offsets.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns for each of [`tensors`](Self::tensors) its index among the specs.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the offset of the first tensor. All bytes before it are the [`header`](Self::header).
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// Returns the length of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.tensors.last().map_or(self.data_offset, |last| last.offset + last.bytes)
    }

    /// Returns the length field and header, with the checksums of each tensor's chunks in the order of the tensors.
    #[must_use]
    pub fn header(&self, chunks: &[&[u64]]) -> Vec<u8> {
        let json = self.json(chunks);
        let mut bytes = (self.data_offset - LENGTH_BYTES).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(self.data_offset as usize, b' ');
        if self.has_checksums {
            write_header_checksum(&mut bytes);
        }
        bytes
    }

    fn frame(&self) -> Frame {
        Frame { file_bytes: self.file_bytes(), index_offset: 0, index_bytes: self.data_offset }
    }

    fn json(&self, chunks: &[&[u64]]) -> String {
        let names = self.tensors.iter().map(|tensor| tensor.name.as_str());
        let checksum_text = self.has_checksums.then(|| encode(names.zip(chunks.iter().copied()), self.frame()));
        let texts = self.metadata.iter().map(|(key, text)| (key.as_str(), text.as_str()));
        let texts: Vec<_> =
            texts.chain(checksum_text.as_deref().map(|checksum_text| (METADATA_KEY, checksum_text))).collect();
        let metadata = (!texts.is_empty()).then(|| (METADATA, Value::Metadata(Entries(texts.into_iter()))));
        let entry = |tensor: &'_ Tensor| {
            let begin = tensor.offset - self.data_offset;
            let dtype = tensor.dtype.safetensors_name().unwrap_or_default();
            Entry { dtype, shape: tensor.shape.clone(), data_offsets: (begin, begin + tensor.bytes) }
        };
        let tensors = self.tensors.iter().map(|tensor| (tensor.name.as_str(), Value::Tensor(entry(tensor))));
        serde_json::to_string(&Entries(metadata.into_iter().chain(tensors))).unwrap_or_default()
    }
}

/// Writes the checksum of a header (all bytes before the first tensor) into the header's checksums. Does nothing if the
/// header has no checksums of deepnvme.
pub fn write_header_checksum(header: &mut [u8]) {
    if let Some(digits) = checksums::quoted_digits(header) {
        checksums::write_index_checksum(header, digits.clone(), &[digits]);
    }
}

/// An entry of a header.
#[derive(Clone, Serialize)]
#[serde(untagged)]
enum Value<M> {
    Metadata(M),
    Tensor(Entry<&'static str>),
}
