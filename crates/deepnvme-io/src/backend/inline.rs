//! Performs ops on the submitting thread, one system call each.
//!
//! If the caller of a small transfer waits for it, passing it to a worker and back takes longer than the transfer.

use std::sync::Arc;

use super::call;
use super::contract::{Backend, BackendKind, Wake};
use crate::error::Result;
use crate::op::{Completion, Op, Submit};

/// Performs each op in `submit`. `reap` only returns the results.
#[derive(Debug, Default)]
pub struct InlineBackend {
    done: Option<Completion>,
}

struct NoWaiter;

impl Wake for NoWaiter {
    fn wake(&self) {}
}

impl Backend for InlineBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Threads
    }

    fn depth(&self) -> u32 {
        1
    }

    fn in_flight(&self) -> u32 {
        u32::from(self.done.is_some())
    }

    fn submit(&mut self, op: Op) -> Submit {
        if self.done.is_some() {
            return Submit::Busy(op);
        }
        let result = call::perform(&op);
        self.done = Some(Completion { op, result });
        Submit::Queued
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Never blocks: submitted ops are already done.
    fn reap(&mut self, _min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        completions.extend(self.done.take());
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWaiter)
    }
}
