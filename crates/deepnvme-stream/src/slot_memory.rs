//! The memory of slots, some of which lie in each other's.

use std::ops::Range;

use deepnvme_io::mem::{RegionMut, StreamHandle};

/// An arena, cut wherever a slot begins or ends. A slot is some cells side by side.
#[derive(Debug)]
pub(crate) struct Cells {
    cells: Vec<Cell>,
    slots: Vec<Range<usize>>,
}

/// Memory, while no fetch has it, and the stream of a GPU that has used it last.
#[derive(Debug)]
struct Cell {
    bytes: usize,
    memory: Option<RegionMut>,
    stream: StreamHandle,
}

impl Cells {
    /// `places` has where in the arena each slot begins, and its bytes.
    ///
    /// # Panics
    /// When a slot does not lie in the arena.
    pub(crate) fn new(arena: RegionMut, places: &[(usize, usize)]) -> Self {
        let stream = arena.stream();
        let mut cuts: Vec<usize> = places.iter().flat_map(|(begin, bytes)| [*begin, begin + bytes]).collect();
        cuts.extend([0, arena.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        let mut rest = arena;
        let mut cells = Vec::with_capacity(cuts.len());
        for pair in cuts.windows(2) {
            let bytes = pair[1] - pair[0];
            let (memory, behind) = rest.split_at(bytes);
            cells.push(Cell { bytes, memory: Some(memory), stream });
            rest = behind;
        }
        let index = |at: usize| cuts.partition_point(|cut| *cut < at);
        let slots = places.iter().map(|(begin, bytes)| index(*begin)..index(begin + bytes)).collect();
        Self { cells, slots }
    }

    /// The memory of a slot, to be changed after what has used it last; `None` where some of it did not come home.
    pub(crate) fn take(&mut self, slot: usize) -> Option<RegionMut> {
        let cells = &mut self.cells[self.slots[slot].clone()];
        if cells.iter().any(|cell| cell.memory.is_none()) {
            return None;
        }
        let mut parts = cells.iter_mut().filter_map(|cell| Some(cell.memory.take()?.after(cell.stream)));
        let first = parts.next()?;
        parts.try_fold(first, |before, part| before.join(part).ok())
    }

    /// It comes home, if it does.
    pub(crate) fn put(&mut self, slot: usize, memory: Option<RegionMut>) {
        let mut rest = memory;
        for cell in &mut self.cells[self.slots[slot].clone()] {
            let Some((own, behind)) = rest.map(|memory| memory.split_at(cell.bytes)) else { return };
            cell.memory = Some(own);
            rest = Some(behind);
        }
    }

    /// That stream has used a slot.
    pub(crate) fn used(&mut self, slot: usize, stream: StreamHandle) {
        self.cells[self.slots[slot].clone()].iter_mut().for_each(|cell| cell.stream = stream);
    }
}

/// The other slots that have some of the memory of each slot. `places` has where each begins, and its bytes.
pub(crate) fn overlaps(places: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let meet = |one: (usize, usize), other: (usize, usize)| one.0 < other.0 + other.1 && other.0 < one.0 + one.1;
    let others = |slot: usize| move |other: &usize| *other != slot && meet(places[slot], places[*other]);
    (0..places.len()).map(|slot| (0..places.len()).filter(others(slot)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use deepnvme_io::mem::Buffer;

    use super::*;

    fn cells(bytes: usize, places: &[(usize, usize)]) -> Cells {
        Cells::new(Buffer::zeroed(bytes).unwrap().into_region(), places)
    }

    #[test]
    fn slots_in_a_slot_have_its_memory_by_turns() {
        // A slot by itself, a large one, three small ones in it, of which the last goes on behind it.
        let places = [(0, 4096), (4096, 20_480), (4096, 8192), (12_288, 8192), (20_480, 8192)];
        let mut cells = cells(28_672, &places);
        assert_eq!(overlaps(&places), [vec![], vec![2, 3, 4], vec![1], vec![1], vec![1]]);
        let first = cells.take(2).unwrap();
        assert_eq!(first.len(), 8192);
        assert!(cells.take(1).is_none(), "a part of it is in use");
        assert_eq!(cells.take(4).map(|memory| memory.len()), Some(8192));
        cells.put(2, Some(first));
        assert!(cells.take(1).is_none(), "the last one has not come home");
        assert_eq!(cells.take(0).map(|memory| memory.len()), Some(4096));
        assert_eq!(cells.take(3).map(|memory| memory.len()), Some(8192));
    }

    #[test]
    fn what_comes_home_is_where_it_was() {
        let mut cells = cells(28_672, &[(0, 20_480), (0, 8192), (8192, 8192), (16_384, 8192)]);
        let all = cells.take(0).unwrap();
        let begin = all.addr();
        cells.put(0, Some(all));
        let small: Vec<_> = (1..4).map(|slot| cells.take(slot).unwrap()).collect();
        assert_eq!(small.iter().map(|memory| memory.addr() - begin).collect::<Vec<_>>(), [0, 8192, 16_384]);
        small.into_iter().zip(1..).for_each(|(memory, slot)| cells.put(slot, Some(memory)));
        assert_eq!(cells.take(0).map(|memory| (memory.addr(), memory.len())), Some((begin, 20_480)));
        cells.put(0, None);
        assert!(cells.take(0).is_none() && cells.take(3).is_none() && cells.take(1).is_none(), "lost");
    }
}
