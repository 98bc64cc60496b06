//! A file laid out before its first byte is written.

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::{Entry, HEADER_BYTES_MAX, LENGTH_BYTES, METADATA, Tensor, TensorSpec, byte_count};
use crate::error::{Error, Result};
use crate::json::Object;
use crate::sums::{METADATA_KEY, SideCarRecord, cell_count, encode};
use crate::{ALIGNMENT_LARGE, FILE_BYTES_MAX};

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
            let too_large = || Error::invalid(format!("with the tensor {:?} the file is larger than any", spec.name));
            let bytes = byte_count(&spec.shape, spec.dtype).ok_or_else(too_large)?;
            let TensorSpec { name, dtype, shape } = spec.clone();
            tensors.push(Tensor { name, dtype, shape, offset: at, bytes });
            at = at.checked_add(bytes).filter(|end| *end <= FILE_BYTES_MAX).ok_or_else(too_large)?;
        }
        let mut plan = Self { metadata, tensors, data_offset: 0, has_sums };
        let blank = |tensor: &Tensor| if has_sums { vec![0; cell_count(tensor.bytes)] } else { Vec::new() };
        let blank: Vec<Vec<u64>> = plan.tensors.iter().map(blank).collect();
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
