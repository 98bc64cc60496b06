//! Which items are in memory, who may borrow them, and which read or write comes next. This module does no I/O.
//!
//! ```text
//!            read              exclusive borrow, create       write-back
//!  Absent ---------> Reading ---------> Clean <-----> Dirty ---------> Writing
//!    ^                  | failed          | evicted      ^  failed        |
//!    +------------------+-----------------+              +----------------+--> Clean, or Dirty if changed meanwhile
//!    +--> Reserved: a slot for a new item, which nothing is read into
//! ```
//!
//! In addition, an item may be borrowed, either by any number of readers or by one writer. A borrowed item keeps its
//! slot. It may be written back while borrowed; later changes are written again. A flush is over when a write has ended
//! and the item was neither changed nor borrowed exclusively meanwhile; until then no new borrow may change it.
//!
//! `item` has the states of an item, `state` the items and their transitions. `schedule` picks the next read or write,
//! `eviction` finds room for it, and `victims` the best range of memory. No decision looks at all items: `reindex`
//! keeps the `index`, with its `victim_set`s, up to date with each change, and `read_ahead` the `window`.

mod eviction;
mod index;
mod item;
mod read_ahead;
mod reindex;
mod schedule;
mod state;
mod victim_set;
mod victims;
mod window;

pub(crate) use item::BorrowMode;
pub(crate) use state::{Action, BorrowResult, Budgets, ItemLocation, PendingFlush, Residency};

#[cfg(test)]
mod cost_tests;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
