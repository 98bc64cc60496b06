//! GPUDirect Storage: what an engine has of cuFile, and how its ops become transfers.
//!
//! `cufile` has the library, and makes one op with one call; `submission` makes many at once, by way of the `batches` that an
//! engine keeps; `beside` puts all that beside another backend. `pins` is the memory that cuFile knows in this process (`recency`
//! decides purely what goes first), `alone` is for those who drive backends without an engine.

pub mod alone;
mod batches;
mod beside;
mod cufile;
mod pins;
mod recency;
mod submission;

pub(crate) use self::beside::GdsBackend;
pub(crate) use self::cufile::{Counts, Gds};
pub use self::pins::GpuPin;
pub use crate::op::KnownFile;
