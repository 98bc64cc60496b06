//! Checks every interleaving of the oneshot that carries a result:
//! `RUSTFLAGS="--cfg loom" cargo test -p deepnvme-io --release --test loom`
#![cfg(loom)]

use deepnvme_io::handover::Handover;
use loom::sync::Arc;
use loom::thread;

#[test]
fn a_waiter_gets_the_value_whenever_it_comes() {
    loom::model(|| {
        let handover = Arc::new(Handover::new());
        let writer = Arc::clone(&handover);
        let thread = thread::spawn(move || writer.put(7));
        assert_eq!(handover.wait(), 7);
        assert_eq!(handover.get(), Some(7));
        thread.join().unwrap();
    });
}

#[test]
fn two_waiters_are_both_woken() {
    loom::model(|| {
        let handover = Arc::new(Handover::new());
        let other = Arc::clone(&handover);
        let waiter = thread::spawn(move || other.wait());
        let writer = Arc::clone(&handover);
        let thread = thread::spawn(move || writer.put(7));
        assert_eq!(handover.wait(), 7);
        assert_eq!(waiter.join().unwrap(), 7);
        thread.join().unwrap();
    });
}

#[test]
fn the_first_of_two_values_stays() {
    loom::model(|| {
        let handover = Arc::new(Handover::new());
        let writer = Arc::clone(&handover);
        let thread = thread::spawn(move || writer.put(1));
        handover.put(2);
        let seen = handover.wait();
        thread.join().unwrap();
        assert_eq!(handover.get(), Some(seen));
    });
}
