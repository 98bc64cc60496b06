//! `deepnvme.Stats`: what an engine has done so far.

use deepnvme_io::StatsSnapshot;
use deepnvme_mem::LockState;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Declares the class once: its fields, its dictionary and its text all name the same figures.
macro_rules! figures {
    ($(#[$class_doc:meta])* $class:ident { $($(#[$doc:meta])* $name:ident: $kind:ty),* $(,)? }) => {
        $(#[$class_doc])*
        #[pyclass(frozen, get_all, module = "deepnvme")]
        pub(crate) struct $class { $($(#[$doc])* $name: $kind),* }

        #[pymethods]
        impl $class {
            /// The same figures by name, ready for JSON.
            fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
                let figures = PyDict::new(py);
                $(figures.set_item(stringify!($name), &self.$name)?;)*
                Ok(figures)
            }

            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let figures = [$((stringify!($name), (&self.$name).into_pyobject(py)?.repr()?.to_string())),*];
                let figures = figures.map(|(name, value)| format!("{name}={value}"));
                Ok(format!(concat!(stringify!($class), "({})"), figures.join(", ")))
            }
        }
    };
}
pub(crate) use figures;

figures! {
    /// What an engine has done so far. All figures but ``pool_bytes`` only grow.
    ///
    /// Example:
    ///     >>> before = deepnvme.stats()
    ///     >>> deepnvme.write(tensor, "weights.bin")
    ///     4096
    ///     >>> deepnvme.stats().bytes_written - before.bytes_written
    ///     4096
    Stats {
        /// What moves the bytes: ``"io_uring"``, ``"aio"`` or ``"threads"``.
        backend: String,
        /// Requests that have ended, in whatever way.
        requests: u64,
        /// Requests that ended in an error.
        requests_failed: u64,
        /// Transfers that were handed to the kernel, with those submitted again.
        ops: u64,
        /// Bytes read from files.
        bytes_read: u64,
        /// Bytes written to files.
        bytes_written: u64,
        /// Bytes moved past the page cache, straight from or to the tensor.
        bytes_direct: u64,
        /// Bytes moved past the page cache, by way of the engine's own memory.
        bytes_bounced: u64,
        /// Bytes moved through the page cache.
        bytes_buffered: u64,
        /// The first reason why bytes were buffered although direct I/O was wanted.
        buffered_reason: Option<String>,
        /// Transfers that were interrupted or refused for now, and submitted again.
        retries: u64,
        /// Transfers that moved less than asked, and were continued.
        short_transfers: u64,
        /// Syncs of files and folders.
        syncs: u64,
        /// Copies between the engine's own memory and GPUs.
        gpu_copies: u64,
        /// Bytes copied to GPUs.
        bytes_to_gpu: u64,
        /// Bytes copied from GPUs.
        bytes_from_gpu: u64,
        /// Of the bytes read and written: moved between disk and GPU by cuFile.
        bytes_gds: u64,
        /// Of these: from and to memory that was registered with cuFile.
        bytes_gds_pinned: u64,
        /// Registrations of GPU memory with cuFile.
        gds_pins: u64,
        /// Registrations, of whatever engine, that were ended for this engine's to have room.
        gds_pins_evicted: u64,
        /// The first reason why bytes of a GPU went through the engine's own memory although cuFile was wanted.
        gds_reason: Option<String>,
        /// Requests that waited for work that a CUDA stream had been given before them.
        gpu_waits: u64,
        /// Bytes of tensors that ``load`` has compared with the checksums of their files.
        bytes_compared: u64,
        /// Those that it has not: the file has no checksums, or comparing would have cost too much time.
        bytes_not_compared: u64,
        /// Why the driver stages copies to and from GPUs, where it could not be told of the engine's own memory.
        staged_reason: Option<String>,
        /// Blocks whose latency was measured, from submission to completion.
        latency_count: u64,
        /// Shortest latency in microseconds.
        latency_us_min: u64,
        /// Half of the blocks were faster, in microseconds.
        latency_us_p50: u64,
        /// 99 of 100 blocks were faster, in microseconds.
        latency_us_p99: u64,
        /// Longest latency in microseconds.
        latency_us_max: u64,
        /// Memory that the engine holds of its own now, in bytes.
        pool_bytes: u64,
        /// Whether that memory is page-locked; ``None`` while there is none.
        pool_locked: Option<bool>,
        /// Why it is not, where it is not.
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
            short_transfers: snapshot.short_transfers,
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
