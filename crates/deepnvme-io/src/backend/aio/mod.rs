//! Linux native AIO: ops go to the kernel in arrays and return as events.
//!
//! `sys` has the system calls, `request` encodes ops for them, and `wake_poll` is the poll that lets other threads end
//! a wait. This file is the queue: collected ops, ops in flight, and partial acceptance by the kernel. The kernel
//! checks each op at submission, so an op can fail there. That failure becomes the op's own completion, and the other
//! ops continue.
#![allow(unsafe_code)]

mod request;
mod sys;
#[cfg(test)]
mod tests;
mod wake_poll;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use self::request::{block_of, set_up_error, sync_inline};
use self::sys::{Context, ControlBlock, IoEvent};
use self::wake_poll::{WAKE_DATA, WakePoll};
use super::contract::{Backend, BackendKind, BackendSetup, Wake};
use super::op_slots::OpSlots;
use crate::error::{Error, Result};
use crate::op::{Completion, Errno, Op, Submit, SubmitMode};

/// Maximum queue depth, far below the size at which `io_setup` returns EINVAL.
const DEPTH_MAX: u32 = 32 * 1024;
/// Pause when the kernel has no room although nothing of ours is in flight.
const STALL_PAUSE: Duration = Duration::from_millis(1);

/// The native AIO backend.
pub struct AioBackend {
    // Declared first, so that the queue is destroyed before anything that it may use.
    context: Context,
    ops: OpSlots,
    /// Ops that wait for the next `io_submit`, oldest first.
    collected: VecDeque<ControlBlock>,
    /// Ops that ended without an event: refused by `io_submit`, or done in the call.
    ended: Vec<Completion>,
    events: Vec<IoEvent>,
    depth: u32,
    submit: SubmitMode,
    wake_poll: WakePoll,
}

impl AioBackend {
    /// Sets up a queue in the kernel.
    ///
    /// # Errors
    /// The error of `io_setup`: not in this kernel, forbidden, or the system's limit of AIO ops is reached. The error
    /// of `eventfd`.
    pub fn open(setup: &BackendSetup) -> Result<Self> {
        // One more than the ops, for the poll of the waker.
        Self::open_with_length(setup, setup.queue_depth.clamp(1, DEPTH_MAX) + 1)
    }

    fn open_with_length(setup: &BackendSetup, queue_length: u32) -> Result<Self> {
        let depth = setup.queue_depth.clamp(1, DEPTH_MAX);
        let context = Context::new(queue_length).map_err(|errno| set_up_error(errno, depth))?;
        Ok(Self {
            context,
            ops: OpSlots::new(depth),
            collected: VecDeque::new(),
            ended: Vec::new(),
            events: vec![IoEvent::default(); depth as usize + 1],
            depth,
            submit: setup.submit,
            wake_poll: WakePoll::new()?,
        })
    }

    /// Returns the number of ops in the kernel.
    fn in_kernel(&self) -> usize {
        self.ops.len() as usize - self.collected.len()
    }

    /// Submits the collected ops to the kernel, until none is left or the kernel has no more room.
    fn submit_collected(&mut self) -> Result<()> {
        while !self.collected.is_empty() {
            let blocks = self.collected.make_contiguous();
            let mut pointers: Vec<*mut ControlBlock> = blocks.iter_mut().map(std::ptr::from_mut).collect();
            // SAFETY: the pointers are to blocks of `collected`, which live for the call. `ops` owns each op's memory,
            // file and iovecs until its event has been fetched, and leaks them if it never is.
            match unsafe { self.context.submit(&mut pointers) } {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(taken) => drop(self.collected.drain(..taken)),
                Err(Errno::INTR) => {}
                Err(errno) => self.refuse(errno),
            }
        }
        Ok(())
    }

    /// Handles the kernel's refusal of the first collected op.
    fn refuse(&mut self, errno: Errno) {
        let Some(block) = self.collected.pop_front() else {
            return;
        };
        let index = block.data() as u32;
        let result = match self.ops.get(index) {
            // Some file systems have no asynchronous sync. A plain one has the same effect, but blocks this thread.
            Some(op) if errno == Errno::INVAL => sync_inline(op).unwrap_or(Err(errno)),
            _ => Err(errno),
        };
        let kernel_result = result.map_or_else(|errno| -i64::from(errno.raw_os_error()), |()| 0);
        self.ended.extend(self.ops.complete(index, kernel_result));
    }

    /// Fetches events. With `wait`, waits for the first one, or until the next check for a wake.
    fn fetch(&mut self, wait: bool, completions: &mut Vec<Completion>) -> Result<()> {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = if wait { self.wake_poll.wait_max() } else { Some(zero) };
        let fetched = match self.context.events(usize::from(wait), &mut self.events, timeout) {
            Ok(fetched) => fetched,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(Error::os("io_getevents", errno)),
        };
        for event in &self.events[..fetched] {
            if event.data == WAKE_DATA {
                self.wake_poll.complete_poll(event);
            } else {
                completions.extend(self.ops.complete(event.data as u32, event.result));
            }
        }
        self.wake_poll.check();
        Ok(())
    }

    /// Handles a kernel without room although nothing of ours is in flight. Pauses, and submits again. If the kernel
    /// still has no room, the first op fails with EAGAIN, so that the worker decides how often to retry.
    fn stalled(&mut self) -> Result<()> {
        std::thread::sleep(STALL_PAUSE);
        let before = self.collected.len();
        self.submit_collected()?;
        if self.collected.len() == before {
            self.refuse(Errno::AGAIN);
        }
        Ok(())
    }
}

impl Drop for AioBackend {
    fn drop(&mut self) {
        let mut completions = Vec::new();
        while self.in_flight() > 0 {
            if self.reap(1, &mut completions).is_err() {
                // The kernel may still write into this memory, so it must never be freed.
                std::mem::forget(std::mem::replace(&mut self.ops, OpSlots::new(0)));
                break;
            }
            completions.clear();
        }
        self.wake_poll.cancel_poll(&self.context);
    }
}

impl Backend for AioBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Aio
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn in_flight(&self) -> u32 {
        self.ops.len() + self.ended.len() as u32
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.in_flight() >= self.depth {
            return Submit::Busy(op);
        }
        let (index, memory) = self.ops.insert(op);
        if let Some(op) = self.ops.get(index) {
            self.collected.push_back(block_of(op, memory).carrying(u64::from(index)));
        }
        if self.submit == SubmitMode::Single {
            // Ops that the kernel does not accept now stay collected until the next flush or reap.
            let _ = self.submit_collected();
        }
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        self.submit_collected()
    }

    fn reap(&mut self, min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        let enough = completions.len() + min as usize;
        loop {
            self.wake_poll.arm(&self.context);
            self.submit_collected()?;
            completions.append(&mut self.ended);
            let satisfied = completions.len() >= enough || self.wake_poll.wakes.is_woken();
            if !satisfied && !self.collected.is_empty() && self.in_kernel() == 0 {
                self.stalled()?;
                continue;
            }
            self.fetch(!satisfied, completions)?;
            if completions.len() >= enough || self.wake_poll.wakes.is_woken() {
                break;
            }
        }
        // Events have made room for the ops that the kernel had left.
        self.submit_collected()?;
        completions.append(&mut self.ended);
        if min > 0 {
            self.wake_poll.wakes.clear();
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.wake_poll.wakes.event().clone()
    }
}
