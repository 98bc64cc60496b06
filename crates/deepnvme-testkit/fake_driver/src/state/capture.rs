//! Stream capture: captures in progress, the capture mode of each thread, and the calls that they prohibit.
//!
//! Work that is queued on a capturing stream is counted and dropped: there are no graphs to launch.

use std::cell::Cell;
use std::thread::{self, ThreadId};

use super::clock::StreamId;
use super::stream::{Stream, StreamKind};
use crate::abi::{CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, Device, INVALID_VALUE, Outcome};

/// The modes of `CUstreamCaptureMode`.
const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// `CUstreamCaptureStatus`.
const NONE: i32 = 0;
const ACTIVE: i32 = 1;
const INVALIDATED: i32 = 2;

/// The calls that a capture may prohibit, as an H200 with driver 580.159 did for each function that this library has.
const PROHIBITED: [&str; 11] = [
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

thread_local! {
    static MODE: Cell<i32> = const { Cell::new(GLOBAL) };
}

/// A capture in progress.
#[derive(Debug)]
struct Capture {
    stream: StreamId,
    device: Device,
    is_blocking: bool,
    mode: i32,
    thread: ThreadId,
    is_invalidated: bool,
}

impl Capture {
    /// Returns whether it prohibits calls of this thread in this mode.
    fn prohibits(&self, mode: i32) -> bool {
        let is_own = self.thread == thread::current().id();
        match mode {
            RELAXED => false,
            THREAD_LOCAL => is_own && self.mode != RELAXED,
            _ => {
                if is_own {
                    self.mode != RELAXED
                } else {
                    self.mode == GLOBAL
                }
            }
        }
    }
}

/// All captures in progress.
#[derive(Debug, Default)]
pub(crate) struct Captures(Vec<Capture>);

impl Captures {
    /// Begins the capture of a stream.
    pub(crate) fn begin(&mut self, id: StreamId, stream: &Stream, mode: i32) -> Outcome {
        if !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        if stream.kind == StreamKind::Legacy || self.has(id) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        self.0.push(Capture {
            stream: id,
            device: stream.device,
            is_blocking: stream.is_blocking(),
            mode,
            thread: thread::current().id(),
            is_invalidated: false,
        });
        Ok(())
    }

    /// Ends the capture of a stream.
    pub(crate) fn end(&mut self, stream: StreamId) -> Outcome {
        let place = self.0.iter().position(|capture| capture.stream == stream).ok_or(INVALID_VALUE)?;
        let capture = self.0.swap_remove(place);
        if capture.is_invalidated { Err(CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    fn of(&mut self, stream: StreamId) -> Option<&mut Capture> {
        self.0.iter_mut().find(|capture| capture.stream == stream)
    }

    /// Returns whether the stream is being captured.
    pub(crate) fn has(&self, stream: StreamId) -> bool {
        self.0.iter().any(|capture| capture.stream == stream)
    }

    /// Fails a call that a capture prohibits, and invalidates the capture.
    pub(crate) fn check_call(&mut self, symbol: &str) -> Outcome {
        if !PROHIBITED.contains(&symbol) {
            return Ok(());
        }
        // It would wait for the capturing stream itself.
        let is_always = symbol == "cuCtxSynchronize";
        let mode = MODE.get();
        let mut outcome = Ok(());
        for capture in self.0.iter_mut().filter(|capture| is_always || capture.prohibits(mode)) {
            capture.is_invalidated = true;
            outcome = Err(CAPTURE_UNSUPPORTED);
        }
        outcome
    }

    /// Fails a query of a capturing stream, in any mode, and invalidates the capture.
    pub(crate) fn check_query(&mut self, stream: StreamId) -> Outcome {
        let Some(capture) = self.of(stream) else { return Ok(()) };
        capture.is_invalidated = true;
        Err(CAPTURE_UNSUPPORTED)
    }

    /// Fails a use of the legacy default stream while a stream that synchronises with it is captured. Invalidates the
    /// capture, unless the use only asks for the status of the capture.
    pub(crate) fn check_legacy(&mut self, device: Device, is_status: bool) -> Outcome {
        let mut outcome = Ok(());
        for capture in self.0.iter_mut().filter(|capture| capture.device == device && capture.is_blocking) {
            capture.is_invalidated |= !is_status;
            outcome = Err(CAPTURE_IMPLICIT);
        }
        outcome
    }

    /// Returns the status of a stream.
    pub(crate) fn status(&self, stream: StreamId) -> i32 {
        let found = self.0.iter().find(|capture| capture.stream == stream);
        found.map_or(NONE, |capture| if capture.is_invalidated { INVALIDATED } else { ACTIVE })
    }
}

/// `cuThreadExchangeStreamCaptureMode`: sets the mode of this thread, and returns the previous one.
pub(crate) fn exchange(mode: i32) -> Outcome<i32> {
    if (GLOBAL..=RELAXED).contains(&mode) { Ok(MODE.replace(mode)) } else { Err(INVALID_VALUE) }
}
