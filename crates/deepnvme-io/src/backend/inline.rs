//! Ops that the thread which submits them performs itself, one system call each.
//!
//! For a single small transfer that somebody waits for, handing it to another thread and being woken again costs
//! more than the transfer.

use std::sync::Arc;

use super::call;
use super::contract::{Backend, BackendKind, Wake};
use crate::error::Result;
use crate::op::{Completion, Op, Submit};

/// Performs each op in `submit`; `reap` only hands out what has been done.
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

    /// Never blocks: what was submitted is done.
    fn reap(&mut self, _min: u32, completions: &mut Vec<Completion>) -> Result<()> {
        completions.extend(self.done.take());
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NoWaiter)
    }
}
