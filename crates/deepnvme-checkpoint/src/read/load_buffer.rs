//! The plan of the byte ranges of a file to mirror in memory. Pure.
//!
//! Memory that begins at a page and mirrors a file from a block on can be read directly, without a copy. Each tensor
//! keeps the alignment that it has in the file. Small adjacent tensors share a buffer. A large tensor gets its own, so
//! that its memory is freed when it is dropped.

use deepnvme_io::mem::PAGE_BYTES;

use super::extent::Extent;

/// Maximum size of a buffer that several extents share.
const SHARED_BYTES_MAX: u64 = 32 << 20;
/// Maximum gap of unwanted bytes that is read along.
const GAP_BYTES_MAX: u64 = 64 << 10;

/// An extent in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferedExtent {
    /// Index of the extent.
    pub extent: usize,
    /// Start of its data in the buffer.
    pub at: u64,
}

/// A byte range of the file that is mirrored in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBuffer {
    /// Offset in the file.
    pub offset: u64,
    /// Size of the range.
    pub bytes: u64,
    /// The extents inside.
    pub members: Vec<BufferedExtent>,
}

/// Returns whether an extent is aligned for use in place.
pub(super) fn is_mirrored(extent: &Extent) -> bool {
    extent.data_offset.is_multiple_of(extent.alignment)
}

/// Plans the buffers of the wanted extents, in file order. Empty extents are in none.
pub(super) fn plan(extents: &[Extent], wanted: &[usize], file_bytes: u64) -> Vec<LoadBuffer> {
    let mut order: Vec<usize> = wanted.iter().copied().filter(|index| extents[*index].bytes > 0).collect();
    order.sort_unstable_by_key(|index| (extents[*index].data_offset, *index));
    order.dedup();
    let mut buffers: Vec<LoadBuffer> = Vec::new();
    // End of the last wanted byte in the current buffer.
    let mut end = 0;
    for index in order {
        let extent = &extents[index];
        if !is_mirrored(extent) {
            let members = vec![BufferedExtent { extent: index, at: 0 }];
            buffers.push(LoadBuffer { offset: extent.data_offset, bytes: extent.bytes, members });
            end = u64::MAX;
            continue;
        }
        let shared = buffers.last_mut().filter(|buffer| {
            extent.header_offset >= end
                && extent.header_offset - end <= GAP_BYTES_MAX
                && extent.end() - buffer.offset <= SHARED_BYTES_MAX
        });
        match shared {
            Some(buffer) => {
                buffer.members.push(BufferedExtent { extent: index, at: extent.data_offset - buffer.offset });
                buffer.bytes = rounded(extent.end(), file_bytes) - buffer.offset;
            }
            None => {
                let offset = extent.header_offset / PAGE_BYTES * PAGE_BYTES;
                let members = vec![BufferedExtent { extent: index, at: extent.data_offset - offset }];
                buffers.push(LoadBuffer { offset, bytes: rounded(extent.end(), file_bytes) - offset, members });
            }
        }
        end = extent.end();
    }
    buffers
}

/// Rounds up to the end of the block or the file.
fn rounded(end: u64, file_bytes: u64) -> u64 {
    end.next_multiple_of(PAGE_BYTES).min(file_bytes)
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
            let buffers = plan(&extents, &wanted, file_bytes);
            let mut found = Vec::new();
            for buffer in &buffers {
                prop_assert!(buffer.offset + buffer.bytes <= file_bytes);
                for member in &buffer.members {
                    let extent = &extents[member.extent];
                    prop_assert_eq!(buffer.offset + member.at, extent.data_offset);
                    prop_assert!(member.at + extent.bytes <= buffer.bytes);
                    prop_assert!(buffer.members.len() == 1 || buffer.bytes <= SHARED_BYTES_MAX + PAGE_BYTES);
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
        let buffers = plan(&extents, &[0, 1, 2], 400);
        assert_eq!(buffers.len(), 1);
        assert_eq!(buffers[0].members.iter().map(|member| member.at).collect::<Vec<_>>(), [60, 220, 380]);
        extents[1].alignment = 8;
        assert_eq!(plan(&extents, &[0, 1, 2], 400).len(), 3, "220 is no place for 8 bytes");
    }

    #[test]
    fn a_tensor_at_an_odd_place_has_memory_of_its_own() {
        let mut all = extents(&[(4, 100), (4, 100), (4, 100)]);
        all[1].data_offset += 1;
        let buffers = plan(&all, &[0, 1, 2], 10_000);
        assert_eq!(buffers.len(), 3);
        assert_eq!((buffers[1].offset, buffers[1].bytes), (all[1].data_offset, 100));
    }
}
