//! A thread that waits for requests whose `Transfer` was dropped, and makes the interpreter release their tensors.
//!
//! It never waits for Python: it asks the interpreter's main thread to sweep the orphans at its next chance. It shares
//! no lock with threads that may fork while it runs, so no child finds one locked for ever.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, Weak};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::flight::{Flight, SLICE};
use crate::{memory, orphans};

/// This process's thread. Locked only with the GIL held, as every fork of Python does.
static WATCH: Mutex<Option<Watch>> = Mutex::new(None);

struct Watch {
    pid: u32,
    flights: Sender<Weak<Flight>>,
    /// Set when the interpreter is about to exit: nothing may be scheduled on it.
    is_over: Arc<Mutex<bool>>,
}

/// Keep a request until it is done, then make the interpreter sweep the orphans. Without a thread, later calls do it.
pub(crate) fn adopt(flight: Arc<Flight>) {
    watch(&flight);
    orphans::keep(flight);
}

fn watch(flight: &Arc<Flight>) {
    let mut watch = ignore_poison(WATCH.lock());
    if watch.as_ref().is_none_or(|watch| watch.pid != std::process::id()) {
        let (flights, receiver) = mpsc::channel();
        let is_over = Arc::new(Mutex::new(false));
        let seen = Arc::clone(&is_over);
        let thread = std::thread::Builder::new().name("deepnvme-watch".into());
        if deepnvme_io::start_thread(|| thread.spawn(move || run(&receiver, &seen))).is_err() {
            return;
        }
        let made = Watch { pid: std::process::id(), flights, is_over };
        // State from before a fork belongs to a thread that is missing here, and may be locked by it.
        std::mem::forget(watch.replace(made));
    }
    if let Some(watch) = &*watch {
        let _ = watch.flights.send(Arc::downgrade(flight));
    }
}

/// Stop scheduling calls on the interpreter.
pub(crate) fn end() {
    let watch = ignore_poison(WATCH.lock());
    if let Some(watch) = watch.as_ref().filter(|watch| watch.pid == std::process::id()) {
        *ignore_poison(watch.is_over.lock()) = true;
    }
}

fn run(receiver: &Receiver<Weak<Flight>>, is_over: &Mutex<bool>) {
    while let Ok(first) = receiver.recv() {
        let mut flights = vec![first];
        while let Some(oldest) = flights.first() {
            if let Some(flight) = oldest.upgrade() {
                flight.wait_quietly(SLICE);
            }
            flights.extend(receiver.try_iter());
            let before = flights.len();
            flights.retain(|flight| flight.upgrade().is_some_and(|flight| !flight.is_done()));
            if flights.len() < before {
                let is_over = ignore_poison(is_over.lock());
                if *is_over {
                    return;
                }
                memory::call_soon(look);
            }
        }
    }
}

/// Called by the interpreter on its main thread.
extern "C" fn look(_: *mut c_void) -> c_int {
    Python::try_attach(orphans::sweep_all);
    0
}
