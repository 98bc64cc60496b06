//! Accepting, refusing and returning ops, and counting them.

use std::collections::BTreeSet;
use std::sync::Arc;

use deepnvme_io::op::{OpKind, Submit, Token};

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, random_bytes, region_at};

const OP_BYTES: usize = 4096;

/// Every accepted op is returned by `reap` exactly once.
///
/// # Panics
/// If the backend breaks the contract, like every check.
pub fn accepted_ops_come_back_exactly_once(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(1, 32 * OP_BYTES));
    let mut harness = Harness::new(make, 32);
    let mut submitted = BTreeSet::new();
    for index in 0..32 {
        let memory = region_at(0, OP_BYTES).region();
        let op = harness.op(OpKind::Read, &file.file, index * OP_BYTES as u64, &[memory]);
        submitted.insert(harness.submit(op));
        assert_eq!(harness.backend.in_flight(), index as u32 + 1);
    }
    let mut returned = BTreeSet::new();
    for completion in harness.reap(32) {
        assert!(returned.insert(completion.op.token), "{:?} came back twice", completion.op.token);
        assert_eq!(completion.result, Ok(OP_BYTES));
    }
    assert_eq!(returned, submitted);
    assert_eq!(harness.backend.in_flight(), 0);
    let mut more = Vec::new();
    for _ in 0..10 {
        harness.backend.reap(0, &mut more).expect("the queue works");
    }
    assert!(more.is_empty(), "ops came back twice: {more:?}");
}

/// With `depth` ops in flight, the next one is returned unchanged, and accepted once another completes.
pub fn a_full_queue_returns_the_op(make: Make<'_>) {
    let content = random_bytes(2, 8 * OP_BYTES);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 4);
    for index in 0..4 {
        let op = harness.op(OpKind::Read, &file.file, index * 100, &[region_at(0, OP_BYTES).region()]);
        harness.submit(op);
    }
    let target = region_at(17, 1000);
    let fifth = harness.op(OpKind::Read, &file.file, 4321, &[target.region()]);
    let token = fifth.token;
    let Submit::Busy(fifth) = harness.backend.submit(fifth) else { panic!("a fifth op was taken at depth 4") };
    assert_eq!((fifth.token, fifth.kind, fifth.offset), (token, OpKind::Read, 4321));
    assert_eq!((fifth.iovecs[0].addr(), fifth.iovecs[0].len()), (target.addr(), 1000));
    assert!(Arc::ptr_eq(&fifth.file, &file.file));
    assert_eq!(harness.backend.in_flight(), 4);

    let completed = harness.reap_some().len() as u32;
    harness.submit(fifth);
    assert_eq!(harness.backend.in_flight(), 5 - completed);
    let rest = harness.reap(5 - completed as usize);
    assert!(rest.iter().any(|completion| completion.op.token == token));
    assert_eq!(bytes_of(&target.region()), content[4321..5321]);
}

/// A completion contains the op as submitted: the same file, memory, offset and token.
pub fn a_completion_returns_the_submitted_op(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(3, 4 * OP_BYTES));
    let mut harness = Harness::new(make, 8);
    for (index, number) in [0, 1, u64::from(u32::MAX), 1 << 32, u64::MAX - 1, u64::MAX].into_iter().enumerate() {
        let memory = [region_at(0, 700).region(), region_at(5, 300).region()];
        let mut op = harness.op(OpKind::Read, &file.file, index as u64 * 10, &memory);
        op.token = Token(number);
        let op = harness.run(op).op;
        assert_eq!((op.token, op.kind, op.offset), (Token(number), OpKind::Read, index as u64 * 10));
        assert!(Arc::ptr_eq(&op.file, &file.file), "another file was returned");
        let places: Vec<_> = op.iovecs.iter().map(|iovec| (iovec.addr(), iovec.len())).collect();
        assert_eq!(places, [(memory[0].addr(), 700), (memory[1].addr(), 300)]);
    }
}

/// `reap` waits for at least `min` completions, and keeps the contents of the vector.
pub fn reap_appends_at_least_min(make: Make<'_>) {
    let file = TestFile::holding(&random_bytes(4, 16 * OP_BYTES));
    let mut harness = Harness::new(make, 16);
    let mut completions = Vec::new();
    for round in 1..=3_usize {
        for index in 0..16 {
            let memory = region_at(0, OP_BYTES).region();
            let op = harness.op(OpKind::Read, &file.file, index * OP_BYTES as u64, &[memory]);
            harness.submit(op);
        }
        let before = completions.len();
        harness.backend.reap(5, &mut completions).expect("the queue works");
        assert!(completions.len() >= before + 5, "reap(5) brought {}", completions.len() - before);
        assert_eq!(harness.backend.in_flight() as usize, 16 * round - completions.len());
        let rest = harness.reap(harness.backend.in_flight() as usize);
        completions.extend(rest);
    }
    let tokens: BTreeSet<Token> = completions.iter().map(|completion| completion.op.token).collect();
    assert_eq!(tokens.len(), 48);
}

/// A queue of depth one works, repeatedly.
pub fn depth_one_works(make: Make<'_>) {
    let content = random_bytes(5, 3000);
    let file = TestFile::holding(&content);
    let mut harness = Harness::new(make, 1);
    for index in 0..50 {
        let target = region_at(index, 50);
        let op = harness.op(OpKind::Read, &file.file, 50 * index as u64, &[target.region()]);
        harness.submit(op);
        let extra = harness.op(OpKind::Read, &file.file, 0, &[region_at(0, 1).region()]);
        assert!(matches!(harness.backend.submit(extra), Submit::Busy(_)), "a second op was taken at depth 1");
        assert_eq!(harness.reap(1)[0].result, Ok(50));
        assert_eq!(bytes_of(&target.region()), content[50 * index..50 * index + 50]);
    }
}
