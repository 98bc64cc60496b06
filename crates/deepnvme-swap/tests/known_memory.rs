//! The CUDA driver knows a swapper's memory also if the process uses a GPU only later. Runs with a fake driver.
//! One test, since contexts belong to the process.

#![allow(clippy::unwrap_used)]

use std::ffi::c_int;
use std::sync::Arc;

use deepnvme_fake_driver::Loaded;
use deepnvme_io::mem::Region;
use deepnvme_io::{Config, Engine};
use deepnvme_swap::{Swapper, SwapperOptions};

#[test]
fn borrowed_memory_of_an_older_swapper_is_registered() {
    let driver = Loaded::exclusive();
    let folder = tempfile::tempdir().unwrap();
    let engine = Arc::new(Engine::new(Config::default()).unwrap());
    let swapper = Swapper::new(engine, &SwapperOptions::new(folder.path(), 1 << 20)).unwrap();
    swapper.put("a", &Region::from_vec(vec![7; 5000])).unwrap();
    assert_eq!((driver.live("registrations"), driver.live("contexts")), (0, 0));

    // Another library uses the GPU.
    let mut context = 0;
    type Retain = unsafe extern "C" fn(*mut u64, c_int) -> c_int;
    // SAFETY: the function has this type, and the pointer is to a local value.
    assert_eq!(unsafe { driver.function::<Retain>("cuDevicePrimaryCtxRetain")(&raw mut context, 0) }, 0);
    drop(swapper.borrow("a", false, &mut || false).unwrap());
    assert_eq!(driver.live("registrations"), 1);
    drop(swapper);
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    // SAFETY: it was retained above.
    assert_eq!(unsafe { driver.function::<Release>("cuDevicePrimaryCtxRelease_v2")(0) }, 0);
    driver.assert_released();
}
