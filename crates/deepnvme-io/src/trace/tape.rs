//! The recorder as one worker sees it.

use std::path::Path;
use std::sync::Arc;

use super::event::{Way, What};
use super::now_ns;
use super::recorder::Recorder;
use crate::split::Direction;
use crate::sync::Instant;

/// Notes what one worker does.
#[derive(Clone, Debug)]
pub(crate) struct Tape {
    recorder: Arc<Recorder>,
    worker: Option<u32>,
}

/// A transfer that has come back.
pub(crate) struct Moved<'a> {
    pub(crate) direction: Direction,
    pub(crate) file: &'a Path,
    pub(crate) offset: u64,
    /// `None` where it was refused.
    pub(crate) bytes: Option<u64>,
    pub(crate) way: Way,
}

/// A copy that is over.
#[derive(Clone, Copy)]
pub(crate) struct Copied {
    pub(crate) gpu: u32,
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
    /// 0 where nobody recorded when it began, or ended.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) failed: bool,
}

impl Tape {
    /// Of a worker; of callers that do small transfers themselves, `None`.
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
        let Moved { direction, file, offset, bytes, way } = *moved;
        self.recorder.note(self.recorder.at(began), now_ns(), |names| What::Transfer {
            worker: self.worker,
            direction,
            file: names.file(file),
            offset,
            bytes: bytes.unwrap_or(0),
            way,
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
