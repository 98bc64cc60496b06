//! Operations of the functions of both libraries on the state, by subject.
//!
//! | module | contents |
//! | --- | --- |
//! | `context` | retains and releases primary contexts |
//! | `locate` | finds the bytes of a copy |
//! | `queue` | queues ops, and runs them on the threads of streams |
//! | `stream` | creates streams, and finds them by handle |
//! | `event` | records events, and waits for them |
//! | `release` | frees memory, and reports accesses that the program has not waited for |

pub(crate) mod context;
pub(crate) mod event;
pub(crate) mod locate;
pub(crate) mod queue;
pub(crate) mod release;
pub(crate) mod stream;
