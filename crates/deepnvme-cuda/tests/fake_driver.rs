//! The driver and cuFile over the fake driver: resources are released, and errors are reported.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::c_int;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use deepnvme_cuda::{
    Batch, BatchEntry, BufferRegistration, CuFile, Device, DeviceSpan, Driver, ErrorCode, Event, FileHandle,
    HostRegistration, IoError, RawStream, Rows, Stream, current_device, own_this_thread, wait_for_stream,
};
use deepnvme_fake_driver::{Loaded, pattern};

/// Longer than any batch of a test.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The fake driver, with helpers for memory of the current device.
struct FakeDriver(Loaded);

impl Deref for FakeDriver {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.0
    }
}

impl Drop for FakeDriver {
    /// Checks a test that has passed: all that uses the driver is dropped before.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_released();
            assert_eq!(self.live("contexts"), 0, "contexts that were not released");
        }
    }
}

impl FakeDriver {
    fn new() -> Self {
        Self(Loaded::exclusive())
    }

    /// Returns a driver, and one of its devices.
    fn with_device(index: u32) -> (Self, Arc<Device>) {
        let fake_driver = Self::new();
        let device = Arc::new(Device::new(Driver::get().unwrap(), index).unwrap());
        (fake_driver, device)
    }

    /// Allocates memory of the current device.
    fn allocate(&self, bytes: usize) -> u64 {
        let mut at = 0;
        type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
        // SAFETY: the function has this type, and the pointer is to a local value.
        assert_eq!(unsafe { self.function::<Alloc>("cuMemAlloc_v2")(&raw mut at, bytes) }, 0);
        at
    }

    fn free(&self, at: u64) {
        type Free = unsafe extern "C" fn(u64) -> c_int;
        // SAFETY: the function has this type.
        assert_eq!(unsafe { self.function::<Free>("cuMemFree_v2")(at) }, 0);
    }
}

#[test]
fn devices_and_their_attributes() {
    let _fake_driver = FakeDriver::new();
    let driver = Driver::get().unwrap();
    assert_eq!(driver.version(), 13000);
    assert_eq!(format!("{driver:?}"), "Driver(CUDA 13.0)");
    assert_eq!(driver.device_count().unwrap(), 2);
    let device = Device::new(driver, 1).unwrap();
    assert_eq!(device.index(), 1);
    let properties = driver.device_properties(1).unwrap();
    assert!(!properties.name.is_empty() && properties.memory_bytes > 1 << 20);
    let id = properties.pci_bus_id;
    assert!(id.contains(':') && id == id.to_lowercase(), "{id}");
    let error = Device::new(driver, 9).unwrap_err();
    assert_eq!((error.call(), error.code()), ("cuDeviceGet", ErrorCode::Driver(101)));
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_DEVICE"), "{error}");
}

#[test]
fn copies_events_and_registrations() {
    let (fake_driver, device) = FakeDriver::with_device(0);
    let _current = device.enter().unwrap();
    let at = fake_driver.allocate(100_000);
    let host: Box<[u8]> = pattern(7, 50_000).into();
    let owner = Box::new(());
    // SAFETY: the box outlives the registration.
    let registration =
        unsafe { HostRegistration::new(&device, host.as_ptr().expose_provenance(), host.len(), owner) }.unwrap();
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device).unwrap();
    assert!(event.is_complete().unwrap(), "nothing was recorded");
    // SAFETY: both sides stay valid until `event.wait` returns.
    unsafe { stream.copy_to_device(&Rows::single(at as usize, 50_000), host.as_ptr()) }.unwrap();
    event.record(stream.raw()).unwrap();
    event.wait(TIMEOUT).unwrap();
    assert!(event.is_complete().unwrap());
    assert!(fake_driver.peek(at, 50_000) == pattern(7, 50_000));
    // Four bytes out of every eight.
    let mut back = vec![0; 40_000];
    let rows = Rows { address: at as usize, bytes: 4, count: 10_000, pitch: 8 };
    fake_driver.poke(at, &pattern(8, 80_000));
    // SAFETY: both sides stay valid until `synchronise` returns, which waits for the copy.
    unsafe { stream.copy_to_host(back.as_mut_ptr(), &rows) }.unwrap();
    stream.synchronise().unwrap();
    let expected: Vec<u8> = pattern(8, 80_000).chunks(8).flat_map(|pair| pair[..4].to_vec()).collect();
    assert!(back == expected);
    fake_driver.fail("cuMemcpyHtoDAsync_v2", 0, 2);
    // SAFETY: the copy fails before it accesses either side.
    let error = unsafe { stream.copy_to_device(&Rows::single(at as usize, 8), host.as_ptr()) }.unwrap_err();
    assert!(error.is_out_of_memory());
    drop(registration);
    fake_driver.free(at);
}

