//! What a safetensors file is made of.

use std::collections::HashMap;

use deepnvme_format::Result;
use deepnvme_format::safetensors::{Plan, TensorSpec};
use deepnvme_format::sums::RecordSums;

use super::Tensor;
use super::image::Layout;
use super::origin::Origin;
use super::spans::{Content, Spans};

/// The plan of a file: its header holds all sums.
pub(super) struct SafetensorsLayout {
    plan: Plan,
}

impl SafetensorsLayout {
    pub(super) fn new(tensors: &[Tensor], metadata: Vec<(String, String)>, has_sums: bool) -> Result<Self> {
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        let plan = Plan::new(&specs, metadata, has_sums)?;
        // The plan knows the sizes from type and shape; the memory must have as many bytes.
        let planned: HashMap<&str, u64> =
            plan.tensors().iter().map(|planned| (planned.name.as_str(), planned.bytes)).collect();
        for tensor in tensors {
            if planned.get(tensor.spec.name.as_str()) != Some(&tensor.bytes.bytes()) {
                let (name, bytes) = (&tensor.spec.name, tensor.bytes.bytes());
                let text = format!("the tensor {name:?} of {:?} has {bytes} bytes", tensor.spec.shape);
                return Err(deepnvme_format::Error::Invalid(text));
            }
        }
        Ok(Self { plan })
    }

    /// The tensors' memory in the plan's order.
    pub(super) fn in_order(&self, tensors: Vec<Tensor>) -> Vec<Origin> {
        let mut by_name: HashMap<String, Tensor> =
            tensors.into_iter().map(|tensor| (tensor.spec.name.clone(), tensor)).collect();
        let ordered = self.plan.tensors().iter().filter_map(|planned| by_name.remove(&planned.name));
        ordered.map(|tensor| tensor.bytes).collect()
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

    fn index(&self, sums: &[RecordSums]) -> Vec<u8> {
        let cells: Vec<Vec<u64>> = sums.iter().map(|sums| sums.cells.clone()).collect();
        self.plan.header(&cells)
    }
}
