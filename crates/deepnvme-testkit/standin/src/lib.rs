//! A stand-in for `libcuda.so.1` and `libcufile.so.0`, for tests of code that loads them at run time.
//!
//! One shared library exports the functions of both, and some of its own (`standin_*`, see `control.rs`) with which a
//! test arranges faults and asks what happened. It needs no GPU. It is stricter than a driver: copies take effect
//! late and in another order than they were queued in, device memory traps when the host touches it, no handle or
//! device address is given out twice, and what a driver would leave undefined is kept as a *violation*: a race, memory
//! that was freed too early, a host function that calls back.
//!
//! # How a test finds the library
//!
//! Have this crate among the dev-dependencies: cargo then builds `libdeepnvme_standin.so` before it builds the test,
//! and puts it beside the test's own executable, in `target/<profile>/deps`. [`library_path`] says where that is;
//! another process is told by the variable `DEEPNVME_STANDIN`, which comes first. (`target/<profile>` itself has a copy
//! only where this package was asked for by name.) The functions that the executable got by linking the Rust library
//! are of no use: what they know is not what the loaded library knows. Call nothing but [`Loaded`],
//! [`library_path`], [`private_copy`], [`pattern`] and [`splitmix64`].
//!
//! A process has one stand-in for each file that it loads. A test that wants one for itself loads a
//! [`private_copy`]. The environment (`config.rs`) is read at the first call. It never gets unloaded.
//!
//! # What it does not do
//!
//! Kernels, graphs, arrays, capture, managed memory, peers, green contexts, per-thread variants of symbols (`_ptsz`),
//! `cuGetProcAddress`. A failure that shows up in a later call on the stream has to be injected into that call.
//!
//! # Map
//!
//! | module | what lives there |
//! | --- | --- |
//! | `abi`, `calls` | the C boundary, and the gate of every function |
//! | `world` | all state, under one lock |
//! | `config`, `ledger` | the environment; calls, faults, counters, violations |
//! | `stream`, `queue`, `event`, `context` | streams and their threads, and what orders them |
//! | `order`, `span`, `lifetime` | what is a race, and what is freed too early |
//! | `memory`, `host`, `bytes` | where bytes are |
//! | `driver`, `cufile`, `control`, `kernels` | the exported functions |
//! | `client` | the loaded library, as tests of other crates ask it |

mod abi;
mod bytes;
mod calls;
mod client;
mod config;
mod context;
mod control;
mod cufile;
mod driver;
mod event;
mod host;
mod kernels;
mod ledger;
mod lifetime;
mod memory;
mod order;
mod queue;
mod rng;
mod span;
mod stream;
mod world;

use std::io;
use std::path::{Path, PathBuf};

pub use client::Loaded;
pub use rng::{pattern, splitmix64};

/// The name of the shared library.
const FILE_NAME: &str = "libdeepnvme_standin.so";

/// Where the shared library is: what `DEEPNVME_STANDIN` says, else beside the running executable as cargo puts it.
///
/// Tests and benchmarks lie in `deps` with it, examples and programs beside or above that folder; a copy outside of
/// `deps` comes later, since it may be an old one. Where it is nowhere, the answer is the place beside the executable,
/// so that loading it fails with a name that can be looked for.
#[must_use]
pub fn library_path() -> PathBuf {
    if let Some(path) = std::env::var_os("DEEPNVME_STANDIN") {
        return path.into();
    }
    let folder = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_path_buf)).unwrap_or_default();
    let candidates = ["deps", "", "../deps", ".."].map(|below| folder.join(below).join(FILE_NAME));
    candidates.iter().find(|path| path.is_file()).unwrap_or(&candidates[1]).clone()
}

/// Copies the shared library into a folder, for a test that wants state of its own. Loaded, the file may be deleted.
///
/// # Errors
/// When the library is not there, or the copy cannot be written.
pub fn private_copy(folder: &Path) -> io::Result<PathBuf> {
    let copy = folder.join(FILE_NAME);
    std::fs::copy(library_path(), &copy)?;
    Ok(copy)
}
