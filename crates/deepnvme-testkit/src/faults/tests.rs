//! Fault plans: kinds, frequencies, and determinism.

use std::sync::Arc;

use deepnvme_io::op::{Errno, Op, OpKind, Token};

use super::{FaultPlan, Faults, InjectedFault};
use crate::data::{TestFile, open_direct, region_at};

fn op(file: &TestFile, kind: OpKind, offset: u64, bytes: usize) -> Op {
    let iovecs = std::iter::once(region_at(0, bytes).region()).collect();
    Op { token: Token(0), kind, file: file.file.clone(), offset, iovecs, cufile: None }
}

#[test]
fn an_empty_plan_does_nothing() {
    let file = TestFile::holding(b"x");
    let faults = Faults::new(FaultPlan::default());
    for offset in 0..200 {
        assert_eq!(faults.decide(&op(&file, OpKind::Write, offset, 4096)), (InjectedFault::Nothing, None));
    }
    assert_eq!(faults.counts(), super::FaultCounts { ops: 200, ..Default::default() });
}

#[test]
fn faults_are_a_function_of_seed_place_and_try() {
    let file = TestFile::holding(b"x");
    let plan = FaultPlan { seed: 5, short: 300, eintr: 200, eio: 100, enospc: 100, ..FaultPlan::default() };
    let injected = |plan: &FaultPlan, offsets: &mut dyn Iterator<Item = u64>| -> Vec<(u64, InjectedFault)> {
        let faults = Faults::new(plan.clone());
        let mut injected: Vec<_> =
            offsets.map(|offset| (offset, faults.decide(&op(&file, OpKind::Write, offset, 9000)).0)).collect();
        injected.sort_by_key(|fault| fault.0);
        injected
    };
    let one = injected(&plan, &mut (0..300));
    assert_eq!(one, injected(&plan, &mut (0..300).rev()), "the order of the threads must not matter");
    let again = injected(&plan, &mut std::iter::repeat_n(7, 50));
    assert!(again.iter().any(|fault| fault.1 != again[0].1), "a retry must be able to fare better");
    assert_ne!(one, injected(&FaultPlan { seed: 6, ..plan }, &mut (0..300)));
}

#[test]
fn every_fault_is_drawn_and_counted() {
    let file = TestFile::holding(b"x");
    let plan =
        FaultPlan { seed: 1, short: 200, eintr: 200, eagain: 200, eio: 200, enospc: 200, ..FaultPlan::default() };
    let faults = Faults::new(FaultPlan { sync_eio: 500, ..plan });
    for offset in 0..500 {
        let _ = faults.decide(&op(&file, OpKind::Write, offset, 9000));
        let _ = faults.decide(&op(&file, OpKind::SyncData, offset, 0));
    }
    let counts = faults.counts();
    assert_eq!(counts.ops, 1000);
    for count in [counts.short, counts.eintr, counts.eagain, counts.eio, counts.enospc, counts.sync_eio] {
        assert!(count > 20, "{counts:?}");
    }
    assert_eq!(counts.fatal(), counts.eio + counts.enospc + counts.sync_eio);
}

#[test]
fn a_dead_device_and_a_bad_sector_stay_so() {
    let file = TestFile::holding(b"x");
    let dying = Faults::new(FaultPlan { eio_after_ops: Some(3), ..FaultPlan::default() });
    let injected: Vec<InjectedFault> = (0..6).map(|at| dying.decide(&op(&file, OpKind::Read, at, 10)).0).collect();
    assert_eq!(injected[..3], [InjectedFault::Nothing; 3]);
    assert_eq!(injected[3..], [InjectedFault::Fail(Errno::IO); 3]);
    let sector = Faults::new(FaultPlan { eio_at_byte: Some(100), ..FaultPlan::default() });
    let hit =
        |offset, bytes| sector.decide(&op(&file, OpKind::Read, offset, bytes)).0 == InjectedFault::Fail(Errno::IO);
    assert!(hit(0, 101) && hit(100, 1) && !hit(0, 100) && !hit(101, 50));
}

#[test]
fn cuts_move_at_least_one_byte_and_stay_aligned_on_direct_files() {
    let file = TestFile::holding(&[0; 8192]);
    let faults = Faults::new(FaultPlan { seed: 3, short: 1000, ..FaultPlan::default() });
    let anywhere = Faults::new(FaultPlan { short_anywhere: true, ..faults.plan().clone() });
    let direct = open_direct(&file.path);
    let mut unaligned = 0;
    for offset in 0..300 {
        for bytes in [1, 2, 512, 513, 4096, 20_000] {
            let mut op = op(&file, OpKind::Read, offset * 4096, bytes);
            match faults.decide(&op).0 {
                InjectedFault::Short { reported, carried } => {
                    assert!(reported > 0 && reported < bytes && carried == reported);
                    unaligned += usize::from(reported % 512 != 0);
                }
                fault => assert_eq!((bytes, fault), (1, InjectedFault::Nothing)),
            }
            let Some(direct) = &direct else { continue };
            op.file = Arc::clone(direct);
            match faults.decide(&op).0 {
                InjectedFault::Short { reported, carried } => {
                    assert!(reported % 4096 == 0 && reported > 0 && reported < bytes && carried == reported);
                }
                fault => assert_eq!(fault, InjectedFault::Nothing),
            }
            if let InjectedFault::Short { reported, carried } = anywhere.decide(&op).0 {
                assert!(reported > 0 && reported < bytes && carried <= bytes);
                assert!(carried % 4096 == 0 || carried == bytes, "the device would refuse {carried} bytes");
            }
        }
    }
    assert!(unaligned > 100);
}
