//! CUDA graphs that another thread captures, and the number of driver calls.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use deepnvme_io::{BackendChoice, Engine, ErrorKind, WriteOptions};
use deepnvme_mem::StreamHandle;

use super::config;
use super::fake_driver::Gpu;
use super::files::{folder, on_host, set_up};

/// The longest that a wait of one second may ask the driver, for one request.
const CALLS_PER_SECOND_WAITED: u64 = 1200;
/// The most driver calls for a block, or 80,000 for a GB in blocks of 512 KiB. The fake driver delays each op by up to
/// 300 us, so most of them are polls.
const CALLS_PER_BLOCK: f64 = 40.0;

/// A stream that is captured in the driver's strictest mode, as torch does by default.
struct Capture<'a> {
    gpu: &'a Gpu,
    stream: StreamHandle,
}

impl<'a> Capture<'a> {
    fn begin(gpu: &'a Gpu, stream: StreamHandle) -> Self {
        // SAFETY: the function has this type, and the stream is alive.
        let begin = unsafe { gpu.function::<unsafe extern "C" fn(usize, c_int) -> c_int>("cuStreamBeginCapture_v2") };
        // SAFETY: the stream is alive.
        assert_eq!(unsafe { begin(stream.as_raw(), 0) }, 0);
        Self { gpu, stream }
    }

    /// Ends the capture. Returns whether it was valid to the end.
    fn end(self) -> bool {
        let mut graph = 0;
        type End = unsafe extern "C" fn(usize, *mut u64) -> c_int;
        // SAFETY: the function has this type, the stream is alive, and the pointer is to a local value.
        unsafe { self.gpu.function::<End>("cuStreamEndCapture")(self.stream.as_raw(), &raw mut graph) == 0 }
    }
}

#[test]
fn requests_go_on_while_another_thread_captures_a_graph() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Threads));
    let memory = gpu.memory(0, 300_000, 1);
    let other = gpu.memory(0, 300_000, 2);
    let captured = gpu.stream(0);
    let capture = Capture::begin(&gpu, captured);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (_, wrote) = engine.write(&file, 77, memory.region(), WriteOptions::default()).unwrap().wait();
            assert_eq!(wrote.unwrap().bytes, 300_000);
            let (_, read) = engine.read(&file, 77, other.region_mut()).unwrap().wait();
            read.unwrap();
            // An engine begins and ends: it registers its memory with the driver.
            let fresh = Engine::new(config(BackendChoice::Threads)).unwrap();
            let (_, read) = fresh.read(&file, 77, other.region_mut()).unwrap().wait();
            read.unwrap();
            assert_eq!(engine.stats().staged_reason, None);
            // Memory for a caller, and a copy that waits.
            let allocated = engine.gpu_access().allocate(0, 4096).unwrap();
            engine.gpu_access().copy_from_slice(&allocated, 0, &[5; 4096]).unwrap();
            let mut seen = [0; 4096];
            engine.gpu_access().copy_to_slice(&allocated.region(), 0, &mut seen).unwrap();
            assert_eq!(seen, [5; 4096]);
        });
    });
    assert!(capture.end(), "the capture was invalidated");
    assert!(on_host(&engine, &file, 77, 300_000) == gpu.peek(&other));
    drop(engine);
    gpu.end_stream(0, captured);
}

#[test]
fn memory_of_a_stream_that_is_captured_is_refused_and_the_capture_goes_on() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Threads));
    let memory = gpu.memory(0, 5000, 1);
    let captured = gpu.stream(0);
    let capture = Capture::begin(&gpu, captured);
    let region = memory.region().after(captured);
    let error = engine.write(&file, 0, region.clone(), WriteOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("transfer it before or after the capture"), "{error}");
    assert!(capture.end(), "the capture was invalidated");
    let (_, wrote) = engine.write(&file, 0, region, WriteOptions::default()).unwrap().wait();
    wrote.unwrap();
    drop(engine);
    gpu.end_stream(0, captured);
}

#[test]
fn a_wait_of_a_second_and_a_gigabyte_make_few_calls() {
    let (gpu, folder) = (Gpu::new(), folder());
    let engine = Engine::new(config(BackendChoice::Threads)).unwrap();
    let file = super::files::open(&folder.path().join("file"), deepnvme_io::DirectMode::Preferred);
    let memory = gpu.memory(0, 4 << 20, 1);
    let calls = |gpu: &Gpu| gpu.count("calls");
    let before = calls(&gpu);
    let (_, wrote) = engine.write(&file, 0, memory.region(), WriteOptions::default()).unwrap().wait();
    wrote.unwrap();
    let (_, read) = engine.read(&file, 0, memory.region_mut()).unwrap().wait();
    read.unwrap();
    let blocks = f64::from(2 * (4 << 20) / 16384);
    let per_block = (calls(&gpu) - before) as f64 / blocks;
    assert!(per_block < CALLS_PER_BLOCK, "{per_block} calls for a block");

    let stream = gpu.stream(0);
    gpu.fill(stream, &memory, 5, 1_000_000);
    let (before, begin) = (calls(&gpu), Instant::now());
    let request = engine.write(&file, 0, memory.region().after(stream), WriteOptions::default()).unwrap();
    std::thread::sleep(Duration::from_millis(900));
    let waited = begin.elapsed().as_millis() as u64;
    let asked = calls(&gpu) - before;
    // A poll is a query, between entering and leaving the context in relaxed mode.
    assert!(asked < 5 * CALLS_PER_SECOND_WAITED * waited / 1000, "{asked} calls in {waited} ms");
    request.wait().1.unwrap();
    drop(engine);
    gpu.end_stream(0, stream);
}
