//! The compressed-weight cache: weights kept in memory as they are on disk, and decoded on each use.
//!
//! Encoded weights have fewer bytes than decoded ones (bf16 instead of fp32, packed, quantised), so the cache saves
//! more reads than decoded groups in the same memory would. It is spread evenly over the groups, so the disk load stays
//! even as well.

use deepnvme_io::mem::Buffer;

use crate::error::Result;
use crate::layer_group::{Conversion, LayerGroup};

/// The cache entry of each conversion, if it has one: by group, then by conversion.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CachePlan {
    entries: Vec<Vec<Option<usize>>>,
    /// Bytes of each entry.
    pub(crate) entry_bytes: Vec<usize>,
}

impl CachePlan {
    /// Chooses entries that fit into this much memory, spread evenly over the groups that are not pinned.
    pub(crate) fn choose(groups: &[LayerGroup], pinned: &[bool], bytes_max: u64) -> Self {
        let mut plan = Self {
            entries: groups.iter().map(|group| vec![None; group.conversions.len()]).collect(),
            entry_bytes: vec![],
        };
        let passing = (0..groups.len()).filter(|group| !pinned.get(*group).copied().unwrap_or_default());
        let all = passing.flat_map(|group| (0..groups[group].conversions.len()).map(move |index| (group, index)));
        let mut left: Vec<(usize, usize, usize)> = all
            .filter_map(|(group, index)| Some((group, index, entry_bytes(&groups[group].conversions[index])?)))
            .collect();
        let wanted: u64 = left.iter().map(|(.., bytes)| *bytes as u64).sum();
        let mut memory = bytes_max;
        // The first pass spreads the entries evenly. The second adds all that still fit.
        let mut owed: u128 = 0;
        for is_last in [false, true] {
            left.retain(|(group, index, bytes)| {
                let cost = *bytes as u64;
                owed += u128::from(cost) * u128::from(bytes_max.min(wanted));
                let is_due = is_last || owed >= u128::from(cost) * u128::from(wanted);
                if !is_due || cost > memory {
                    return true;
                }
                owed = owed.saturating_sub(u128::from(cost) * u128::from(wanted));
                memory -= cost;
                plan.entries[*group][*index] = Some(plan.entry_bytes.len());
                plan.entry_bytes.push(*bytes);
                false
            });
        }
        plan
    }

    /// Returns the entry of a conversion, if it has one.
    pub(crate) fn entry_of(&self, group: usize, conversion: usize) -> Option<usize> {
        self.entries[group][conversion]
    }

    /// Returns the bytes of all entries.
    pub(crate) fn total(&self) -> u64 {
        self.entry_bytes.iter().map(|bytes| *bytes as u64).sum()
    }
}

/// Returns the bytes that an unlimited cache would take for these groups, and the bytes that they decode to.
#[must_use]
pub fn cacheable_bytes(groups: &[LayerGroup]) -> (u64, u64) {
    let conversions = groups.iter().flat_map(|group| &group.conversions);
    let cacheable = conversions.filter_map(|each| Some((entry_bytes(each)? as u64, each.target_bytes as u64)));
    cacheable.fold((0, 0), |(stored, becomes), (bytes, target)| (stored + bytes, becomes + target))
}

/// Returns the bytes of a cache entry for a conversion: whole blocks, so it can be read with direct I/O. `None` if it
/// saves nothing.
fn entry_bytes(conversion: &Conversion) -> Option<usize> {
    let bytes = conversion.read_bytes();
    (bytes < conversion.target_bytes).then_some(bytes)
}

/// The memory of the entries.
#[derive(Debug, Default)]
pub(crate) struct CompressedCache {
    entries: Vec<Entry>,
}

#[derive(Debug)]
enum Entry {
    Empty(Buffer),
    Full(Buffer),
    /// In use by a read or a conversion, or lost to an error.
    Taken,
}

impl CompressedCache {
    /// Allocates memory for entries of these sizes, without touching it.
    pub(crate) fn new(bytes: &[usize]) -> Result<Self> {
        let buffers = Buffer::zeroed_each(bytes).map_err(|error| deepnvme_io::Error::from_io("allocate", &error))?;
        Ok(Self { entries: buffers.into_iter().map(Entry::Empty).collect() })
    }

    /// Takes the memory of an entry, if it contains the weights.
    pub(crate) fn take_cached(&mut self, entry: usize) -> Option<Buffer> {
        self.take(entry, |entry| matches!(entry, Entry::Full(_)))
    }

