//! What stays in memory as it is on disk, and is converted whenever its unit comes.
//!
//! Bytes on disk are fewer than those that they become (bf16 for fp32, packed, quantised), so that as much memory spares more
//! reading than whole units in it would. Every unit has about the same part of its bytes there: the disk is needed as
//! steadily as without.

use deepnvme_io::mem::Buffer;

use crate::error::Result;
use crate::layer_group::{Conversion, Unit};

/// Which conversions have their bytes in a berth, and which one: of each unit, in the order of its conversions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Berths {
    of: Vec<Vec<Option<usize>>>,
    /// Bytes of each.
    pub(crate) bytes: Vec<usize>,
}

impl Berths {
    /// As many as so much memory is enough for, spread evenly over the units that come and go.
    pub(crate) fn choose(units: &[Unit], stays: &[bool], bytes_max: u64) -> Self {
        let mut berths =
            Self { of: units.iter().map(|unit| vec![None; unit.conversions.len()]).collect(), bytes: vec![] };
        let passing = (0..units.len()).filter(|unit| !stays.get(*unit).copied().unwrap_or_default());
        let all = passing.flat_map(|unit| (0..units[unit].conversions.len()).map(move |index| (unit, index)));
        let mut left: Vec<(usize, usize, usize)> =
            all.filter_map(|(unit, index)| Some((unit, index, worth(&units[unit].conversions[index])?))).collect();
        let wanted: u64 = left.iter().map(|(.., bytes)| *bytes as u64).sum();
        let mut memory = bytes_max;
        // Of each stretch of the order its share, then whatever still fits.
        let mut owed: u128 = 0;
        for is_last in [false, true] {
            left.retain(|(unit, index, bytes)| {
                let cost = *bytes as u64;
                owed += u128::from(cost) * u128::from(bytes_max.min(wanted));
                let is_due = is_last || owed >= u128::from(cost) * u128::from(wanted);
                if !is_due || cost > memory {
                    return true;
                }
                owed = owed.saturating_sub(u128::from(cost) * u128::from(wanted));
                memory -= cost;
                berths.of[*unit][*index] = Some(berths.bytes.len());
                berths.bytes.push(*bytes);
                false
            });
        }
        berths
    }

    /// The one of a conversion.
    pub(crate) fn of(&self, unit: usize, conversion: usize) -> Option<usize> {
        self.of[unit][conversion]
    }

    /// Bytes of all.
    pub(crate) fn total(&self) -> u64 {
        self.bytes.iter().map(|bytes| *bytes as u64).sum()
    }
}

/// Bytes of all that is worth a berth in these units, and of what they become: what an unlimited stash would have.
#[must_use]
pub fn stash_bytes_wanted(units: &[Unit]) -> (u64, u64) {
    let conversions = units.iter().flat_map(|unit| &unit.conversions);
    let worth = conversions.filter_map(|each| Some((worth(each)? as u64, each.target_bytes as u64)));
    worth.fold((0, 0), |(stored, becomes), (bytes, target)| (stored + bytes, becomes + target))
}

/// Bytes of a berth for a conversion: whole blocks, since it is read into directly. `None` where those are no fewer than
/// what they become.
fn worth(conversion: &Conversion) -> Option<usize> {
    let bytes = conversion.read_bytes();
    (bytes < conversion.target_bytes).then_some(bytes)
}

/// The memory of the berths.
#[derive(Debug, Default)]
pub(crate) struct Stash {
    berths: Vec<Berth>,
}

#[derive(Debug)]
enum Berth {
    Empty(Buffer),
    Full(Buffer),
    /// Somebody reads into it or converts from it; or it was lost to an error.
    Taken,
}

impl Stash {
    /// Memory for berths of so many bytes, nothing of which has been touched.
    pub(crate) fn new(bytes: &[usize]) -> Result<Self> {
        let buffers = Buffer::zeroed_each(bytes).map_err(|error| deepnvme_io::Error::from_io("allocate", &error))?;
        Ok(Self { berths: buffers.into_iter().map(Berth::Empty).collect() })
    }

    /// The memory of a berth, if its bytes are in it.
    pub(crate) fn take_full(&mut self, berth: usize) -> Option<Buffer> {
        self.take(berth, |berth| matches!(berth, Berth::Full(_)))
    }

