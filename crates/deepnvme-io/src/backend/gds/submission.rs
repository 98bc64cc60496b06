//! Performs several ops with one submission to cuFile, if it supports batches. Otherwise, and for a single op, one by
//! one.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use deepnvme_cuda::{Batch, BatchEntry, BatchEvent, CuFile, Device as Gpu};
use deepnvme_mem::Device;

use super::cufile::Gds;
use super::cufile::refuse;
use super::file_systems::Directness;
use super::registrations::{Acquired, RegistrationUse};
use crate::op::{Completion, Errno, Op, OpKind, RegisteredFile};

/// Maximum transfers of one batch.
pub(super) const ENTRIES_MAX: usize = 64;
/// How long a batch may report nothing before it is cancelled, and as long again before it is abandoned. As long as the
/// kernel's timeout for a disk.
const BATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// An op for a batch, with everything that it needs.
struct BatchOp {
    op: Op,
    file: RegisteredFile,
    span: deepnvme_cuda::DeviceSpan,
    is_registered: bool,
    registration_use: RegistrationUse,
}

impl BatchOp {
    fn entry(&self, cookie: usize) -> BatchEntry<'_> {
        let is_read = self.op.kind == OpKind::Read;
        BatchEntry { file: self.file.handle(), is_read, span: self.span, offset: self.op.offset, cookie }
    }
}

type Finish<'a> = &'a mut dyn FnMut(Completion);

impl Gds {
    /// Performs all these ops, in any order.
    pub(super) fn perform_all(&self, ops: Vec<Op>, finish: Finish<'_>) {
        let mut by_gpu: BTreeMap<Option<u32>, Vec<Op>> = BTreeMap::new();
        for op in ops {
            let result = match self.directness(&op) {
                Directness::Direct => None,
                Directness::Unknown => Some(self.perform_trial(&op)),
                Directness::Copied(reason) => {
                    refuse(&op, reason);
                    Some(Err(Errno::OPNOTSUPP))
                }
            };
            if let Some(result) = result {
                finish(Completion { op, result });
                continue;
            }
            let gpu = op.iovecs.first().and_then(|memory| match memory.device() {
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

    /// Performs ops on one GPU with a batch. Returns the ops that were not started.
    fn submit(&self, index: u32, ops: Vec<Op>, finish: Finish<'_>) -> Vec<Op> {
        let Some(mut batch) = self.batch(index) else { return ops };
        let mut ready: Vec<Option<BatchOp>> =
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
        // SAFETY: each op keeps its memory, which is contiguous on that GPU, and `ready` keeps the file's registration,
        // until its completion is reported. Both are leaked below if the completion never arrives.
        if unsafe { batch.submit(&entries) }.is_err() {
            // Each op has a call of its own then, which states its reason.
            self.batches.are_refused.store(true, Ordering::Relaxed);
            left.extend(ready.into_iter().flatten().map(|ready| ready.op));
            return left;
        }
        self.batches.submissions.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = self.reap(&mut batch, &mut ready, finish) {
            ready.iter().flatten().for_each(|late| refuse(&late.op, error.to_string()));
            // A cancelled batch still reports its transfers. The worker repeats cancelled ones through a bounce buffer.
            let _ = batch.cancel();
            let _ = self.reap(&mut batch, &mut ready, finish);
        }
        // Transfers that were never reported may still be running.
        for lost in ready.into_iter().flatten() {
            abandon(lost, finish);
        }
        if batch.outstanding() == 0 {
            self.batches.put_back(index, batch);
        }
        left
    }

    /// Reports the completions of a batch until all have arrived.
    fn reap(
        &self,
        batch: &mut Batch,
        ready: &mut [Option<BatchOp>],
        finish: Finish<'_>,
    ) -> Result<(), deepnvme_cuda::Error> {
        while batch.outstanding() > 0 {
            let events = batch.wait(BATCH_TIMEOUT)?;
            self.report(events, ready, finish);
        }
        Ok(())
    }

    /// Collects everything that an op needs. Completes the op with an error if something is missing.
    fn ready(&self, index: u32, op: Op, finish: Finish<'_>) -> Option<BatchOp> {
        let Some(file) = op.cufile.clone() else {
            finish(Completion { op, result: Err(Errno::BADF) });
            return None;
        };
        let memory = &op.iovecs[0];
        let Acquired { span, is_registered, registration_use } =
            self.registrations.acquire(index, memory.addr(), memory.len());
        Some(BatchOp { op, file, span, is_registered, registration_use })
    }

    fn report(&self, events: Vec<BatchEvent>, ready: &mut [Option<BatchOp>], finish: Finish<'_>) {
        for BatchEvent { cookie, result } in events {
            let Some(BatchOp { op, is_registered, registration_use, .. }) =
                ready.get_mut(cookie).and_then(Option::take)
            else {
                continue;
            };
            drop(registration_use);
            let result = self.record_result(&op, result, is_registered);
            finish(Completion { op, result });
        }
    }

    /// Returns a batch for this GPU, or `None` if batches are unsupported.
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
            Err(_) => {
                self.batches.are_refused.store(true, Ordering::Relaxed);
                None
            }
        }
    }
}

/// Reports an op whose completion is unknown. Its memory, file and registrations are leaked, since they may still be in
/// use.
fn abandon(lost: BatchOp, finish: Finish<'_>) {
    let BatchOp { op, file, registration_use, .. } = lost;
    std::mem::forget((op.iovecs.clone(), Arc::clone(&op.file), file, registration_use));
    finish(Completion { op, result: Err(Errno::IO) });
}
