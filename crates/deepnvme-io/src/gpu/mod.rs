//! GPUs of any vendor: their memory, and copies from and to it.
//!
//! `device` has the traits of a GPU, and `cuda` is their one implementation. `registry` has the GPUs that an engine has
//! opened. `copies` moves bytes between bounce buffers and GPUs. `access` is for callers that wait for their copies.
//! `known_memory` registers host memory that copies use. `probe` lists the GPUs of a machine, and `gds_access` adds
//! cuFile to a backend.
//!
//! Besides `cuda`, only `registry`, `known_memory`, `probe` and `gds_access` know the vendor. All else uses the traits.

mod access;
pub(crate) mod copies;
mod cuda;
mod device;
mod gds_access;
mod known_memory;
mod probe;
mod registry;
#[cfg(test)]
mod tests;

pub(crate) use access::EngineGpus;
pub use access::{GpuAccess, HostRegistration, StartedCopy, StreamEvents};
pub(crate) use copies::{AsyncCopier, CompletedCopy, GpuSlice};
pub use deepnvme_cuda::TransferCounts;
pub(crate) use device::GpuEvent;
pub use gds_access::{GdsAccess, GdsTrial};
pub use known_memory::{current_gpu, register_waiting, register_with_driver, wait_for_copies};
pub use probe::{GpuFacts, GpuProbe};
