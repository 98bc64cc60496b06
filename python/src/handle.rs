//! An open stream behind a Python object. It is closed at most once, shared by threads, and left alone by forked
//! children.

use std::sync::Mutex;

use deepnvme_mem::sync::ignore_poison;
use pyo3::prelude::*;

use crate::error;

/// An engine stream, until it is closed.
pub(crate) struct Handle<T: Send> {
    stream: Mutex<Option<T>>,
    pid: u32,
}

impl<T: Send> Handle<T> {
    pub(crate) fn new(stream: T) -> Self {
        Self { stream: Mutex::new(Some(stream)), pid: deepnvme_mem::process_id() }
    }

    /// Uses the stream without the GIL: other threads may hold the lock while they wait for the disk.
    ///
    /// # Errors
    /// If the stream is closed or belongs to the process before a fork, or if `act` fails.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut T) -> deepnvme_io::Result<R> + Send,
    ) -> PyResult<R> {
        self.check_process(py)?;
        let result = py.detach(|| {
            let mut stream = ignore_poison(self.stream.lock());
            stream.as_mut().map(act)
        });
        match result {
            Some(result) => error::check(py, result),
            None => Err(error::plain(py, "ClosedError", "I/O operation on closed file; open it again".into())),
        }
    }

    /// Looks at the stream with the GIL held, if no thread is using it. For work that takes less time than releasing
    /// the GIL.
    pub(crate) fn try_peek<R>(&self, act: impl FnOnce(&T) -> R) -> Option<R> {
        let stream = self.stream.try_lock().ok().filter(|_| self.pid == deepnvme_mem::process_id())?;
        stream.as_ref().map(act)
    }

    /// Takes the stream and ends it without the GIL. `None` if it was taken before.
    pub(crate) fn end<R: Send>(&self, py: Python<'_>, act: impl FnOnce(T) -> R + Send) -> PyResult<Option<R>> {
        self.check_process(py)?;
        Ok(py.detach(|| {
            let stream = ignore_poison(self.stream.lock()).take();
            stream.map(act)
        }))
    }

    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.pid == deepnvme_mem::process_id() {
            return Ok(());
        }
        let message = "the file was opened before the fork and belongs to the parent process; open it again here";
        Err(error::plain(py, "ClosedError", message.into()))
    }
}

impl<T: Send> Drop for Handle<T> {
    /// A stream opened before a fork is ended by the parent: its temporary file must not be removed here. Any other
    /// waits for transfers in flight without the GIL.
    fn drop(&mut self) {
        let stream = ignore_poison(self.stream.get_mut()).take();
        if self.pid != deepnvme_mem::process_id() {
            std::mem::forget(stream);
        } else if stream.is_some() {
            Python::try_attach(|py| py.detach(|| drop(stream)));
        }
    }
}
