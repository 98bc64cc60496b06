//! Huge pages for memory that is about to be filled.
//!
//! Huge pages cost one fault instead of 512 and fewer TLB entries, so they usually pay off. They do not where a
//! virtual machine returns free memory to its host (free page reporting): that happens in huge pages, and fetching
//! one again takes several times as long as filling it. Small pages come from recently used memory instead. No
//! interface tells which case applies, so it is measured: on the memory itself, which is about to be touched anyway.
//! The measurement is repeated now and then, because the kernel hands out recently freed pages first: a trial that gets
//! only those calls huge pages fast.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, madvise};

use crate::Alignment;

/// Bytes between trials while huge pages are slow.
const TRIAL_INTERVAL_BYTES_SLOW: usize = 32 << 20;
/// Bytes between trials while huge pages are fast. A trial leaves 2 MiB in small pages, and direct I/O to small pages
/// needs more segments.
const TRIAL_INTERVAL_BYTES: usize = 256 << 20;
/// The smallest region to run a trial on.
const TRIAL_REGION_BYTES_MIN: usize = 8 << 20;
/// Bytes of a trial for each page size: one huge page.
const TRIAL_BYTES: usize = 2 << 20;
/// Huge pages count as slow if they take this many times as long as small ones.
const SLOW_FACTOR: u32 = 2;
/// Shorter times prove nothing: the memory was already there.
const TRIAL_TIME_MIN: Duration = Duration::from_micros(500);

/// The result of the last trial. It is used until the next one.
static THP_IS_SLOW: AtomicBool = AtomicBool::new(false);
/// Bytes requested since the last trial. The first request of [`TRIAL_REGION_BYTES_MIN`] or more runs one.
static BYTES_SINCE_TRIAL: AtomicUsize = AtomicUsize::new(TRIAL_INTERVAL_BYTES);

/// Requests huge pages for the whole huge pages inside the range, unless huge pages are slow. Returns whether the
/// kernel accepted.
///
/// # Safety
/// The range is mapped until the call returns.
pub(crate) unsafe fn advise_huge_inside(start: *mut u8, len: usize) -> bool {
    let head_bytes = start.align_offset(Alignment::HUGE.bytes() as usize);
    let inside_bytes = Alignment::HUGE.floor(len.saturating_sub(head_bytes) as u64) as usize;
    if inside_bytes == 0 {
        return false;
    }
    let start = start.wrapping_add(head_bytes);
    let bytes_since_trial = BYTES_SINCE_TRIAL.fetch_add(inside_bytes, Ordering::Relaxed).saturating_add(inside_bytes);
    let is_due = bytes_since_trial
        >= if THP_IS_SLOW.load(Ordering::Relaxed) { TRIAL_INTERVAL_BYTES_SLOW } else { TRIAL_INTERVAL_BYTES };
    if is_due
        && inside_bytes >= TRIAL_REGION_BYTES_MIN
        && let Some((huge, small)) = time_both_page_sizes(start)
    {
        BYTES_SINCE_TRIAL.store(0, Ordering::Relaxed);
        THP_IS_SLOW.store(thp_is_slow(huge, small), Ordering::Relaxed);
    }
    if THP_IS_SLOW.load(Ordering::Relaxed) {
        return false;
    }
    advise(start, inside_bytes, Advice::LinuxHugepage).is_some()
}

fn thp_is_slow(huge: Duration, small: Duration) -> bool {
    huge >= TRIAL_TIME_MIN && huge > small * SLOW_FACTOR
}

/// Measures how long the kernel takes to populate the start of the memory: one huge page, then as many bytes of small
/// pages. Returns the times in this order. Returns `None` if the kernel cannot populate it (before Linux 5.14, or not
/// for such memory).
fn time_both_page_sizes(start: *mut u8) -> Option<(Duration, Duration)> {
    let huge = time_populate(start, Advice::LinuxHugepage)?;
    let small = time_populate(start.wrapping_add(TRIAL_BYTES), Advice::LinuxNoHugepage)?;
    Some((huge, small))
}

fn time_populate(start: *mut u8, pages: Advice) -> Option<Duration> {
    advise(start, TRIAL_BYTES, pages)?;
    let began = Instant::now();
    advise(start, TRIAL_BYTES, Advice::LinuxPopulateWrite)?;
    Some(began.elapsed())
}

fn advise(start: *mut u8, len: usize, advice: Advice) -> Option<()> {
    // SAFETY: the caller of `advise_huge_inside` keeps the memory alive, and none of this advice changes a byte of it.
    unsafe { madvise(start.cast(), len, advice) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_slow_if_they_take_much_longer_and_a_measurable_time() {
        let us = Duration::from_micros;
        assert!(thp_is_slow(us(1300), us(400)), "a virtual machine that fetches them from its host");
        assert!(!thp_is_slow(us(200), us(400)), "the usual case");
        assert!(!thp_is_slow(us(700), us(400)), "not much longer");
        assert!(!thp_is_slow(us(40), us(3)), "the memory was already there");
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no kernel to ask")]
    fn a_trial_changes_no_byte() {
        let bytes: Vec<u8> = (0..80_000_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut copy = bytes.clone();
        // SAFETY: `copy` is mapped.
        let _taken = unsafe { advise_huge_inside(copy.as_mut_ptr(), copy.len()) };
        assert!(copy == bytes);
    }
}
