//! A file as a plain vector, and random programs of writes and reads over it.
//!
//! A program is a function of its seed, its length and its ground, so a failure is repeated, and shrunk,
//! by two numbers. Several threads share one file by [`lanes`]: each owns a range and leaves the rest alone.

mod program;

use std::ops::Range;

pub use program::{Ground, Program, Step, pick_bytes};

use crate::rng::Rng;

/// What a range of a file must hold. It knows nothing of blocks, queues and errors.
#[derive(Clone, Debug)]
pub struct Model {
    start: u64,
    bytes: Vec<u8>,
}

impl Model {
    /// A model of the file from `start` on, which holds `bytes` now.
    #[must_use]
    pub const fn new(start: u64, bytes: Vec<u8>) -> Self {
        Self { start, bytes }
    }

    /// The part of the file that the model knows.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes.len() as u64
    }

    /// What the range holds.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A write: it changes its range, and extends the file (with zeros in a gap) where it ends later.
    ///
    /// # Panics
    /// When it starts before the model does.
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

    /// What a read of the range gives: all of it, or what there is before the end of the file.
    ///
    /// # Panics
    /// When it starts before the model does.
    #[must_use]
    pub fn read(&self, range: &Range<u64>) -> &[u8] {
        let at = range.start.checked_sub(self.start).expect("a read before the model's range") as usize;
        let end = (range.end - self.start) as usize;
        &self.bytes[at.min(self.bytes.len())..end.min(self.bytes.len())]
    }
}

/// Cuts a file of `file_bytes` into ranges for `count` threads, at random places that respect no block.
///
/// # Panics
/// When the file has fewer bytes than there are threads.
#[must_use]
pub fn lanes(seed: u64, file_bytes: u64, count: usize) -> Vec<Range<u64>> {
    assert!(file_bytes >= count as u64, "a file of {file_bytes} bytes has no room for {count} lanes");
    let mut rng = Rng::keyed(seed, &[file_bytes, count as u64]);
    let share = file_bytes / count as u64;
    let mut cuts: Vec<u64> = (1..count as u64).map(|lane| lane * share - rng.below(share.min(1000))).collect();
    cuts.insert(0, 0);
    cuts.push(file_bytes);
    cuts.windows(2).map(|cut| cut[0]..cut[1]).collect()
}

/// Whether the two ranges share a byte.
#[must_use]
pub const fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::{Model, lanes, overlap};

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
            let lanes = lanes(seed, 1 << 20, 5);
            assert_eq!((lanes.len(), lanes[0].start, lanes[4].end), (5, 0, 1 << 20));
            assert!(lanes.windows(2).all(|pair| pair[0].end == pair[1].start && !pair[1].is_empty()));
        }
        assert!(overlap(&(0..5), &(4..6)) && !overlap(&(0..5), &(5..6)) && !overlap(&(3..3), &(3..3)));
    }
}
