//! An engine until it is closed: what its Python object has, and each trace of it.

use std::sync::{Arc, PoisonError, RwLock};

use deepnvme_io::Engine;
use pyo3::prelude::*;

use crate::error;

/// An engine that may be closed at any time. Clones are of the same one.
#[derive(Clone)]
pub(crate) struct OpenEngine(Arc<RwLock<Option<Arc<Engine>>>>);

impl OpenEngine {
    pub(crate) fn new(engine: Engine) -> Self {
        Self(Arc::new(RwLock::new(Some(Arc::new(engine)))))
    }

    /// The engine, unless it was closed.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<Engine>> {
        let engine = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        engine.ok_or_else(|| error::plain(py, "ClosedError", "the engine is closed; make a new one".into()))
    }

    /// Takes it away, so that nobody gets it any more.
    pub(crate) fn take(&self) -> Option<Arc<Engine>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}
