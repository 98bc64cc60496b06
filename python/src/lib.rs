//! `deepnvme._deepnvme`: the engine's Python interface. The package `deepnvme` re-exports it.
//!
//! The path of a call: `engine` defines the methods, and `module` the functions, on the engine of `default`. `request`
//! parses the arguments with `path` and `tensor_memory` (which asks `torch`, `array` and `dlpack` for the bytes), and
//! makes the request without the GIL. `pending_request` waits for it. `transfer` is the Python object of a started
//! request, and `reaper` waits for the `detached_requests`, whose object was dropped. `reader` and `writer` implement
//! `deepnvme.open`, and `exit` finishes requests at exit.
//!
//! Apart from this path, `checkpoint`, `optim`, `streaming`, `swap`, `rows`, `replace` and `fs` are for the
//! packages `deepnvme._checkpoint`, `optim`, `_stream`, `_swap` and `_rows`. `timeline` records events, `command` runs the command line,
//! `param_groups` is for `_offload`, and `docs` has the texts that functions and methods share. The other modules are
//! helpers of these.
//!
//! Only Python's own threads take the GIL. `memory` is the only folder with unsafe code, apart from the calls in
//! `optim` that turn tensors into slices.
#![deny(unsafe_code)]

mod array;
mod capture_mode;
mod checkpoint;
mod command;
mod default;
mod detached_requests;
mod device_pin;
mod dlpack;
mod docs;
mod engine;
mod error;
mod exit;
mod fs;
mod gc_pause;
mod handle;
mod ignored;
mod imported;
mod interruptible;
#[allow(unsafe_code)]
mod memory;
mod module;
mod once;
mod open_engine;
#[allow(unsafe_code)]
mod optim;
mod param_groups;
mod path;
mod pending_request;
mod pinned;
mod probe;
mod reader;
mod reaper;
mod replace;
mod request;
mod rows;
mod saved_hooks;
mod settings;
mod stats;
mod streaming;
mod swap;
mod tensor_memory;
mod threads;
mod timeline;
mod torch;
mod transfer;
mod writer;

#[pyo3::pymodule(gil_used = false)]
mod _deepnvme {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::{
        capture_mode::_exchange_capture_mode,
        checkpoint::{
            _check_pickle, _checkpoint_paths, _crc64, _crc64_of_all, _find_set, _list_state, _not_plain, _pickle_plain,
            _plan_archive, _plan_safetensors, _refuse_list_name, _shard_ranges, CheckpointReader, DirectReads,
            HashCosts, Loading, NewFile, NewFolder, PlainTargets, PyHistory, PyReflinkTarget, SavePlan, SaveShard,
            SaveStaging, Saving,
        },
        command::{_command_result, _python_command, _run_command},
        device_pin::{_pin_device, DevicePin},
        engine::PyEngine,
        exit::_at_exit,
        fs::{_make_folders, _open_regular, _read_small_file},
        gc_pause::{_end_gc_pauses, PyGcPause},
        memory::_is_held,
        module::{
            default_engine, probe, read, read_batch, span, start_read, start_read_batch, start_write,
            start_write_batch, stats, trace, write, write_batch,
        },
        optim::{PyKernel, PyStepGradients, PyStepPlan, PyStepRecord},
        param_groups::_call_with_params,
        path::StripeSet,
        pinned::_pinned_capsule,
        probe::{BackendProbe, Probe},
        reader::FileReader,
        replace::{_remove_leftovers, _retire_set, PrivateFolder, SetReplacement},
        rows::{_pack_rows, _packed_block_bytes, _parse_packed_rows, PyGather, PyRowStore},
        saved_hooks::SavedHooksScope,
        settings::_parse_bytes,
        stats::Stats,
        streaming::{
            _cacheable_bytes, _packed_tensors, _row_page_bytes, _sees_used_pages, PySparseRowCache, PyStoredTensor,
            PyStreamer,
        },
        swap::{BorrowScope, PyBorrowed, PySwapper},
        timeline::Trace,
        transfer::{Progress, PyTransfer},
        writer::FileWriter,
    };

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        crate::memory::watch_forks();
        crate::once::fill_cells_of_pyo3(py)?;
        py.import("atexit")?.call_method1("register", (module.getattr("_at_exit")?,))?;
        Ok(())
    }
}
