//! Many concurrent requests on an engine that may fail them. Every outcome is checked.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::op::Errno;
use deepnvme_io::{
    Durability, Engine, Error, ErrorKind, ReadItem, TensorFile, Transferred, WriteItem, WriteMode, WriteOptions,
};
use deepnvme_mem::RegionMut;
use deepnvme_testkit::data::{TestFile, bytes_of, difference, random_bytes, region_at, region_holding};
use deepnvme_testkit::rng::Rng;

/// Cuts a file into ranges of odd sizes. Most are used, and the others must not change.
fn ranges(rng: &mut Rng, file_bytes: u64) -> Vec<(Range<u64>, bool)> {
    let mut cuts: Vec<u64> = (0..16).map(|_| rng.below(file_bytes)).collect();
    cuts.extend([0, file_bytes]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| (pair[0]..pair[1], rng.chance(750))).collect()
}

/// An engine, a file, and the seed that a failed check prints.
pub(crate) struct Storm<'a> {
    pub(crate) seed: u64,
    pub(crate) engine: &'a Engine,
    pub(crate) file: &'a TestFile,
    pub(crate) opened: &'a Arc<TensorFile>,
}

impl Storm<'_> {
    /// Writes many ranges concurrently. Returns the number of failed requests.
    pub(crate) fn write(&self, rng: &mut Rng) -> u64 {
        let Self { seed, engine, file, opened } = self;
        let before = file.bytes();
        let mut expected = before.clone();
        let mut pendings = Vec::new();
        let (mut batch, mut batch_ranges) = (Vec::new(), Vec::new());
        let options = WriteOptions { mode: WriteMode::InPlace, durability: pick_durability(rng) };
        for (range, used) in ranges(rng, before.len() as u64) {
            if !used {
                continue;
            }
            let bytes = random_bytes(rng.next_u64(), (range.end - range.start) as usize);
            expected[range.start as usize..range.end as usize].copy_from_slice(&bytes);
            let source = region_holding(rng.below(600) as usize, &bytes).region();
            if rng.chance(300) {
                batch.push(WriteItem { file: Arc::clone(opened), offset: range.start, source });
                batch_ranges.push(range);
            } else {
                let pending = engine.write(opened, range.start, source, options);
                pendings.push((range, pending.expect("an open engine takes requests")));
            }
        }
        let batch = engine.write_batch(batch, options).expect("an open engine takes requests");
        let mut failed = Vec::new();
        for (range, pending) in pendings {
            let (returned, result) = pending.wait();
            let returned = returned.unwrap_or_else(|| panic!("seed {seed}: the memory of {range:?} was not returned"));
            assert_eq!(returned.len() as u64, range.end - range.start, "seed {seed}: other memory was returned");
            if self.finish(&range, result) {
                failed.push(vec![range]);
            }
        }
        let (returned, result) = batch.wait();
        assert_eq!(
            returned.map(|returned| returned.len()),
            Some(batch_ranges.len()),
            "seed {seed}: memory of a batch is missing"
        );
        let whole = batch_ranges.first().map_or(0, |r| r.start)..batch_ranges.last().map_or(0, |r| r.end);
        if self.check_sum(&whole, batch_ranges.iter().map(|r| r.end - r.start).sum(), result) {
            failed.push(batch_ranges);
        }
        // Failed ranges may be old, new or mixed. Everything else must be as expected.
        let mut found = file.bytes();
        assert_eq!(found.len(), expected.len(), "seed {seed}: the file has another length");
        for range in failed.iter().flatten() {
            let range = range.start as usize..range.end as usize;
            for at in range.clone() {
                assert!(found[at] == before[at] || found[at] == expected[at], "seed {seed}: byte {at} is neither");
            }
            found[range.clone()].copy_from_slice(&expected[range]);
        }
        assert_eq!(difference(&found, &expected), None, "seed {seed}: the file after the writes");
        failed.len() as u64
    }

    /// Reads many ranges concurrently. Returns the number of failed requests.
    pub(crate) fn read(&self, rng: &mut Rng) -> u64 {
        let Self { seed, engine, file, opened } = self;
        let content = file.bytes();
        let mut pendings = Vec::new();
        let (mut batch, mut batch_ranges) = (Vec::new(), Vec::new());
        for (range, used) in ranges(rng, content.len() as u64) {
            if !used {
                continue;
            }
            let target = region_at(rng.pick(&[0, 0, 1, 64, 512]), (range.end - range.start) as usize);
            if rng.chance(300) {
                batch.push(ReadItem { file: Arc::clone(opened), offset: range.start, target });
                batch_ranges.push(range);
            } else {
                let pending = engine.read(opened, range.start, target).expect("an open engine takes requests");
                pendings.push((range, pending));
            }
        }
        let batch = engine.read_batch(batch).expect("an open engine takes requests");
        let mut failures = 0;
        let check = |range: &Range<u64>, returned: RegionMut| {
            let wrong = difference(&bytes_of(&returned.region()), &content[range.start as usize..range.end as usize]);
            assert_eq!(wrong, None, "seed {seed}: a read of {range:?}");
        };
        for (range, pending) in pendings {
            let (returned, result) = pending.wait();
            let returned = returned.unwrap_or_else(|| panic!("seed {seed}: the memory of {range:?} was not returned"));
            if self.finish(&range, result) {
                failures += 1;
            } else {
                check(&range, returned);
            }
        }
        let (returned, result) = batch.wait();
        let returned = returned.unwrap_or_else(|| panic!("seed {seed}: the memory of a batch was not returned"));
        let whole = batch_ranges.first().map_or(0, |r| r.start)..batch_ranges.last().map_or(0, |r| r.end);
        if self.check_sum(&whole, batch_ranges.iter().map(|r| r.end - r.start).sum(), result) {
            failures += 1;
        } else {
            batch_ranges.iter().zip(returned).for_each(|(range, returned)| check(range, returned));
        }
        failures
    }

    /// Checks that an error contains the injected errno, the file, and an offset in it.
    fn check_error(&self, error: &Error, range: &Range<u64>) {
        let (seed, path) = (self.seed, self.opened.path());
        let what = format!("seed {seed}, {range:?}: {error}");
        let errno = error.errno().unwrap_or_else(|| panic!("no errno: {what}"));
        let kind = match Errno::from_raw_os_error(errno) {
            Errno::IO => ErrorKind::Io,
            Errno::NOSPC => ErrorKind::NoSpace,
            _ => panic!("nobody injected that: {what}"),
        };
        assert_eq!(error.kind(), kind, "{what}");
        if error.operation() == "sync" {
            let folder = path.parent();
            assert!(error.path() == Some(path) || error.path() == folder, "another path: {what}");
            return;
        }
        assert_eq!(error.path(), Some(path), "another path: {what}");
        let offset = error.offset().unwrap_or_else(|| panic!("no offset: {what}"));
        let around = range.start.saturating_sub(4096)..=range.end;
        assert!(around.contains(&offset), "an offset outside the request: {what}");
        assert!(error.bytes_done() <= range.end - range.start, "too many bytes are done: {what}");
        assert!(error.to_string().contains("data.bin"), "the message names no file: {what}");
    }

    /// Checks an outcome and returns whether it is a failure.
    fn finish(&self, range: &Range<u64>, result: Result<Transferred, Error>) -> bool {
        self.check_sum(range, range.end - range.start, result)
    }

    fn check_sum(&self, range: &Range<u64>, sum: u64, result: Result<Transferred, Error>) -> bool {
        match result {
            Ok(transfer) => {
                assert_eq!(transfer.bytes, sum, "seed {}: {range:?} moved other bytes than asked", self.seed);
                false
            }
            Err(error) => {
                self.check_error(&error, range);
                true
            }
        }
    }
}

fn pick_durability(rng: &mut Rng) -> Durability {
    rng.pick(&[Durability::None, Durability::None, Durability::None, Durability::Data, Durability::Full])
}
