//! `deepnvme.Engine`.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;

use deepnvme_io::{Config, Engine};
use deepnvme_settings::SettingsFile;
use pyo3::prelude::*;

use crate::docs::docs;
use crate::ignored::Ignored;
use crate::open_engine::OpenEngine;
use crate::path::file_name;
use crate::probe::Probe;
use crate::request::{Offset, Request};
use crate::settings::{self, Flag, RawSettings, Word, direct_word, submit_word, window_word};
use crate::stats::Stats;
use crate::threads::SIGNAL_CHECK_INTERVAL;
use crate::timeline::{self, Trace};
use crate::transfer::PyTransfer;
use crate::{detached_requests, error, threads};

/// Move tensors between files and memory.
///
/// Every argument is optional. Threads may share an engine. Each engine owns its threads and memory, so one per process
/// is enough. Don't use it after ``fork``: create a new one in the child.
///
/// Args:
///     backend: I/O interface: ``"io_uring"``, ``"aio"`` (Linux native AIO), ``"threads"``, or ``"auto"`` (default):
///         the first of them that works here. ``probe()`` explains the choice.
///     workers: threads that submit and reap, 1 to 64. Default: one per CPU, at most 4.
///     queue_depth: ops in flight per worker, 1 to 4096. Default 128. With ``window="sliding"`` it is an upper
///         bound: the depth adapts to the ops that the device completes in 200 ms, but does not fall below 16, or below
///         ``queue_depth`` if that is less.
///     block_bytes: maximum bytes of an op, a multiple of 4096 up to 64 MiB, or text such as ``"1MiB"``. Default
///         2 MiB. Ops through bounce buffers have at most 512 KiB.
///     submit: ``"batch"`` (default) submits several ops per system call, ``"single"`` one at a time.
///     window: refill policy of the queue: ``"sliding"`` (default) refills as soon as an op completes, ``"drain"``
///         once all have, as DeepSpeed does with ``overlap_events=False``.
///     direct: page cache bypass: ``"preferred"`` (default) bypasses it if the file system can, except for reads
///         of bytes that are in it; ``"required"`` bypasses it for these as well, and raises if the file system
///         cannot; ``"disabled"`` always uses the page cache. The ragged edges of writes use it in every mode.
///         ``stats()`` reports the result.
///     gds: direct transfers between disk and GPU with cuFile (GPUDirect Storage): ``"preferred"`` uses cuFile if it
///         works, ``"required"`` raises if it does not, ``"disabled"`` (default) uses bounce buffers. ``stats()``
///         reports the result (``bytes_gds``, ``gds_reason``).
///     pool_bytes: upper bound of the memory for bounce buffers: bytes, or text such as ``"64MiB"``. Each worker needs
///         at least one buffer. Default: 8 MiB per worker, at most 256 MiB, and 1.125 MiB for small calls.
///     lock_pool: pin this memory if ``RLIMIT_MEMLOCK`` allows. Default True.
///     register_pool: register this memory with io_uring. Default True.
///
/// Raises:
///     ValueError: a setting is out of range; the message names the range.
///     deepnvme.errors.UnsupportedError: the requested backend does not work here; the message says why.
///
/// Example:
///     >>> with deepnvme.Engine(workers=2, block_bytes="1MiB") as engine:
///     ...     engine.write(torch.ones(1024), "weights.bin")
///     4096
#[pyclass(frozen, name = "Engine", weakref, module = "deepnvme")]
pub(crate) struct PyEngine {
    inner: OpenEngine,
    config: Config,
    backend: &'static str,
}

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(
        signature = (*, backend=Word::Text("auto"), workers=None, queue_depth=None, block_bytes=None,
                     submit=Word::Text("batch"), window=Word::Text("sliding"), direct=Word::Text("preferred"),
                     gds=Word::Text("disabled"), pool_bytes=None, lock_pool=Flag::Set(true),
                     register_pool=Flag::Set(true)),
        text_signature = "(*, backend=\"auto\", workers=None, queue_depth=None, block_bytes=None, submit=\"batch\", \
                          window=\"sliding\", direct=\"preferred\", gds=\"disabled\", pool_bytes=None, \
                          lock_pool=True, register_pool=True)"
    )]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword of the Python signature")]
    fn new(
        py: Python<'_>,
        backend: Word<'_, '_>,
        workers: Option<&Bound<'_, PyAny>>,
        queue_depth: Option<&Bound<'_, PyAny>>,
        block_bytes: Option<&Bound<'_, PyAny>>,
        submit: Word<'_, '_>,
        window: Word<'_, '_>,
        direct: Word<'_, '_>,
        gds: Word<'_, '_>,
        pool_bytes: Option<&Bound<'_, PyAny>>,
        lock_pool: Flag<'_, '_>,
        register_pool: Flag<'_, '_>,
    ) -> PyResult<Self> {
        let config = RawSettings {
            backend,
            workers,
            queue_depth,
            block_bytes,
            submit,
            window,
            direct,
            gds,
            pool_bytes,
            lock_pool,
            register_pool,
        }
        .parse()?;
        Self::open(py, config)
    }

    /// Create an engine with settings that ``deepnvme tune`` wrote.
    ///
    /// Args:
    ///     path: the settings file. Default: ``DEEPNVME_CONFIG``, else ``deepnvme.toml`` in the current folder.
    ///     folder: folder of the data. Uses the settings of the deepest listed folder that contains it. Default: the
    ///         settings for every folder.
    ///     direction: ``"read"`` or ``"write"``, for an engine that does only one. Default: both.
    ///
    /// Returns:
    ///     A new engine.
    ///
    /// Raises:
    ///     FileNotFoundError: the file does not exist.
    ///     ValueError: a setting is invalid; the message names it and its range.
    ///
    /// Example:
    ///     >>> with open("deepnvme.toml", "w") as file:  # or deepnvme.tune("/mnt/nvme")
    ///     ...     _ = file.write("[engine]\nqueue_depth = 8\n")
    ///     >>> deepnvme.Engine.from_file("deepnvme.toml", folder="/mnt/nvme", direction="read").queue_depth
    ///     8
    #[staticmethod]
    #[pyo3(signature = (path=None, *, folder=None, direction=None))]
    fn from_file(
        py: Python<'_>,
        path: Option<&Bound<'_, PyAny>>,
        folder: Option<&Bound<'_, PyAny>>,
        direction: Option<Word<'_, '_>>,
    ) -> PyResult<Self> {
        let path = match path {
            Some(path) => file_name(path)?,
            None => settings::settings_path().unwrap_or_else(|| "deepnvme.toml".into()),
        };
        let folder = folder.map(file_name).transpose()?;
        let read = py.detach(|| {
            // The file lists canonical folders.
            let folder = folder.map(|folder| folder.canonicalize().unwrap_or(folder));
            SettingsFile::load(&path).map(|file| (file, folder))
        });
        let (file, folder) = error::check(py, read)?;
        Self::open(py, file.of(folder.as_deref(), settings::direction(direction)?).clone())
    }

    #[doc = docs!(read)]
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "($self, tensor, path, offset=0)")]
    pub(crate) fn read(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Offset,
    ) -> PyResult<u64> {
        Request::read(tensor, path, offset)?.run(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(write)]
    #[pyo3(
        signature = (tensor, path, offset=None, *, durability=Word::Text("none")),
        text_signature = "($self, tensor, path, offset=None, *, durability=\"none\")"
    )]
    pub(crate) fn write(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Option<Offset>,
        durability: Word<'_, '_>,
    ) -> PyResult<u64> {
        Request::write(tensor, path, offset, durability)?.run(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(start_read)]
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "($self, tensor, path, offset=0)")]
    pub(crate) fn start_read(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Offset,
    ) -> PyResult<PyTransfer> {
        Request::read(tensor, path, offset)?.start(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(start_write)]
    #[pyo3(
        signature = (tensor, path, offset=None, *, durability=Word::Text("none")),
        text_signature = "($self, tensor, path, offset=None, *, durability=\"none\")"
    )]
    pub(crate) fn start_write(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Option<Offset>,
        durability: Word<'_, '_>,
    ) -> PyResult<PyTransfer> {
        Request::write(tensor, path, offset, durability)?.start(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(read_batch)]
    #[pyo3(signature = (items))]
    pub(crate) fn read_batch(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<u64> {
        Request::read_batch(items)?.run(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(write_batch)]
    #[pyo3(
        signature = (items, *, durability=Word::Text("none")),
        text_signature = "($self, items, *, durability=\"none\")"
    )]
    pub(crate) fn write_batch(
        &self,
        py: Python<'_>,
        items: &Bound<'_, PyAny>,
        durability: Word<'_, '_>,
    ) -> PyResult<u64> {
        Request::write_batch(items, durability)?.run(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(start_read_batch)]
    #[pyo3(signature = (items))]
    pub(crate) fn start_read_batch(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<PyTransfer> {
        Request::read_batch(items)?.start(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(start_write_batch)]
    #[pyo3(
        signature = (items, *, durability=Word::Text("none")),
        text_signature = "($self, items, *, durability=\"none\")"
    )]
    pub(crate) fn start_write_batch(
        &self,
        py: Python<'_>,
        items: &Bound<'_, PyAny>,
        durability: Word<'_, '_>,
    ) -> PyResult<PyTransfer> {
        Request::write_batch(items, durability)?.start(py, &*self.open_engine(py)?)
    }

    #[doc = docs!(stats)]
    pub(crate) fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        Ok(Stats::from(self.open_engine(py)?.stats()))
    }

    #[doc = docs!(trace)]
    pub(crate) fn trace(&self, path: &Bound<'_, PyAny>) -> PyResult<Trace> {
        Ok(Trace::new(self.inner.clone(), file_name(path)?))
    }

    #[doc = docs!(span)]
    pub(crate) fn span(
        &self,
        py: Python<'_>,
        name: Word<'_, '_>,
        lane: Word<'_, '_>,
        start_ns: &Bound<'_, PyAny>,
        end_ns: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (name, lane) = (name.text("name")?, lane.text("lane")?);
        timeline::span(&*self.open_engine(py)?, name, lane, timeline::range(start_ns, end_ns)?)
    }

    #[doc = docs!(probe)]
    pub(crate) fn probe(&self, py: Python<'_>) -> PyResult<Probe> {
        Probe::of(py, &*self.open_engine(py)?)
    }

    /// Finish all transfers in flight, including other threads', and stop the engine's threads.
    ///
    /// Later calls raise ``deepnvme.errors.ClosedError``, as do files, streamers and swappers that use the engine.
    /// Closing twice does nothing. A ``with`` block closes the engine at its end.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached_requests::reap(py);
        let Some(engine) = self.inner.take() else { return Ok(()) };
        // The engine's drop waits for the device, perhaps for long. Another thread does that, so that Ctrl-C works
        // here. Calls in progress keep the engine alive, and the last one drops it.
        let closing = Arc::clone(&engine);
        let close = threads::start(py, "deepnvme-close", move || {
            closing.close();
            drop(closing);
        });
        let Ok(close) = close else {
            py.detach(move || engine.close());
            return Ok(());
        };
        while matches!(close.wait(py, SIGNAL_CHECK_INTERVAL), Err(RecvTimeoutError::Timeout)) {
            py.check_signals()?;
        }
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, py: Python<'_>, exc_type: Ignored, exc_value: Ignored, traceback: Ignored) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        self.close(py)
    }

    /// Backend in use: ``"io_uring"``, ``"aio"`` or ``"threads"``.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// Threads that submit and reap.
    #[getter]
    fn workers(&self) -> u32 {
        self.config.workers
    }

    /// Ops in flight per worker.
    #[getter]
    fn queue_depth(&self) -> u32 {
        self.config.queue_depth
    }

    /// Maximum bytes of an op.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.config.block_bytes
    }

    /// Whether several ops are submitted per system call: ``"batch"`` or ``"single"``.
    #[getter]
    fn submit(&self) -> &'static str {
        submit_word(self.config.submit)
    }

    /// Refill policy of the queue: ``"sliding"`` or ``"drain"``.
    #[getter]
    fn window(&self) -> &'static str {
        window_word(self.config.window)
    }

    /// Page cache bypass: ``"preferred"``, ``"required"`` or ``"disabled"``.
    #[getter]
    fn direct(&self) -> &'static str {
        direct_word(self.config.direct)
    }

    /// Use of cuFile for CUDA tensors: ``"preferred"``, ``"required"`` or ``"disabled"``.
    #[getter]
    fn gds(&self) -> &'static str {
        direct_word(self.config.gds)
    }

    /// Upper bound of the engine's bounce buffers, in bytes.
    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.config.pool_bound_bytes()
    }

    /// Whether the engine is closed.
    #[getter]
    pub(crate) fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    fn __repr__(&self) -> String {
        let state = if self.is_closed() { ", closed" } else { "" };
        let Config { workers, queue_depth, block_bytes, .. } = self.config;
        format!(
            "<deepnvme.Engine {}, workers={workers}, queue_depth={queue_depth}, block_bytes={block_bytes}, \
             direct={:?}{state}>",
            self.backend,
            self.direct()
        )
    }
}

impl PyEngine {
    pub(crate) fn open(py: Python<'_>, config: Config) -> PyResult<Self> {
        let engine = py.detach(|| Engine::new(config).map(Engine::dropped_in_background));
        let engine = error::check(py, engine)?;
        let (config, backend) = (engine.config().clone(), engine.backend_kind().name());
        Ok(Self { inner: OpenEngine::new(engine), config, backend })
    }

    /// Returns the engine, unless it is closed.
    pub(crate) fn open_engine(&self, py: Python<'_>) -> PyResult<Arc<Engine>> {
        self.inner.get(py)
    }
}
