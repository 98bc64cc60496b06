//! A batch that cuFile never reports: waiting ends with an error. A binary of its own, since a batch that is given up
//! is leaked.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::c_int;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_cuda::{Batch, BatchEntry, CuFile, Device, DeviceSpan, Driver, FileHandle};
use deepnvme_fake_driver::Loaded;

const TIMEOUT: Duration = Duration::from_millis(200);

#[test]
fn a_silent_batch_is_given_up() {
    let fake_driver = Loaded::exclusive();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![1; 1 << 16]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let device = Arc::new(Device::new(Driver::get().unwrap(), 0).unwrap());
    let current = device.enter().unwrap();
    let mut at = 0;
    type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
    // SAFETY: the function has this type, and the pointer is to a local value.
    assert_eq!(unsafe { fake_driver.function::<Alloc>("cuMemAlloc_v2")(&raw mut at, 1 << 16) }, 0);
    let cufile = CuFile::open().unwrap();
    let handle = FileHandle::new(&cufile, file.as_fd()).unwrap();
    let mut batch = Batch::new(&cufile, &device, 4).unwrap().unwrap();
    let span = DeviceSpan::unregistered(at as usize, 1 << 16);
    let entry = BatchEntry { file: &handle, is_read: true, span, offset: 0, cookie: 1 };
    // A slow transfer: the wait ends in time.
    fake_driver.fail("cuFileBatchIO@slow", 0, 1500);
    // SAFETY: file and memory outlive the test, with no other access.
    unsafe { batch.submit(&[entry]) }.unwrap();
    let begin = Instant::now();
    assert!(batch.wait(TIMEOUT).is_err());
    assert!((TIMEOUT..Duration::from_millis(1400)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert_eq!(batch.wait(Duration::from_secs(60)).unwrap().len(), 1, "the transfer continued");
    assert_eq!(batch.outstanding(), 0);

    // SAFETY: file and memory outlive the test, and nothing else accesses them.
    unsafe { batch.submit(&[entry]) }.unwrap();
    fake_driver.fail_always("cuFileBatchIOGetStatus@silent", 1);
    let begin = Instant::now();
    let error = batch.wait(TIMEOUT).unwrap_err();
    assert!(error.to_string().contains("none of 1 transfers was reported within 0.2 s"), "{error}");
    assert_eq!((error.call(), batch.outstanding()), ("cuFileBatchIOGetStatus", 1));
    assert!((TIMEOUT..Duration::from_secs(20)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    drop(batch);
    assert!(begin.elapsed() < Duration::from_secs(40), "its drop has a timeout");
    assert_eq!(fake_driver.live("cufile_batches"), 1, "the batch is leaked");
    std::mem::forget(handle);
    drop(current);
}
