//! Cuts a workload into requests. This module does no I/O.

use super::workload::{AccessOrder, Workload};

/// Maximum memory of a sequential round, unless every byte is compared or the workload names its buffer.
pub(super) const BUFFER_BYTES_MAX: u64 = 4 << 30;
/// Requests in flight for a file that is larger than the memory.
const PARTS_IN_FLIGHT: u64 = 2;

/// Maximum blocks in one request.
const BATCH_MAX: usize = 16;

/// One transfer between a file and one slot of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) file: usize,
    pub(super) offset: u64,
    bytes: u64,
    /// The index of its slot.
    pub(super) slot: usize,
}

/// The requests of a round, and the slots of memory that they need. Unlike those of a pool, slots may differ in size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestPlan {
    pub(super) pieces: Vec<Piece>,
    /// Bytes of each slot: those of its pieces.
    pub(super) slots: Vec<u64>,
    /// Pieces in flight at once. No two of them share a slot.
    pub(super) in_flight: usize,
    /// Pieces in one request: several small blocks, since each request costs a wake-up of another thread.
    batch: usize,
}

impl RequestPlan {
    /// Returns the bytes of all slots.
    pub(super) fn buffer_bytes(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// Returns the pieces of each request. The first requests grow in size. The engine serves requests in turn:
    /// requests of one size that start together also end together, and the device would idle each time.
    pub(super) fn requests(&self) -> impl Iterator<Item = &[Piece]> {
        let (mut rest, mut count) = (self.pieces.as_slice(), 0);
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            count += 1;
            let (request, after) = rest.split_at(count.min(self.batch).min(rest.len()));
            rest = after;
            Some(request)
        })
    }

    /// Cuts a workload up. `buffer_bytes` bounds the memory of a sequential workload that does not name its buffer. If
    /// contents are compared, it has no effect: then each piece has its own slot.
    pub(super) fn of(workload: &Workload, buffer_bytes: u64) -> Self {
        match (workload.order, workload.buffer_bytes) {
            (AccessOrder::Sequential, None) => in_parts(workload, buffer_bytes),
            (AccessOrder::Sequential, Some(_)) | (AccessOrder::Random, _) => in_blocks(workload),
        }
    }

    /// Shuffles random requests. Sequential ones keep their order.
    pub(super) fn shuffle(&mut self, order: AccessOrder, seed: u64) {
        if order == AccessOrder::Sequential {
            return;
        }
        fastrand::Rng::with_seed(seed).shuffle(&mut self.pieces);
        // Random pieces have one size: any slot fits.
        if self.slots.len() < self.pieces.len() {
            let slots = self.slots.len();
            self.pieces.iter_mut().enumerate().for_each(|(index, piece)| piece.slot = index % slots);
        }
    }
}

fn in_parts(workload: &Workload, buffer_bytes: u64) -> RequestPlan {
    let (files, bytes) = (workload.file_count(), workload.file_bytes());
    let share = buffer_bytes / files as u64;
    let part_bytes = if bytes <= share || workload.validate {
        bytes
    } else {
        // Whole blocks: only the last request of a file has a partial block. It has a slot of its own.
        let block_bytes = workload.config.block_bytes;
        (share / (PARTS_IN_FLIGHT + 1) / block_bytes * block_bytes).max(block_bytes)
    };
    let whole_parts = bytes / part_bytes;
    let rest_bytes = bytes % part_bytes;
    let in_turn = files * whole_parts.min(PARTS_IN_FLIGHT) as usize;
    let mut slots = vec![part_bytes; in_turn];
    // The files in turn: their disks work at the same time.
    let whole = (0..whole_parts as usize * files).map(|index| Piece {
        file: index % files,
        offset: (index / files) as u64 * part_bytes,
        bytes: part_bytes,
        slot: index % in_turn,
    });
    let mut pieces: Vec<_> = whole.collect();
    if rest_bytes > 0 {
        slots.extend(std::iter::repeat_n(rest_bytes, files));
        let offset = whole_parts * part_bytes;
        pieces.extend((0..files).map(|file| Piece { file, offset, bytes: rest_bytes, slot: in_turn + file }));
    }
    RequestPlan { pieces, slots, in_flight: in_turn, batch: 1 }
}

