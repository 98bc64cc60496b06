//! `io_uring`: ops are written into a ring shared with the kernel. Many ops cost one system call.
//!
//! `ring` opens the ring and enters the kernel. `files` and `buffers` are the kernel's tables of frequently used files
//! and memory. `entry` encodes an op. This file is the queue: the ops in flight, and the waker.
#![allow(unsafe_code)]

mod buffers;
mod entry;
mod files;
mod ring;
#[cfg(test)]
mod tests;
mod wake_poll;

use std::sync::Arc;

use deepnvme_mem::RegistrableRange;

use self::buffers::BufferTable;
use self::files::{FileRef, FileTable};
use self::ring::{Ring, RingMode};
use self::wake_poll::{WAKE_DATA, WakePoll};
use super::contract::{Backend, BackendKind, BackendSetup, Wake};
use super::op_slots::OpSlots;
use crate::error::Result;
use crate::op::{Completion, Op, Submit, SubmitMode};

/// Maximum queue depth: the kernel's largest ring, minus the entry that polls the waker.
const DEPTH_MAX: u32 = 32 * 1024 - 1;

/// The `io_uring` backend.
pub struct UringBackend {
    ring: Ring,
    ops: OpSlots,
    /// File reference of each op, by slot.
    file_refs: Vec<FileRef>,
    files: FileTable,
    buffers: BufferTable,
    submit: SubmitMode,
    wake_poll: WakePoll,
}

impl UringBackend {
    /// Opens a ring with the best flags of this kernel.
    ///
    /// # Errors
    /// The error of `io_uring_setup`: not in this kernel, forbidden, or no memory. `Unsupported` before Linux 5.6. The
    /// error of `eventfd`.
    pub fn open(setup: &BackendSetup) -> Result<Self> {
        Self::open_in(setup, &RingMode::ALL)
    }

    fn open_in(setup: &BackendSetup, modes: &[RingMode]) -> Result<Self> {
        let depth = setup.queue_depth.clamp(1, DEPTH_MAX);
        let ring = Ring::open(depth + 1, modes)?;
        let files = FileTable::new(&ring.submitter());
        let buffers = BufferTable::new(&ring.submitter());
        let wake_poll = WakePoll::new()?;
        let ops = OpSlots::new(depth);
        let file_refs = vec![FileRef { entry: None, registered: false }; depth as usize];
        Ok(Self { ring, ops, file_refs, files, buffers, submit: setup.submit, wake_poll })
    }

    /// Describes the features of this ring.
    #[must_use]
    pub fn describe(&self) -> String {
        let has = |enabled: bool| if enabled { "yes" } else { "no" };
        format!(
            "{}; registered files: {}; registered buffers: {}",
            self.ring.flags(),
            has(self.files.is_enabled()),
            has(self.buffers.is_enabled())
        )
    }

    /// Submits, and waits for one completion if `wait`.
    fn enter(&mut self, wait: bool) -> Result<()> {
        self.wake_poll.arm(&mut self.ring);
        let queued = self.ring.queued() as u32;
        self.ring.enter(wait, self.ops.len().saturating_sub(queued))
    }

    /// Takes the visible completions.
    fn fetch(&mut self, completions: &mut Vec<Completion>) -> Result<()> {
        let Self { ring, ops, file_refs, files, wake_poll, .. } = self;
        for entry in ring.completions() {
            if entry.user_data() == WAKE_DATA {
                wake_poll.complete_poll(&entry)?;
                continue;
            }
            let index = entry.user_data() as u32;
            if let Some(completion) = ops.complete(index, i64::from(entry.result())) {
                files.release(file_refs[index as usize]);
                completions.push(completion);
            }
        }
        Ok(())
    }
}

impl Drop for UringBackend {
    fn drop(&mut self) {
        let mut completions = Vec::new();
        while self.ops.len() > 0 {
            if self.reap(1, &mut completions).is_err() {
                if self.ring.has_accepted() {
                    // The kernel may still write into this memory, so it must never be freed.
                    std::mem::forget(std::mem::replace(&mut self.ops, OpSlots::new(0)));
                }
                break;
            }
            completions.clear();
        }
        // The kernel destroys the ring in the background after its descriptor is closed. Externally visible resources
        // (open files, locked memory) are released here.
        self.files.sweep(&self.ring.submitter(), true);
        self.buffers.clear(&self.ring.submitter());
    }
}

impl Backend for UringBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Uring
    }

    fn depth(&self) -> u32 {
        self.file_refs.len() as u32
    }

    fn in_flight(&self) -> u32 {
        self.ops.len()
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.ops.is_full() || self.ring.is_full() {
            return Submit::Busy(op);
        }
        let file_ref = self.files.acquire(&self.ring.submitter(), &op.file);
        let (index, memory) = self.ops.insert(op);
        self.file_refs[index as usize] = file_ref;
        if let Some(op) = self.ops.get(index) {
            let entry = entry::of(op, memory, file_ref, &self.buffers).user_data(u64::from(index));
            // SAFETY: `ops` owns the op, its memory, file and iovecs until its completion is fetched, and leaks them if
            // the kernel may have the op and never returns it.
            let pushed = unsafe { self.ring.push(&entry) };
            assert!(pushed, "the ring has a free entry: is_full was checked above");
        }
        if self.submit == SubmitMode::Single {
            // After an error, the entry stays in the queue, and the next flush or reap reports it.
            let _ = self.enter(false);
        }
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        loop {
            let queued = self.ring.queued();
            if queued == 0 {
                return Ok(());
            }
            self.enter(false)?;
            if self.ring.queued() >= queued {
                // The kernel accepts no more now. The next reap submits the rest, and can wait.
                return Ok(());
            }
        }
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let enough = completions.len() + min as usize;
        self.fetch(completions)?;
        let mut satisfied = completions.len() >= enough || self.wake_poll.wakes.is_woken();
        loop {
            if !satisfied || self.ring.has_work() {
                self.enter(!satisfied)?;
                self.fetch(completions)?;
            }
            if satisfied {
                break;
            }
            satisfied = completions.len() >= enough || self.wake_poll.wakes.is_woken();
            if satisfied && self.ring.queued() == 0 {
                break;
            }
        }
        if min > 0 {
            self.wake_poll.wakes.clear();
        }
        self.files.sweep(&self.ring.submitter(), self.ops.len() == 0);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.wake_poll.wakes.event().clone()
    }

    fn register(&mut self, memory: &RegistrableRange) -> bool {
        self.buffers.register(&self.ring.submitter(), memory)
    }

    fn unregister(&mut self, memory: &RegistrableRange) {
        self.buffers.unregister(&self.ring.submitter(), memory);
    }
}
