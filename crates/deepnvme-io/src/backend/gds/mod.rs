//! GPUDirect Storage: an engine's use of cuFile.
//!
//! `cufile` has the library and performs one op per call. `submission` performs many at once, with the engine's
//! `batches`. `combined` combines cuFile with another backend. `registrations` is the process's memory registered with
//! cuFile, and `recency` is its eviction order. `file_systems` tells direct transfers from copied ones.

mod batches;
mod combined;
mod cufile;
mod file_systems;
mod recency;
mod registrations;
mod submission;

pub(crate) use self::combined::GdsBackend;
pub(crate) use self::cufile::{Counts, CudaDevices, Gds};
pub use self::file_systems::obstacle;
pub(crate) use self::file_systems::{Directness, device_of, judge, obstacle_of};
pub use self::registrations::{GpuRegistration, REGISTERED_BYTES_MAX};
