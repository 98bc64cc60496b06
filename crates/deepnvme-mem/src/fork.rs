//! Detects values that a forked child inherited from its parent.
//!
//! A child has its parent's memory, but only the thread that called `fork`: worker threads are missing, locks may be held
//! forever, and files on disk belong to the parent.

use std::process;

/// The process that created a value.
///
/// ```
/// let creator = deepnvme_mem::CreatorProcess::current();
/// assert!(creator.is_current());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreatorProcess {
    id: u32,
}

impl CreatorProcess {
    /// Returns the calling process.
    #[must_use]
    pub fn current() -> Self {
        Self { id: process::id() }
    }

    /// Whether the calling process is the creator, and not a child forked from it.
    #[must_use]
    pub fn is_current(self) -> bool {
        self.id == process::id()
    }
}