    /// Takes the memory of an entry that has not been read yet.
    pub(crate) fn take_empty(&mut self, entry: usize) -> Option<Buffer> {
        self.take(entry, |entry| matches!(entry, Entry::Empty(_)))
    }

    fn take(&mut self, entry: usize, is_wanted: impl Fn(&Entry) -> bool) -> Option<Buffer> {
        let taken = self.entries.get_mut(entry).filter(|entry| is_wanted(entry))?;
        match std::mem::replace(taken, Entry::Taken) {
            Entry::Empty(buffer) | Entry::Full(buffer) => Some(buffer),
            Entry::Taken => None,
        }
    }

    /// Puts an entry's memory back; `is_full` if it contains the weights.
    pub(crate) fn put(&mut self, entry: usize, buffer: Buffer, is_full: bool) {
        if let Some(place) = self.entries.get_mut(entry) {
            *place = if is_full { Entry::Full(buffer) } else { Entry::Empty(buffer) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layer_group::Decoding;

    fn conversion(offset: u64, bytes: usize, target_bytes: usize) -> Conversion {
        let decoding = Decoding::Unpack;
        Conversion { source: 0, offset, bytes, at: 0, target_bytes, decoding, trim: (0, 0), final_cast: None }
    }

    proptest! {
        #[test]
        fn cache_entries_fit_save_bytes_and_are_spread_evenly(
            sizes in proptest::collection::vec(proptest::collection::vec((1..5_000_000usize, 1..4usize), 0..12), 1..12),
            pinned in proptest::collection::vec(any::<bool>(), 12), share in 0..130u64, offset in 0..10_000u64,
        ) {
            let groups: Vec<LayerGroup> = sizes.iter().map(|group| LayerGroup {
                conversions: group.iter().map(|(bytes, times)| conversion(offset, *bytes, bytes * times)).collect(),
                ..LayerGroup::default()
            }).collect();
            let passing: Vec<LayerGroup> =
                groups.iter().zip(&pinned).filter(|(_, pinned)| !**pinned).map(|(group, _)| group.clone()).collect();
            let (wanted, becomes) = cacheable_bytes(&passing);
            prop_assert!(wanted <= becomes);
            let memory = wanted * share / 100;
            let plan = CachePlan::choose(&groups, &pinned, memory);
            prop_assert!(plan.total() <= memory);
            prop_assert!(share < 100 || plan.total() == wanted, "all entries fit");
            let largest = groups.iter().flat_map(|group| &group.conversions).filter_map(entry_bytes).max().unwrap_or(0) as u64;
            prop_assert!(plan.total() + largest > memory.min(wanted) || wanted == 0, "memory is used");
            let (mut seen, mut cached, mut before) = (vec![false; plan.entry_bytes.len()], 0, 0);
            for (index, group) in groups.iter().enumerate() {
                for (number, each) in group.conversions.iter().enumerate() {
                    let bytes = entry_bytes(each).filter(|_| !pinned[index]);
                    if let Some(entry) = plan.entry_of(index, number) {
                        prop_assert_eq!(Some(plan.entry_bytes[entry]), bytes);
                        prop_assert!(!std::mem::replace(&mut seen[entry], true), "each conversion has its own entry");
                        cached += plan.entry_bytes[entry] as u64;
                    }
                    before += bytes.unwrap_or(0) as u64;
                    let due = before as f64 * memory.min(wanted) as f64 / wanted.max(1) as f64;
                    // The last pass adds whatever still fits to the first groups.
                    prop_assert!(cached as f64 - due <= 2.0 * largest as f64 && due - cached as f64 <= 2.0 * largest as f64);
                }
            }
            prop_assert!(seen.into_iter().all(|seen| seen));
        }
    }

    #[test]
    fn cache_entries_are_taken_and_returned() {
        let mut cache = CompressedCache::new(&[4096, 8192]).unwrap();
        assert!(cache.take_cached(0).is_none() && cache.take_cached(7).is_none());
        let buffer = cache.take_empty(1).unwrap();
        assert_eq!(buffer.as_slice().len(), 8192);
        assert!(cache.take_empty(1).is_none() && cache.take_cached(1).is_none());
        cache.put(1, buffer, false);
        let buffer = cache.take_empty(1).unwrap();
        cache.put(1, buffer, true);
        assert!(cache.take_empty(1).is_none() && cache.take_cached(1).is_some());
    }
}
