//! Calls that wait for memory, for an item or for the disk: they end, or are reported as deadlocks.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::mem::{Buffer, Region};
use deepnvme_swap::{Borrowed, Error, FileRange};
use deepnvme_testkit::faults::FaultPlan;
use deepnvme_testkit::watchdog::with_time_limit;

use crate::common::{KIB, LIMIT, bytes_of, change, engine, faulty, never, random, read, world};

#[test]
fn borrowing_too_much_is_a_deadlock() {
    let world = world(engine(), 4 * 4096, |_| {});
    let swapper = &world.swapper;
    for key in 0..6 {
        swapper.put(&key.to_string(), &Region::from_vec(vec![key; 4096])).unwrap();
    }
    let held: Vec<Borrowed> =
        (0..4).map(|key| swapper.borrow(&key.to_string(), key % 2 == 0, &mut never()).unwrap()).collect();
    let Err(Error::Deadlock(text)) = swapper.borrow("4", false, &mut never()) else { panic!() };
    assert!(text.contains("4 items are borrowed, 4 of them by this thread"), "{text}");
    let Err(Error::Deadlock(text)) = swapper.borrow("0", false, &mut never()) else { panic!() };
    assert!(text.contains("return it first"), "{text}");
    assert!(matches!(swapper.put("7", &Region::from_vec(vec![0])), Err(Error::Deadlock(_))));
    assert!(matches!(swapper.flush(None, &mut never()), Err(Error::Deadlock(_))));
    drop(swapper.borrow("1", false, &mut never()).unwrap());
    drop(held);
    assert_eq!(read(swapper, "4"), [4; 4096]);
    swapper.flush(None, &mut never()).unwrap();
}

#[test]
fn a_thread_without_borrows_waits_for_memory() {
    with_time_limit("a_thread_without_borrows_waits", LIMIT, || {
        let world = world(engine(), 2 * 4096, |_| {});
        for key in 0..4_u8 {
            world.swapper.put(&key.to_string(), &Region::from_vec(vec![key; 4096])).unwrap();
        }
        let held = [0, 1].map(|key| world.swapper.borrow(&key.to_string(), true, &mut never()).unwrap());
        let (swapper, (begun, begins)) = (Arc::clone(&world.swapper), std::sync::mpsc::channel());
        let waits = std::thread::spawn(move || {
            let borrowed = swapper.borrow("2", false, &mut || {
                let _ = begun.send(());
                false
            });
            bytes_of(&borrowed.unwrap())
        });
        begins.recv().unwrap();
        drop(held);
        assert_eq!(waits.join().unwrap(), [2; 4096]);
    });
}

#[test]
fn no_increment_of_a_thread_is_lost() {
    with_time_limit("no_increment_of_a_thread_is_lost", LIMIT, || {
        let world = world(engine(), 5 * 4096, |_| {});
        let swapper = &world.swapper;
        for key in 0..9 {
            swapper.put(&key.to_string(), &Region::from_vec(vec![0; 4096 + key])).unwrap();
        }
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                scope.spawn(move || {
                    for turn in 0..120 {
                        let key = deepnvme_testkit::rng::Rng::keyed(thread, &[turn]).below(9).to_string();
                        if turn % 5 == 0 {
                            swapper.prefetch([key.as_str()]).unwrap();
                        }
                        let borrowed = swapper.borrow(&key, true, &mut never()).unwrap();
                        let mut count = [0; 4];
                        borrowed.region().copy_to_slice(0, &mut count);
                        borrowed.target().copy_from_slice(0, &(u32::from_ne_bytes(count) + 1).to_ne_bytes());
                    }
                });
            }
        });
        let count = |key: usize| u32::from_ne_bytes(read(swapper, &key.to_string())[..4].try_into().unwrap());
        assert_eq!((0..9).map(count).sum::<u32>(), 4 * 120);
        let stats = swapper.stats();
        assert!(stats.resident_bytes_peak <= 5 * 4096 && stats.evictions > 0 && stats.write_backs > 0, "{stats:?}");
        assert_eq!(stats.hits + stats.waits, 9 + 480 + 9);
    });
}

