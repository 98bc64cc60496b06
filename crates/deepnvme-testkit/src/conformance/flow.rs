//! Many ops through one queue, in both submit modes, and two queues at once.

use deepnvme_io::SubmitMode;
use deepnvme_io::op::OpKind;

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, random_bytes, region_at, region_holding};

const OP_BYTES: usize = 4096;

/// Many more ops than the queue depth pass through it, each with its own bytes.
pub fn a_window_slides_over_many_ops(make: Make<'_>) {
    const OPS: usize = 500;
    let content = random_bytes(6, OPS * 512);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 7);
    let mut completions = Vec::new();
    for index in 0..OPS {
        let op = harness.op(OpKind::Read, &file.file, 512 * index as u64, &[region_at(0, 512).region()]);
        harness.submit(op);
        if harness.backend.in_flight() == 7 {
            harness.backend.reap(1, &mut completions).expect("the queue works");
        }
    }
    let rest = harness.reap(harness.backend.in_flight() as usize);
    completions.extend(rest);
    assert_eq!(completions.len(), OPS);
    for completion in completions {
        let at = completion.op.offset as usize;
        assert_eq!(completion.result, Ok(512));
        assert_eq!(bytes_of(&completion.op.iovecs[0]), content[at..at + 512], "the op at {at} has other bytes");
    }
}

/// Batched and single submission complete the same ops. `flush` may be called any time and never waits.
pub fn both_submit_modes_complete(make: Make<'_>) {
    for mode in [SubmitMode::Batch, SubmitMode::Single] {
        let content = random_bytes(7, 8 * OP_BYTES);
        let file = TestFile::holding(&vec![0; content.len()]);
        let mut harness = Harness::with_mode(make, 8, mode);
        harness.backend.flush().expect("an empty flush");
        for (index, bytes) in content.chunks(OP_BYTES).enumerate() {
            let source = region_holding(0, bytes).region();
            let op = harness.op(OpKind::Write, &file.file, (index * OP_BYTES) as u64, &[source]);
            harness.submit(op);
            if index % 3 == 0 {
                harness.backend.flush().expect("the queue works");
            }
        }
        assert_eq!(harness.backend.in_flight(), 8, "only `reap` returns ops");
        assert!(harness.reap(8).iter().all(|completion| completion.result == Ok(OP_BYTES)));
        assert!(file.bytes() == content, "other bytes were written in mode {mode:?}");
    }
}

/// Two backends read one file without mixing their ops.
pub fn two_backends_do_not_mix(make: Make<'_>) {
    let content = random_bytes(8, 64 * OP_BYTES);
    let file = TestFile::holding(&content);
    let mut harnesses = [Harness::new(make, 16), Harness::new(make, 16)];
    for round in 0..4 {
        for (side, harness) in harnesses.iter_mut().enumerate() {
            for index in 0..8 {
                let offset = ((side * 32 + round * 8 + index) * OP_BYTES) as u64;
                let op = harness.op(OpKind::Read, &file.file, offset, &[region_at(0, OP_BYTES).region()]);
                harness.submit(op);
            }
        }
        for (side, harness) in harnesses.iter_mut().enumerate() {
            for completion in harness.reap(8) {
                let at = completion.op.offset as usize;
                assert_eq!(at / OP_BYTES / 32, side, "an op completed on another backend");
                assert_eq!(completion.result, Ok(OP_BYTES));
                assert!(bytes_of(&completion.op.iovecs[0]) == content[at..at + OP_BYTES]);
            }
        }
    }
}