#[test]
fn cufile_moves_bytes_and_gives_everything_back() {
    let (fake_driver, device) = FakeDriver::with_device(1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let _current = device.enter().unwrap();
    let at = fake_driver.allocate(1 << 20);
    fake_driver.poke(at, &pattern(1, 1 << 20));
    let cufile = CuFile::open().unwrap();
    assert_eq!(cufile.nvidia_fs_version(), (2, 25));
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let handle = FileHandle::new(&cufile, file.as_fd()).unwrap();
    // The handle has its own descriptor.
    drop(file);
    // SAFETY: the memory outlives the registration.
    let registration =
        unsafe { BufferRegistration::new(&cufile, &device, at as usize, 1 << 20, Box::new(())) }.unwrap();
    // SAFETY: the memory has no other access.
    let moved = unsafe { handle.write(&device, DeviceSpan::unregistered(at as usize, 1 << 20), 4096) };
    assert_eq!(moved.unwrap(), 1 << 20);
    assert!(std::fs::read(&path).unwrap()[4096..] == pattern(1, 1 << 20));
    fake_driver.poke(at, &vec![0; 1 << 20]);
    // SAFETY: the memory has no other access.
    let moved =
        unsafe { handle.read(&device, DeviceSpan { base: at as usize, offset_in_base: 512, bytes: 8192 }, 8192) };
    assert_eq!(moved.unwrap(), 8192);
    assert!(fake_driver.peek(at + 512, 8192) == pattern(1, 1 << 20)[4096..12288]);
    // At the end of the file.
    // SAFETY: the memory has no other access.
    let moved = unsafe { handle.read(&device, DeviceSpan::unregistered(at as usize, 8192), (1 << 20) + 4096 - 100) };
    assert_eq!(moved.unwrap(), 100);

    fake_driver.fail("cuFileWrite", 0, 5036);
    // SAFETY: nothing else accesses the memory.
    let error = unsafe { handle.write(&device, DeviceSpan::unregistered(at as usize, 4096), 0) }.unwrap_err();
    assert!(matches!(error, IoError::CuFile(5036, _)), "{error}");
    fake_driver.fail("cuFileHandleRegister", 0, 5008);
    let file = std::fs::File::open(&path).unwrap();
    let error = FileHandle::new(&cufile, file.as_fd()).unwrap_err();
    assert_eq!(error.to_string(), "cuFileHandleRegister: not supported by this file or its file system (5008)");
    // `CU_FILE_CUDA_DRIVER_ERROR`, without a code of the driver.
    fake_driver.fail("cuFileHandleRegister", 0, 5011);
    let error = FileHandle::new(&cufile, file.as_fd()).unwrap_err();
    assert_eq!(error.to_string(), "cuFileHandleRegister: the CUDA driver failed, without a reason (5011)");
    fake_driver.fail("cuFileDriverOpen", 0, 5001);
    assert!(CuFile::open().unwrap_err().to_string().contains("cuFile does not start: cuFileDriverOpen"), "it says why");
    drop((registration, handle, cufile));
    fake_driver.free(at);
}

#[test]
fn batches_end_entry_by_entry_and_can_be_used_again() {
    let (fake_driver, device) = FakeDriver::with_device(0);
    let _current = device.enter().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let cufile = CuFile::open().unwrap();
    assert!(cufile.has_batches());
    let handle = FileHandle::new(&cufile, file.as_fd()).unwrap();
    let at = fake_driver.allocate(64 * 4096);
    fake_driver.poke(at, &pattern(5, 64 * 4096));
    let mut batch = Batch::new(&cufile, &device, 1000).unwrap().unwrap();
    assert_eq!(batch.entries_max(), 128, "no more than the driver takes");
    let entry = |index: usize, is_read| BatchEntry {
        file: &handle,
        is_read,
        span: DeviceSpan { base: at as usize, offset_in_base: index * 4096, bytes: 4096 },
        offset: (63 - index as u64) * 4096,
        cookie: index,
    };
    let ended = |batch: &mut Batch| {
        let mut ended = vec![0; 64];
        while batch.outstanding() > 0 {
            for event in batch.wait(TIMEOUT).unwrap() {
                assert_eq!(event.result.unwrap(), 4096);
                ended[event.cookie] += 1;
            }
        }
        assert_eq!(ended, [1; 64]);
    };
    for is_read in [false, true] {
        let entries: Vec<_> = (0..64).map(|index| entry(index, is_read)).collect();
        // SAFETY: file and memory outlive the batch, with no other access.
        unsafe { batch.submit(&entries) }.unwrap();
        ended(&mut batch);
        if !is_read {
            fake_driver.poke(at, &vec![7; 64 * 4096]);
        }
    }
    assert!(fake_driver.peek(at, 64 * 4096) == pattern(5, 64 * 4096));
    // Cancelled transfers are reported, and a drop waits for the others.
    let entries: Vec<_> = (0..64).map(|index| entry(index, false)).collect();
    // SAFETY: file and memory outlive the batch, and nothing else accesses them.
    unsafe { batch.submit(&entries) }.unwrap();
    batch.cancel().unwrap();
    let (mut moved, mut taken_back) = (0, 0);
    while batch.outstanding() > 0 {
        for event in batch.wait(TIMEOUT).unwrap() {
            *if event.result.is_ok() { &mut moved } else { &mut taken_back } += 1;
        }
    }
    assert!(moved + taken_back == 64 && taken_back > 0);
    fake_driver.fail("cuFileBatchIOSubmit", 0, 5035);
    // SAFETY: file and memory outlive the batch, and nothing else accesses them.
    let error = unsafe { batch.submit(&entries) }.unwrap_err();
    assert_eq!((error.call(), error.code(), batch.outstanding()), ("cuFileBatchIOSubmit", ErrorCode::CuFile(5035), 0));
    // SAFETY: file and memory outlive the batch, and nothing else accesses them.
    unsafe { batch.submit(&entries) }.unwrap();
    drop(batch);
    drop((handle, cufile));
    fake_driver.free(at);
}

#[test]
fn a_wait_ends_at_its_limit() {
    let (fake_driver, device) = FakeDriver::with_device(0);
    let _current = device.enter().unwrap();
    let at = fake_driver.allocate(64);
    let stream = Stream::new(&device).unwrap();
    let event = Event::new(&device).unwrap();
    type Fill = unsafe extern "C" fn(usize, u64, usize, u64, u64) -> c_int;
    // SAFETY: the function has this type.
    let fill = unsafe { fake_driver.function::<Fill>("fake_driver_fill_kernel") };
    // SAFETY: the stream is alive, and the memory is freed after the wait.
    assert_eq!(unsafe { fill(stream.raw().as_handle(), at, 64, 1, 400_000) }, 0);
    event.record(stream.raw()).unwrap();
    let before = fake_driver.calls("cuEventQuery");
    let error = event.wait(Duration::from_millis(100)).unwrap_err();
    assert_eq!((error.call(), error.code()), ("cuEventQuery", ErrorCode::TimedOut));
    assert!(error.to_string().ends_with("its work was not complete within 0.1 s"), "{error}");
    assert!(fake_driver.calls("cuEventQuery") - before < 1000, "ever longer pauses");
    event.wait(TIMEOUT).unwrap();
    fake_driver.free(at);
}

#[test]
fn no_call_invalidates_a_capture_of_another_thread() {
    let (fake_driver, device) = FakeDriver::with_device(0);
    let folder = tempfile::tempdir().unwrap();
    let host: Box<[u8]> = pattern(7, 50_000).into();
    let captured = Stream::new(&device).unwrap();
    let current = device.enter().unwrap();
    let at = fake_driver.allocate(1 << 16);
    type Begin = unsafe extern "C" fn(usize, c_int) -> c_int;
    type End = unsafe extern "C" fn(usize, *mut u64) -> c_int;
    let handle = captured.raw().as_handle();
    // SAFETY: the function has this type, and the stream is alive.
    assert_eq!(unsafe { fake_driver.function::<Begin>("cuStreamBeginCapture_v2")(handle, 0) }, 0);
    // This thread holds a guard, so its capture mode is relaxed. The spawned thread holds none: each call must relax the
    // mode itself.
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let again = Device::new(Driver::get().unwrap(), 0).unwrap();
            let stream = Stream::new(&device).unwrap();
            let event = Event::new(&device).unwrap();
            let owner = Box::new(());
            let start = host.as_ptr().expose_provenance();
            // SAFETY: the box outlives the registration.
            let registration = unsafe { HostRegistration::new(&device, start, host.len(), owner) }.unwrap();
            // SAFETY: both sides stay valid until `event.wait` returns.
            unsafe { stream.copy_to_device(&Rows::single(at as usize, 50_000), host.as_ptr()) }.unwrap();
            event.record(stream.raw()).unwrap();
            event.wait(TIMEOUT).unwrap();
            stream.synchronise().unwrap();
            // SAFETY: the default stream always exists.
            assert!(unsafe { RawStream::from_handle(0) }.is_idle(&device).unwrap());
            let memory = deepnvme_cuda::DeviceMemory::new(&device, 4096).unwrap();
            let cufile = CuFile::open().unwrap();
            let file = std::fs::File::create(folder.path().join("file")).unwrap();
            let file = FileHandle::new(&cufile, file.as_fd()).unwrap();
            // SAFETY: the memory has no other access.
            let moved = unsafe { file.write(&device, DeviceSpan::unregistered(memory.address(), 4096), 0) };
            assert_eq!(moved.unwrap(), 4096);
            let error = captured.raw().is_idle(&device).unwrap_err();
            assert!(error.is_capturing(), "{error}");
            drop((file, cufile, memory, registration, event, stream, again));
        });
        others.join().unwrap();
    });
    let mut graph = 0;
    // SAFETY: the function has this type, the stream is alive, and the pointer is to a local value.
    let code = unsafe { fake_driver.function::<End>("cuStreamEndCapture")(handle, &raw mut graph) };
    assert_eq!(code, 0, "the capture was not invalidated");
    fake_driver.free(at);
    drop(current);
}

