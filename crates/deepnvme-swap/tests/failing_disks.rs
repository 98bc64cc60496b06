//! Disks that fail or damage bytes: calls end with the disk's error, and no accepted byte is lost.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::HashMap;

use deepnvme_io::ErrorKind;
use deepnvme_io::mem::Region;
use deepnvme_swap::Error;
use deepnvme_testkit::faults::FaultPlan;
use deepnvme_testkit::watchdog::with_time_limit;

use crate::common::{LIMIT, bytes_of, engine, faulty, never, random, read, world};

/// Every call succeeds or fails as the disk did; no accepted byte is lost.
#[test]
fn a_failing_disk_loses_nothing_in_memory() {
    with_time_limit("a_failing_disk_loses_nothing", LIMIT, || {
        let mut failures = 0;
        for seed in 0..25 {
            let plan = FaultPlan { seed, eio: 120, enospc: 60, ..FaultPlan::default() };
            let (engine, faults) = faulty(plan);
            let world = world(engine, 6 * 4096, |options| options.has_checksums = seed % 2 == 0);
            let swapper = &world.swapper;
            let mut model: HashMap<String, Vec<u8>> = HashMap::new();
            for turn in 0..120_u64 {
                let mut rng = deepnvme_testkit::rng::Rng::keyed(seed, &[turn]);
                let key = rng.below(10).to_string();
                let data = random(turn, 5000);
                match rng.below(4) {
                    // A failed put leaves the old item or none.
                    0 => match swapper.put(&key, &Region::from_vec(data.clone())) {
                        Ok(()) => drop(model.insert(key, data)),
                        Err(error) => check_failure(&error, &mut failures),
                    },
                    1 => match swapper.borrow(&key, true, &mut never()) {
                        Ok(borrowed) => {
                            assert!(bytes_of(&borrowed) == model[&key], "seed {seed}, turn {turn}");
                            borrowed.target().copy_from_slice(0, &data);
                            model.insert(key, data);
                        }
                        Err(Error::NotFound { .. }) => assert!(!model.contains_key(&key)),
                        Err(error) => check_failure(&error, &mut failures),
                    },
                    2 => match swapper.borrow(&key, false, &mut never()) {
                        Ok(borrowed) => assert!(bytes_of(&borrowed) == model[&key], "seed {seed}, turn {turn}"),
                        Err(Error::NotFound { .. }) => assert!(!model.contains_key(&key)),
                        Err(error) => check_failure(&error, &mut failures),
                    },
                    _ => {
                        if let Err(error) = swapper.flush(None, &mut never()) {
                            check_failure(&error, &mut failures);
                        }
                    }
                }
            }
            // The disk fails only sometimes, so every item can be read in the end.
            for (key, data) in &model {
                let borrowed = (0..200).find_map(|_| swapper.borrow(key, false, &mut never()).ok());
                assert!(bytes_of(&borrowed.expect("it is readable in the end")) == *data, "seed {seed}");
            }
            assert!(faults.counts().fatal() > 0, "seed {seed} injected nothing");
        }
        assert!(failures > 20, "only {failures} calls failed");
    });
}

fn check_failure(error: &Error, failures: &mut u32) {
    let Error::Io(error) = error else { panic!("{error}") };
    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::NoSpace) && error.path().is_some(), "{error}");
    *failures += 1;
}

#[test]
fn a_dead_disk_is_an_error_and_blocks_nobody() {
    with_time_limit("a_dead_disk", LIMIT, || {
        let (engine, _) = faulty(FaultPlan { eio_after_ops: Some(0), ..FaultPlan::default() });
        let world = world(engine, 4 * 4096, |_| {});
        for key in ["a", "b", "c", "d"] {
            world.swapper.put(key, &Region::from_vec(random(1, 4096))).unwrap();
        }
        for _ in 0..3 {
            let refused = world.swapper.put("e", &Region::from_vec(random(2, 4096))).unwrap_err();
            assert!(matches!(refused, Error::Io(_)), "{refused}");
            assert!(matches!(world.swapper.flush(None, &mut never()), Err(Error::Io(_))));
            assert!(read(&world.swapper, "a") == random(1, 4096), "items in memory stay readable");
        }
        assert!(!world.swapper.contains("e"));
    });
}

#[test]
fn damage_on_disk_is_found() {
    let world = world(engine(), 4 * 4096, |options| (options.has_checksums, options.is_named) = (true, true));
    let swapper = &world.swapper;
    swapper.put("victim", &Region::from_vec(random(1, 10_000))).unwrap();
    let part = swapper.extents("victim", &mut never()).unwrap().remove(0);
    swapper.put("other", &Region::from_vec(random(2, 16_000))).unwrap();
    assert!(swapper.stats().evictions > 0, "the victim is on disk only");
    use std::os::unix::fs::FileExt;
    std::fs::File::options().write(true).open(&part.path).unwrap().write_all_at(b"!", part.offset + 5000).unwrap();
    let Err(Error::Corrupt { path, key, offset, .. }) = swapper.borrow("victim", false, &mut never()) else { panic!() };
    assert_eq!((path, key.as_str(), offset), (part.path, "victim", part.offset));
    swapper.put("victim", &Region::from_vec(random(3, 10_000))).unwrap();
    assert!(read(swapper, "victim") == random(3, 10_000), "the key can be put again");
}
