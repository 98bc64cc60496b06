//! The stand-in for a GPU, as the engine finds it, and memory on it.

use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use deepnvme_io::mem::{Device, Region, RegionMut, Strided};
use libloading::Library;

pub(crate) use deepnvme_standin::pattern;

/// The right to use the stand-in: one test at a time, since faults and counters are the process's.
pub(crate) struct Gpu {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Gpu {
    pub(crate) fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = LIBRARY.get_or_init(|| {
            let path = deepnvme_standin::library_path();
            // SAFETY: no other thread of this test looks at the environment yet.
            unsafe {
                std::env::set_var("DEEPNVME_LIBCUDA", &path);
                std::env::set_var("DEEPNVME_LIBCUFILE", &path);
            }
            // SAFETY: loading the stand-in runs nothing but the start of Rust's library.
            unsafe { Library::new(&path) }.unwrap()
        });
        let gpu = Self { library, _alone: alone };
        // SAFETY: the functions have these types.
        unsafe {
            gpu.call::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit")(0);
            gpu.call::<unsafe extern "C" fn()>("standin_clear")();
        }
        for device in 0..2 {
            gpu.enter(device);
        }
        gpu
    }

    /// # Safety
    /// The symbol has this type.
    unsafe fn call<F: Copy>(&self, symbol: &str) -> F {
        // SAFETY: passed on to the caller.
        *unsafe { self.library.get::<F>(symbol.as_bytes()) }.unwrap()
    }

