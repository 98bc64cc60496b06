//! `deepnvme.Engine`.

use std::sync::{Arc, mpsc};

use deepnvme_io::{Config, Engine};
use deepnvme_settings::SettingsFile;
use pyo3::prelude::*;

use crate::flight::SLICE;
use crate::open_engine::OpenEngine;
use crate::path::file_name;
use crate::probe::Probe;
use crate::request::{Offset, Request};
use crate::settings::{self, Typed, direct_word, submit_word, window_word};
use crate::stats::Stats;
use crate::timeline::{self, Trace};
use crate::transfer::PyTransfer;
use crate::{error, orphans};

/// Moves tensors between files and memory.
///
/// Every argument is optional. An engine may be shared by threads; each has its own threads and memory, so that
/// one per process is enough. It must not be used after ``fork``: make a new one in the child.
///
/// Args:
///     backend: what moves the bytes: ``"io_uring"``, ``"aio"`` (Linux native AIO), ``"threads"``, or ``"auto"``
///         (default): the first of them that works here. ``probe()`` says why.
///     workers: threads that submit and reap, 1 to 64. Default: one per processor, 4 at the most.
///     queue_depth: transfers in flight per worker, 1 to 4096. Default 128. It is an upper bound where ``window`` is
///         ``"sliding"``: no more are in flight than the device does in 200 ms, but 16 always.
///     block_bytes: bytes of the largest single transfer, a multiple of 4096 up to 64 MiB. Default 2 MiB; through bounce
///         buffers 512 KiB at the most.
///     submit: ``"batch"`` (default) hands several transfers to the kernel at once, ``"single"`` each by itself.
///     window: when the queue is filled again: ``"sliding"`` (default) as soon as a transfer has ended, ``"wave"`` when
///         all have, as DeepSpeed does with ``overlap_events=False``.
///     direct: whether to bypass the page cache: ``"preferred"`` (default) does where the file system can,
///         ``"required"`` raises where it cannot, ``"disabled"`` never does. ``stats()`` says what happened.
///     gds: whether bytes of CUDA tensors go between disk and GPU past the host's memory, by way of cuFile (GPUDirect Storage):
///         ``"preferred"`` does where cuFile really can, ``"required"`` raises where it cannot, ``"disabled"`` (default)
///         uses bounce buffers. ``stats()`` says what happened (``bytes_gds``, ``gds_reason``).
///     pool_bytes: upper bound of the engine's own memory, at least a bounce buffer per worker. Default: 8 MiB
///         for each worker, 256 MiB at the most, and 1 MiB for small calls.
///     lock_pool: page-lock that memory where ``RLIMIT_MEMLOCK`` allows. Default True.
///     register_pool: register that memory with io_uring. Default True.
///
/// Raises:
///     ValueError: a setting is out of its range; the message names the range.
///     deepnvme.errors.UnsupportedError: the backend that was asked for does not work here; the message says why.
///
/// Example:
///     >>> with deepnvme.Engine(workers=2, block_bytes=1 << 20) as engine:
///     ...     engine.write(tensor, "weights.bin")
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
    #[pyo3(signature = (*, backend="auto", workers=None, queue_depth=None, block_bytes=None, submit="batch",
                        window="sliding", direct="preferred", gds="disabled", pool_bytes=None, lock_pool=true,
                        register_pool=true))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword of the Python signature")]
    fn new(
        py: Python<'_>,
        backend: &str,
        workers: Option<&Bound<'_, PyAny>>,
        queue_depth: Option<&Bound<'_, PyAny>>,
        block_bytes: Option<&Bound<'_, PyAny>>,
        submit: &str,
        window: &str,
        direct: &str,
        gds: &str,
        pool_bytes: Option<&Bound<'_, PyAny>>,
        lock_pool: bool,
        register_pool: bool,
    ) -> PyResult<Self> {
        let config = Typed {
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
        .meaning()?;
        Self::open(py, config)
    }

    /// An engine with the settings of a file that ``deepnvme tune`` wrote.
    ///
    /// Args:
    ///     path: the file. Default: what ``DEEPNVME_CONFIG`` names, else ``deepnvme.toml`` in the current folder.
    ///     folder: where the data lies: the settings of the deepest folder of the file that holds it are taken. Default:
    ///         those that are for every folder.
    ///     direction: ``"read"`` or ``"write"``, for an engine that does only one. Default: both.
    ///
    /// Raises:
    ///     FileNotFoundError: there is no such file.
    ///     ValueError: it holds what no engine takes; the message names the setting and its range.
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
        direction: Option<&str>,
    ) -> PyResult<Self> {
        let path = match path {
            Some(path) => file_name(path)?,
            None => settings::settings_path().unwrap_or_else(|| "deepnvme.toml".into()),
        };
        let folder = folder.map(file_name).transpose()?;
        let file = error::check(py, SettingsFile::load(&path))?;
        // The file names folders as they really are.
        let folder = folder.map(|folder| folder.canonicalize().unwrap_or(folder));
        Self::open(py, file.of(folder.as_deref(), settings::direction(direction)?).clone())
    }

    /// Reads ``tensor.nbytes`` bytes at ``offset`` into ``tensor``, and returns that number.
    ///
    /// Any size, offset and memory alignment will do. The GIL is released meanwhile, and signals (Ctrl-C) are seen.
    ///
    /// Args:
    ///     tensor: what to fill: a torch tensor in host memory (any shape, dtype and strides), a numpy array, or a
    ///         writable object with the buffer protocol or DLPack.
    ///     path: ``str``, ``bytes``, ``os.PathLike``, an open file descriptor (it stays open, and its position
    ///         unchanged) or a ``StripeSet``.
    ///     offset: where in the file, in bytes. Default 0.
    ///
    /// Raises:
    ///     FileNotFoundError, PermissionError: as from ``open``.
    ///     deepnvme.EndOfFileError: the file ends inside the range; ``bytes_done`` says how many bytes were there.
    ///     TypeError, ValueError: the tensor cannot be filled (read-only, on a GPU, sparse, overlapping elements).
    ///     deepnvme.Error: any other failure, with ``errno``, ``filename`` and ``offset``.
    ///
    /// Example:
    ///     >>> deepnvme.write(tensor, "weights.bin")
    ///     4096
    ///     >>> deepnvme.read(tensor, "weights.bin")
    ///     4096
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "($self, tensor, path, offset=0)")]
    fn read(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Offset,
    ) -> PyResult<u64> {
        Request::read(tensor, path, offset)?.run(py, &*self.open_engine(py)?)
    }

    /// Writes the bytes of ``tensor`` to a file, and returns their number.
    ///
    /// Without ``offset`` the file becomes exactly the tensor: a longer old file is cut, a missing one made. With
    /// ``offset`` only that range changes, and the file grows if the range ends beyond it. Elements are written in
    /// row-major order, as ``tensor.contiguous()`` would hold them.
    ///
    /// Args:
    ///     tensor: as for ``read``; it may be read-only, and its elements may overlap.
    ///     path: as for ``read``. A missing file is made; its folder must exist.
    ///     offset: where in the file, in bytes; ``None`` (default) writes the whole file.
    ///     durability: what survives a power cut when this returns: ``"none"`` (default) promises nothing,
    ///         ``"data"`` the bytes and the size, ``"full"`` also the file's name in its folder.
    ///
    /// Raises:
    ///     deepnvme.Error: the write failed; a full disk has ``errno.ENOSPC``. The file may be half written: for
    ///         files that are whole or absent, use ``deepnvme.open(path, "wb")``.
    ///     TypeError, ValueError: the tensor cannot be written (on a GPU, sparse, without memory).
    ///
    /// Example:
    ///     >>> deepnvme.write(tensor, "weights.bin", durability="full")
    ///     4096
    #[pyo3(signature = (tensor, path, offset=None, *, durability="none"))]
    fn write(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Option<Offset>,
        durability: &str,
    ) -> PyResult<u64> {
        Request::write(tensor, path, offset, durability)?.run(py, &*self.open_engine(py)?)
    }

    /// Starts what ``read`` does, and returns at once, whatever the size. See ``Transfer``.
    ///
    /// Example:
    ///     >>> deepnvme.write(tensor, "weights.bin")
    ///     4096
    ///     >>> pending = deepnvme.start_read(tensor, "weights.bin")
    ///     >>> pending.wait()
    ///     4096
    #[pyo3(signature = (tensor, path, offset=Offset(0)), text_signature = "($self, tensor, path, offset=0)")]
    fn start_read(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Offset,
    ) -> PyResult<PyTransfer> {
        Request::read(tensor, path, offset)?.start(py, &*self.open_engine(py)?)
    }

    /// Starts what ``write`` does, and returns at once, whatever the size. See ``Transfer``.
    ///
    /// Example:
    ///     >>> pending = deepnvme.start_write(tensor, "weights.bin")
    ///     >>> pending.wait()
    ///     4096
    #[pyo3(signature = (tensor, path, offset=None, *, durability="none"))]
    fn start_write(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, PyAny>,
        path: &Bound<'_, PyAny>,
        offset: Option<Offset>,
        durability: &str,
    ) -> PyResult<PyTransfer> {
        Request::write(tensor, path, offset, durability)?.start(py, &*self.open_engine(py)?)
    }

    /// Reads many tensors as one request, and returns the number of bytes. Ranges that lie side by side in a file
    /// become large transfers, so that thousands of small tensors cost what their bytes cost.
    ///
    /// Args:
    ///     items: tuples ``(path, offset, tensor)``, each as for ``read``.
    ///
    /// Raises:
    ///     TypeError, ValueError: an item cannot be meant; the message says which.
    ///     deepnvme.Error: as from ``read``; ``filename`` and ``offset`` say where.
    ///
    /// Example:
    ///     >>> deepnvme.write(tensor, "weights.bin")
    ///     4096
    ///     >>> deepnvme.read_batch([("weights.bin", 0, tensor[:512]), ("weights.bin", 2048, tensor[512:])])
    ///     4096
    #[pyo3(signature = (items))]
    fn read_batch(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<u64> {
        Request::read_batch(items)?.run(py, &*self.open_engine(py)?)
    }

    /// Writes many tensors as one request, and returns the number of bytes.
    ///
    /// Args:
    ///     items: tuples ``(path, offset, tensor)``. Either each has an offset, or each has ``None``: then every
    ///         file becomes exactly its tensor.
    ///     durability: as for ``write``, for all the files.
    ///
    /// Raises:
    ///     TypeError, ValueError: an item cannot be meant, or two ranges overlap.
    ///     deepnvme.Error: as from ``write``.
    ///
    /// Example:
    ///     >>> deepnvme.write_batch([("parts.bin", 0, tensor[:512]), ("parts.bin", 2048, tensor[512:])])
    ///     4096
    #[pyo3(signature = (items, *, durability="none"))]
    fn write_batch(&self, py: Python<'_>, items: &Bound<'_, PyAny>, durability: &str) -> PyResult<u64> {
        Request::write_batch(items, durability)?.run(py, &*self.open_engine(py)?)
    }

    /// Starts what ``read_batch`` does, and returns one ``Transfer`` for all of it.
    #[pyo3(signature = (items))]
    fn start_read_batch(&self, py: Python<'_>, items: &Bound<'_, PyAny>) -> PyResult<PyTransfer> {
        Request::read_batch(items)?.start(py, &*self.open_engine(py)?)
    }

    /// Starts what ``write_batch`` does, and returns one ``Transfer`` for all of it.
    #[pyo3(signature = (items, *, durability="none"))]
    fn start_write_batch(&self, py: Python<'_>, items: &Bound<'_, PyAny>, durability: &str) -> PyResult<PyTransfer> {
        Request::write_batch(items, durability)?.start(py, &*self.open_engine(py)?)
    }

    /// What this engine has done so far.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        Ok(Stats::from(self.open_engine(py)?.stats()))
    }

    /// Records what this engine does while a ``with`` block runs, and writes it to a file that appears as a whole when the
    /// block ends, also by an exception. Several may run at once; each has everything that ended while it ran, of at most
    /// 262,144 events, after which they are counted. While none runs, all of it costs nothing.
    ///
    /// Args:
    ///     path: what the file is called: ``*.json`` for https://ui.perfetto.dev and ``chrome://tracing``, ``*.html`` for a
    ///         page that needs nothing else.
    ///
    /// Raises:
    ///     deepnvme.Error: the file could not be written; said when the block begins.
    ///     ValueError: another ending.
    ///
    /// Example:
    ///     >>> engine = deepnvme.Engine(workers=1)
    ///     >>> with engine.trace("timeline.html") as trace:
    ///     ...     engine.write(tensor, "weights.bin")
    ///     4096
    ///     >>> trace.summary()["requests"]
    ///     1
    pub(crate) fn trace(&self, path: &Bound<'_, PyAny>) -> PyResult<Trace> {
        Ok(Trace::new(self.inner.clone(), file_name(path)?))
    }

    /// Adds a bar to the traces of this engine that run, in a lane of its own: what computes, or waits. Without a trace,
    /// nothing happens.
    ///
    /// Args:
    ///     name: what the bar is called.
    ///     lane: the line that it is drawn in; bars of the same lane share it.
    ///     start_ns: when it began, by ``time.monotonic_ns()``.
    ///     end_ns: when it was over, by the same clock.
    ///
    /// Raises:
    ///     ValueError: it would end before it began.
    fn span(
        &self,
        py: Python<'_>,
        name: &str,
        lane: &str,
        start_ns: &Bound<'_, PyAny>,
        end_ns: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        timeline::span(&*self.open_engine(py)?, name, lane, timeline::range(start_ns, end_ns)?)
    }

    /// What works on this machine, and why this backend was chosen.
    fn probe(&self, py: Python<'_>) -> PyResult<Probe> {
        Probe::of(py, &*self.open_engine(py)?)
    }

    /// Finishes what is in flight, also for other threads, and ends the engine's threads. Later calls raise
    /// ``deepnvme.errors.ClosedError``, and so do files, streamers and swappers that use the engine; closing twice does
    /// nothing.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        orphans::sweep(py);
        let Some(engine) = self.inner.take() else { return Ok(()) };
        // The engine's end waits for the device, perhaps long; another thread does that, so that Ctrl-C arrives here. Whoever
        // is inside a call has the engine, too: it is closed for them, and dropped by the last.
        let (report, mut over) = mpsc::sync_channel::<()>(1);
        let closing = Arc::clone(&engine);
        let thread = std::thread::Builder::new().name("deepnvme-close".into());
        let started = deepnvme_io::start_thread(|| {
            thread.spawn(move || {
                closing.close();
                drop((closing, report));
            })
        });
        if started.is_err() {
            py.detach(move || engine.close());
            return Ok(());
        }
        loop {
            let waited;
            (over, waited) = py.detach(move || {
                let waited = over.recv_timeout(SLICE);
                (over, waited)
            });
            if !matches!(waited, Err(mpsc::RecvTimeoutError::Timeout)) {
                return Ok(());
            }
            py.check_signals()?;
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (exc_type, exc_value, traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: Option<&Bound<'_, PyAny>>,
        exc_value: Option<&Bound<'_, PyAny>>,
        traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let _ = (exc_type, exc_value, traceback);
        self.close(py)
    }

    /// What moves the bytes: ``"io_uring"``, ``"aio"`` or ``"threads"``.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// Threads that submit and reap.
    #[getter]
    fn workers(&self) -> u32 {
        self.config.workers
    }

    /// Transfers in flight per worker.
    #[getter]
    fn queue_depth(&self) -> u32 {
        self.config.queue_depth
    }

    /// Bytes of the largest single transfer.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.config.block_bytes
    }

    /// ``"batch"`` or ``"single"``.
    #[getter]
    fn submit(&self) -> &'static str {
        submit_word(self.config.submit)
    }

    /// When the queue is filled again.
    #[getter]
    fn window(&self) -> &'static str {
        window_word(self.config.window)
    }

    /// ``"preferred"``, ``"required"`` or ``"disabled"``.
    #[getter]
    fn direct(&self) -> &'static str {
        direct_word(self.config.direct)
    }

    /// Whether bytes of CUDA tensors go by way of cuFile.
    #[getter]
    fn gds(&self) -> &'static str {
        direct_word(self.config.gds)
    }

    /// Upper bound of the engine's own memory, in bytes.
    #[getter]
    fn pool_bytes(&self) -> u64 {
        self.config.pool_bound_bytes()
    }

    /// Whether ``close`` was called.
    #[getter]
    pub(crate) fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { ", closed" } else { "" };
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

    /// The engine, unless it was closed.
    pub(crate) fn open_engine(&self, py: Python<'_>) -> PyResult<Arc<Engine>> {
        self.inner.get(py)
    }
}
