//! The exported functions of `libcufile.so.0`.
//!
//! | module | contents |
//! | --- | --- |
//! | `calls` | the entry checks of these functions |
//! | `session` | opening and closing the driver, its parameters and properties |
//! | `statistics` | switching the statistics of transfers, and reading them |
//! | `registered` | files and buffers that are registered |
//! | `transfer` | one transfer: checked when requested, then moved by several calls |
//! | `synchronous` | synchronous calls |
//! | `batch` | batches, whose entries complete late and in any order |
//! | `stream_ordered` | transfers that are ops of a stream |
//!
//! Stricter than the library: the driver must be open, a context of the memory's device must be current, and host
//! memory must be registered with the driver.

mod batch;
mod calls;
mod registered;
mod session;
mod statistics;
mod stream_ordered;
mod synchronous;
mod transfer;
