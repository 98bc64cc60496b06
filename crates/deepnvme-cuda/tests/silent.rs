//! A batch of which cuFile says nothing, over and over: whoever waits is told in time. A binary of its own, since what is
//! given up is never given back.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_cuda::{Batch, BatchEntry, CuFile, Device, DeviceSpan, Driver, FileHandle};
use deepnvme_standin::Loaded;

const PATIENCE: Duration = Duration::from_millis(200);

#[test]
fn a_batch_that_is_silent_is_given_up() {
    let standin = Loaded::alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![1; 1 << 16]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let device = Arc::new(Device::new(Driver::get().unwrap(), 0).unwrap());
    let current = device.enter().unwrap();
    let mut at = 0;
    type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
    // SAFETY: the function has this type, and the pointer is to a number of ours.
    assert_eq!(unsafe { standin.function::<Alloc>("cuMemAlloc_v2")(&raw mut at, 1 << 16) }, 0);
    let cufile = CuFile::open().unwrap();
    let handle = FileHandle::new(&cufile, file.as_fd()).unwrap();
    let mut batch = Batch::new(&cufile, &device, 4).unwrap().unwrap();
    let span = DeviceSpan::unregistered(at as usize, 1 << 16);
    let entry = BatchEntry { file: &handle, is_read: true, span, offset: 0, cookie: 1 };
    // A transfer that takes long: the call that asks for it comes back in time as well.
    standin.fail("cuFileBatchIO@slow", 0, 1500);
    // SAFETY: file and memory stay until the test ends, and nothing else uses them.
    unsafe { batch.submit(&[entry]) }.unwrap();
    let begin = Instant::now();
    assert!(batch.wait(PATIENCE).is_err());
    assert!((PATIENCE..Duration::from_millis(1400)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert_eq!(batch.wait(Duration::from_secs(60)).unwrap().len(), 1, "it has gone on");
    assert_eq!(batch.outstanding(), 0);

    // SAFETY: as above.
    unsafe { batch.submit(&[entry]) }.unwrap();
    standin.fail_always("cuFileBatchIOGetStatus@silent", 1);
    let begin = Instant::now();
    let error = batch.wait(PATIENCE).unwrap_err();
    assert!(error.to_string().contains("none of 1 transfers was reported within 0.2 s"), "{error}");
    assert_eq!((error.call(), batch.outstanding()), ("cuFileBatchIOGetStatus", 1));
    assert!((PATIENCE..Duration::from_secs(20)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    drop(batch);
    assert!(begin.elapsed() < Duration::from_secs(40), "its drop waits for as short a time");
    assert_eq!(standin.live("cufile_batches"), 1, "nobody knows that it is over");
    std::mem::forget(handle);
    drop(current);
}
