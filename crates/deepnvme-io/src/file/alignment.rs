//! What direct I/O needs on one file: the kernel's word (`statx`), else a try.

use std::os::fd::BorrowedFd;

use crate::fs::{self, Stat};
use crate::op::Errno;
use crate::split::FileAlignment;
use deepnvme_mem::{Alignment, Buffer};

/// Alignments that a file system without `STATX_DIOALIGN` is tried with, smallest first.
const CANDIDATES: [u64; 4] = [512, 1024, 2048, 4096];

/// Assumed where neither `statx` nor a try can tell: every direct file system in use takes a page.
const ASSUMED: Alignment = Alignment::PAGE;

/// `tmpfs` and `ramfs` keep files in the page cache and nowhere else: they take the flag for direct I/O, which
/// nothing can keep, and say nothing of it in `statx`.
const MEMORY_FILE_SYSTEMS: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// What is known about direct I/O on a file.
pub(super) enum Found {
    Aligned(FileAlignment),
    /// There is none, because of this.
    None(&'static str),
}

/// What the kernel says of a descriptor open for direct I/O, else what small reads on it show.
pub(super) fn find(fd: BorrowedFd<'_>, stat: &Stat) -> Found {
    if let Some((memory, offset)) = stat.direct_alignment {
        return match (Alignment::new(memory.into()), Alignment::new(offset.into())) {
            (Some(memory), Some(offset)) => Found::Aligned(FileAlignment { memory, offset }),
            _ => Found::None("the file system reports that this file has no direct I/O"),
        };
    }
    if fs::file_system(fd).is_ok_and(|system| MEMORY_FILE_SYSTEMS.contains(&system)) {
        return Found::None("the file system keeps its files in memory, where there is no direct I/O");
    }
    let alignment = try_reads(fd);
    Found::Aligned(FileAlignment { memory: alignment, offset: alignment })
}

/// The smallest alignment with which a read is not refused. A file that cannot be read, or is empty, says nothing.
fn try_reads(fd: BorrowedFd<'_>) -> Alignment {
    let Ok(mut page) = Buffer::zeroed(Alignment::PAGE.bytes() as usize * 2) else {
        return ASSUMED;
    };
    for bytes in CANDIDATES {
        // The address is aligned to the candidate and no better, so that a pass proves it for memory as well.
        let at = bytes as usize;
        match fs::read_at(fd, &mut page.as_mut_slice()[at..at + at.min(4096)], 0) {
            Ok(0) => return ASSUMED,
            Ok(_) => return Alignment::new(bytes).unwrap_or(ASSUMED),
            Err(Errno::INVAL) => {}
            Err(_) => return ASSUMED,
        }
    }
    ASSUMED
}
