//! How much memory an execution of the simulation has: all of its threads are one of the operating system's.

use std::cell::Cell;

thread_local! {
    static HELD: Cell<u64> = const { Cell::new(0) };
    static HELD_MAX: Cell<u64> = const { Cell::new(0) };
}

/// Begins to count, from nothing.
pub fn begin() {
    HELD.set(0);
    HELD_MAX.set(0);
}

/// Forgets how much there was; how much there is.
pub fn watch() -> u64 {
    HELD_MAX.set(HELD.get());
    HELD.get()
}

/// Mapped bytes now.
#[must_use]
pub fn held_bytes() -> u64 {
    HELD.get()
}

/// The most that there were at once since the last [`watch`].
#[must_use]
pub fn held_bytes_max() -> u64 {
    HELD_MAX.get()
}

pub(crate) fn take(bytes: usize) {
    HELD.set(HELD.get() + bytes as u64);
    HELD_MAX.set(HELD_MAX.get().max(HELD.get()));
}

pub(crate) fn give(bytes: usize) {
    HELD.set(HELD.get().saturating_sub(bytes as u64));
}
