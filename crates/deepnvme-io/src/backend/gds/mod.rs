//! GPUDirect Storage: an engine's use of cuFile.
//!
//! `cufile` has the library and performs one op per call. `submission` performs many at once, with the engine's
//! `batches`. `combined` combines cuFile with another backend. `registrations` is the process's memory registered with
//! cuFile, and `recency` is its eviction order.

mod batches;
mod combined;
mod cufile;
mod recency;
mod registrations;
mod submission;

pub(crate) use self::combined::GdsBackend;
pub(crate) use self::cufile::{Counts, CudaDevices, Gds};
pub use self::registrations::{GpuRegistration, REGISTERED_BYTES_MAX};
