//! How long to sleep between polls of the driver.

use std::time::{Duration, Instant};

/// A wait spins for this long, then sleeps: a copy of up to a megabyte takes no longer, and a thread that sleeps wakes later than that.
const SPIN: Duration = Duration::from_micros(30);
/// The pause between two polls: an eighth of the time waited so far, within these bounds.
const PAUSE_SHARE: u32 = 8;
const PAUSE_MIN: Duration = Duration::from_micros(1);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// Polls until the work is complete, with longer and longer pauses, at most 1 ms. It spins for as long as a small copy
/// takes, then sleeps. A wait of 30 us makes at most 20 polls, and a wait of a second fewer than 1,100.
///
/// Returns `false` if `limit` passes first.
///
/// # Errors
/// Those of `is_complete`.
pub(crate) fn poll<E>(limit: Duration, mut is_complete: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    let begin = Instant::now();
    loop {
        if is_complete()? {
            return Ok(true);
        }
        let waited = begin.elapsed();
        if waited >= limit {
            return Ok(false);
        }
        let pause = pause_after(waited);
        if waited >= SPIN {
            std::thread::sleep(pause);
            continue;
        }
        while begin.elapsed() < waited + pause {
            std::hint::spin_loop();
        }
    }
}

/// Returns the pause before the next poll of work that has been waited for this long.
#[must_use]
pub fn pause_after(waited: Duration) -> Duration {
    (waited / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_makes_few_polls() {
        let polls_of = |wait: Duration| {
            let ends = std::iter::successors(Some(Duration::ZERO), |waited| Some(*waited + pause_after(*waited)));
            ends.take_while(|waited| *waited < wait).count()
        };
        assert!((10..=20).contains(&polls_of(SPIN)), "{}", polls_of(SPIN));
        let long = polls_of(Duration::from_secs(1));
        assert!((1000..1100).contains(&long), "{long}");
    }

    #[test]
    fn it_ends_with_the_work_the_limit_or_the_error() {
        let mut left = 5;
        let done = poll::<()>(Duration::from_secs(60), || {
            left -= 1;
            Ok(left == 0)
        });
        assert_eq!((done, left), (Ok(true), 0));
        assert_eq!(poll::<()>(Duration::from_millis(2), || Ok(false)), Ok(false));
        assert_eq!(poll(Duration::from_secs(60), || Err(7)), Err(7));
    }
}
