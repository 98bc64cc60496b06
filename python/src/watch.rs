//! A thread that waits for requests whose `Transfer` was dropped, and then has the interpreter let go of their tensors.
//!
//! It never waits for Python: it asks the interpreter's main thread to sweep the orphans when it comes by. It shares no
//! lock with threads that may fork while it runs, so that no child finds one locked for ever.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, Weak};

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::flight::{Flight, SLICE};
use crate::{memory, orphans};

/// The thread of this process. Only locked by who holds the GIL, as every fork of Python does.
static WATCH: Mutex<Option<Watch>> = Mutex::new(None);

struct Watch {
    pid: u32,
    flights: Sender<Weak<Flight>>,
    /// The interpreter is about to end: nobody may ask anything of it.
    is_over: Arc<Mutex<bool>>,
}

/// Keeps a request until it is done, and has the interpreter sweep the orphans then. Without a thread the calls to come do it.
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
        // What came over a fork belongs to a thread that is not here, and may have been locked by it.
        std::mem::forget(watch.replace(made));
    }
    if let Some(watch) = &*watch {
        let _ = watch.flights.send(Arc::downgrade(flight));
    }
}

/// No more asking, from here on.
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

/// For the interpreter to call, in its main thread.
extern "C" fn look(_: *mut c_void) -> c_int {
    Python::try_attach(orphans::sweep_all);
    0
}
