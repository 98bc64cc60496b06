//! The alignment that direct I/O on a file requires: from the kernel (`statx`), or by trial.

use std::os::fd::BorrowedFd;

use crate::fs::{self, Stat};
use crate::op::Errno;
use crate::split::FileAlignment;
use deepnvme_mem::{Alignment, Buffer, PAGE_BYTES};

/// Alignments to try on a file system without `STATX_DIOALIGN`, in ascending order.
const CANDIDATES: [u64; 4] = [512, 1024, 2048, PAGE_BYTES];

/// Assumed if neither `statx` nor a trial can tell. Every direct file system in use accepts a page.
const ASSUMED: Alignment = Alignment::PAGE;

/// `tmpfs` and `ramfs` keep files in the page cache only. They accept the flag for direct I/O without effect, and
/// report nothing in `statx`.
const MEMORY_FILE_SYSTEMS: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// The alignment of direct I/O on a file.
pub(super) enum Found {
    Aligned(FileAlignment),
    /// Not supported, for this reason.
    None(&'static str),
}

/// Returns the alignment that the kernel reports for a direct descriptor, or else the result of small trial reads.
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

/// Returns the smallest alignment that a read succeeds with. An unreadable or empty file cannot tell.
fn try_reads(fd: BorrowedFd<'_>) -> Alignment {
    let Ok(mut page) = Buffer::zeroed(Alignment::PAGE.bytes() as usize * 2) else {
        return ASSUMED;
    };
    for bytes in CANDIDATES {
        // The address is aligned to exactly the candidate, so a success also proves the memory alignment.
        let at = bytes as usize;
        match fs::read_at(fd, &mut page.as_mut_slice()[at..2 * at], 0) {
            Ok(0) => return ASSUMED,
            Ok(_) => return Alignment::new(bytes).unwrap_or(ASSUMED),
            Err(Errno::INVAL) => {}
            Err(_) => return ASSUMED,
        }
    }
    ASSUMED
}