    /// The memory of a berth that nothing has been read into yet.
    pub(crate) fn take_empty(&mut self, berth: usize) -> Option<Buffer> {
        self.take(berth, |berth| matches!(berth, Berth::Empty(_)))
    }

    fn take(&mut self, berth: usize, is_it: impl Fn(&Berth) -> bool) -> Option<Buffer> {
        let taken = self.berths.get_mut(berth).filter(|berth| is_it(berth))?;
        match std::mem::replace(taken, Berth::Taken) {
            Berth::Empty(buffer) | Berth::Full(buffer) => Some(buffer),
            Berth::Taken => None,
        }
    }

    /// Gives the memory back; `is_full` where the right bytes are in it.
    pub(crate) fn put(&mut self, berth: usize, buffer: Buffer, is_full: bool) {
        if let Some(place) = self.berths.get_mut(berth) {
            *place = if is_full { Berth::Full(buffer) } else { Berth::Empty(buffer) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layer_group::Arrival;

    fn conversion(offset: u64, bytes: usize, target_bytes: usize) -> Conversion {
        let arrival = Arrival::Unpacked;
        Conversion { source: 0, offset, bytes, at: 0, target_bytes, arrival, trim: (0, 0), then: None }
    }

    proptest! {
        #[test]
        fn berths_are_within_memory_worth_it_and_spread_evenly(
            sizes in proptest::collection::vec(proptest::collection::vec((1..5_000_000usize, 1..4usize), 0..12), 1..12),
            stays in proptest::collection::vec(any::<bool>(), 12), share in 0..130u64, offset in 0..10_000u64,
        ) {
            let units: Vec<Unit> = sizes.iter().map(|unit| Unit {
                conversions: unit.iter().map(|(bytes, times)| conversion(offset, *bytes, bytes * times)).collect(),
                ..Unit::default()
            }).collect();
            let passing: Vec<Unit> =
                units.iter().zip(&stays).filter(|(_, stays)| !**stays).map(|(unit, _)| unit.clone()).collect();
            let (wanted, becomes) = stash_bytes_wanted(&passing);
            prop_assert!(wanted <= becomes);
            let memory = wanted * share / 100;
            let berths = Berths::choose(&units, &stays, memory);
            prop_assert!(berths.total() <= memory);
            prop_assert!(share < 100 || berths.total() == wanted, "all that there is memory for");
            let largest = units.iter().flat_map(|unit| &unit.conversions).filter_map(worth).max().unwrap_or(0) as u64;
            prop_assert!(berths.total() + largest > memory.min(wanted) || wanted == 0, "memory is used");
            let (mut seen, mut stashed, mut before) = (vec![false; berths.bytes.len()], 0, 0);
            for (index, unit) in units.iter().enumerate() {
                for (number, each) in unit.conversions.iter().enumerate() {
                    let worth = worth(each).filter(|_| !stays[index]);
                    if let Some(berth) = berths.of(index, number) {
                        prop_assert_eq!(Some(berths.bytes[berth]), worth);
                        prop_assert!(!std::mem::replace(&mut seen[berth], true), "each has one of its own");
                        stashed += berths.bytes[berth] as u64;
                    }
                    before += worth.unwrap_or(0) as u64;
                    let due = before as f64 * memory.min(wanted) as f64 / wanted.max(1) as f64;
                    // What still fits in the end comes first.
                    prop_assert!(stashed as f64 - due <= 2.0 * largest as f64 && due - stashed as f64 <= 2.0 * largest as f64);
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }
    }

    #[test]
    fn a_berth_is_whose_it_is() {
        let mut stash = Stash::new(&[4096, 8192]).unwrap();
        assert!(stash.take_full(0).is_none() && stash.take_full(7).is_none());
        let buffer = stash.take_empty(1).unwrap();
        assert_eq!(buffer.as_slice().len(), 8192);
        assert!(stash.take_empty(1).is_none() && stash.take_full(1).is_none());
        stash.put(1, buffer, false);
        let buffer = stash.take_empty(1).unwrap();
        stash.put(1, buffer, true);
        assert!(stash.take_empty(1).is_none() && stash.take_full(1).is_some());
    }
}
