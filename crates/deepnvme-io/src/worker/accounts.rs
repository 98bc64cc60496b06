//! Where a worker counts and records what it does.

use std::sync::Arc;

use crate::stats::WorkerStats;
use crate::trace::Tracer;

/// The counters and the tracer of a worker.
#[derive(Clone)]
pub(crate) struct Accounts {
    pub(crate) stats: Arc<WorkerStats>,
    pub(crate) tracer: Tracer,
}