#[test]
fn a_thread_of_the_library_stays_in_its_last_device() {
    let (fake_driver, first) = FakeDriver::with_device(0);
    let second = Arc::new(Device::new(Driver::get().unwrap(), 1).unwrap());
    type Set = unsafe extern "C" fn(u64) -> c_int;
    // SAFETY: the function has this type.
    let set = unsafe { fake_driver.function::<Set>("cuCtxSetCurrent") };
    std::thread::scope(|scope| {
        let own = scope.spawn(|| {
            own_this_thread();
            assert_eq!(current_device(), None);
            drop(first.enter().unwrap());
            assert_eq!(current_device(), Some(0));
            // Another device inside: the outer one is current again afterwards.
            let outer = first.enter().unwrap();
            {
                let _inner = second.enter().unwrap();
                assert_eq!(current_device(), Some(1));
            }
            assert_eq!(current_device(), Some(0));
            drop(outer);
            // Code of others changes it, and the next guard notices.
            // SAFETY: null is no context, and always allowed.
            assert_eq!(unsafe { set(0) }, 0);
            let _current = first.enter().unwrap();
            assert_eq!(current_device(), Some(0));
        });
        own.join().unwrap();
        let calls = |symbol| fake_driver.calls(symbol);
        let before = (calls("cuCtxSetCurrent"), calls("cuCtxPushCurrent_v2"));
        scope
            .spawn(|| {
                own_this_thread();
                (0..100).for_each(|_| drop(first.enter().unwrap()));
            })
            .join()
            .unwrap();
        assert_eq!((calls("cuCtxSetCurrent"), calls("cuCtxPushCurrent_v2")), (before.0 + 1, before.1));
    });
    // A device that was released: its context is not taken for the next one.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            own_this_thread();
            drop(second.enter().unwrap());
            drop(second);
            let third = Device::new(Driver::get().unwrap(), 1).unwrap();
            let _current = third.enter().unwrap();
            assert_eq!(current_device(), Some(1));
        });
    });
}

