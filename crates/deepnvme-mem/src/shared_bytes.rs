//! Finds tensors that share bytes, whatever their strides.
//!
//! Views may lie in each other's range without sharing a byte, as the columns of a matrix do. So the ranges decide only
//! which tensors to compare. Those are reduced to runs of contiguous bytes, which are walked in the order of their
//! addresses, all tensors at once. That takes memory for a few numbers a tensor, and time for each run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::strided::Strided;

/// The place of a tensor: the address of its first element, and its layout.
#[derive(Clone, Debug)]
pub struct TensorPlace {
    /// The address of the first element, the one whose indices are all zero.
    pub address: usize,
    /// The layout. It must be checked ([`Strided::check`]).
    pub layout: Strided,
}

/// Returns the indices of two tensors that share a byte, or of one whose own elements share one, twice.
///
/// As [`Strided::may_overlap`], it takes a tensor whose dimensions interleave for one whose elements share bytes.
///
/// ```
/// use deepnvme_mem::{Strided, TensorPlace, first_shared};
/// // Two columns of a matrix of 4-byte items with ten columns.
/// let column = |index: usize| -> std::io::Result<TensorPlace> {
///     Ok(TensorPlace { address: 4096 + 4 * index, layout: Strided::new(vec![100], vec![40], 4)? })
/// };
/// assert_eq!(first_shared(&[column(0)?, column(1)?]), None);
/// assert_eq!(first_shared(&[column(3)?, column(3)?]), Some((0, 1)));
/// # Ok::<(), std::io::Error>(())
/// ```
#[must_use]
pub fn first_shared(places: &[TensorPlace]) -> Option<(usize, usize)> {
    if let Some(index) = places.iter().position(|place| place.layout.may_overlap()) {
        return Some((index, index));
    }
    let mut ranges: Vec<(Range<usize>, usize)> =
        places.iter().enumerate().map(|(index, place)| (range_of(place), index)).collect();
    ranges.retain(|(range, _)| !range.is_empty());
    ranges.sort_unstable_by_key(|(range, _)| (range.start, range.end));
    let (mut from, mut end) = (0, 0);
    for at in 0..ranges.len() {
        if ranges[at].0.start >= end {
            if let Some(found) = shared_in(places, &ranges[from..at]) {
                return Some(found);
            }
            from = at;
        }
        end = end.max(ranges[at].0.end);
    }
    shared_in(places, &ranges[from..])
}

fn range_of(place: &TensorPlace) -> Range<usize> {
    if place.layout.total_bytes() == 0 {
        return 0..0;
    }
    let (below, above) = place.layout.bytes_around_first();
    place.address.saturating_sub(below)..place.address.saturating_add(above)
}

/// Looks among tensors whose ranges meet.
fn shared_in(places: &[TensorPlace], group: &[(Range<usize>, usize)]) -> Option<(usize, usize)> {
    if group.len() < 2 {
        return None;
    }
    let mut walks: Vec<RunWalk> =
        group.iter().map(|(range, index)| RunWalk::new(range.start, &places[*index].layout)).collect();
    let mut next: BinaryHeap<Reverse<(usize, usize)>> =
        walks.iter().enumerate().map(|(walk, runs)| Reverse((runs.address, walk))).collect();
    // The end of the runs so far, and the tensor whose run ends there.
    let (mut end, mut last) = (0, 0);
    while let Some(Reverse((address, walk))) = next.pop() {
        if address < end {
            let (one, other) = (group[last].1, group[walk].1);
            return Some((one.min(other), one.max(other)));
        }
        (end, last) = (address + walks[walk].run_bytes, walk);
        if walks[walk].advance() {
            next.push(Reverse((walks[walk].address, walk)));
        }
    }
    None
}

/// The runs of a tensor whose elements share no byte, lowest address first.
struct RunWalk {
    address: usize,
    run_bytes: usize,
    /// Bytes to the next run, how many there are, and the current one: the smallest stride first.
    dims: Vec<(usize, usize, usize)>,
}

