//! Settings and arguments of a swapper.

use std::path::PathBuf;

use deepnvme_file::Target;

/// Settings of a [`Swapper`](crate::Swapper).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SwapperOptions {
    /// Folders for the swap files: one, or one for each disk.
    pub folders: Vec<PathBuf>,
    /// Bytes of memory for all items, pinned where the kernel allows it.
    pub memory_bytes: usize,
    /// Bytes of upcoming scheduled items that may be read before they are borrowed. Default: three eighths of the
    /// memory, at most 1 GiB.
    pub prefetch_bytes: Option<usize>,
    /// Bytes of memory that early write-back keeps free or evictable. Default: the default of `prefetch_bytes`.
    pub headroom_bytes: Option<usize>,
    /// Store a checksum with each write and verify it on each read.
    pub has_checksums: bool,
    /// Give the swap files names.
    pub is_named: bool,
    /// With several files, the bytes written to one before the next.
    pub stripe_bytes: u64,
}

impl SwapperOptions {
    /// The defaults, with this folder and this much memory.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>, memory_bytes: usize) -> Self {
        Self {
            folders: vec![folder.into()],
            memory_bytes,
            prefetch_bytes: None,
            headroom_bytes: None,
            has_checksums: false,
            is_named: false,
            stripe_bytes: deepnvme_file::stripe_set::STRIPE_BYTES_DEFAULT,
        }
    }
}

/// A range of a file that [`Swapper::attach`](crate::Swapper::attach) makes an item of.
#[derive(Clone, Copy, Debug)]
pub struct AttachedRange<'a> {
    /// The file.
    pub target: &'a Target,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
    /// Bytes of an element, to align elements in memory.
    pub element_bytes: usize,
}

/// Polled while waiting; return true to cancel.
pub type CancelCheck<'a> = &'a mut dyn FnMut() -> bool;
