//! The device of a scheduled backend: real files, whose writes and syncs are recorded in the journals of a disk.

use deepnvme_io::Result;
use deepnvme_io::backend::Backend;
use deepnvme_io::op::{Completion, Op, OpKind, Submit};

use super::SimDisk;
use super::journal::WriteId;
use super::schedule::SimDevice;
use crate::rng::Rng;

/// A disk, and the real backend that moves its bytes.
pub struct JournaledDevice {
    pub(super) disk: SimDisk,
    pub(super) real_backend: Box<dyn Backend>,
}

impl SimDevice for JournaledDevice {
    /// For a sync: the writes that it makes durable.
    type Accepted = Vec<WriteId>;
    type Change = Option<WriteId>;

    const DELAY_REAPS_MAX: u64 = 6;

    fn accept(&mut self, op: &Op) -> Vec<WriteId> {
        match op.kind {
            OpKind::SyncData | OpKind::SyncAll => {
                self.disk.with_journal(op, |journal| journal.completed_writes()).unwrap_or_default()
            }
            OpKind::Read | OpKind::Write => Vec::new(),
        }
    }

    fn execute(
        &mut self,
        op: Op,
        completed_before_sync: &Vec<WriteId>,
        _: &mut Rng,
    ) -> Result<(Completion, Option<WriteId>)> {
        if op.kind != OpKind::Read {
            // The journal needs the contents before the first write.
            self.disk.with_journal(&op, |_| ());
        }
        let Submit::Queued = self.real_backend.submit(op) else { panic!("the real backend has one op at a time") };
        let mut completions = Vec::with_capacity(1);
        while completions.is_empty() {
            self.real_backend.reap(1, &mut completions)?;
        }
        let completion = completions.swap_remove(0);
        let id = match (completion.op.kind, completion.result) {
            (OpKind::Write, Ok(written)) => {
                self.disk.with_journal(&completion.op, |journal| journal.record(&completion.op, written))
            }
            (OpKind::SyncData | OpKind::SyncAll, Ok(_)) => {
                self.disk.with_journal(&completion.op, |journal| {
                    journal.sync(completed_before_sync, &*completion.op.file);
                });
                None
            }
            _ => None,
        };
        Ok((completion, id))
    }

    fn complete(&mut self, completion: &Completion, _: Vec<WriteId>, id: Option<WriteId>) {
        if let Some(id) = id {
            self.disk.with_journal(&completion.op, |journal| journal.report(id));
        }
    }
}
