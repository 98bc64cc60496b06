//! A strided tensor copied one byte at a time.

use std::sync::Arc;

use deepnvme_mem::{Device, Region, RegionMut, Strided};
use proptest::prelude::*;
use proptest::sample::Index;

/// A tensor inside a vector, and the position of each of its flat bytes.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) layout: Strided,
    pub(crate) memory: Vec<u8>,
    /// Position of the first element in `memory`.
    origin: usize,
    /// Position of each flat byte in `memory`.
    pub(crate) positions: Vec<usize>,
}

impl Model {
    pub(crate) fn new(shape: &[usize], stride_bytes: &[isize], item_bytes: usize) -> Self {
        let layout = Strided::new(shape.to_vec(), stride_bytes.to_vec(), item_bytes).unwrap();
        let mut offsets = vec![];
        let items = shape.iter().product::<usize>();
        for item in 0..items {
            let (mut rest, mut offset) = (item, 0_isize);
            for (count, stride) in shape.iter().zip(stride_bytes).rev() {
                offset += (rest % count) as isize * stride;
                rest /= count;
            }
            offsets.extend((0..item_bytes as isize).map(|byte| offset + byte));
        }
        let lowest = offsets.iter().copied().min().unwrap_or(0);
        let highest = offsets.iter().copied().max().unwrap_or(0);
        let origin = lowest.unsigned_abs() + 3;
        let positions: Vec<usize> = offsets.iter().map(|offset| origin.checked_add_signed(*offset).unwrap()).collect();
        let bytes = origin.checked_add_signed(highest).unwrap() + 4;
        let memory = (0..bytes).map(|index| (index.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
        Self { layout, memory, origin, positions }
    }

    /// Returns the tensor as a region over a copy of the memory, and the whole memory to inspect afterwards.
    pub(crate) fn region(&self) -> (RegionMut, Region) {
        let whole = RegionMut::from_vec(self.memory.clone()).region();
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(whole.addr() + self.origin);
        // SAFETY: every position of the tensor lies in the vector, which the owner keeps alive.
        let tensor =
            unsafe { RegionMut::from_strided(start, self.layout.clone(), Device::Host, Arc::new(whole.clone())) };
        (tensor, whole)
    }

    pub(crate) fn flat(&self) -> Vec<u8> {
        self.positions.iter().map(|place| self.memory[*place]).collect()
    }

    /// Returns whether two flat bytes share a position.
    pub(crate) fn overlaps(&self) -> bool {
        let mut positions = self.positions.clone();
        positions.sort_unstable();
        positions.windows(2).any(|pair| pair[0] == pair[1])
    }
}

pub(crate) fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes);
    bytes
}

/// A view of a contiguous tensor with sliced, flipped, permuted or expanded dimensions.
pub(crate) fn views() -> impl Strategy<Value = Model> {
    let dim = (1_usize..6, 1_usize..4, any::<bool>());
    let item = prop::sample::select(vec![1_usize, 2, 3, 4, 5, 8, 12, 16]);
    (prop::collection::vec(dim, 0..5), item, any::<Index>()).prop_flat_map(|(dims, item_bytes, expanded)| {
        let mut stride = item_bytes;
        let mut pairs = Vec::new();
        for (count, step, flipped) in dims {
            let sign = if flipped { -1 } else { 1 };
            pairs.push((count, sign * (stride * step) as isize));
            stride *= count * step;
        }
        // Sometimes one dimension is expanded.
        let chosen = expanded.index(4 * pairs.len().max(1));
        if let Some(pair) = pairs.get_mut(chosen) {
            pair.1 = 0;
        }
        Just(pairs).prop_shuffle().prop_map(move |pairs| {
            let (shape, strides): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            Model::new(&shape, &strides, item_bytes)
        })
    })
}

/// Arbitrary strides, so that elements may overlap in any way.
pub(crate) fn overlapping_layouts() -> impl Strategy<Value = Model> {
    let dims = prop::collection::vec((0_usize..4, -9_isize..10), 0..4);
    (dims, 1_usize..5).prop_map(|(dims, item_bytes)| {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        Model::new(&shape, &strides, item_bytes)
    })
}

/// A model with a range of its flat bytes: start and length.
pub(crate) fn with_range(models: impl Strategy<Value = Model>) -> impl Strategy<Value = (Model, usize, usize)> {
    (models, any::<(Index, Index)>()).prop_map(|(model, (one, other))| {
        let ends = model.layout.total_bytes() + 1;
        let (one, other) = (one.index(ends), other.index(ends));
        (model, one.min(other), one.abs_diff(other))
    })
}
