//! Decides what follows a completion. This module does no I/O.

use crate::error::Error;
use crate::op::{Direction, Errno};

/// Maximum resubmissions of one op without progress. After that, its error is reported.
pub const RETRIES_MAX: u32 = 100;

/// The next step after a completion.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Every wanted byte is present.
    Done,
    /// Submit the rest after this many bytes (a multiple of the alignment, possibly 0).
    Continue { bytes: usize },
    /// Submit the same op again.
    Retry,
    /// The first direct op was refused, for this reason: submit the same op through the page cache, or an op of cuFile
    /// through a bounce buffer.
    FallBack(String),
    /// The file ended early.
    EndOfFile,
    /// The block failed.
    Fail(Error),
}

/// The progress of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BlockProgress {
    /// Bytes moved so far, from the start of the block.
    pub(super) reached: usize,
    /// Completions since then without progress.
    pub(super) retries: u32,
}

/// The op that completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Attempt {
    /// Bytes of the block's range before this op.
    pub(super) before: usize,
    /// Bytes from the start of the block that complete it.
    pub(super) needed: usize,
    /// The alignment of a continuation's start.
    pub(super) step_bytes: usize,
    /// Whether it bypassed the page cache.
    pub(super) is_direct: bool,
    pub(super) direction: Direction,
}

/// Classifies one completion and updates the progress.
pub(super) fn classify(progress: &mut BlockProgress, attempt: Attempt, result: Result<usize, Errno>) -> Outcome {
    match result {
        Ok(bytes) => classify_transfer(progress, attempt, bytes),
        Err(Errno::INTR | Errno::AGAIN) => {
            progress.retries += 1;
            if progress.retries <= RETRIES_MAX {
                return Outcome::Retry;
            }
            let error = Error::os(attempt.direction.name(), result.err().unwrap_or(Errno::AGAIN));
            Outcome::Fail(error.because(format!("still refused after {RETRIES_MAX} retries")))
        }
        Err(errno @ (Errno::INVAL | Errno::OPNOTSUPP)) if attempt.is_direct && progress.reached == 0 => {
            let reason =
                format!("the first direct {} was refused (errno {})", attempt.direction.name(), errno.raw_os_error());
            Outcome::FallBack(reason)
        }
        Err(errno) => Outcome::Fail(Error::os(attempt.direction.name(), errno)),
    }
}

fn classify_transfer(progress: &mut BlockProgress, attempt: Attempt, bytes: usize) -> Outcome {
    let reached = attempt.before + bytes;
    if reached >= attempt.needed {
        return Outcome::Done;
    }
    if reached > progress.reached {
        *progress = BlockProgress { reached, retries: 0 };
        // A direct op continues at an aligned offset, so it may move some bytes twice.
        return Outcome::Continue { bytes: bytes / attempt.step_bytes * attempt.step_bytes };
    }
    if attempt.direction == Direction::Read {
        return Outcome::EndOfFile;
    }
    progress.retries += 1;
    if progress.retries <= RETRIES_MAX {
        return Outcome::Retry;
    }
    let error = Error::os(attempt.direction.name(), Errno::IO);
    Outcome::Fail(error.because(format!("the file took no more bytes in {RETRIES_MAX} attempts")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Attempt =
        Attempt { before: 0, needed: 8000, step_bytes: 512, is_direct: true, direction: Direction::Read };

    fn fresh() -> BlockProgress {
        BlockProgress { reached: 0, retries: 0 }
    }

    #[test]
    fn a_short_direct_transfer_continues_at_an_aligned_offset() {
        let mut progress = fresh();
        assert!(matches!(classify(&mut progress, READ, Ok(1000)), Outcome::Continue { bytes: 512 }));
        assert_eq!(progress.reached, 1000);
        let again = Attempt { before: 512, ..READ };
        assert!(matches!(classify(&mut progress, again, Ok(488)), Outcome::EndOfFile));
        assert!(matches!(classify(&mut progress, again, Ok(7488)), Outcome::Done));
    }

    #[test]
    fn interruptions_are_retried_within_the_limit_and_progress_resets_them() {
        let mut progress = fresh();
        for _ in 0..RETRIES_MAX {
            assert!(matches!(classify(&mut progress, READ, Err(Errno::INTR)), Outcome::Retry));
        }
        let last = classify(&mut progress, READ, Err(Errno::INTR));
        assert!(matches!(last, Outcome::Fail(error) if error.errno() == Some(Errno::INTR.raw_os_error())));
        assert!(matches!(classify(&mut progress, READ, Ok(512)), Outcome::Continue { .. }));
        assert_eq!(progress.retries, 0);
    }

    #[test]
    fn einval_means_buffered_only_for_the_first_direct_transfer() {
        assert!(matches!(classify(&mut fresh(), READ, Err(Errno::INVAL)), Outcome::FallBack(_)));
        let buffered = Attempt { is_direct: false, ..READ };
        assert!(matches!(classify(&mut fresh(), buffered, Err(Errno::INVAL)), Outcome::Fail(_)));
        let mut underway = BlockProgress { reached: 512, retries: 0 };
        assert!(matches!(classify(&mut underway, READ, Err(Errno::INVAL)), Outcome::Fail(_)));
    }

    #[test]
    fn a_write_that_moves_nothing_is_not_the_end_of_the_file() {
        let write = Attempt { direction: Direction::Write, ..READ };
        let mut progress = fresh();
        assert!(matches!(classify(&mut progress, write, Ok(0)), Outcome::Retry));
        progress.retries = RETRIES_MAX;
        assert!(matches!(classify(&mut progress, write, Ok(0)), Outcome::Fail(_)));
    }
}