#[test]
fn closing_ends_waits() {
    with_time_limit("closing_ends_waits", LIMIT, || {
        let world = world(engine(), 4096, |_| {});
        for key in ["a", "b"] {
            world.swapper.put(key, &Region::from_vec(vec![1; 4096])).unwrap();
        }
        let held = world.swapper.borrow("a", false, &mut never()).unwrap();
        let (swapper, (begun, begins)) = (Arc::clone(&world.swapper), std::sync::mpsc::channel());
        let waits = std::thread::spawn(move || swapper.borrow("b", false, &mut || begun.send(()).is_err()).map(drop));
        begins.recv().unwrap();
        world.swapper.close();
        assert!(matches!(waits.join().unwrap(), Err(Error::Closed(_))));
        assert_eq!(bytes_of(&held)[0], 1, "borrowed memory stays valid");
        drop(held);
        assert!(matches!(world.swapper.put("c", &Region::from_vec(vec![1])), Err(Error::Closed(_))));
        assert_eq!(std::fs::read_dir(world.folder.path()).unwrap().count(), 0);
    });
}

#[test]
fn waiters_for_an_abandoned_item_find_nothing() {
    with_time_limit("waiters_for_an_abandoned_item", LIMIT, || {
        let world = world(engine(), 256 * KIB, |_| {});
        let borrowed = world.swapper.create("a", 20_000, &mut never()).unwrap();
        let (swapper, (begun, begins)) = (Arc::clone(&world.swapper), std::sync::mpsc::channel());
        let mut is_cancelled = move || begun.send(()).is_err();
        let waits = std::thread::spawn(move || swapper.borrow("a", false, &mut is_cancelled).map(drop));
        begins.recv().unwrap();
        drop(borrowed);
        assert!(matches!(waits.join().unwrap(), Err(Error::NotFound { .. })));
    });
}

/// A flush that waits for a state that has passed would wait until some other call happens to write the item.
#[test]
fn a_flush_during_changes_of_other_threads_ends() {
    with_time_limit("a_flush_during_changes_of_other_threads_ends", LIMIT, || {
        for turn in 0..60_u8 {
            let world = world(engine(), 64 * 4096, |options| options.has_checksums = turn % 3 == 2);
            let swapper = &world.swapper;
            let keys: Vec<String> = (0..10).map(|key| key.to_string()).collect();
            for key in &keys {
                swapper.put(key, &Region::from_vec(vec![turn; 12_000])).unwrap();
            }
            std::thread::scope(|scope| {
                // Another thread may end while the flush waits, and no call of anybody follows.
                scope.spawn(|| {
                    for use_index in 0..300 {
                        let key = &keys[use_index % keys.len()];
                        match use_index % 7 {
                            5 => swapper.put(key, &Region::from_vec(vec![turn; 12_000])).unwrap(),
                            6 => swapper.prefetch([key.as_str()]).unwrap(),
                            _ => drop(swapper.borrow(key, true, &mut never()).unwrap()),
                        }
                    }
                });
                swapper.flush(None, &mut never()).unwrap();
            });
        }
    });
}

#[test]
fn threads_that_never_pause_do_not_hold_up_a_flush() {
    with_time_limit("threads_that_never_pause", LIMIT, || {
        for has_checksums in [false, true] {
            let world = world(engine(), 64 * 4096, |options| options.has_checksums = has_checksums);
            let swapper = &world.swapper;
            for key in ["a", "b"] {
                swapper.put(key, &Region::from_vec(vec![0; 12_000])).unwrap();
            }
            let is_over = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                for key in ["a", "b"] {
                    let is_over = &is_over;
                    scope.spawn(move || {
                        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                            change(swapper, key, &[1; 12_000]);
                        }
                    });
                }
                for _ in 0..100 {
                    swapper.flush(None, &mut never()).unwrap();
                }
                is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
        }
    });
}

