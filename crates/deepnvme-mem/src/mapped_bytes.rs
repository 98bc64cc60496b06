//! Bytes mapped by a simulated execution. All its threads run on one operating system thread.

use std::cell::Cell;

thread_local! {
    static MAPPED: Cell<u64> = const { Cell::new(0) };
    static PEAK: Cell<u64> = const { Cell::new(0) };
}

/// Resets both counters to zero.
pub fn reset() {
    MAPPED.set(0);
    PEAK.set(0);
}

/// Resets the peak to the mapped bytes, and returns them.
pub fn reset_peak() -> u64 {
    PEAK.set(MAPPED.get());
    MAPPED.get()
}

/// Returns the bytes that are mapped now.
#[must_use]
pub fn mapped_bytes() -> u64 {
    MAPPED.get()
}

/// Returns the most bytes mapped at once since the last [`reset_peak`].
#[must_use]
pub fn mapped_bytes_peak() -> u64 {
    PEAK.get()
}

pub(crate) fn add(bytes: usize) {
    MAPPED.set(MAPPED.get() + bytes as u64);
    PEAK.set(PEAK.get().max(MAPPED.get()));
}

pub(crate) fn subtract(bytes: usize) {
    MAPPED.set(MAPPED.get().saturating_sub(bytes as u64));
}
