//! `deepnvme.Stats`: an engine's counters.

use deepnvme_io::StatsSnapshot;
use deepnvme_mem::LockState;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Declare the class once, so that its fields, dictionary and text name the same counters.
macro_rules! record_class {
    ($(#[$class_doc:meta])* $class:ident { $($(#[$doc:meta])* $name:ident: $kind:ty),* $(,)? }) => {
        $(#[$class_doc])*
        #[pyclass(frozen, get_all, module = "deepnvme")]
        pub(crate) struct $class { $($(#[$doc])* $name: $kind),* }

        #[pymethods]
        impl $class {
            /// Return the fields as a dictionary, ready for JSON.
            fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let fields = PyDict::new(py);
                $(fields.set_item(stringify!($name), &self.$name)?;)*
                Ok(fields)
            }

            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let fields = [$((stringify!($name), (&self.$name).into_pyobject(py)?.repr()?.to_string())),*];
                let fields = fields.map(|(name, value)| format!("{name}={value}"));
                Ok(format!(concat!(stringify!($class), "({})"), fields.join(", ")))
            }
        }
    };
}
pub(crate) use record_class;

/// Make a dictionary of some counters of a struct, by the names of its fields.
macro_rules! counter_dict {
    ($py:expr, $stats:expr, $($name:ident),+ $(,)?) => {
        pyo3::types::IntoPyDict::into_py_dict([$((stringify!($name), $stats.$name)),+], $py)
    };
}
pub(crate) use counter_dict;

record_class! {
    /// Counters of an engine's work so far. Counts and bytes only grow, except ``pool_bytes``.
    ///
    /// Example:
    ///     >>> before = deepnvme.stats()
    ///     >>> deepnvme.write(torch.ones(1024), "weights.bin")
    ///     4096
    ///     >>> deepnvme.stats().bytes_written - before.bytes_written
    ///     4096
    Stats {
        /// Backend in use: ``"io_uring"``, ``"aio"`` or ``"threads"``.
        backend: String,
        /// Requests that have ended, successfully or not.
        requests: u64,
        /// Requests that ended in an error.
        requests_failed: u64,
        /// Reads, writes and syncs submitted to the kernel, including resubmitted ones.
        ops: u64,
        /// Bytes read from files.
        bytes_read: u64,
        /// Bytes written to files.
        bytes_written: u64,
        /// Bytes read and written with direct I/O, to or from the tensor.
        bytes_direct: u64,
        /// Bytes read and written with direct I/O, through bounce buffers.
        bytes_bounced: u64,
        /// Bytes read and written through the page cache.
        bytes_buffered: u64,
        /// First reason for buffered I/O although direct I/O was requested.
        buffered_reason: Option<String>,
        /// Ops that were interrupted or temporarily refused, and resubmitted.
        retries: u64,
        /// Ops that moved fewer bytes than requested, and were continued.
        short_ops: u64,
        /// Syncs of files and folders.
        syncs: u64,
        /// Copies between bounce buffers and GPUs.
        gpu_copies: u64,
        /// Bytes copied to GPUs.
        bytes_to_gpu: u64,
        /// Bytes copied from GPUs.
        bytes_from_gpu: u64,
        /// Bytes read and written by cuFile between disk and GPU. Part of ``bytes_read`` and ``bytes_written``.
        bytes_gds: u64,
        /// Part of ``bytes_gds`` that used memory registered with cuFile.
        bytes_gds_pinned: u64,
        /// Registrations of GPU memory with cuFile.
        gds_pins: u64,
        /// Registrations, of any engine, that were evicted to make room for this engine's.
        gds_pins_evicted: u64,
        /// First reason for using bounce buffers for GPU tensors although cuFile was requested.
        gds_reason: Option<String>,
        /// Requests that waited for earlier work on a CUDA stream.
        gpu_waits: u64,
        /// Tensor bytes that ``load`` compared with checksums.
        bytes_compared: u64,
        /// Tensor bytes that ``load`` did not compare, without checksums or because it would have taken too long.
        bytes_not_compared: u64,
        /// Reason for staged GPU copies, if the driver could not register the bounce buffers.
        staged_reason: Option<String>,
        /// Blocks whose latency was measured, from submission to completion.
        latency_count: u64,
        /// Shortest latency in microseconds.
        latency_us_min: u64,
        /// Median latency in microseconds.
        latency_us_p50: u64,
        /// 99th percentile of the latency in microseconds.
        latency_us_p99: u64,
        /// Longest latency in microseconds.
        latency_us_max: u64,
        /// Bytes of memory that the engine holds now.
        pool_bytes: u64,
        /// Whether this memory is pinned; ``None`` while there is none.
        pool_locked: Option<bool>,
        /// Reason why this memory is not pinned; ``None`` if it is, and while there is none.
        pool_lock_reason: Option<String>,
    }
}

impl From<StatsSnapshot> for Stats {
    fn from(snapshot: StatsSnapshot) -> Self {
        let (pool_locked, pool_lock_reason) = match snapshot.pool_lock {
            None => (None, None),
            Some(LockState::Locked) => (Some(true), None),
            Some(LockState::Refused { reason }) => (Some(false), Some(reason)),
            Some(LockState::NotRequested) => (Some(false), Some("lock_pool is False".into())),
        };
        Self {
            backend: snapshot.backend.name().into(),
            requests: snapshot.requests,
            requests_failed: snapshot.requests_failed,
            ops: snapshot.ops,
            bytes_read: snapshot.bytes_read,
            bytes_written: snapshot.bytes_written,
            bytes_direct: snapshot.bytes_direct,
            bytes_bounced: snapshot.bytes_bounced,
            bytes_buffered: snapshot.bytes_buffered,
            buffered_reason: snapshot.buffered_reason,
            retries: snapshot.retries,
            short_ops: snapshot.short_ops,
            syncs: snapshot.syncs,
            gpu_copies: snapshot.gpu_copies,
            bytes_to_gpu: snapshot.bytes_to_gpu,
            bytes_from_gpu: snapshot.bytes_from_gpu,
            bytes_gds: snapshot.bytes_gds,
            bytes_gds_pinned: snapshot.bytes_gds_pinned,
            gds_pins: snapshot.gds_pins,
            gds_pins_evicted: snapshot.gds_pins_evicted,
            gds_reason: snapshot.gds_reason,
            gpu_waits: snapshot.gpu_waits,
            bytes_compared: snapshot.bytes_compared,
            bytes_not_compared: snapshot.bytes_not_compared,
            staged_reason: snapshot.staged_reason,
            latency_count: snapshot.latency.count,
            latency_us_min: snapshot.latency.min_us,
            latency_us_p50: snapshot.latency.p50_us,
            latency_us_p99: snapshot.latency.p99_us,
            latency_us_max: snapshot.latency.max_us,
            pool_bytes: snapshot.pool_bytes,
            pool_locked,
            pool_lock_reason,
        }
    }
}
