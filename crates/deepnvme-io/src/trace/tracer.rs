//! Makes events of completed work.

use std::path::Path;
use std::sync::Arc;

use super::event::{DataPath, EventKind};
use super::now_ns;
use super::recorder::Recorder;
use crate::op::Direction;
use crate::sync::Instant;

/// Records the events of one worker, or of callers that do work themselves.
#[derive(Clone, Debug)]
pub(crate) struct Tracer {
    recorder: Arc<Recorder>,
    worker: Option<u32>,
}

/// A completed read or write of one op.
pub(crate) struct CompletedOp<'a> {
    pub(crate) direction: Direction,
    pub(crate) file: &'a Path,
    pub(crate) offset: u64,
    /// `None` if it failed.
    pub(crate) bytes: Option<u64>,
    pub(crate) data_path: DataPath,
}

/// A completed copy between a bounce buffer and a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuCopy {
    pub(crate) gpu: u32,
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
}

impl Tracer {
    /// Creates the tracer of a worker. `None` stands for callers, which run small requests and synchronous GPU copies
    /// themselves.
    pub(crate) fn new(recorder: &Arc<Recorder>, worker: Option<u32>) -> Self {
        Self { recorder: Arc::clone(recorder), worker }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.recorder.is_on()
    }

    pub(crate) fn now(&self) -> Option<u64> {
        self.recorder.now()
    }

    pub(crate) fn op(&self, began: Instant, completed: &CompletedOp<'_>) {
        let CompletedOp { direction, file, offset, bytes, data_path } = *completed;
        self.recorder.record(self.recorder.time_of(began), now_ns(), |names| EventKind::Op {
            worker: self.worker,
            direction,
            file: names.file(file),
            offset,
            bytes: bytes.unwrap_or(0),
            data_path,
            failed: bytes.is_none(),
        });
    }

    pub(crate) fn sync(&self, began: Instant, file: &Path, failed: bool) {
        let kind = |names: &mut super::recorder::Names<'_>| EventKind::Sync {
            worker: self.worker,
            file: names.file(file),
            failed,
        };
        self.recorder.record(self.recorder.time_of(began), now_ns(), kind);
    }

    /// Records a copy between these times, in nanoseconds.
    pub(crate) fn gpu_copy(&self, (start_ns, end_ns): (u64, u64), copy: GpuCopy, failed: bool) {
        let GpuCopy { gpu, direction, bytes } = copy;
        let worker = self.worker;
        self.recorder.record(start_ns, end_ns, |_| EventKind::Copy { worker, gpu, direction, bytes, failed });
    }
}
