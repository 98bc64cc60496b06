//! An engine until it is closed, shared by its Python object and its traces.

use std::sync::{Arc, RwLock};

use deepnvme_io::Engine;
use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::error;

/// An engine that may be closed at any time. Clones share it.
#[derive(Clone)]
pub(crate) struct OpenEngine(Arc<RwLock<Option<Arc<Engine>>>>);

impl OpenEngine {
    pub(crate) fn new(engine: Engine) -> Self {
        Self(Arc::new(RwLock::new(Some(Arc::new(engine)))))
    }

    /// Returns the engine, unless it is closed.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<Engine>> {
        let engine = ignore_poison(self.0.read()).clone();
        engine.ok_or_else(|| error::plain(py, "ClosedError", "the engine is closed; make a new one".into()))
    }

    /// Removes the engine, so that later calls find it closed.
    pub(crate) fn take(&self) -> Option<Arc<Engine>> {
        ignore_poison(self.0.write()).take()
    }

    pub(crate) fn is_closed(&self) -> bool {
        ignore_poison(self.0.read()).is_none()
    }
}
