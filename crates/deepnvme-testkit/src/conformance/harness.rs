//! A harness for a backend under test: creates, submits and reaps ops.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use deepnvme_io::SubmitMode;
use deepnvme_io::backend::{Backend, BackendSetup};
use deepnvme_io::op::{Completion, Errno, Op, OpKind, Submit, Token};
use deepnvme_mem::Region;

use super::Make;

/// A backend under test, and the tokens of its ops.
pub struct Harness {
    /// The backend.
    pub backend: Box<dyn Backend>,
    next_token: u64,
}

impl Harness {
    /// Creates a backend with this queue depth that submits in batches.
    pub fn new(make: Make<'_>, depth: u32) -> Self {
        Self::with_mode(make, depth, SubmitMode::Batch)
    }

    /// Creates a backend of a depth and submit mode.
    ///
    /// # Panics
    /// If the new backend is not empty or has another depth.
    pub fn with_mode(make: Make<'_>, depth: u32, submit: SubmitMode) -> Self {
        let backend = make(&BackendSetup { queue_depth: depth, submit, worker_index: 0 });
        assert_eq!(backend.in_flight(), 0, "a new backend has nothing in flight");
        assert_eq!(backend.depth(), depth, "a backend is as deep as it was asked to be");
        Self { backend, next_token: 0 }
    }

    /// Creates an op with the next token.
    pub fn op(&mut self, kind: OpKind, file: &Arc<OwnedFd>, offset: u64, iovecs: &[Region]) -> Op {
        self.next_token += 1;
        let iovecs = iovecs.iter().cloned().collect();
        Op { token: Token(self.next_token), kind, file: file.clone(), offset, iovecs, cufile: None }
    }

    /// Submits an op that must be accepted.
    ///
    /// # Panics
    /// If it is not.
    pub fn submit(&mut self, op: Op) -> Token {
        let token = op.token;
        match self.backend.submit(op) {
            Submit::Queued => token,
            Submit::Busy(op) => {
                panic!("{op:?} was refused with {} of {} ops in flight", self.backend.in_flight(), self.backend.depth())
            }
        }
    }

    /// Reaps exactly `count` ops.
    ///
    /// # Panics
    /// If more complete, or the queue fails.
    pub fn reap(&mut self, count: usize) -> Vec<Completion> {
        let mut completions = Vec::with_capacity(count);
        while completions.len() < count {
            assert!(self.backend.in_flight() > 0, "{} of {count} ops never completed", count - completions.len());
            let missing = (count - completions.len()) as u32;
            self.backend.reap(missing.min(self.backend.in_flight()), &mut completions).expect("the queue works");
        }
        assert_eq!(completions.len(), count, "more ops completed than were in flight");
        completions
    }

    /// Reaps at least one op.
    ///
    /// # Panics
    /// If none is in flight, or the queue fails.
    pub fn reap_some(&mut self) -> Vec<Completion> {
        let mut completions = Vec::new();
        while completions.is_empty() {
            assert!(self.backend.in_flight() > 0, "no op is in flight");
            self.backend.reap(1, &mut completions).expect("the queue works");
        }
        completions
    }

    /// Submits one op to an idle backend and reaps it.
    pub fn run(&mut self, op: Op) -> Completion {
        self.submit(op);
        self.reap(1).swap_remove(0)
    }

    /// Reads into the memory and returns the kernel's result.
    pub fn read(&mut self, file: &Arc<OwnedFd>, offset: u64, memory: &Region) -> Result<usize, Errno> {
        let op = self.op(OpKind::Read, file, offset, std::slice::from_ref(memory));
        self.run(op).result
    }

    /// Writes the memory and returns the kernel's result.
    pub fn write(&mut self, file: &Arc<OwnedFd>, offset: u64, memory: &Region) -> Result<usize, Errno> {
        let op = self.op(OpKind::Write, file, offset, std::slice::from_ref(memory));
        self.run(op).result
    }
}
