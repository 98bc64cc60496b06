//! Faults by call, and the environment variables that configure the fake driver.

mod common;

use common::codes::cuda;
use common::{FakeDriver, in_child};

#[test]
fn faults_hit_the_call_of_their_name_and_number() {
    let fake_driver = FakeDriver::with_context();
    fake_driver.fail("cuMemAlloc_v2", 1, cuda::OUT_OF_MEMORY);
    let codes = [0, 1, 2].map(|_| (fake_driver.cuMemAlloc_v2)(&mut 0, 100));
    assert_eq!((codes, fake_driver.calls("cuMemAlloc_v2")), ([0, cuda::OUT_OF_MEMORY, 0], 3));
    assert_eq!(fake_driver.live("device_allocations"), 2);
    (fake_driver.fake_driver_fail_always)(common::c("cuStreamSynchronize").as_ptr(), cuda::ILLEGAL_ADDRESS);
    assert_eq!([0, 1].map(|_| (fake_driver.cuStreamSynchronize)(0)), [cuda::ILLEGAL_ADDRESS; 2]);
    (fake_driver.fake_driver_clear)();
    assert_eq!(((fake_driver.cuStreamSynchronize)(0), fake_driver.calls("cuMemAlloc_v2")), (0, 0));
    assert_eq!(
        (fake_driver.live("nonsense"), fake_driver.count("nonsense"), fake_driver.calls("nonsense")),
        (-1, 0, 0)
    );
}

#[test]
fn environment_variables_configure_the_driver() {
    let environment = [
        ("DEEPNVME_FAKE_DRIVER_DEVICES", "3"),
        ("DEEPNVME_FAKE_DRIVER_MEMORY", "100000"),
        ("DEEPNVME_FAKE_DRIVER_DELAY_US", "0"),
        ("DEEPNVME_FAKE_DRIVER_CUFILE_COMPAT", "1"),
        // 2 is CUDA_ERROR_OUT_OF_MEMORY, 304 is CUDA_ERROR_OPERATING_SYSTEM.
        ("DEEPNVME_FAKE_DRIVER_FAIL", "cuEventCreate:1:2,cuMemHostAlloc:always:304"),
    ];
    assert!(in_child("child_reads_environment_variables", &environment).success());
    assert!(!in_child("child_reads_environment_variables", &[]).success());
    assert!(in_child("child_has_no_device", &[("DEEPNVME_FAKE_DRIVER_DEVICES", "0")]).success());
}

#[test]
#[ignore = "run by environment_variables_configure_the_driver, in a process of its own"]
fn child_reads_environment_variables() {
    let fake_driver = FakeDriver::with_context();
    let mut count = 0;
    assert_eq!(((fake_driver.cuDeviceGetCount)(&mut count), count), (0, 3));
    assert_eq!((fake_driver.cuMemAlloc_v2)(&mut 0, 100_001), cuda::OUT_OF_MEMORY);
    assert_eq!([0, 1, 2].map(|_| (fake_driver.cuEventCreate)(&mut 0, 0)), [0, cuda::OUT_OF_MEMORY, 0]);
    assert_eq!([0, 1].map(|_| (fake_driver.cuMemHostAlloc)(&mut 0, 10, 0)), [cuda::OPERATING_SYSTEM; 2]);
    let mut properties = common::api::DriverProperties::default();
    assert_eq!((fake_driver.cuFileDriverGetProperties)(&mut properties).err, 0);
    assert_eq!((properties.major, properties.status_flags, properties.control_flags), (0, 0, 2));
}

#[test]
#[ignore = "run by environment_variables_configure_the_driver, in a process of its own"]
fn child_has_no_device() {
    assert_eq!((FakeDriver::load().cuInit)(0), cuda::NO_DEVICE);
}
