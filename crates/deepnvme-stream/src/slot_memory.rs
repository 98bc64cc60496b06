//! The memory of slots, some of which overlap.

use std::ops::Range;

use deepnvme_io::mem::{RegionMut, StreamHandle};

/// An arena, split wherever a slot begins or ends. A slot is a range of segments.
#[derive(Debug)]
pub(crate) struct SlotMemory {
    segments: Vec<Segment>,
    slots: Vec<Range<usize>>,
}

/// Memory that no fetch holds, and the GPU stream that used it last.
#[derive(Debug)]
struct Segment {
    bytes: usize,
    memory: Option<RegionMut>,
    stream: StreamHandle,
}

impl SlotMemory {
    /// `ranges` are the offset and the length of each slot.
    ///
    /// # Panics
    /// If a slot exceeds the arena.
    pub(crate) fn new(arena: RegionMut, ranges: &[(usize, usize)]) -> Self {
        let stream = arena.stream();
        let mut cuts: Vec<usize> = ranges.iter().flat_map(|(begin, bytes)| [*begin, begin + bytes]).collect();
        cuts.extend([0, arena.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        let mut rest = arena;
        let mut segments = Vec::with_capacity(cuts.len());
        for pair in cuts.windows(2) {
            let bytes = pair[1] - pair[0];
            let (memory, behind) = rest.split_at(bytes);
            segments.push(Segment { bytes, memory: Some(memory), stream });
            rest = behind;
        }
        let index = |at: usize| cuts.partition_point(|cut| *cut < at);
        let slots = ranges.iter().map(|(begin, bytes)| index(*begin)..index(begin + bytes)).collect();
        Self { segments, slots }
    }

    /// Takes the memory of a slot, to be written after its last stream. `None` if some of it was lost.
    pub(crate) fn take(&mut self, slot: usize) -> Option<RegionMut> {
        let segments = &mut self.segments[self.slots[slot].clone()];
        if segments.iter().any(|segment| segment.memory.is_none()) {
            return None;
        }
        let mut parts = segments.iter_mut().filter_map(|segment| Some(segment.memory.take()?.after(segment.stream)));
        let first = parts.next()?;
        parts.try_fold(first, |before, part| before.join(part).ok())
    }

    /// Returns the memory of a slot; `None` if it was lost.
    pub(crate) fn put(&mut self, slot: usize, memory: Option<RegionMut>) {
        let mut rest = memory;
        for segment in &mut self.segments[self.slots[slot].clone()] {
            let Some((own, behind)) = rest.map(|memory| memory.split_at(segment.bytes)) else { return };
            segment.memory = Some(own);
            rest = Some(behind);
        }
    }

    /// Records the stream that used a slot last.
    pub(crate) fn used(&mut self, slot: usize, stream: StreamHandle) {
        self.segments[self.slots[slot].clone()].iter_mut().for_each(|segment| segment.stream = stream);
    }
}

/// The slots that share memory with each slot. `ranges` are the offset and the length of each slot.
pub(crate) fn overlaps(ranges: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let meet = |one: (usize, usize), other: (usize, usize)| one.0 < other.0 + other.1 && other.0 < one.0 + one.1;
    let others = |slot: usize| move |other: &usize| *other != slot && meet(ranges[slot], ranges[*other]);
    (0..ranges.len()).map(|slot| (0..ranges.len()).filter(others(slot)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use deepnvme_io::mem::Buffer;

    use super::*;

    fn segments(bytes: usize, ranges: &[(usize, usize)]) -> SlotMemory {
        SlotMemory::new(Buffer::zeroed(bytes).unwrap().into_region(), ranges)
    }

    #[test]
    fn overlapping_slots_take_turns() {
        // One slot alone, then a large one and three small ones inside it.
        let ranges = [(0, 4096), (4096, 20_480), (4096, 8192), (12_288, 8192), (20_480, 8192)];
        let mut segments = segments(28_672, &ranges);
        assert_eq!(overlaps(&ranges), [vec![], vec![2, 3, 4], vec![1], vec![1], vec![1]]);
        let first = segments.take(2).unwrap();
        assert_eq!(first.len(), 8192);
        assert!(segments.take(1).is_none(), "a part of it is in use");
        assert_eq!(segments.take(4).map(|memory| memory.len()), Some(8192));
        segments.put(2, Some(first));
        assert!(segments.take(1).is_none(), "the last slot inside it is in use");
        assert_eq!(segments.take(0).map(|memory| memory.len()), Some(4096));
        assert_eq!(segments.take(3).map(|memory| memory.len()), Some(8192));
    }

    #[test]
    fn returned_memory_is_at_its_place() {
        let mut segments = segments(28_672, &[(0, 20_480), (0, 8192), (8192, 8192), (16_384, 8192)]);
        let all = segments.take(0).unwrap();
        let begin = all.addr();
        segments.put(0, Some(all));
        let small: Vec<_> = (1..4).map(|slot| segments.take(slot).unwrap()).collect();
        assert_eq!(small.iter().map(|memory| memory.addr() - begin).collect::<Vec<_>>(), [0, 8192, 16_384]);
        small.into_iter().zip(1..).for_each(|(memory, slot)| segments.put(slot, Some(memory)));
        assert_eq!(segments.take(0).map(|memory| (memory.addr(), memory.len())), Some((begin, 20_480)));
        segments.put(0, None);
        assert!(segments.take(0).is_none() && segments.take(3).is_none() && segments.take(1).is_none(), "lost");
    }
}
