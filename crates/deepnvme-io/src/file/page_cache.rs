//! Whether reads of a file may use the page cache although it is open for direct I/O.

use std::os::fd::BorrowedFd;

use crate::fs::{self, FileKind, Stat};

/// File systems whose page cache is never older than the device: ext2 to ext4, XFS, Btrfs, F2FS and bcachefs. Those of a
/// network are not among them, since another machine may have written the file. The kernel reports no cached pages for
/// files of an overlay.
const COHERENT_FILE_SYSTEMS: [u32; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e];

/// Returns whether the page cache has the same bytes as the device. Not for a block device: a file system on it has a
/// page cache of its own.
pub(super) fn is_coherent(fd: BorrowedFd<'_>, stat: &Stat) -> bool {
    stat.kind == FileKind::File && fs::file_system(fd).is_ok_and(|system| COHERENT_FILE_SYSTEMS.contains(&system))
}

/// How much of a range the page cache has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CachedShare {
    /// Nothing, or the cache may not be used, or the kernel does not say.
    None,
    /// Less than seven eighths of its pages. One from the device costs far more than a cached one saves.
    Some,
    /// At least seven eighths.
    Most,
    /// Every page.
    All,
}

impl CachedShare {
    pub(super) fn of(cached: u64, pages: u64) -> Self {
        match cached {
            0 => Self::None,
            cached if cached >= pages => Self::All,
            cached if cached >= pages - pages / 8 => Self::Most,
            _ => Self::Some,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CachedShare;

    #[test]
    fn most_of_a_range_is_seven_eighths_of_it() {
        let cases = [
            (0, 1, CachedShare::None),
            (1, 1, CachedShare::All),
            (1, 8, CachedShare::Some),
            (6, 7, CachedShare::Some),
            (7, 8, CachedShare::Most),
            (800, 1000, CachedShare::Some),
            (900, 1000, CachedShare::Most),
            (1000, 1000, CachedShare::All),
        ];
        for (cached, pages, expected) in cases {
            assert_eq!(CachedShare::of(cached, pages), expected, "{cached} of {pages}");
        }
    }
}
