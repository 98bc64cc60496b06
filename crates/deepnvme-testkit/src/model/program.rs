//! Random programs, biased to boundary sizes and offsets.

use std::ops::Range;

use crate::rng::Rng;

/// The file range of a program, and its boundaries.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The range of the file.
    pub range: Range<u64>,
    /// The engine's block size; sizes around it are frequent.
    pub block_bytes: u64,
    /// The maximum transfer size.
    pub step_bytes_max: u64,
}

/// A transfer of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write `random_bytes(data_seed, range.len())`.
    Write {
        /// Range in the file.
        range: Range<u64>,
        /// Offset of the memory from a page boundary.
        skew: usize,
        /// Seed of the data.
        data_seed: u64,
    },
    /// Read and compare.
    Read {
        /// Range in the file.
        range: Range<u64>,
        /// Offset of the memory from a page boundary.
        skew: usize,
    },
}

impl Step {
    /// Range in the file.
    #[must_use]
    pub const fn range(&self) -> &Range<u64> {
        match self {
            Self::Write { range, .. } | Self::Read { range, .. } => range,
        }
    }

    /// Returns whether it is a write.
    #[must_use]
    pub const fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. })
    }
}

/// A deterministic sequence of transfers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    /// Its seed.
    pub seed: u64,
    /// The transfers in order of effect.
    pub steps: Vec<Step>,
}

impl Program {
    /// Creates the program of a seed. A longer program starts like a shorter one.
    ///
    /// # Panics
    /// If the scope is empty.
    #[must_use]
    pub fn new(seed: u64, length: usize, scope: &Scope) -> Self {
        assert!(!scope.range.is_empty(), "a program needs scope");
        let mut rng = Rng::keyed(seed, &[scope.range.start, scope.range.end]);
        let mut last_end = scope.range.start;
        let mut steps = Vec::with_capacity(length);
        for _ in 0..length {
            let range = pick_range(&mut rng, scope, last_end);
            last_end = range.end;
            let skew = pick_skew(&mut rng);
            steps.push(if rng.chance(600) {
                Step::Write { range, skew, data_seed: rng.next_u64() }
            } else {
                Step::Read { range, skew }
            });
        }
        Self { seed, steps }
    }
}

/// Returns a size from 0 to `max`: often at or next to a boundary, otherwise of any magnitude.
#[must_use]
pub fn pick_bytes(rng: &mut Rng, block_bytes: u64, max: u64) -> u64 {
    let bytes = match rng.below(10) {
        0 => rng.pick(&[0, 1, 2, 3]),
        1 | 2 => near(rng, 512),
        3 | 4 => near(rng, 4096),
        5 | 6 => {
            let blocks = rng.within(1..4);
            near(rng, blocks * block_bytes)
        }
        7 => rng.below(max + 1),
        _ => {
            let magnitude = rng.below(u64::from(u64::BITS - max.leading_zeros()) + 1);
            rng.below(1 << magnitude)
        }
    };
    bytes.min(max)
}

fn near(rng: &mut Rng, boundary: u64) -> u64 {
    boundary + rng.within(0..3) - 1
}

fn pick_range(rng: &mut Rng, scope: &Scope, last_end: u64) -> Range<u64> {
    let range = &scope.range;
    let bytes = pick_bytes(rng, scope.block_bytes, scope.step_bytes_max.min(range.end - range.start));
    let latest = range.end - bytes;
    let wish = match rng.below(8) {
        // Adjacent to the previous transfer, so that two requests share a block.
        0 | 1 => last_end,
        2 => last_end.saturating_sub(bytes).saturating_sub(rng.below(3)),
        3 => range.start,
        4 => latest,
        5 => rng.within(range.start..latest + 1).next_multiple_of(512),
        6 => (rng.within(range.start..latest + 1).next_multiple_of(4096) + rng.within(0..3)).saturating_sub(1),
        _ => rng.within(range.start..latest + 1),
    };
    let offset = wish.clamp(range.start, latest);
    offset..offset + bytes
}

fn pick_skew(rng: &mut Rng) -> usize {
    match rng.below(4) {
        0 => 0,
        1 => 512 * rng.below(8) as usize,
        2 => 64,
        _ => rng.below(4096) as usize,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{Program, Scope, Step, pick_bytes};
    use crate::rng::Rng;

    const SCOPE: Scope = Scope { range: 1001..3_000_001, block_bytes: 65536, step_bytes_max: 1 << 20 };

    #[test]
    fn a_program_stays_on_its_ground_and_a_longer_one_starts_the_same() {
        for seed in 0..50 {
            let program = Program::new(seed, 60, &SCOPE);
            assert!(program.steps.iter().all(|step| {
                let range = step.range();
                range.start >= 1001 && range.end <= 3_000_001 && range.end - range.start <= 1 << 20
            }));
            assert_eq!(Program::new(seed, 20, &SCOPE).steps[..], program.steps[..20]);
        }
    }

    #[test]
    fn programs_reach_the_boundaries() {
        let mut rng = Rng::new(5);
        let sizes: BTreeSet<u64> = (0..4000).map(|_| pick_bytes(&mut rng, 65536, 1 << 20)).collect();
        for wanted in [0, 1, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, 131_073] {
            assert!(sizes.contains(&wanted), "{wanted} was never tried");
        }
        assert!(sizes.last().is_some_and(|largest| *largest > 900_000 && *largest <= 1 << 20));
        let steps: Vec<Step> = (0..50).flat_map(|seed| Program::new(seed, 20, &SCOPE).steps).collect();
        let adjacent = steps.windows(2).filter(|pair| pair[0].range().end == pair[1].range().start);
        assert!(adjacent.count() > 50, "adjacent transfers share blocks and must be common");
    }
}