#[test]
fn an_export_never_takes_an_item_that_is_deleted_before_it_is_written() {
    with_time_limit("an_export_never_takes_a_deleted_item", LIMIT, || {
        let (engine, _) =
            faulty(FaultPlan { slow: 1000, slow_max: Duration::from_millis(400), ..FaultPlan::default() });
        let world = world(engine, 64 * 4096, |_| {});
        let swapper = &world.swapper;
        let mut refused = 0;
        for seed in 0..8 {
            let data = random(seed, 9000);
            swapper.put("a", &Region::from_vec(data.clone())).unwrap();
            let file = tempfile::tempfile().unwrap();
            // Asked while the export waits for the write.
            let mut is_cancelled = || {
                let _ = swapper.delete("a");
                false
            };
            match swapper.export("a", file.as_fd(), 0, &mut is_cancelled) {
                Ok(_) => {
                    let mut found = vec![0; data.len()];
                    std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 0).unwrap();
                    assert!(found == data, "seed {seed}: an export succeeded with other bytes");
                }
                Err(Error::NotFound { .. }) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(refused > 0, "no delete came before the write");
    });
}

/// More than one copy inside the kernel.
const LARGE: usize = 80 << 20;

#[test]
fn a_copy_ends_when_its_caller_gives_up_or_the_swapper_is_closed() {
    with_time_limit("a_copy_ends_when_its_caller_gives_up", LIMIT, || {
        for closes in [false, true] {
            let world = world(engine(), LARGE, |_| {});
            let swapper = &world.swapper;
            let (source, target) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            source.set_len(LARGE as u64).unwrap();
            let range = FileRange { file: source.as_fd(), offset: 0, bytes: LARGE };
            swapper.import("a", "", &range, &mut never()).unwrap();
            let stored = swapper.stats().stored_bytes;
            if !closes {
                // Asked before each part of the copy.
                let mut asked = 0;
                let imported = swapper.import("b", "", &range, &mut || {
                    asked += 1;
                    asked == 2
                });
                assert!(matches!(imported, Err(Error::Interrupted { .. })), "{imported:?}");
                assert_eq!((swapper.keys(), swapper.stats().stored_bytes), (vec!["a".into()], stored));
            }
            let mut asked = 0;
            let exported = swapper.export("a", target.as_fd(), 0, &mut || {
                asked += 1;
                if asked == 2 && closes {
                    swapper.close();
                }
                asked == 2 && !closes
            });
            let is_expected = match &exported {
                Err(Error::Closed(_)) => closes,
                Err(Error::Interrupted { .. }) => !closes,
                _ => false,
            };
            assert!(is_expected, "{exported:?}");
            assert!(target.metadata().unwrap().len() < LARGE as u64);
        }
    });
}

#[test]
fn a_partial_read_or_write_ends_when_its_caller_gives_up_or_the_swapper_is_closed() {
    with_time_limit("a_partial_read_or_write_ends", LIMIT, || {
        let bytes = 16 << 20;
        for (writes, closes) in [(false, false), (false, true), (true, false), (true, true)] {
            let slow = FaultPlan { slow: 1000, slow_max: Duration::from_millis(100), ..FaultPlan::default() };
            let (world, source) = (world(faulty(slow).0, bytes, |_| {}), tempfile::tempfile().unwrap());
            let swapper = &world.swapper;
            source.set_len(bytes as u64).unwrap();
            let range = FileRange { file: source.as_fd(), offset: 0, bytes };
            swapper.import("a", "", &range, &mut never()).unwrap();
            let mut gives_up = || {
                if closes {
                    swapper.close();
                }
                !closes
            };
            let began = std::time::Instant::now();
            let borrowed = swapper.access("a", writes, &mut never()).unwrap();
            let moved = if writes {
                borrowed.write_at(0, &Region::from_vec(vec![1; bytes]), &mut gives_up)
            } else {
                borrowed.read_at(0, Buffer::zeroed(bytes).unwrap().into_region(), &mut gives_up)
            };
            let is_expected = match &moved {
                Err(Error::Closed(_)) => closes,
                Err(Error::Interrupted { .. }) => !closes,
                _ => false,
            };
            assert!(is_expected, "{moved:?}");
            // All of its blocks would take a minute.
            assert!(began.elapsed() < Duration::from_secs(20));
        }
    });
}