fn in_blocks(workload: &Workload) -> RequestPlan {
    let config = &workload.config;
    let (bytes, files, block_bytes) = (workload.file_bytes(), workload.file_count(), config.block_bytes);
    // All blocks are whole. The remainder of a sequential file is a piece of its own.
    let whole = (bytes / block_bytes) as usize * files;
    let rest_bytes = bytes % block_bytes;
    if whole == 0 {
        return in_parts(workload, u64::MAX);
    }
    // Twice the queue depth: younger requests complete while the run waits for the oldest, and the queues must stay
    // full.
    let in_flight = (2 * config.workers as usize * config.queue_depth as usize).min(whole);
    let slots = match workload.buffer_bytes {
        Some(buffer_bytes) => ((buffer_bytes / block_bytes) as usize).clamp(1, whole),
        None if workload.validate => whole,
        None => in_flight,
    };
    let in_flight = in_flight.min(slots);
    let piece = |index: usize| Piece {
        file: index % files,
        offset: (index / files) as u64 * block_bytes,
        bytes: block_bytes,
        slot: index % slots,
    };
    // An eighth of the pieces in flight: while one request is handed to a worker, the others keep the queues full.
    let batch = (in_flight / 8).clamp(1, BATCH_MAX);
    let mut plan =
        RequestPlan { pieces: (0..whole).map(piece).collect(), slots: vec![block_bytes; slots], in_flight, batch };
    if rest_bytes > 0 {
        plan.slots.extend(std::iter::repeat_n(rest_bytes, files));
        let offset = bytes - rest_bytes;
        plan.pieces.extend((0..files).map(|file| Piece { file, offset, bytes: rest_bytes, slot: slots + file }));
    }
    plan
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::super::workload::{Direction, tests::small};
    use super::*;

    fn workload(order: AccessOrder, files: usize, io_bytes: u64, validate: bool) -> Workload {
        let folders = ["/a", "/b", "/c"].map(Path::new);
        Workload { order, io_bytes, validate, ..small(Direction::Read, &folders[..files]) }
    }

    proptest! {
        #[test]
        fn every_byte_of_every_file_is_transferred_once(
            is_random: bool, files in 1_usize..4, io_bytes in 65_536_u64..3_000_000, validate: bool,
            buffer in 0_u64..2_000_000, seed: u64, ring in proptest::option::of(65_536_u64..2_000_000),
        ) {
            let ring = ring.filter(|_| !validate);
            let order = if is_random { AccessOrder::Random } else { AccessOrder::Sequential };
            let workload = Workload { buffer_bytes: ring, ..workload(order, files, io_bytes, validate) };
            let mut plan = RequestPlan::of(&workload, buffer);
            plan.shuffle(order, seed);
            for file in 0..files {
                let mut pieces: Vec<_> = plan.pieces.iter().filter(|piece| piece.file == file).collect();
                pieces.sort_by_key(|piece| piece.offset);
                let end = pieces.iter().try_fold(0, |end, piece| (piece.offset == end).then_some(end + piece.bytes));
                prop_assert_eq!(end, Some(workload.file_bytes()));
            }
            prop_assert!(plan.pieces.iter().all(|piece| piece.bytes == plan.slots[piece.slot]));
            prop_assert!(plan.in_flight >= 1 && plan.slots.len() <= plan.pieces.len());
            prop_assert!(plan.batch >= 1 && plan.batch <= plan.in_flight);
            let requests: Vec<_> = plan.requests().flatten().copied().collect();
            prop_assert_eq!(&requests, &plan.pieces);
            prop_assert!(plan.requests().all(|request| (1..=plan.batch).contains(&request.len())));
            let near = plan.pieces.windows(plan.in_flight).all(|window| {
                window.iter().enumerate().all(|(index, piece)| window[..index].iter().all(|other| other.slot != piece.slot))
            });
            prop_assert!(near, "two requests in flight share a slot");
            prop_assert!(!validate || plan.slots.len() == plan.pieces.len(), "all compared bytes are in memory");
            let fits = plan.buffer_bytes() <= buffer.max(3 * 3 * 65_536);
            prop_assert!(validate || is_random || ring.is_some() || fits, "{} of {buffer}", plan.buffer_bytes());
            let ring_fits = ring.is_none_or(|ring| plan.buffer_bytes() <= ring + 3 * 65_536);
            prop_assert!(ring_fits, "{} of {ring:?}", plan.buffer_bytes());
        }
    }

    #[test]
    fn a_tensor_is_one_request_and_a_large_file_has_two_in_flight() {
        let one = RequestPlan::of(&workload(AccessOrder::Sequential, 1, 1 << 30, false), BUFFER_BYTES_MAX);
        assert_eq!((one.pieces.len(), one.slots.len()), (1, 1));
        let huge = RequestPlan::of(&workload(AccessOrder::Sequential, 1, 100 << 30, false), BUFFER_BYTES_MAX);
        assert_eq!((huge.in_flight, huge.slots.len()), (2, 3));
        assert!(huge.buffer_bytes() <= BUFFER_BYTES_MAX && huge.pieces.len() == 76, "{}", huge.pieces.len());
    }
}
