//! The layout of a safetensors file.

use deepnvme_format::Result;
use deepnvme_format::checksums::RecordChecksums;
use deepnvme_format::safetensors::{SafetensorsPlan, TensorSpec};

use super::data_source::DataSource;
use super::file_layout::HeaderRenderer;
use super::spans::{Content, Spans};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name, type and shape.
    pub spec: TensorSpec,
    /// Its elements in row-major order.
    pub data: DataSource,
}

/// A safetensors file to write: its plan, from which the header is rendered. The header contains all checksums that the
/// file stores.
pub(super) struct SafetensorsFile {
    plan: SafetensorsPlan,
}

impl SafetensorsFile {
    /// Plans the file. Returns the tensors' data sources in the plan's order.
    pub(super) fn new(
        tensors: Vec<Tensor>,
        metadata: Vec<(String, String)>,
        has_checksums: bool,
    ) -> Result<(Self, Vec<DataSource>)> {
        let (specs, mut sources): (Vec<TensorSpec>, Vec<Option<DataSource>>) =
            tensors.into_iter().map(|tensor| (tensor.spec, Some(tensor.data))).unzip();
        let plan = SafetensorsPlan::new(specs, metadata, has_checksums)?;
        let ordered: Vec<DataSource> = plan.order().iter().filter_map(|index| sources[*index].take()).collect();
        // The plan derives sizes from type and shape. The memory must match them.
        for (planned, source) in plan.tensors().iter().zip(&ordered) {
            let bytes = source.bytes();
            if planned.bytes != bytes {
                let text = format!("the tensor {:?} of {:?} has {bytes} bytes", planned.name, planned.shape);
                return Err(deepnvme_format::Error::Invalid(text));
            }
        }
        Ok((Self { plan }, ordered))
    }

    pub(super) fn spans(&self) -> Spans {
        let mut spans = Spans::default();
        spans.push(0, self.plan.data_offset(), Content::Index);
        for (index, tensor) in self.plan.tensors().iter().enumerate() {
            spans.push(tensor.offset, tensor.bytes, Content::Record(index));
        }
        spans
    }
}

impl HeaderRenderer for SafetensorsFile {
    fn name(&self, record: usize) -> &str {
        &self.plan.tensors()[record].name
    }

    fn header(&self, _: usize, _: u32) -> Vec<u8> {
        Vec::new()
    }

    fn index(&self, checksums: &[RecordChecksums]) -> Vec<u8> {
        let chunks: Vec<&[u64]> = checksums.iter().map(|checksums| checksums.chunks.as_slice()).collect();
        self.plan.header(&chunks)
    }
}
