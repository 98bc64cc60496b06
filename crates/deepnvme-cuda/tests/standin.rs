//! The driver and cuFile by way of the stand-in: what is made is given back, and what is refused is said.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use deepnvme_cuda::{
    BufferRegistration, CuFile, Device, Driver, Event, FileHandle, IoError, Registration, Rows, Stream,
};
use deepnvme_standin::pattern;
use libloading::Library;

/// The right to use the stand-in, and what it knows.
struct Standin {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Standin {
    fn new() -> Self {
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
        let standin = Self { library, _alone: alone };
        // SAFETY: the function has this type.
        unsafe { (*standin.library.get::<unsafe extern "C" fn()>(b"standin_clear").unwrap())() };
        standin
    }

    fn fail(&self, symbol: &str, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_uint, c_int);
        let symbol = CString::new(symbol).unwrap();
        // SAFETY: the function has this type.
        unsafe { (*self.library.get::<Fail>(b"standin_fail").unwrap())(symbol.as_ptr(), 0, code) };
    }

    fn live(&self, kind: &str) -> i64 {
        type Live = unsafe extern "C" fn(*const c_char) -> i64;
        let kind = CString::new(kind).unwrap();
        // SAFETY: the function has this type.
        unsafe { (*self.library.get::<Live>(b"standin_live").unwrap())(kind.as_ptr()) }
    }

    fn violations(&self) -> String {
        type Violations = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        let mut text = vec![0; 1 << 16];
        // SAFETY: the function has this type, and writes as many bytes at the most.
        let length = unsafe {
            (*self.library.get::<Violations>(b"standin_violations").unwrap())(text.as_mut_ptr().cast(), text.len())
        };
        text.truncate(length);
        String::from_utf8(text).unwrap()
    }

    /// Memory of the device that is current.
    fn allocate(&self, bytes: usize) -> u64 {
        let mut at = 0;
        type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
        // SAFETY: the function has this type, and the pointer is to a number of ours.
        assert_eq!(unsafe { (*self.library.get::<Alloc>(b"cuMemAlloc_v2").unwrap())(&raw mut at, bytes) }, 0);
        at
    }

    fn free(&self, at: u64) {
        type Free = unsafe extern "C" fn(u64) -> c_int;
        // SAFETY: the function has this type.
        assert_eq!(unsafe { (*self.library.get::<Free>(b"cuMemFree_v2").unwrap())(at) }, 0);
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        type Poke = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
        // SAFETY: the function has this type, and the memory as many bytes.
        let code =
            unsafe { (*self.library.get::<Poke>(b"standin_poke").unwrap())(at, bytes.as_ptr().cast(), bytes.len()) };
        assert_eq!(code, 0);
    }

    fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        type Peek = unsafe extern "C" fn(u64, *mut c_void, usize) -> c_int;
        let mut seen = vec![0; bytes];
        // SAFETY: the function has this type, and both ends as many bytes.
        let code =
            unsafe { (*self.library.get::<Peek>(b"standin_peek").unwrap())(at, seen.as_mut_ptr().cast(), bytes) };
        assert_eq!(code, 0);
        seen
    }

    fn assert_clean(&self) {
        assert_eq!(self.violations(), "");
        for kind in
            ["contexts", "streams", "events", "registrations", "cufile_handles", "cufile_buffers", "cufile_drivers"]
        {
            assert_eq!(self.live(kind), 0, "{kind} that nobody has given back");
        }
    }
}

#[test]
fn devices_and_what_they_say() {
    let standin = Standin::new();
    let driver = Driver::get().unwrap();
    assert_eq!(driver.version(), 13000);
    assert_eq!(format!("{driver:?}"), "Driver(CUDA 13.0)");
    assert_eq!(driver.device_count().unwrap(), 2);
    let device = Device::new(driver, 1).unwrap();
    assert_eq!(device.index(), 1);
    let facts = driver.facts(1).unwrap();
    assert!(!facts.name.is_empty() && facts.memory_bytes > 1 << 20);
    let id = facts.pci_bus_id;
    assert!(id.contains(':') && id == id.to_lowercase(), "{id}");
    let error = Device::new(driver, 9).unwrap_err();
    assert_eq!((error.call(), error.code()), ("cuDeviceGet", 101));
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_DEVICE"), "{error}");
    drop(device);
    standin.assert_clean();
}

