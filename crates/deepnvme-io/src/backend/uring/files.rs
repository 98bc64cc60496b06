//! Registered files: a frequently used file gets an entry in the ring's table, which saves the kernel two atomic
//! operations on the shared file per op.
//!
//! The table keeps a file open that its owner has closed, so an entry lives only while ops of the file keep coming. The
//! entry is cleared when the queue is empty, when the file's owner is gone, or when another file needs the entry.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};

use io_uring::Submitter;

/// Entries of the table.
const FILES_MAX: usize = 64;
/// Ops of one file, without an empty queue between them, after which the two calls of registering pay off.
const OPS_BEFORE_REGISTERING: u32 = 64;
/// An empty entry.
const NO_FILE: RawFd = -1;

/// The ring's table of files, and the candidates for it.
pub(super) struct FileTable {
    entries: Vec<Entry>,
    recent: usize,
    enabled: bool,
}

#[derive(Default)]
struct Entry {
    /// `Weak`, so that an entry neither keeps a file open nor lets its address be reused.
    file: Weak<OwnedFd>,
    ops_seen: u32,
    in_flight: u32,
    registered: bool,
}

/// An op's reference to its file, and the entry to release when the op is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FileRef {
    /// The entry that counts this op.
    pub(super) entry: Option<u16>,
    /// Whether the op uses the entry instead of the descriptor.
    pub(super) registered: bool,
}

impl FileTable {
    /// Creates an empty table. Without kernel support, every op uses the descriptor.
    pub(super) fn new(submitter: &Submitter<'_>) -> Self {
        let enabled = submitter.register_files_sparse(FILES_MAX as u32).is_ok();
        let entries = if enabled { (0..FILES_MAX).map(|_| Entry::default()).collect() } else { Vec::new() };
        Self { entries, recent: 0, enabled }
    }

    /// Returns whether the kernel supports the table.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Counts an op on `file` that is about to be submitted.
    pub(super) fn acquire(&mut self, submitter: &Submitter<'_>, file: &Arc<OwnedFd>) -> FileRef {
        let Some(index) = self.find(file).or_else(|| self.allocate(submitter, file)) else {
            return FileRef { entry: None, registered: false };
        };
        self.recent = index;
        let entry = &mut self.entries[index];
        entry.ops_seen = entry.ops_seen.saturating_add(1);
        entry.in_flight += 1;
        // Exactly at the threshold, so that a refused registration is not repeated for every op.
        if !entry.registered && entry.ops_seen == OPS_BEFORE_REGISTERING {
            entry.registered = submitter.register_files_update(index as u32, &[file.as_raw_fd()]).is_ok();
        }
        FileRef { entry: Some(index as u16), registered: entry.registered }
    }

    /// Counts an op of an entry as completed.
    pub(super) fn release(&mut self, file_ref: FileRef) {
        if let Some(index) = file_ref.entry {
            let entry = &mut self.entries[usize::from(index)];
            assert!(entry.in_flight > 0, "a lease is released once");
            entry.in_flight -= 1;
        }
    }

    /// Unregisters files without ops in flight: all of them if the queue is `idle`, otherwise those that their owner
    /// has dropped.
    pub(super) fn sweep(&mut self, submitter: &Submitter<'_>, idle: bool) {
        for index in 0..self.entries.len() {
            let entry = &self.entries[index];
            if entry.ops_seen > 0 && entry.in_flight == 0 && (idle || entry.file.strong_count() == 0) {
                self.clear(submitter, index);
            }
        }
    }

    fn find(&self, file: &Arc<OwnedFd>) -> Option<usize> {
        let is_same = |entry: &Entry| entry.ops_seen > 0 && std::ptr::eq(entry.file.as_ptr(), Arc::as_ptr(file));
        if self.entries.get(self.recent).is_some_and(is_same) {
            return Some(self.recent);
        }
        self.entries.iter().position(is_same)
    }

    /// Returns an entry for a new file: a free one, or one without ops in flight.
    fn allocate(&mut self, submitter: &Submitter<'_>, file: &Arc<OwnedFd>) -> Option<usize> {
        let free = self.entries.iter().position(|entry| entry.ops_seen == 0);
        let index = free.or_else(|| self.entries.iter().position(|entry| entry.in_flight == 0))?;
        self.clear(submitter, index);
        self.entries[index].file = Arc::downgrade(file);
        Some(index)
    }

    fn clear(&mut self, submitter: &Submitter<'_>, index: usize) {
        if self.entries[index].registered {
            // Emptying an entry allocates nothing, and is only refused without a table.
            let _ = submitter.register_files_update(index as u32, &[NO_FILE]);
        }
        self.entries[index] = Entry::default();
    }
}
