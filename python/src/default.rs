//! The engine of calls that name none.

use std::sync::{Arc, Mutex};

use deepnvme_io::{Config, Engine};
use deepnvme_mem::sync::ignore_poison;
use deepnvme_settings::SettingsFile;
use pyo3::prelude::*;

use crate::engine::PyEngine;
use crate::error;
use crate::settings::settings_path;

struct Current {
    engine: Py<PyEngine>,
    pid: u32,
}

static CURRENT: Mutex<Option<Current>> = Mutex::new(None);

/// Returns the engine of the module-level functions: created on first use, one per process.
pub(crate) fn object(py: Python<'_>) -> PyResult<Py<PyEngine>> {
    if let Some(current) = current(py) {
        return Ok(current);
    }
    // Created without the lock, so that other threads don't wait for it. The first to store one wins.
    let config = match settings_path() {
        Some(path) => error::check(py, py.detach(|| SettingsFile::load(&path)))?.engine,
        None => Config::default(),
    };
    let made = Py::new(py, PyEngine::open(py, config)?)?;
    if let Some(current) = current(py) {
        return Ok(current);
    }
    let new = Current { engine: made.clone_ref(py), pid: deepnvme_mem::process_id() };
    let before = ignore_poison(CURRENT.lock()).replace(new);
    // After a fork, the parent's engine is left alone: its threads do not exist here.
    std::mem::forget(before.filter(|before| before.pid != deepnvme_mem::process_id()));
    Ok(made)
}

/// Returns the default engine; `None` if it was never created, is closed, or belongs to the process before a fork.
fn current(py: Python<'_>) -> Option<Py<PyEngine>> {
    let slot = ignore_poison(CURRENT.lock());
    let current = slot.as_ref().filter(|current| current.pid == deepnvme_mem::process_id())?;
    (!current.engine.get().is_closed()).then(|| current.engine.clone_ref(py))
}

/// Returns the default engine for a call.
pub(crate) fn engine(py: Python<'_>) -> PyResult<Arc<Engine>> {
    object(py)?.get().open_engine(py)
}

/// Returns the engine of an optional argument, or the default one.
pub(crate) fn or_default(py: Python<'_>, chosen: Option<&Bound<'_, PyEngine>>) -> PyResult<Arc<Engine>> {
    chosen.map_or_else(|| engine(py), |chosen| chosen.get().open_engine(py))
}
