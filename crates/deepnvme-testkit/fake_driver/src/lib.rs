//! A fake `libcuda.so.1` and `libcufile.so.0`, for tests of code that loads them at run time.
//!
//! One shared library exports the functions of both, and functions of its own (`fake_driver_*`, see `control`) that
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
//! From the exported functions down. Each uses only what is below it.
//!
//! | module | contents |
//! | --- | --- |
//! | `driver`, `cufile`, `control` | the exported functions |
//! | `calls` | the entry checks of every function |
//! | `operations` | what these functions do with the state |
//! | `state` | all state, under one lock; a module for each part of it |
//! | `abi` | the C boundary |
//! | `access` | the bytes that an op accesses |
//! | `config` | the environment |
//! | `rng` | random delays, and the known pattern |
//!
//! `client` is the loaded library, for tests of other crates, and `library` its file.

mod abi;
mod access;
mod calls;
mod client;
mod config;
mod control;
mod cufile;
mod driver;
mod library;
mod operations;
mod rng;
mod state;

pub use client::Loaded;
pub use library::{library_path, old_copy, private_copy};
pub use rng::{pattern, splitmix64};
