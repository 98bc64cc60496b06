//! Which stretches of a file are mirrored in memory: pure.
//!
//! A stretch of memory that begins at a page and holds what a file holds from a block on can be filled directly, without
//! a copy, and each tensor in it is as aligned as in the file. Neighbouring small tensors share a stretch; a large one
//! has its own, so that its memory is free when it is dropped.

use super::extent::Extent;

/// Where mirrored stretches begin: at a page of memory, and at a block of the file.
const BLOCK_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;
/// Neighbours share a stretch up to that size.
const SHARED_BYTES_MAX: u64 = 32 << 20;
/// What nobody wants is read along if it is no longer than that.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Bytes that begin at such a place can be used where they are, whatever their type.
pub(super) const ELEMENT_ALIGNMENT: u64 = 16;

/// One extent in an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Which extent.
    pub extent: usize,
    /// Where in the arena its bytes begin.
    pub at: u64,
}

/// A stretch of the file that is mirrored in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Where in the file it begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
    /// What is in it.
    pub members: Vec<Member>,
}

/// Whether an extent's bytes can be used where they come to lie.
pub(super) fn is_mirrored(extent: &Extent) -> bool {
    extent.data_offset.is_multiple_of(extent.alignment)
}

/// The arenas of the wanted extents, in the order of the file. Extents without bytes are in none.
pub(super) fn plan(extents: &[Extent], wanted: &[usize], file_bytes: u64) -> Vec<Arena> {
    let mut order: Vec<usize> = wanted.iter().copied().filter(|index| extents[*index].bytes > 0).collect();
    order.sort_unstable_by_key(|index| (extents[*index].data_offset, *index));
    order.dedup();
    let mut arenas: Vec<Arena> = Vec::new();
    // Where the last wanted byte of the arena at hand ends.
    let mut end = 0;
    for index in order {
        let extent = &extents[index];
        if !is_mirrored(extent) {
            let members = vec![Member { extent: index, at: 0 }];
            arenas.push(Arena { offset: extent.data_offset, bytes: extent.bytes, members });
            end = u64::MAX;
            continue;
        }
        let shared = arenas.last_mut().filter(|arena| {
            extent.header_offset >= end
                && extent.header_offset - end <= GAP_BYTES_MAX
                && extent.end() - arena.offset <= SHARED_BYTES_MAX
        });
        match shared {
            Some(arena) => {
                arena.members.push(Member { extent: index, at: extent.data_offset - arena.offset });
                arena.bytes = rounded(extent.end(), file_bytes) - arena.offset;
            }
            None => {
                let offset = extent.header_offset / BLOCK_BYTES * BLOCK_BYTES;
                let members = vec![Member { extent: index, at: extent.data_offset - offset }];
                arenas.push(Arena { offset, bytes: rounded(extent.end(), file_bytes) - offset, members });
            }
        }
        end = extent.end();
    }
    arenas
}

/// Up to the end of the block, or of the file.
fn rounded(end: u64, file_bytes: u64) -> u64 {
    end.next_multiple_of(BLOCK_BYTES).min(file_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extents(sizes: &[(u64, u64)]) -> Vec<Extent> {
        let mut at = 0;
        let mut extents = Vec::new();
        for (gap, bytes) in sizes {
            let header_offset = at + gap;
            let data_offset = header_offset + 60;
            at = data_offset + bytes;
            let (name, record_name) = (String::new(), String::new());
            extents.push(Extent {
                name,
                header_offset,
                data_offset,
                bytes: *bytes,
                crc32: None,
                record_name,
                alignment: 16,
            });
        }
        extents
    }

    proptest! {
        #[test]
        fn every_wanted_byte_is_in_one_arena(
            sizes in proptest::collection::vec((0..200_000u64, prop_oneof![0..3000u64, 0..40_000_000u64]), 1..20),
            picks in proptest::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let extents = extents(&sizes);
            let file_bytes = extents.last().unwrap().end() + 10;
            let wanted: Vec<usize> = picks.iter().map(|pick| pick.index(extents.len())).collect();
            let arenas = plan(&extents, &wanted, file_bytes);
            let mut found = Vec::new();
            for arena in &arenas {
                prop_assert!(arena.offset + arena.bytes <= file_bytes);
                for member in &arena.members {
                    let extent = &extents[member.extent];
                    prop_assert_eq!(arena.offset + member.at, extent.data_offset);
                    prop_assert!(member.at + extent.bytes <= arena.bytes);
                    prop_assert!(arena.members.len() == 1 || arena.bytes <= SHARED_BYTES_MAX + BLOCK_BYTES);
                    found.push(member.extent);
                }
            }
            found.sort_unstable();
            let mut expected: Vec<usize> = wanted.into_iter().filter(|index| extents[*index].bytes > 0).collect();
            expected.sort_unstable();
            expected.dedup();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn neighbours_that_are_aligned_for_their_own_type_share_memory() {
        let mut extents = extents(&[(0, 90), (10, 96), (4, 4)]);
        extents.iter_mut().for_each(|extent| extent.alignment = 2);
        assert_eq!(extents.iter().map(|extent| extent.data_offset).collect::<Vec<_>>(), [60, 220, 380]);
        let arenas = plan(&extents, &[0, 1, 2], 400);
        assert_eq!(arenas.len(), 1);
        assert_eq!(arenas[0].members.iter().map(|member| member.at).collect::<Vec<_>>(), [60, 220, 380]);
        extents[1].alignment = 8;
        assert_eq!(plan(&extents, &[0, 1, 2], 400).len(), 3, "220 is no place for 8 bytes");
    }

    #[test]
    fn a_tensor_at_an_odd_place_has_memory_of_its_own() {
        let mut all = extents(&[(4, 100), (4, 100), (4, 100)]);
        all[1].data_offset += 1;
        let arenas = plan(&all, &[0, 1, 2], 10_000);
        assert_eq!(arenas.len(), 3);
        assert_eq!((arenas[1].offset, arenas[1].bytes), (all[1].data_offset, 100));
    }
}
