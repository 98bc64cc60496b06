//! The layout of a safetensors file.

use deepnvme_format::Result;
use deepnvme_format::checksums::RecordChecksums;
use deepnvme_format::safetensors::{Plan, TensorSpec};

use super::image::Layout;
use super::origin::Origin;
use super::spans::{Content, Spans};

/// A tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name, type and shape.
    pub spec: TensorSpec,
    /// Its elements in row-major order.
    pub bytes: Origin,
}

/// The plan of a file. Its header contains all checksums.
pub(super) struct SafetensorsLayout {
    plan: Plan,
}

impl SafetensorsLayout {
    /// Plans the file. Returns the tensors' data sources in the plan's order.
    pub(super) fn new(
        tensors: Vec<Tensor>,
        metadata: Vec<(String, String)>,
        has_sums: bool,
    ) -> Result<(Self, Vec<Origin>)> {
        let (specs, mut origins): (Vec<TensorSpec>, Vec<Option<Origin>>) =
            tensors.into_iter().map(|tensor| (tensor.spec, Some(tensor.bytes))).unzip();
        let plan = Plan::new(specs, metadata, has_sums)?;
        let ordered: Vec<Origin> = plan.order().iter().filter_map(|index| origins[*index].take()).collect();
        // The plan derives sizes from type and shape. The memory must match them.
        for (planned, origin) in plan.tensors().iter().zip(&ordered) {
            let bytes = origin.bytes();
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

impl Layout for SafetensorsLayout {
    fn name(&self, record: usize) -> &str {
        &self.plan.tensors()[record].name
    }

    fn header(&self, _: usize, _: u32) -> Vec<u8> {
        Vec::new()
    }

    fn index(&self, sums: &[RecordChecksums]) -> Vec<u8> {
        let cells: Vec<&[u64]> = sums.iter().map(|sums| sums.chunks.as_slice()).collect();
        self.plan.header(&cells)
    }
}