    /// Makes the device's context current here. The test keeps it, as torch does.
    fn enter(&self, device: i32) -> u64 {
        static CONTEXTS: Mutex<[u64; 2]> = Mutex::new([0; 2]);
        let context = &mut CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)[device as usize];
        // SAFETY: the functions have these types.
        unsafe {
            if *context == 0 {
                let retain = self.call::<unsafe extern "C" fn(*mut u64, c_int) -> c_int>("cuDevicePrimaryCtxRetain");
                assert_eq!(retain(context, device), 0);
            }
            assert_eq!(self.call::<unsafe extern "C" fn(u64) -> c_int>("cuCtxSetCurrent")(*context), 0);
        }
        *context
    }

    /// So many bytes on a device, of a known pattern.
    pub(crate) fn memory(&self, device: u32, bytes: usize, seed: u64) -> GpuMemory {
        self.enter(device as i32);
        let mut at = 0;
        // SAFETY: the functions have these types.
        let alloc = unsafe { self.call::<unsafe extern "C" fn(*mut u64, usize) -> c_int>("cuMemAlloc_v2") };
        // SAFETY: the pointer is to a number of ours.
        assert_eq!(unsafe { alloc(&raw mut at, bytes.max(1)) }, 0);
        // SAFETY: as above.
        let free = unsafe { self.call::<unsafe extern "C" fn(u64) -> c_int>("cuMemFree_v2") };
        let memory = GpuMemory { at, bytes, device, owner: Arc::new(Allocation { at, free }) };
        self.poke(&memory, &pattern(seed, bytes));
        memory
    }

    pub(crate) fn poke(&self, memory: &GpuMemory, bytes: &[u8]) {
        type Poke = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
        // SAFETY: the function has this type, and the memory as many bytes.
        assert_eq!(unsafe { self.call::<Poke>("standin_poke")(memory.at, bytes.as_ptr().cast(), bytes.len()) }, 0);
    }

    /// What the memory holds now.
    pub(crate) fn peek(&self, memory: &GpuMemory) -> Vec<u8> {
        type Peek = unsafe extern "C" fn(u64, *mut c_void, usize) -> c_int;
        let mut bytes = vec![0; memory.bytes];
        // SAFETY: the function has this type, and both ends as many bytes.
        assert_eq!(unsafe { self.call::<Peek>("standin_peek")(memory.at, bytes.as_mut_ptr().cast(), bytes.len()) }, 0);
        bytes
    }

    /// A stream that does not care for the default one.
    pub(crate) fn stream(&self, device: u32) -> usize {
        self.enter(device as i32);
        let mut stream = 0usize;
        // SAFETY: the function has this type, and the pointer is to a number of ours.
        let code = unsafe {
            self.call::<unsafe extern "C" fn(*mut usize, c_uint) -> c_int>("cuStreamCreate")(&raw mut stream, 1)
        };
        assert_eq!(code, 0);
        stream
    }

    pub(crate) fn end_stream(&self, device: u32, stream: usize) {
        self.enter(device as i32);
        for symbol in ["cuStreamSynchronize", "cuStreamDestroy_v2"] {
            // SAFETY: the functions have this type.
            assert_eq!(unsafe { self.call::<unsafe extern "C" fn(usize) -> c_int>(symbol)(stream) }, 0);
        }
    }

    /// A kernel that fills the memory with a pattern, so long after it was launched.
    pub(crate) fn fill(&self, stream: usize, memory: &GpuMemory, seed: u64, delay_us: u64) {
        self.enter(memory.device as i32);
        type Fill = unsafe extern "C" fn(usize, u64, usize, u64, u64) -> c_int;
        // SAFETY: the function has this type.
        let code = unsafe { self.call::<Fill>("standin_fill_kernel")(stream, memory.at, memory.bytes, seed, delay_us) };
        assert_eq!(code, 0);
    }

    /// A kernel that copies one memory to another, so long after it was launched.
    pub(crate) fn copy(&self, stream: usize, target: &GpuMemory, source: &GpuMemory, delay_us: u64) {
        self.enter(source.device as i32);
        type Copy = unsafe extern "C" fn(usize, u64, u64, usize, u64) -> c_int;
        // SAFETY: the function has this type.
        let code =
            unsafe { self.call::<Copy>("standin_copy_kernel")(stream, target.at, source.at, source.bytes, delay_us) };
        assert_eq!(code, 0);
    }

    pub(crate) fn fail(&self, symbol: &str, after: u32, code: i32) {
        let symbol = CString::new(symbol).unwrap();
        type Fail = unsafe extern "C" fn(*const c_char, c_uint, c_int);
        // SAFETY: the function has this type.
        unsafe { self.call::<Fail>("standin_fail")(symbol.as_ptr(), after, code) };
    }

    pub(crate) fn clear(&self) {
        // SAFETY: the function has this type.
        unsafe { self.call::<unsafe extern "C" fn()>("standin_clear")() };
    }

    pub(crate) fn calls(&self, symbol: &str) -> u64 {
        let symbol = CString::new(symbol).unwrap();
        // SAFETY: the function has this type.
        unsafe { self.call::<unsafe extern "C" fn(*const c_char) -> u64>("standin_calls")(symbol.as_ptr()) }
    }

    pub(crate) fn live(&self, kind: &str) -> i64 {
        let kind = CString::new(kind).unwrap();
        // SAFETY: the function has this type.
        unsafe { self.call::<unsafe extern "C" fn(*const c_char) -> i64>("standin_live")(kind.as_ptr()) }
    }

    pub(crate) fn count(&self, counter: &str) -> u64 {
        let counter = CString::new(counter).unwrap();
        // SAFETY: the function has this type.
        unsafe { self.call::<unsafe extern "C" fn(*const c_char) -> u64>("standin_count")(counter.as_ptr()) }
    }

    pub(crate) fn violations(&self) -> String {
        let mut text = vec![0; 1 << 16];
        type Violations = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        // SAFETY: the function has this type, and writes as many bytes at the most.
        let length = unsafe { self.call::<Violations>("standin_violations")(text.as_mut_ptr().cast(), text.len()) };
        text.truncate(length);
        String::from_utf8(text).unwrap()
    }

    /// Nothing of the engine is left, and nothing was done that a real GPU would have suffered from.
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.violations(), "");
        for kind in ["streams", "events", "registrations", "cufile_handles", "cufile_buffers", "cufile_drivers"] {
            assert_eq!(self.live(kind), 0, "{kind} that nobody has given back");
        }
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
        // SAFETY: it was allocated, and is freed once. A context is current, or the driver says so.
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
        // SAFETY: it is memory of that device, which the owner keeps.
        unsafe { Region::from_raw(self.start(), self.bytes, self.on(), Arc::clone(&self.owner)) }
    }

    pub(crate) fn region_mut(&self) -> RegionMut {
        // SAFETY: as above; the test looks at it only between requests.
        unsafe { RegionMut::from_raw(self.start(), self.bytes, self.on(), Arc::clone(&self.owner)) }
    }

    /// As if it were on another device.
    pub(crate) fn on_device(&self, index: u32) -> Region {
        // SAFETY: nobody looks at it: there is no such device.
        unsafe { Region::from_raw(self.start(), self.bytes, Device::Cuda { index }, Arc::clone(&self.owner)) }
    }

    pub(crate) fn strided(&self, at: usize, layout: Strided) -> Region {
        // SAFETY: as above; the tests give layouts that stay inside.
        unsafe { Region::from_strided(self.start().wrapping_add(at), layout, self.on(), Arc::clone(&self.owner)) }
    }

    pub(crate) fn strided_mut(&self, at: usize, layout: Strided) -> RegionMut {
        // SAFETY: as above.
        unsafe { RegionMut::from_strided(self.start().wrapping_add(at), layout, self.on(), Arc::clone(&self.owner)) }
    }
}
