//! The ring: opens it with the best flags of this kernel, and enters the kernel.
#![allow(unsafe_code)]

use std::io;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, Probe, cqueue, opcode, squeue};

use crate::error::{Error, ErrorKind, Result};
use crate::op::Errno;

/// Maximum consecutive refusals of submissions (no memory) while nothing is in flight.
const STALLS_MAX: u32 = 200;
/// Pause after such a refusal.
const STALL_PAUSE: Duration = Duration::from_millis(1);

/// One way to set up a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RingMode {
    /// Linux 6.1: completions run only when this thread asks, without interrupting it.
    DeferTaskrun,
    /// Linux 5.19: completions do not interrupt this thread while it runs.
    CoopTaskrun,
    /// Linux 5.6.
    Plain,
}

impl RingMode {
    /// All modes, the best first.
    pub(super) const ALL: [Self; 3] = [Self::DeferTaskrun, Self::CoopTaskrun, Self::Plain];

    pub(super) const fn flags(self) -> &'static str {
        match self {
            Self::DeferTaskrun => "SINGLE_ISSUER, DEFER_TASKRUN",
            Self::CoopTaskrun => "COOP_TASKRUN",
            Self::Plain => "no set-up flags",
        }
    }

    fn build(self, entries: u32) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        match self {
            Self::DeferTaskrun => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all()
            }
            Self::CoopTaskrun => builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all(),
            Self::Plain => &mut builder,
        };
        builder.build(entries)
    }
}

/// An open ring.
pub(super) struct Ring {
    inner: IoUring,
    mode: RingMode,
    /// Consecutive refusals while nothing was in flight.
    stalls: u32,
    /// Whether the kernel has ever accepted an entry.
    has_accepted: bool,
}

impl Ring {
    /// Opens a ring of at least `entries` submissions in the first of `modes` that this kernel supports.
    pub(super) fn open(entries: u32, modes: &[RingMode]) -> Result<Self> {
        let mut refusal = Errno::INVAL;
        for &mode in modes {
            match mode.build(entries) {
                Ok(inner) => {
                    check_ops(&inner)?;
                    return Ok(Self { inner, mode, stalls: 0, has_accepted: false });
                }
                Err(error) => refusal = errno_of(&error),
            }
            // A kernel returns EINVAL for an unknown flag. Any other error applies to every mode.
            if refusal != Errno::INVAL {
                break;
            }
        }
        Err(Error::os("io_uring_setup", refusal))
    }

    /// Returns the flags that distinguish the ring's mode, as text.
    pub(super) fn flags(&self) -> &'static str {
        self.mode.flags()
    }

    /// Returns the submitter, to register buffers and files.
    pub(super) fn submitter(&self) -> io_uring::Submitter<'_> {
        self.inner.submitter()
    }

    /// Adds an entry to the submission queue. Returns false if the queue is full.
    ///
    /// # Safety
    /// The entry's memory, iovecs and descriptor stay valid until its completion has been seen.
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the entry's memory, iovecs and descriptor stay valid until its completion, as the caller of `push`
        // ensures.
        unsafe { self.inner.submission().push(entry).is_ok() }
    }

    /// Returns the number of entries that the kernel has not accepted yet.
    pub(super) fn queued(&mut self) -> usize {
        self.inner.submission().len()
    }

    /// Returns whether `push` would be refused.
    pub(super) fn is_full(&mut self) -> bool {
        self.inner.submission().is_full()
    }

    /// Returns whether the kernel has ever accepted an entry. Before that it cannot access any memory.
    pub(super) fn has_accepted(&self) -> bool {
        self.has_accepted
    }

    /// Returns whether entering the kernel would submit ops or make completions visible.
    pub(super) fn has_work(&mut self) -> bool {
        let submission = self.inner.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    /// Returns the visible completions.
    pub(super) fn completions(&mut self) -> cqueue::CompletionQueue<'_> {
        self.inner.completion()
    }

    /// Submits the queued entries and, if `wait`, waits for one completion. `kernel_ops` ops are in the kernel already.
    /// May return early (a signal, a partial submission): the caller checks and repeats.
    pub(super) fn enter(&mut self, wait: bool, kernel_ops: u32) -> Result<()> {
        let queued = self.queued();
        let accepted = match self.enter_once(queued, wait) {
            Ok(accepted) => accepted,
            Err(Errno::INTR) => return Ok(()),
            // EAGAIN: no memory for a request. EBUSY: completions must be fetched first.
            Err(Errno::AGAIN | Errno::BUSY) => 0,
            Err(errno) => return Err(Error::os("io_uring_enter", errno)),
        };
        self.has_accepted |= accepted > 0;
        if accepted > 0 || queued == 0 {
            self.stalls = 0;
            return Ok(());
        }
        self.stalled(wait, kernel_ops)
    }

    /// Handles a kernel that accepted nothing. With `wait`, waits for an op in flight, or briefly, before the next
    /// attempt.
    fn stalled(&mut self, wait: bool, kernel_ops: u32) -> Result<()> {
        if kernel_ops > 0 {
            return match self.enter_once(0, wait) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => Ok(()),
                Err(errno) => Err(Error::os("io_uring_enter", errno)),
            };
        }
        if !wait {
            return Ok(());
        }
        self.stalls += 1;
        if self.stalls > STALLS_MAX {
            self.stalls = 0;
            return Err(Error::os("io_uring_enter", Errno::AGAIN)
                .because("the kernel has no memory for further requests; lower queue_depth or free memory"));
        }
        std::thread::sleep(STALL_PAUSE);
        Ok(())
    }

    fn enter_once(&self, to_submit: usize, wait: bool) -> Result<usize, Errno> {
        // GETEVENTS also makes the kernel run deferred completions and flush those that overflowed the queue.
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: the argument pointer is null (no signal mask). The queue's entries are valid by the contract of
        // `push`.
        let result =
            unsafe { self.inner.submitter().enter::<libc::sigset_t>(to_submit as u32, u32::from(wait), flags, None) };
        result.map_err(|error| errno_of(&error))
    }
}

/// Checks that the kernel supports every kind of entry that this backend submits.
fn check_ops(ring: &IoUring) -> Result<()> {
    let mut probe = Probe::new();
    match ring.submitter().register_probe(&mut probe).map_err(|error| errno_of(&error)) {
        Ok(()) => {}
        // Before Linux 5.6, neither this probe nor plain reads and writes existed.
        Err(Errno::INVAL) => return Err(too_old()),
        // A filter refuses registration, so support is unknown until the first transfer.
        Err(_) => return Ok(()),
    }
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
        opcode::PollAdd::CODE,
    ];
    if needed.iter().all(|&code| probe.is_supported(code)) { Ok(()) } else { Err(too_old()) }
}

fn too_old() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "io_uring_setup",
        "this kernel's io_uring has no plain reads and writes; use Linux 5.6 or later",
    )
}

/// Returns the error number of an `io::Error` from a system call.
pub(super) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
