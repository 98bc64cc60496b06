//! Which items are in memory, who may borrow them, and which read or write comes next: pure.
//!
//! ```text
//!            read              exclusive borrow, create       write-back
//!  Absent ---------> Reading ---------> Clean <-----> Dirty ---------> Writing
//!    ^                  | failed          | evicted      ^  failed        |
//!    +------------------+-----------------+              +----------------+--> Clean, or Dirty if changed meanwhile
//!    +--> Reserved: a slot for a new item, into which nothing is read
//! ```
//!
//! In addition, an item may be borrowed, either by any number of readers or by one writer. A borrowed item keeps its slot.
//! It may be written back while borrowed; later changes are written again. A flush is over when a write has ended and the
//! item was neither changed nor borrowed exclusively meanwhile; until then no new borrow may change it.
//!
//! `item` is one item. `state` holds all items and their transitions, `schedule` picks the next read or write, and
//! `eviction` finds room for it.

mod eviction;
mod item;
mod schedule;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use item::BorrowMode;
pub(crate) use state::{Action, BorrowResult, Budgets, PendingFlush, Residence, Residency};
