//! Checks every interleaving of the oneshot that carries a result:
//! `RUSTFLAGS="--cfg loom" cargo test -p deepnvme-io --release --test loom`
#![cfg(loom)]

use deepnvme_io::Oneshot;
use loom::sync::Arc;
use loom::thread::{self, JoinHandle};

/// Creates a oneshot, and a thread that sets it.
fn set_by_thread(value: u32) -> (Arc<Oneshot<u32>>, JoinHandle<()>) {
    let oneshot = Arc::new(Oneshot::new());
    let writer = Arc::clone(&oneshot);
    (oneshot, thread::spawn(move || writer.set(value)))
}

#[test]
fn loom_a_waiter_gets_the_value_whenever_it_comes() {
    loom::model(|| {
        let (oneshot, thread) = set_by_thread(7);
        assert_eq!(oneshot.wait(), 7);
        assert_eq!(oneshot.get(), Some(7));
        thread.join().unwrap();
    });
}

#[test]
fn loom_two_waiters_are_both_woken() {
    loom::model(|| {
        let (oneshot, thread) = set_by_thread(7);
        let other = Arc::clone(&oneshot);
        let waiter = thread::spawn(move || other.wait());
        assert_eq!(oneshot.wait(), 7);
        assert_eq!(waiter.join().unwrap(), 7);
        thread.join().unwrap();
    });
}

#[test]
fn loom_the_first_of_two_values_stays() {
    loom::model(|| {
        let (oneshot, thread) = set_by_thread(1);
        oneshot.set(2);
        let seen = oneshot.wait();
        thread.join().unwrap();
        assert_eq!(oneshot.get(), Some(seen));
    });
}
