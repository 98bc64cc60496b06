//! Stream capture: captures in progress, the capture mode of each thread, and the calls that they prohibit.
//!
//! Work that is queued on a capturing stream is counted and dropped: there are no graphs to launch.

use std::cell::Cell;
use std::thread::{self, ThreadId};

use crate::abi::{CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, Device, Handle, INVALID_VALUE, Outcome};
use crate::state::DriverState;
use crate::stream::{StreamId, StreamKind};

/// The modes of `CUstreamCaptureMode`.
pub(crate) const GLOBAL: i32 = 0;
pub(crate) const THREAD_LOCAL: i32 = 1;
pub(crate) const RELAXED: i32 = 2;

/// `CUstreamCaptureStatus`.
pub(crate) const NONE: i32 = 0;
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

impl DriverState {
    /// `cuStreamBeginCapture`.
    pub(crate) fn begin_capture(&mut self, stream: StreamId, mode: i32) -> Outcome {
        if !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        let known = self.streams.get(stream)?;
        let (device, is_blocking) = (known.device, known.is_blocking());
        if known.kind == StreamKind::Legacy || self.captures.has(stream) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let thread = thread::current().id();
        self.captures.0.push(Capture { stream, device, is_blocking, mode, thread, is_invalidated: false });
        Ok(())
    }

    /// `cuStreamEndCapture`. Returns a graph, which nothing can launch.
    pub(crate) fn end_capture(&mut self, stream: StreamId) -> Outcome<Handle> {
        let place = self.captures.0.iter().position(|capture| capture.stream == stream).ok_or(INVALID_VALUE)?;
        let capture = self.captures.0.swap_remove(place);
        if capture.is_invalidated { Err(CAPTURE_INVALIDATED) } else { Ok(self.handle()) }
    }
}
