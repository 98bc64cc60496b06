//! A file as a vector, and random programs of writes and reads over it.
//!
//! A program is a function of its seed, length and scope, so two numbers reproduce and shrink a failure. Several
//! threads share one file by [`ranges`]: each owns a range and does not touch the rest.

mod program;

use std::ops::Range;

pub use program::{Program, Scope, Step, pick_bytes};

use crate::rng::Rng;

/// The expected contents of a range of a file. It knows nothing of blocks, queues and errors.
#[derive(Clone, Debug)]
pub struct Model {
    start: u64,
    bytes: Vec<u8>,
}

impl Model {
    /// Creates a model of the file from `start` on, with contents `bytes`.
    #[must_use]
    pub const fn new(start: u64, bytes: Vec<u8>) -> Self {
        Self { start, bytes }
    }

    /// Returns the modelled range.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes.len() as u64
    }

    /// Returns the contents.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Applies a write. It extends the file if it ends later, with zeros in a gap.
    ///
    /// # Panics
    /// If it starts before the model.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let at = offset.checked_sub(self.start).expect("a write before the model's range") as usize;
        if bytes.is_empty() {
            return;
        }
        let end = at + bytes.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[at..end].copy_from_slice(bytes);
    }

    /// Returns the result of a read: the bytes before the end of the file.
    ///
    /// # Panics
    /// If it starts before the model.
    #[must_use]
    pub fn read(&self, range: &Range<u64>) -> &[u8] {
        let at = range.start.checked_sub(self.start).expect("a read before the model's range") as usize;
        let end = (range.end - self.start) as usize;
        &self.bytes[at.min(self.bytes.len())..end.min(self.bytes.len())]
    }
}

/// Splits a file of `file_bytes` into ranges for `count` threads, at random offsets without regard to blocks.
///
/// # Panics
/// If the file has fewer bytes than threads.
#[must_use]
pub fn ranges(seed: u64, file_bytes: u64, count: usize) -> Vec<Range<u64>> {
    assert!(file_bytes >= count as u64, "a file of {file_bytes} bytes has no room for {count} ranges");
    let mut rng = Rng::keyed(seed, &[file_bytes, count as u64]);
    let share = file_bytes / count as u64;
    let mut cuts: Vec<u64> = (1..count as u64).map(|lane| lane * share - rng.below(share.min(1000))).collect();
    cuts.insert(0, 0);
    cuts.push(file_bytes);
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// Returns whether two ranges overlap.
#[must_use]
pub const fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::{Model, overlap, ranges};

    #[test]
    fn the_model_is_a_file() {
        let mut model = Model::new(10, b"abc".to_vec());
        model.write(11, b"XY");
        assert_eq!(model.bytes(), b"aXY");
        model.write(15, b"Z");
        assert_eq!(model.bytes(), b"aXY\0\0Z");
        model.write(99, b"");
        assert_eq!(model.range(), 10..16);
        assert_eq!(model.read(&(11..13)), b"XY");
        assert_eq!(model.read(&(15..30)), b"Z");
        assert_eq!(model.read(&(20..30)), b"");
    }

    #[test]
    fn lanes_cover_the_file_once() {
        for seed in 0..20 {
            let ranges = ranges(seed, 1 << 20, 5);
            assert_eq!((ranges.len(), ranges[0].start, ranges[4].end), (5, 0, 1 << 20));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start && !pair[1].is_empty()));
        }
        assert!(overlap(&(0..5), &(4..6)) && !overlap(&(0..5), &(5..6)) && !overlap(&(3..3), &(3..3)));
    }
}
