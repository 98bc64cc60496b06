//! Records the events of one worker.

use std::path::Path;
use std::sync::Arc;

use super::event::{DataPath, What};
use super::now_ns;
use super::recorder::Recorder;
use crate::op::Direction;
use crate::sync::Instant;

/// Records the events of one worker.
#[derive(Clone, Debug)]
pub(crate) struct Tape {
    recorder: Arc<Recorder>,
    worker: Option<u32>,
}

/// A completed transfer.
pub(crate) struct Moved<'a> {
    pub(crate) direction: Direction,
    pub(crate) file: &'a Path,
    pub(crate) offset: u64,
    /// `None` if it failed.
    pub(crate) bytes: Option<u64>,
    pub(crate) data_path: DataPath,
}

/// A completed copy.
#[derive(Clone, Copy)]
pub(crate) struct Copied {
    pub(crate) gpu: u32,
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
    /// 0 if the start or end was not recorded.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) failed: bool,
}

impl Tape {
    /// Creates the tape of a worker, or with `None` that of callers that run small transfers themselves.
    pub(crate) fn new(recorder: &Arc<Recorder>, worker: Option<u32>) -> Self {
        Self { recorder: Arc::clone(recorder), worker }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.recorder.is_on()
    }

    pub(crate) fn now(&self) -> Option<u64> {
        self.recorder.now()
    }

    pub(crate) fn transfer(&self, began: Instant, moved: &Moved<'_>) {
        let Moved { direction, file, offset, bytes, data_path } = *moved;
        self.recorder.note(self.recorder.at(began), now_ns(), |names| What::Transfer {
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
        let what =
            |names: &mut super::recorder::Names<'_>| What::Sync { worker: self.worker, file: names.file(file), failed };
        self.recorder.note(self.recorder.at(began), now_ns(), what);
    }

    pub(crate) fn copy(&self, copied: Copied) {
        let Copied { gpu, direction, bytes, start_ns, end_ns, failed } = copied;
        let worker = self.worker;
        self.recorder.note(start_ns, end_ns, |_| What::Copy { worker, gpu, direction, bytes, failed });
    }
}
