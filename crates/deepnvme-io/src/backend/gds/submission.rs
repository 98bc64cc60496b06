//! Several ops by way of one submission to cuFile, where it has batches; else, and for a single one, call by call.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use deepnvme_cuda::{Batch, BatchEntry, BatchEvent, CuFile, Device as Gpu};
use deepnvme_mem::Device;

use super::cufile::Gds;
use super::pins::Touched;
use crate::op::{Completion, Errno, KnownFile, Op, OpKind};

/// Transfers of one batch, at the most.
pub(super) const ENTRIES_MAX: usize = 64;
/// How long a batch may be silent before it is taken back, and then given up: as long as the kernel gives a disk.
const PATIENCE: Duration = Duration::from_secs(30);

/// An op on its way to a batch, with all that it needs.
struct Ready {
    op: Op,
    file: KnownFile,
    span: deepnvme_cuda::DeviceSpan,
    is_pinned: bool,
    touched: Touched,
}

impl Ready {
    fn entry(&self, cookie: usize) -> BatchEntry<'_> {
        let is_read = self.op.kind == OpKind::Read;
        BatchEntry { file: self.file.handle(), is_read, span: self.span, offset: self.op.offset, cookie }
    }
}

type Finish<'a> = &'a mut dyn FnMut(Completion);

impl Gds {
    /// Makes all these ops, in whatever order.
    pub(super) fn perform_all(&self, ops: Vec<Op>, finish: Finish<'_>) {
        let mut by_gpu: BTreeMap<Option<u32>, Vec<Op>> = BTreeMap::new();
        for op in ops {
            let gpu = op.pieces.first().and_then(|memory| match memory.device() {
                Device::Cuda { index } => Some(index),
                Device::Host => None,
            });
            by_gpu.entry(gpu).or_default().push(op);
        }
        for (gpu, ops) in by_gpu {
            let left = match gpu {
                Some(index) if ops.len() > 1 => self.submit(index, ops, finish),
                _ => ops,
            };
            for op in left {
                let result = self.perform(&op);
                finish(Completion { op, result });
            }
        }
    }

    /// Makes ops on one GPU by way of a batch; hands back those that were not begun.
    fn submit(&self, index: u32, ops: Vec<Op>, finish: Finish<'_>) -> Vec<Op> {
        let Some(mut batch) = self.batch(index) else { return ops };
        let mut ready: Vec<Option<Ready>> =
            ops.into_iter().filter_map(|op| self.ready(index, op, finish)).map(Some).collect();
        let mut left: Vec<Op> = Vec::new();
        if ready.len() > batch.entries_max() as usize {
            let rest = ready.split_off(batch.entries_max() as usize);
            left.extend(rest.into_iter().flatten().map(|ready| ready.op));
        }
        let entries: Vec<_> = ready.iter().flatten().enumerate().map(|(cookie, ready)| ready.entry(cookie)).collect();
        if entries.is_empty() {
            self.batches.put_back(index, batch);
            return left;
        }
        // SAFETY: each op holds its memory, which is contiguous on that GPU, and `ready` the file's registration, until its
        // end was reported; where that never comes, they are forgotten below.
        if let Err(error) = unsafe { batch.submit(&entries) } {
            self.batches.are_refused.store(true, Ordering::Relaxed);
            self.refuse(error.to_string());
            left.extend(ready.into_iter().flatten().map(|ready| ready.op));
            return left;
        }
        self.batches.submissions.fetch_add(1, Ordering::Relaxed);
        if self.reap(&mut batch, &mut ready, finish).is_err() {
            // Perhaps it does better when nothing is left to begin. What was taken back goes another way.
            let _ = batch.cancel();
            let _ = self.reap(&mut batch, &mut ready, finish);
        }
        // What was never reported is not known to be over.
        for lost in ready.into_iter().flatten() {
            give_up(lost, finish);
        }
        if batch.outstanding() == 0 {
            self.batches.put_back(index, batch);
        }
        left
    }

    /// Hands out what a batch reports, until that is all.
    fn reap(
        &self,
        batch: &mut Batch,
        ready: &mut [Option<Ready>],
        finish: Finish<'_>,
    ) -> Result<(), deepnvme_cuda::Error> {
        while batch.outstanding() > 0 {
            let events = batch.wait(PATIENCE).inspect_err(|error| self.refuse(error.to_string()))?;
            self.settle(events, ready, finish);
        }
        Ok(())
    }

    /// What an op needs; one that lacks some of it ends here.
    fn ready(&self, index: u32, op: Op, finish: Finish<'_>) -> Option<Ready> {
        let Some(file) = op.cufile.clone() else {
            finish(Completion { op, result: Err(Errno::BADF) });
            return None;
        };
        let memory = &op.pieces[0];
        let (span, is_pinned, touched) = self.pins.touch(index, memory.addr(), memory.len());
        Some(Ready { op, file, span, is_pinned, touched })
    }

    fn settle(&self, events: Vec<BatchEvent>, ready: &mut [Option<Ready>], finish: Finish<'_>) {
        for BatchEvent { cookie, result } in events {
            let Some(Ready { op, is_pinned, touched, .. }) = ready.get_mut(cookie).and_then(Option::take) else {
                continue;
            };
            drop(touched);
            let result = self.outcome(result, is_pinned);
            finish(Completion { op, result });
        }
    }

    /// A batch for that GPU; `None` where there are none.
    fn batch(&self, index: u32) -> Option<Batch> {
        if self.batches.are_refused.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(batch) = self.batches.take(index) {
            return Some(batch);
        }
        let (cufile, gpu) = (self.cufile().ok()?, self.device(index).ok()?);
        self.new_batch(cufile, &gpu)
    }

    fn new_batch(&self, cufile: &CuFile, gpu: &Arc<Gpu>) -> Option<Batch> {
        match Batch::new(cufile, gpu, ENTRIES_MAX as u32) {
            Ok(batch) => batch,
            Err(error) => {
                self.batches.are_refused.store(true, Ordering::Relaxed);
                self.refuse(error.to_string());
                None
            }
        }
    }
}

/// Reports an op of which nobody knows whether it is over. Its memory, its file and what cuFile knows of both are never given
/// back, since they may still be in use.
fn give_up(lost: Ready, finish: Finish<'_>) {
    let Ready { op, file, touched, .. } = lost;
    std::mem::forget((op.pieces.clone(), Arc::clone(&op.file), file, touched));
    finish(Completion { op, result: Err(Errno::IO) });
}
