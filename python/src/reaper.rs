//! A thread that waits for requests whose `Transfer` was dropped, and makes the interpreter release their tensors.
//!
//! It never waits for Python: it asks the interpreter's main thread to release them at its next chance. A forked child
//! may find this thread's state locked forever, so it never uses that: it makes a thread and state of its own.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, Weak};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::pending_request::PendingRequest;
use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::{detached_requests, memory};

/// This process's thread. Locked only with the GIL held. Python also forks with the GIL held, so no child finds it
/// locked.
static REAPER: Mutex<Option<Reaper>> = Mutex::new(None);

struct Reaper {
    pid: u32,
    requests: Sender<Weak<PendingRequest>>,
    /// Set when the interpreter is about to exit: nothing may be scheduled on it.
    is_exiting: Arc<Mutex<bool>>,
}

/// Keeps a request until it is done, then makes the interpreter release its memory. Without a thread, later calls do
/// it.
pub(crate) fn detach(request: Arc<PendingRequest>) {
    watch_request(&request);
    detached_requests::add(request);
}

fn watch_request(request: &Arc<PendingRequest>) {
    let mut reaper = ignore_poison(REAPER.lock());
    if reaper.as_ref().is_none_or(|reaper| reaper.pid != deepnvme_mem::process_id()) {
        let (requests, receiver) = mpsc::channel();
        let is_exiting = Arc::new(Mutex::new(false));
        let seen = Arc::clone(&is_exiting);
        let thread = std::thread::Builder::new().name("deepnvme-reaper".into());
        if deepnvme_io::start_thread(|| thread.spawn(move || run(&receiver, &seen))).is_err() {
            return;
        }
        let new = Reaper { pid: deepnvme_mem::process_id(), requests, is_exiting };
        // State from before a fork belongs to a thread that is missing here, and may be locked by it.
        std::mem::forget(reaper.replace(new));
    }
    if let Some(reaper) = &*reaper {
        let _ = reaper.requests.send(Arc::downgrade(request));
    }
}

/// Stops scheduling calls on the interpreter.
pub(crate) fn stop() {
    let reaper = ignore_poison(REAPER.lock());
    if let Some(reaper) = reaper.as_ref().filter(|reaper| reaper.pid == deepnvme_mem::process_id()) {
        *ignore_poison(reaper.is_exiting.lock()) = true;
    }
}

fn run(receiver: &Receiver<Weak<PendingRequest>>, is_exiting: &Mutex<bool>) {
    while let Ok(first) = receiver.recv() {
        let mut requests = vec![first];
        while let Some(oldest) = requests.first() {
            if let Some(request) = oldest.upgrade() {
                request.wait_ignoring_signals(SIGNAL_CHECK_INTERVAL);
            }
            requests.extend(receiver.try_iter());
            let before = requests.len();
            requests.retain(|request| request.upgrade().is_some_and(|request| !request.is_done()));
            if requests.len() < before {
                let is_exiting = ignore_poison(is_exiting.lock());
                if *is_exiting {
                    return;
                }
                memory::call_soon(reap_detached);
            }
        }
    }
}

/// Called by the interpreter on its main thread.
extern "C" fn reap_detached(_: *mut c_void) -> c_int {
    Python::try_attach(detached_requests::reap_all);
    0
}