#[test]
fn copies_events_and_registrations() {
    let standin = Standin::new();
    let device = Arc::new(Device::new(Driver::get().unwrap(), 0).unwrap());
    {
        let current = device.enter().unwrap();
        let at = standin.allocate(100_000);
        let host: Box<[u8]> = pattern(7, 50_000).into();
        let owner = Box::new(());
        // SAFETY: the box stays where it is until the registration is dropped.
        let registration =
            unsafe { Registration::new(&device, host.as_ptr().expose_provenance(), host.len(), owner) }.unwrap();
        let stream = Stream::new(&device).unwrap();
        let event = Event::new(&device).unwrap();
        assert!(event.is_over().unwrap(), "nothing was recorded");
        // SAFETY: both ends stay until the event is over.
        unsafe { stream.copy_to_device(&Rows::one(at as usize, 50_000), host.as_ptr()) }.unwrap();
        event.record(stream.raw()).unwrap();
        event.wait().unwrap();
        assert!(event.is_over().unwrap());
        assert!(standin.peek(at, 50_000) == pattern(7, 50_000));
        // Every second four bytes.
        let mut back = vec![0; 40_000];
        let rows = Rows { address: at as usize, bytes: 4, count: 10_000, pitch: 8 };
        standin.poke(at, &pattern(8, 80_000));
        // SAFETY: as above.
        unsafe { stream.copy_to_host(back.as_mut_ptr(), &rows) }.unwrap();
        stream.synchronize().unwrap();
        let expected: Vec<u8> = pattern(8, 80_000).chunks(8).flat_map(|pair| pair[..4].to_vec()).collect();
        assert!(back == expected);
        standin.fail("cuMemcpyHtoDAsync_v2", 2);
        // SAFETY: as above.
        let error = unsafe { stream.copy_to_device(&Rows::one(at as usize, 8), host.as_ptr()) }.unwrap_err();
        assert!(error.is_out_of_memory());
        drop(registration);
        standin.free(at);
        drop(current);
    }
    drop(device);
    standin.assert_clean();
}

#[test]
fn cufile_moves_bytes_and_gives_everything_back() {
    let standin = Standin::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let device = Arc::new(Device::new(Driver::get().unwrap(), 1).unwrap());
    let current = device.enter().unwrap();
    let at = standin.allocate(1 << 20);
    standin.poke(at, &pattern(1, 1 << 20));
    let cufile = CuFile::open().unwrap();
    assert!(cufile.is_direct() && cufile.compatibility_reason().is_none());
    assert_eq!(cufile.nvidia_fs_version(), (2, 25));
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let handle = FileHandle::new(&cufile, file.as_fd()).unwrap();
    // The handle has a descriptor of its own.
    drop(file);
    // SAFETY: the memory stays until the registration is dropped.
    let registration =
        unsafe { BufferRegistration::new(&cufile, &device, at as usize, 1 << 20, Box::new(())) }.unwrap();
    // SAFETY: nothing else uses the memory.
    assert_eq!(unsafe { handle.write(&device, at as usize, 1 << 20, 4096) }.unwrap(), 1 << 20);
    assert!(std::fs::read(&path).unwrap()[4096..] == pattern(1, 1 << 20));
    standin.poke(at, &vec![0; 1 << 20]);
    // SAFETY: as above.
    assert_eq!(unsafe { handle.read(&device, at as usize + 512, 8192, 8192) }.unwrap(), 8192);
    assert!(standin.peek(at + 512, 8192) == pattern(1, 1 << 20)[4096..12288]);
    // The end of the file.
    // SAFETY: as above.
    assert_eq!(unsafe { handle.read(&device, at as usize, 8192, (1 << 20) + 4096 - 100) }.unwrap(), 100);

    standin.fail("cuFileWrite", 5036);
    // SAFETY: as above.
    let error = unsafe { handle.write(&device, at as usize, 4096, 0) }.unwrap_err();
    assert!(matches!(error, IoError::CuFile(5036, _)), "{error}");
    standin.fail("cuFileHandleRegister", 5008);
    let file = std::fs::File::open(&path).unwrap();
    let error = FileHandle::new(&cufile, file.as_fd()).unwrap_err();
    assert_eq!(error.to_string(), "cuFileHandleRegister: this file, or its file system, cannot do it (5008)");
    standin.fail("cuFileDriverOpen", 5001);
    assert!(CuFile::open().unwrap_err().to_string().contains("cuFile does not start: cuFileDriverOpen"), "it says why");
    drop((registration, handle, cufile));
    standin.free(at);
    drop(current);
    drop(device);
    standin.assert_clean();
}
