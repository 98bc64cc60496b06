//! The CUDA driver as values: devices, streams, events, memory that the driver may copy from and to.
//!
//! Nothing is linked: `library` finds the shared object when it is first asked for, `driver` takes its functions, and a
//! machine without one has an [`Absent`] that says where it was looked for. Whatever the driver reports becomes an [`Error`]
//! with the call, the code and the driver's own words.
//!
//! - [`Driver`]: the library and its version, once per process.
//! - [`Facts`]: what it says about a GPU, without a context.
//! - [`Device`]: one GPU, with its primary context (the one that torch uses) held for as long as the value lives.
//! - [`Stream`] and [`Event`]: copies in order, and how far they are. [`RawStream`] names somebody else's stream.
//! - [`Memory`]: some of a GPU's, allocated here.
//! - [`Registration`]: host memory that copies may use without being staged.
//! - [`CuFile`]: GPUDirect Storage, where disk and GPU do without host memory; [`FileHandle`] and [`BufferRegistration`] are
//!   what it has to know of.
//!
//! Copies take addresses, so that they are unsafe: whoever starts one answers for both ends until an event says that it is
//! over.

mod abi;
mod cufile;
mod device;
mod driver;
mod error;
mod event;
mod facts;
mod library;
mod memory;
mod registration;
mod rows;
mod stream;

pub use cufile::{Batch, BatchEntry, BatchEvent, BufferRegistration, CuFile, DeviceSpan, FileHandle, IoError};
pub use device::{Current, Device};
pub use driver::Driver;
pub use error::{Absent, Error, Result};
pub use event::Event;
pub use facts::Facts;
pub use memory::Memory;
pub use registration::Registration;
pub use rows::Rows;
pub use stream::{RawStream, Stream};
