//! The fake GPU driver, and memory on its GPUs.
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::any::Any;
use std::ffi::{c_int, c_uint};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use deepnvme_fake_driver::Loaded;
use deepnvme_io::mem::{Device, Region, RegionMut, StreamHandle, Strided};

pub(crate) use deepnvme_fake_driver::pattern;

/// The fake driver, with the test's own context on each GPU, as torch has.
pub(crate) struct Gpu {
    driver: Loaded,
    may_leak: bool,
}

impl Deref for Gpu {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.driver
    }
}

impl Drop for Gpu {
    /// Checks a test that has passed. Bind the GPU first: all that uses it is dropped before.
    fn drop(&mut self) {
        if !self.may_leak && !std::thread::panicking() {
            self.assert_clean();
        }
    }
}

impl Gpu {
    pub(crate) fn new() -> Self {
        let gpu = Self { driver: Loaded::exclusive(), may_leak: false };
        for device in 0..2 {
            gpu.enter(device);
        }
        gpu
    }

    /// Returns a GPU for a test that leaks on purpose, or whose backends outlive it.
    pub(crate) fn leaky() -> Self {
        let mut gpu = Self::new();
        gpu.may_leak = true;
        gpu
    }

    /// Makes the device's context current on this thread. The test keeps it, as torch does.
    fn enter(&self, device: i32) -> u64 {
        static CONTEXTS: Mutex<[u64; 2]> = Mutex::new([0; 2]);
        let context = &mut CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)[device as usize];
        // SAFETY: the functions have these types.
        unsafe {
            if *context == 0 {
                let retain =
                    self.function::<unsafe extern "C" fn(*mut u64, c_int) -> c_int>("cuDevicePrimaryCtxRetain");
                assert_eq!(retain(context, device), 0);
            }
            assert_eq!(self.function::<unsafe extern "C" fn(u64) -> c_int>("cuCtxSetCurrent")(*context), 0);
        }
        *context
    }

    /// Allocates bytes with a known pattern on a device.
    pub(crate) fn memory(&self, device: u32, bytes: usize, seed: u64) -> GpuMemory {
        self.enter(device as i32);
        let mut at = 0;
        // SAFETY: the functions have these types.
        let alloc = unsafe { self.function::<unsafe extern "C" fn(*mut u64, usize) -> c_int>("cuMemAlloc_v2") };
        // SAFETY: the pointer is to a local number.
        assert_eq!(unsafe { alloc(&raw mut at, bytes.max(1)) }, 0);
        // SAFETY: the function has this type in cuda.h, which the fake driver implements.
        let free = unsafe { self.function::<unsafe extern "C" fn(u64) -> c_int>("cuMemFree_v2") };
        let memory = GpuMemory { at, bytes, device, owner: Arc::new(Allocation { at, free }) };
        self.poke(&memory, &pattern(seed, bytes));
        memory
    }

    pub(crate) fn poke(&self, memory: &GpuMemory, bytes: &[u8]) {
        self.driver.poke(memory.at, bytes);
    }

    /// Returns the current content of the memory.
    pub(crate) fn peek(&self, memory: &GpuMemory) -> Vec<u8> {
        self.driver.peek(memory.at, memory.bytes)
    }

    /// Creates a stream that does not synchronise with the default one.
    pub(crate) fn stream(&self, device: u32) -> StreamHandle {
        self.enter(device as i32);
        let mut stream = 0usize;
        // SAFETY: the function has this type, and the pointer is to a local number.
        let code = unsafe {
            self.function::<unsafe extern "C" fn(*mut usize, c_uint) -> c_int>("cuStreamCreate")(&raw mut stream, 1)
        };
        assert_eq!(code, 0);
        // SAFETY: the tests destroy a stream only after the last request that uses it.
        unsafe { StreamHandle::from_raw(stream) }
    }

    pub(crate) fn end_stream(&self, device: u32, stream: StreamHandle) {
        self.enter(device as i32);
        for symbol in ["cuStreamSynchronize", "cuStreamDestroy_v2"] {
            // SAFETY: the functions have this type.
            assert_eq!(unsafe { self.function::<unsafe extern "C" fn(usize) -> c_int>(symbol)(stream.as_raw()) }, 0);
        }
    }

    /// Launches a kernel that fills the memory with a pattern after a delay.
    pub(crate) fn fill(&self, stream: StreamHandle, memory: &GpuMemory, seed: u64, delay_us: u64) {
        self.enter(memory.device as i32);
        type Fill = unsafe extern "C" fn(usize, u64, usize, u64, u64) -> c_int;
        // SAFETY: the function has this type.
        let code = unsafe {
            self.function::<Fill>("fake_driver_fill_kernel")(stream.as_raw(), memory.at, memory.bytes, seed, delay_us)
        };
        assert_eq!(code, 0);
    }

    /// Launches a kernel that copies memory after a delay.
    pub(crate) fn copy(&self, stream: StreamHandle, target: &GpuMemory, source: &GpuMemory, delay_us: u64) {
        self.enter(source.device as i32);
        type Copy = unsafe extern "C" fn(usize, u64, u64, usize, u64) -> c_int;
        // SAFETY: the function has this type.
        let code = unsafe {
            self.function::<Copy>("fake_driver_copy_kernel")(
                stream.as_raw(),
                target.at,
                source.at,
                source.bytes,
                delay_us,
            )
        };
        assert_eq!(code, 0);
    }

    /// Checks that the engine has released everything and never misused the GPU.
    pub(crate) fn assert_clean(&self) {
        self.assert_released();
        assert_eq!(self.live("contexts"), 2, "those of the test itself");
        assert_eq!(self.count("device_synchronises"), 0);
    }
}

