//! A fake `libcuda.so.1` and `libcufile.so.0`, for tests of code that loads them at run time.
//!
//! One shared library exports the functions of both, and functions of its own (`fake_driver_*`, see `control.rs`) that
//! let a test inject faults and inspect what happened. It needs no GPU. It is stricter than a real driver: copies take
//! effect late and in an order that only streams and events fix, device memory traps when the host touches it, and no
//! handle or device address is reused. Behaviour that a driver leaves undefined is recorded as a *violation*: a race,
//! memory that is freed too early, a host function that calls the driver.
//!
//! # How a test finds the library
//!
//! Add this crate to the dev-dependencies. cargo then builds `libdeepnvme_fake_driver.so` before the test and puts it
//! next to the test's executable, in `target/<profile>/deps`. [`library_path`] returns its path; the variable
//! `DEEPNVME_FAKE_DRIVER` overrides it, and passes it to other processes. (`target/<profile>` itself has a copy only if
//! this package was built by name.) The functions that are linked into the executable are of no use: they do not share
//! state with the loaded library. Use only [`Loaded`], [`library_path`], [`private_copy`], [`old_copy`], [`pattern`]
//! and [`splitmix64`].
//!
//! A process has one fake driver for each file that it loads. A test that needs its own loads a [`private_copy`]. The
//! environment (`config.rs`) is read at the first call. The library is never unloaded.
//!
//! # Not implemented
//!
//! Kernels, graphs, arrays, managed memory, peers, green contexts, per-thread variants of symbols (`_ptsz`),
//! `cuGetProcAddress`. A failure that a real driver reports in a later call on the stream must be injected into that
//! call.
//!
//! # Modules
//!
//! | module | contents |
//! | --- | --- |
//! | `abi`, `calls` | the C boundary, and the entry checks of every function |
//! | `state` | all state, under one lock |
//! | `config`, `call_log` | the environment; calls, faults, counters, violations |
//! | `stream`, `queue`, `event`, `context` | streams, their threads, and their order |
//! | `capture` | stream capture, and the calls that it prohibits |
//! | `race_detector`, `access`, `release` | races, and memory that is freed too early |
//! | `memory`, `host`, `mapped_range` | locations of bytes |
//! | `rng` | random delays, and the known pattern |
//! | `driver`, `cufile`, `control`, `kernels` | the exported functions |
//! | `client` | the loaded library, for tests of other crates |

mod abi;
mod access;
mod call_log;
mod calls;
mod capture;
mod client;
mod config;
mod context;
mod control;
mod cufile;
mod driver;
mod event;
mod host;
mod kernels;
mod mapped_range;
mod memory;
mod queue;
mod race_detector;
mod release;
mod rng;
mod state;
mod stream;

use std::io;
use std::path::{Path, PathBuf};

pub use client::Loaded;
pub use rng::{pattern, splitmix64};

/// File name of the shared library.
const FILE_NAME: &str = "libdeepnvme_fake_driver.so";

/// Returns the path of the shared library: `DEEPNVME_FAKE_DRIVER`, or cargo's location next to the running
/// executable.
///
/// Tests and benchmarks are in `deps` with it, examples and programs next to or above that folder. A copy outside of
/// `deps` comes last, since it may be outdated. If there is none, the path next to the executable is returned, so
/// that the loader's error names it.
#[must_use]
pub fn library_path() -> PathBuf {
    if let Some(path) = std::env::var_os("DEEPNVME_FAKE_DRIVER") {
        return path.into();
    }
    let folder = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_path_buf)).unwrap_or_default();
    let candidates = ["deps", "", "../deps", ".."].map(|below| folder.join(below).join(FILE_NAME));
    candidates.iter().find(|path| path.is_file()).unwrap_or(&candidates[1]).clone()
}

/// Copies the shared library into a folder, for a test that needs its own state. Once loaded, the file may be
/// deleted.
///
/// # Errors
/// If the library is missing, or the copy cannot be written.
pub fn private_copy(folder: &Path) -> io::Result<PathBuf> {
    let copy = folder.join(FILE_NAME);
    std::fs::copy(library_path(), &copy)?;
    Ok(copy)
}

/// Functions that older releases of cuFile lack.
const NEW_FUNCTIONS: [&str; 7] = [
    "cuFileSetParameterBool",
    "cuFileSetStatsLevel",
    "cuFileGetStatsLevel",
    "cuFileStatsStart",
    "cuFileStatsStop",
    "cuFileStatsReset",
    "cuFileGetStatsL3",
];

/// Copies the shared library into a folder, without the functions that older releases of cuFile lack: their names in
/// the symbol table are changed, so that no look-up finds them.
///
/// # Errors
/// As [`private_copy`].
pub fn old_copy(folder: &Path) -> io::Result<PathBuf> {
    let copy = private_copy(folder)?;
    let mut bytes = std::fs::read(&copy)?;
    for name in NEW_FUNCTIONS {
        let entry = [b"\0", name.as_bytes(), b"\0"].concat();
        let places: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(&entry)).collect();
        places.into_iter().for_each(|at| bytes[at + 1] = b'x');
    }
    std::fs::write(&copy, bytes)?;
    Ok(copy)
}