#[test]
fn the_wait_for_a_stream_ends_with_its_work_and_not_with_a_capture() {
    let (fake_driver, device) = FakeDriver::with_device(0);
    // SAFETY: the default stream always exists.
    wait_for_stream(unsafe { RawStream::from_handle(0) });
    let _current = device.enter().unwrap();
    let stream = Stream::new(&device).unwrap();
    let at = fake_driver.allocate(64);
    type Fill = unsafe extern "C" fn(usize, u64, usize, u64, u64) -> c_int;
    type Begin = unsafe extern "C" fn(usize, c_int) -> c_int;
    type End = unsafe extern "C" fn(usize, *mut u64) -> c_int;
    let handle = stream.raw().as_handle();
    // SAFETY: the function has this type, the stream is alive, and the memory is freed after the wait.
    assert_eq!(unsafe { fake_driver.function::<Fill>("fake_driver_fill_kernel")(handle, at, 64, 1, 50_000) }, 0);
    wait_for_stream(stream.raw());
    assert!(fake_driver.peek(at, 64) == pattern(1, 64));
    // SAFETY: the functions have these types, the stream is alive, and the pointer is to a local value.
    unsafe {
        assert_eq!(fake_driver.function::<Begin>("cuStreamBeginCapture_v2")(handle, 0), 0);
        wait_for_stream(stream.raw());
        let mut graph = 0;
        assert_eq!(fake_driver.function::<End>("cuStreamEndCapture")(handle, &raw mut graph), 0, "still valid");
    }
    fake_driver.free(at);
}