struct Allocation {
    at: u64,
    free: unsafe extern "C" fn(u64) -> c_int,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: it was allocated, and is freed once. If no context is current, the driver returns an error.
        let _ = unsafe { (self.free)(self.at) };
    }
}

/// Memory on a device.
pub(crate) struct GpuMemory {
    at: u64,
    pub(crate) bytes: usize,
    device: u32,
    owner: Arc<dyn Any + Send + Sync>,
}

impl GpuMemory {
    fn start(&self) -> *mut u8 {
        std::ptr::without_provenance_mut(self.at as usize)
    }

    fn on(&self) -> Device {
        Device::Cuda { index: self.device }
    }

    pub(crate) fn region(&self) -> Region {
        // SAFETY: it is memory of that device, which the owner keeps alive.
        unsafe { Region::from_raw(self.start(), self.bytes, self.on(), Arc::clone(&self.owner)) }
    }

    pub(crate) fn region_mut(&self) -> RegionMut {
        // SAFETY: it is memory of that device, which the owner keeps alive. The test only reads it between requests.
        unsafe { RegionMut::from_raw(self.start(), self.bytes, self.on(), Arc::clone(&self.owner)) }
    }

    /// Returns the memory as if it were on another device.
    pub(crate) fn on_device(&self, index: u32) -> Region {
        // SAFETY: it is never accessed, since there is no such device.
        unsafe { Region::from_raw(self.start(), self.bytes, Device::Cuda { index }, Arc::clone(&self.owner)) }
    }

    pub(crate) fn strided(&self, at: usize, layout: Strided) -> Region {
        // SAFETY: it is memory of that device, which the owner keeps alive, and the tests' layouts stay inside.
        unsafe { Region::from_strided(self.start().wrapping_add(at), layout, self.on(), Arc::clone(&self.owner)) }
    }

    pub(crate) fn strided_mut(&self, at: usize, layout: Strided) -> RegionMut {
        // SAFETY: it is memory of that device, which the owner keeps alive, and the tests' layouts stay inside.
        unsafe { RegionMut::from_strided(self.start().wrapping_add(at), layout, self.on(), Arc::clone(&self.owner)) }
    }
}
