//! Classifies completions. Pure.

use crate::error::Error;
use crate::op::Errno;

use super::RETRIES_MAX;

/// The next step after a completion.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Every wanted byte is present.
    Done,
    /// Submit the rest after this many bytes (a multiple of the alignment, possibly 0).
    Continue { bytes: usize },
    /// Submit the same op again.
    Retry,
    /// The file does not support direct I/O, for this reason: submit the same op through the page cache.
    GoBuffered(String),
    /// The file ended early.
    EndOfFile,
    /// The block failed.
    Fail(Error),
}

/// The progress of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Headway {
    /// Bytes moved so far, from the start of the op.
    pub(crate) reached: usize,
    /// Completions since then without progress.
    pub(crate) retries: u32,
}

/// The op that completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Attempt {
    /// Bytes of the block before this op.
    pub(crate) before: usize,
    /// Bytes from the start of the block that complete it.
    pub(crate) needed: usize,
    /// The alignment of a continuation's start.
    pub(crate) step_bytes: usize,
    /// Whether it bypassed the page cache.
    pub(crate) is_direct: bool,
    /// Whether it was a read.
    pub(crate) is_read: bool,
    /// The verb for errors.
    pub(crate) operation: &'static str,
}

/// Classifies one completion and updates the progress.
pub(crate) fn judge(headway: &mut Headway, attempt: Attempt, result: Result<usize, Errno>) -> Verdict {
    match result {
        Ok(bytes) => judge_transfer(headway, attempt, bytes),
        Err(Errno::INTR | Errno::AGAIN) => {
            headway.retries += 1;
            if headway.retries <= RETRIES_MAX {
                return Verdict::Retry;
            }
            let error = Error::os(attempt.operation, result.err().unwrap_or(Errno::AGAIN));
            Verdict::Fail(error.because(format!("still refused after {RETRIES_MAX} retries")))
        }
        Err(errno @ (Errno::INVAL | Errno::OPNOTSUPP)) if attempt.is_direct && headway.reached == 0 => {
            let reason = format!("the first direct {} was refused (errno {})", attempt.operation, errno.raw_os_error());
            Verdict::GoBuffered(reason)
        }
        Err(errno) => Verdict::Fail(Error::os(attempt.operation, errno)),
    }
}

fn judge_transfer(headway: &mut Headway, attempt: Attempt, bytes: usize) -> Verdict {
    let reached = attempt.before + bytes;
    if reached >= attempt.needed {
        return Verdict::Done;
    }
    if reached > headway.reached {
        *headway = Headway { reached, retries: 0 };
        // A direct op continues at an aligned offset, so it may move some bytes twice.
        return Verdict::Continue { bytes: bytes / attempt.step_bytes * attempt.step_bytes };
    }
    if attempt.is_read {
        return Verdict::EndOfFile;
    }
    headway.retries += 1;
    if headway.retries <= RETRIES_MAX {
        return Verdict::Retry;
    }
    let error = Error::os(attempt.operation, Errno::IO);
    Verdict::Fail(error.because(format!("the file took no more bytes in {RETRIES_MAX} attempts")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Attempt =
        Attempt { before: 0, needed: 8000, step_bytes: 512, is_direct: true, is_read: true, operation: "read" };

    fn fresh() -> Headway {
        Headway { reached: 0, retries: 0 }
    }

    #[test]
    fn a_short_direct_transfer_goes_on_at_an_aligned_place() {
        let mut headway = fresh();
        assert!(matches!(judge(&mut headway, READ, Ok(1000)), Verdict::Continue { bytes: 512 }));
        assert_eq!(headway.reached, 1000);
        let again = Attempt { before: 512, ..READ };
        assert!(matches!(judge(&mut headway, again, Ok(488)), Verdict::EndOfFile));
        assert!(matches!(judge(&mut headway, again, Ok(7488)), Verdict::Done));
    }

    #[test]
    fn interruptions_are_retried_within_the_limit_and_headway_resets_them() {
        let mut headway = fresh();
        for _ in 0..RETRIES_MAX {
            assert!(matches!(judge(&mut headway, READ, Err(Errno::INTR)), Verdict::Retry));
        }
        let last = judge(&mut headway, READ, Err(Errno::INTR));
        assert!(matches!(last, Verdict::Fail(error) if error.errno() == Some(Errno::INTR.raw_os_error())));
        assert!(matches!(judge(&mut headway, READ, Ok(512)), Verdict::Continue { .. }));
        assert_eq!(headway.retries, 0);
    }

    #[test]
    fn einval_means_buffered_only_for_the_first_direct_transfer() {
        assert!(matches!(judge(&mut fresh(), READ, Err(Errno::INVAL)), Verdict::GoBuffered(_)));
        let buffered = Attempt { is_direct: false, ..READ };
        assert!(matches!(judge(&mut fresh(), buffered, Err(Errno::INVAL)), Verdict::Fail(_)));
        let mut underway = Headway { reached: 512, retries: 0 };
        assert!(matches!(judge(&mut underway, READ, Err(Errno::INVAL)), Verdict::Fail(_)));
    }

    #[test]
    fn a_write_that_moves_nothing_is_not_the_end_of_the_file() {
        let write = Attempt { is_read: false, operation: "write", ..READ };
        let mut headway = fresh();
        assert!(matches!(judge(&mut headway, write, Ok(0)), Verdict::Retry));
        headway.retries = RETRIES_MAX;
        assert!(matches!(judge(&mut headway, write, Ok(0)), Verdict::Fail(_)));
    }
}
