//! GPUs of the CUDA driver.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_cuda as cuda;
use deepnvme_mem::{Device, RegionMut, RegistrableRange, Rows, StreamHandle};

use super::device::{Gpu, GpuEvent, GpuStream, Registration};
use crate::error::{Error, ErrorKind, Result};

/// A GPU of the CUDA driver.
#[derive(Debug)]
pub(crate) struct CudaGpu(Arc<cuda::Device>);

#[derive(Debug)]
struct CudaStream(cuda::Stream);

#[derive(Debug)]
struct CudaEvent(cuda::Event);

impl Registration for cuda::HostRegistration {}

/// Returns the CUDA device of a GPU, for cuFile, or `None` for other GPUs.
pub(crate) fn cuda_device(gpu: &dyn Gpu) -> Option<&Arc<cuda::Device>> {
    (gpu as &dyn Any).downcast_ref().map(|CudaGpu(device)| device)
}

/// Returns the driver's handle of a stream.
fn raw_stream(stream: StreamHandle) -> cuda::RawStream<'static> {
    // SAFETY: the code that made the handle keeps the stream alive until its last use (`StreamHandle::from_raw`).
    unsafe { cuda::RawStream::from_handle(stream.as_raw()) }
}

impl CudaGpu {
    pub(super) fn open(index: u32) -> Result<Self> {
        let driver = cuda::Driver::get().map_err(|absent| {
            let detail = format!("the memory is on cuda:{index}, and {absent}");
            Error::new(ErrorKind::Unsupported, "use GPU memory", detail)
        })?;
        Ok(Self(Arc::new(converted(cuda::Device::new(driver, index))?)))
    }

    pub(super) fn device(&self) -> &Arc<cuda::Device> {
        &self.0
    }

    fn allocated(&self, memory: cuda::DeviceMemory, bytes: usize) -> RegionMut {
        let start = std::ptr::without_provenance_mut(memory.address());
        let on = Device::Cuda { index: self.index() };
        // SAFETY: the driver allocated these bytes exclusively, and the owner keeps them. Any byte value is valid, and
        // no reference to GPU memory is ever created.
        unsafe { RegionMut::from_raw(start, bytes, on, Arc::new(memory)) }
    }
}

impl Gpu for CudaGpu {
    fn index(&self) -> u32 {
        self.0.index()
    }

    fn pci_bus_id(&self) -> Option<String> {
        self.0.driver().device_properties(self.index()).ok().map(|properties| properties.pci_bus_id)
    }

    fn new_stream(&self) -> Result<Box<dyn GpuStream>> {
        Ok(Box::new(CudaStream(converted(cuda::Stream::new(&self.0))?)))
    }

    fn new_event(&self) -> Result<Box<dyn GpuEvent>> {
        Ok(Box::new(CudaEvent(converted(cuda::Event::new(&self.0))?)))
    }

    fn is_idle(&self, stream: StreamHandle) -> Result<bool> {
        converted(raw_stream(stream).is_idle(&self.0))
    }

    fn allocate(&self, bytes: usize) -> Result<RegionMut> {
        let memory = cuda::DeviceMemory::new(&self.0, bytes).map_err(|error| {
            if !error.is_out_of_memory() {
                return device_error(&error);
            }
            let index = self.index();
            let detail = format!("{error}: cuda:{index} has no {bytes} bytes left; ask for fewer, or free some there");
            Error::new(ErrorKind::Device, "allocate GPU memory", detail)
        })?;
        Ok(self.allocated(memory, bytes))
    }

    fn register(&self, arena: &RegistrableRange) -> Result<Box<dyn Registration>> {
        let (addresses, owner) = (arena.addresses(), Box::new(arena.clone()));
        // SAFETY: the memory stays valid for as long as a clone of its range lives.
        let made = unsafe { cuda::HostRegistration::new(&self.0, addresses.start, addresses.len(), owner) };
        Ok(Box::new(converted(made)?))
    }
}

impl GpuStream for CudaStream {
    fn raw(&self) -> StreamHandle {
        // SAFETY: the stream exists until this value is dropped, and the engine does not use the handle after that.
        unsafe { StreamHandle::from_raw(self.0.raw().as_handle()) }
    }

    // SAFETY: the requirements of the trait are those of the driver's stream, to which this passes its arguments.
    unsafe fn copy_to_gpu(&self, target: Rows, source: *const u8) -> Result<()> {
        // SAFETY: `source` and the rows of `target` stay valid until a later event is complete, and nothing else uses
        // the rows, as the caller of `copy_to_gpu` ensures.
        converted(unsafe { self.0.copy_to_device(&driver_rows(target), source) })
    }

    // SAFETY: the requirements of the trait are those of the driver's stream, to which this passes its arguments.
    unsafe fn copy_to_host(&self, target: *mut u8, source: Rows) -> Result<()> {
        // SAFETY: `target` and the rows of `source` stay valid until a later event is complete, nothing else uses
        // `target`, and nothing writes the rows, as the caller of `copy_to_host` ensures.
        converted(unsafe { self.0.copy_to_host(target, &driver_rows(source)) })
    }

    fn synchronise(&self) -> Result<()> {
        converted(self.0.synchronise())
    }
}

impl GpuEvent for CudaEvent {
    fn record(&self, stream: StreamHandle) -> Result<()> {
        converted(self.0.record(raw_stream(stream)))
    }

    fn is_complete(&self) -> Result<bool> {
        converted(self.0.is_complete())
    }

    fn wait(&self, limit: Duration) -> Result<()> {
        converted(self.0.wait(limit))
    }
}

/// Converts rows to those of `deepnvme-cuda`, which does not depend on `deepnvme-mem`.
fn driver_rows(Rows { address, bytes, count, pitch }: Rows) -> cuda::Rows {
    cuda::Rows { address, bytes, count, pitch }
}

/// Converts a driver's result to the engine's.
fn converted<T>(result: cuda::Result<T>) -> Result<T> {
    result.map_err(|error| device_error(&error))
}

/// Converts a driver's error and adds a remedy.
fn device_error(error: &cuda::Error) -> Error {
    let (kind, remedy) = if error.is_out_of_memory() {
        let remedy =
            "there is no memory that it could lock; lower the engine's pool (`workers`, `block_bytes`), or free some";
        (ErrorKind::Device, remedy)
    } else if error.is_not_initialised() {
        let remedy = "CUDA works only in the process that has initialised it; start others with the method \"spawn\", or use \
                      GPUs in none but the children";
        (ErrorKind::Unsupported, remedy)
    } else if error.code() == cuda::ErrorCode::TimedOut {
        (
            ErrorKind::Device,
            "a kernel before this transfer waits for something; find it, or synchronise the stream first",
        )
    } else if error.is_capturing() {
        let remedy = "a CUDA graph is being captured on the stream of this memory, and a transfer cannot be part of a graph; \
                      transfer it before or after the capture, or from another stream";
        (ErrorKind::Unsupported, remedy)
    } else {
        let remedy =
            "if earlier work on the GPU has failed, this is how it shows: run with CUDA_LAUNCH_BLOCKING=1 to find it";
        (ErrorKind::Device, remedy)
    };
    Error::new(kind, "use GPU memory", format!("{error}; {remedy}"))
}