impl RunWalk {
    fn new(lowest: usize, layout: &Strided) -> Self {
        let mut sorted: Vec<(usize, usize)> =
            layout.wide_dims().map(|(count, stride)| (stride.unsigned_abs(), count)).collect();
        sorted.sort_unstable();
        let mut run_bytes = layout.item_bytes;
        let mut dims: Vec<(usize, usize, usize)> = Vec::new();
        for (stride, count) in sorted {
            match dims.last_mut() {
                None if stride == run_bytes => run_bytes *= count,
                Some((inner, inner_count, _)) if *inner * *inner_count == stride => *inner_count *= count,
                _ => dims.push((stride, count, 0)),
            }
        }
        Self { address: lowest, run_bytes, dims }
    }

    /// Goes to the next run, and returns false after the last one. Each stride steps over the whole span of the smaller
    /// ones, so addresses only grow.
    fn advance(&mut self) -> bool {
        for (stride, count, at) in &mut self.dims {
            *at += 1;
            if at < count {
                self.address += *stride;
                return true;
            }
            self.address -= *stride * (*count - 1);
            *at = 0;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Returns whether any two elements share a byte, by looking at each byte.
    fn expected(places: &[TensorPlace]) -> bool {
        let mut owners: HashMap<usize, usize> = HashMap::new();
        places.iter().enumerate().any(|(owner, place)| {
            let mut starts = vec![place.address];
            for (count, stride) in place.layout.shape.iter().zip(&place.layout.stride_bytes) {
                starts = starts
                    .iter()
                    .flat_map(|start| (0..*count).map(move |index| start.wrapping_add_signed(stride * index as isize)))
                    .collect();
            }
            let bytes = starts.into_iter().flat_map(|start| start..start + place.layout.item_bytes);
            bytes.into_iter().any(|byte| owners.insert(byte, owner).is_some())
        })
    }

    /// A view of memory at 10,000: a shape, cut out of a larger one, whose dimensions are in some order.
    fn view() -> impl Strategy<Value = TensorPlace> {
        let dims = prop::collection::vec((1..4_usize, 1..3_usize, 0..2_usize, any::<bool>()), 0..4);
        (dims, 1..5_usize, 0..40_usize, any::<u64>()).prop_map(|(dims, item_bytes, offset, order)| {
            let (mut address, mut stride) = (10_000 + offset, item_bytes as isize);
            let (mut shape, mut strides) = (Vec::new(), Vec::new());
            for (index, (count, step, slack, is_flipped)) in dims.into_iter().enumerate() {
                let stepped = stride * step as isize;
                let at = if order >> (index * 8) & 1 == 0 { shape.len() } else { 0 };
                shape.insert(at, count);
                strides.insert(at, if is_flipped { -stepped } else { stepped });
                if is_flipped {
                    address += stepped as usize * (count - 1);
                }
                stride = stepped * count as isize + (slack * item_bytes) as isize;
            }
            TensorPlace { address, layout: Strided::new(shape, strides, item_bytes).unwrap() }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn it_agrees_with_a_comparison_of_each_byte(places in prop::collection::vec(view(), 0..4)) {
            let found = first_shared(&places);
            prop_assert_eq!(found.is_some(), expected(&places));
            if let Some((one, other)) = found {
                prop_assert!(one < other && expected(&[places[one].clone(), places[other].clone()]));
            }
        }
    }

    #[test]
    fn a_tensor_that_shares_with_itself_is_named_twice() {
        let layout = Strided::new(vec![100, 20], vec![4, 4], 4).unwrap();
        assert_eq!(first_shared(&[TensorPlace { address: 4096, layout }]), Some((0, 0)));
    }

    #[test]
    fn many_neighbours_take_a_moment() {
        let column = |index: usize| TensorPlace {
            address: 4096 + index * 2,
            layout: Strided::new(vec![1000], vec![2000], 2).unwrap(),
        };
        let mut columns: Vec<TensorPlace> = (0..1000).map(column).collect();
        assert_eq!(first_shared(&columns), None);
        columns.push(column(500));
        assert_eq!(first_shared(&columns), Some((500, 1000)));
    }
}
