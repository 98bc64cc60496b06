//! Huge pages under memory that is about to be filled.
//!
//! One fault instead of 512, and fewer entries in the processor's tables: as a rule they are worth it. Not so where a
//! virtual machine gives free memory back to its host. It does that in whole huge pages (free page reporting), so that the
//! next one to be had has to be fetched again, which takes several times as long as filling it, while small pages
//! come from what has been in use. What of the two is true cannot be asked, only tried: on a part of the memory itself,
//! which is about to be touched anyway, and again now and then, since pages that were free a moment ago come first.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, madvise};

use crate::Alignment;

/// Once for so many bytes that advice is asked for, while huge pages are dear.
const TRIAL_EVERY_BYTES: usize = 32 << 20;
/// And while they are not: a trial leaves small pages, which the disk is slower with.
const TRIAL_EVERY_BYTES_HUGE: usize = 256 << 20;
/// On memory of at least this size.
const TRIED_BYTES_MIN: usize = 8 << 20;
/// How much of it with each kind of pages: one huge page.
const TRIAL_BYTES: usize = 2 << 20;
/// So many times as long huge pages take where they are not worth it.
const TIMES_DEAR: u32 = 2;
/// What takes less than that is too short to be judged: the memory was there already.
const TRIAL_TIME_MIN: Duration = Duration::from_micros(500);

/// What the last trial said; what comes until the next one goes by it.
static ARE_DEAR: AtomicBool = AtomicBool::new(false);
/// Bytes that advice was asked for since then: the first memory is tried.
static UNTRIED_BYTES: AtomicUsize = AtomicUsize::new(TRIAL_EVERY_BYTES_HUGE);

/// Asks for huge pages under somebody's memory, as far as whole ones fit inside and they are worth it; whether the kernel
/// took the advice.
pub(crate) fn advise_inside(start: *mut u8, len: usize) -> bool {
    let head_bytes = start.align_offset(Alignment::HUGE.bytes() as usize);
    let inside_bytes = Alignment::HUGE.floor(len.saturating_sub(head_bytes) as u64) as usize;
    if inside_bytes == 0 {
        return false;
    }
    let start = start.wrapping_add(head_bytes);
    let untried_bytes = UNTRIED_BYTES.fetch_add(inside_bytes, Ordering::Relaxed).saturating_add(inside_bytes);
    let is_due =
        untried_bytes >= if ARE_DEAR.load(Ordering::Relaxed) { TRIAL_EVERY_BYTES } else { TRIAL_EVERY_BYTES_HUGE };
    if is_due
        && inside_bytes >= TRIED_BYTES_MIN
        && let Some((huge, small)) = try_both(start)
    {
        UNTRIED_BYTES.store(0, Ordering::Relaxed);
        ARE_DEAR.store(are_dear(huge, small), Ordering::Relaxed);
    }
    if ARE_DEAR.load(Ordering::Relaxed) {
        return false;
    }
    advise(start, inside_bytes, Advice::LinuxHugepage).is_some()
}

fn are_dear(huge: Duration, small: Duration) -> bool {
    huge >= TRIAL_TIME_MIN && huge > small * TIMES_DEAR
}

/// How long the kernel takes to give the first pages of the memory: huge ones, and as many bytes of small ones. `None`
/// where it cannot be asked (before Linux 5.14), or not for such memory.
fn try_both(start: *mut u8) -> Option<(Duration, Duration)> {
    let huge = touch(start, Advice::LinuxHugepage)?;
    let small = touch(start.wrapping_add(TRIAL_BYTES), Advice::LinuxNoHugepage)?;
    Some((huge, small))
}

fn touch(start: *mut u8, pages: Advice) -> Option<Duration> {
    advise(start, TRIAL_BYTES, pages)?;
    let began = Instant::now();
    advise(start, TRIAL_BYTES, Advice::LinuxPopulateWrite)?;
    Some(began.elapsed())
}

fn advise(start: *mut u8, len: usize, advice: Advice) -> Option<()> {
    // SAFETY: the range is inside memory that its owner keeps alive, and none of this advice changes a byte of it.
    unsafe { madvise(start.cast(), len, advice) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_dear_where_they_take_much_longer_and_long_at_all() {
        let us = Duration::from_micros;
        assert!(are_dear(us(1300), us(400)), "a virtual machine that fetches them from its host");
        assert!(!are_dear(us(200), us(400)), "as a rule");
        assert!(!are_dear(us(700), us(400)), "not much longer");
        assert!(!are_dear(us(40), us(3)), "the memory was there");
    }

    #[test]
    #[cfg_attr(miri, ignore = "miri has no kernel to ask")]
    fn a_trial_changes_no_byte() {
        let bytes: Vec<u8> = (0..80_000_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut copy = bytes.clone();
        let _taken = advise_inside(copy.as_mut_ptr(), copy.len());
        assert!(copy == bytes);
    }
}
