//! Safe handles for the CUDA driver and cuFile, loaded at run time.
//!
//! Nothing is linked. `library` finds the shared object on first use, `driver` loads its functions, and a machine
//! without it gets an [`Unavailable`] that lists the places searched. Driver errors become an [`Error`] with the call,
//! the code and the driver's text.
//!
//! - [`Driver`]: the library and its version, once per process.
//! - [`DeviceProperties`]: name, memory and PCI bus id of a GPU, without a context.
//! - [`Device`]: a GPU with its primary context (the one that torch uses), retained while the value lives.
//! - [`Stream`] and [`Event`]: ordered copies and their progress. [`RawStream`] is the handle of a stream, usually
//!   another library's.
//! - [`DeviceMemory`]: GPU memory allocated here.
//! - [`HostRegistration`]: host memory that copies use without staging.
//! - [`CuFile`]: GPUDirect Storage, transfers between disk and GPU without host memory. [`FileHandle`] and
//!   [`BufferRegistration`] register files and buffers, and [`Batch`] submits many transfers at once.
//!
//! Copies take addresses and are unsafe: the caller keeps both sides valid until an event reports completion.

mod abi;
mod active;
mod backoff;
mod capture;
mod context_object;
mod cufile;
mod cufile_codes;
mod device;
mod device_memory;
mod device_properties;
mod driver;
mod error;
mod event;
mod host_registration;
mod library;
mod rows;
mod stream;

pub use active::{active_device, current_device, wait_for_stream};
pub use backoff::pause_after;
pub use capture::exchange_capture_mode;
pub use cufile::{
    Batch, BatchEntry, BatchEvent, BufferRegistration, CuFile, DeviceSpan, FileHandle, IoError, IoResult,
    TransferCounts,
};
pub use device::{Current, Device, own_this_thread};
pub use device_memory::DeviceMemory;
pub use device_properties::DeviceProperties;
pub use driver::Driver;
pub use error::{Error, ErrorCode, Result, Unavailable};
pub use event::Event;
pub use host_registration::HostRegistration;
pub use library::libraries_loaded;
pub use rows::Rows;
pub use stream::{RawStream, Stream};
