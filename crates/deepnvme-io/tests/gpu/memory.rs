//! GPU memory allocated through the engine, and the driver's GPU information.

use deepnvme_io::gpu::{GpuFacts, GpuProbe};
use deepnvme_io::mem::{Device, RegionMut};
use deepnvme_io::{Config, Engine, ErrorKind};

use crate::fake_driver::{Gpu, pattern};
use crate::files::{set_up, write};

#[test]
fn memory_is_allocated_filled_moved_and_given_back_with_its_last_part() {
    let (gpu, folder, engine, file) = set_up(Config::default());
    let access = engine.gpu_access();
    let memory = access.allocate(1, 100_001).unwrap();
    assert_eq!((memory.len(), memory.device()), (100_001, Device::Cuda { index: 1 }));
    assert_eq!(gpu.live("device_allocations"), 1);
    let bytes = pattern(3, 100_001);
    access.copy_from_slice(&memory, 0, &bytes[..70_000]).unwrap();
    access.copy_from_slice(&memory, 70_000, &bytes[70_000..]).unwrap();
    write(&engine, &file, 0, memory.region());
    assert!(std::fs::read(folder.path().join("file")).unwrap() == bytes);
    let (first, second) = memory.split_at(40_000);
    access.copy_from_slice(&second, 0, &[0; 60_001]).unwrap();
    let (returned, read) = engine.read(&file, 40_000, second).unwrap().wait();
    read.unwrap();
    let mut seen = vec![0; 60_001];
    access.copy_to_slice(&returned.unwrap().region(), 0, &mut seen).unwrap();
    assert!(seen == bytes[40_000..]);
    // The engine may be dropped first.
    drop((engine, file));
    assert_eq!(gpu.live("device_allocations"), 1, "the first part is still there");
    drop((first, access));
    assert_eq!(gpu.live("device_allocations"), 0);
}

#[test]
fn memory_of_the_host_is_filled_as_well() {
    let access = Engine::new(Config::default()).unwrap().gpu_access();
    let memory = RegionMut::from_vec(vec![0; 10]);
    access.copy_from_slice(&memory, 3, &[7; 5]).unwrap();
    let mut seen = [0; 10];
    access.copy_to_slice(&memory.region(), 0, &mut seen).unwrap();
    assert_eq!(seen, [0, 0, 0, 7, 7, 7, 7, 7, 0, 0]);
}

#[test]
fn a_refusal_of_the_driver_is_an_error_with_a_remedy() {
    let gpu = Gpu::new();
    let engine = Engine::new(Config::default()).unwrap();
    let access = engine.gpu_access();
    gpu.fail("cuMemAlloc_v2", 0, 2);
    let error = access.allocate(0, 5000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    let text = error.to_string();
    assert!(text.contains("cuMemAlloc") && text.contains("cuda:0 has no 5000 bytes left; ask for fewer"), "{text}");
    let memory = access.allocate(0, 5000).unwrap();
    for call in ["cuMemcpyHtoDAsync_v2", "cuStreamQuery"] {
        gpu.clear();
        gpu.fail(call, 0, 700);
        let error = access.copy_from_slice(&memory, 0, &[1; 5000]).unwrap_err();
        assert!(error.kind() == ErrorKind::Device && error.to_string().contains("700"), "{call}: {error}");
    }
    gpu.clear();
    access.copy_from_slice(&memory, 0, &[1; 5000]).unwrap();
    assert_eq!(access.allocate(7, 1).unwrap_err().kind(), ErrorKind::Device, "there is no such GPU");
    drop((memory, access, engine));
    assert_eq!(gpu.live("device_allocations"), 0);
}

#[test]
fn the_driver_is_asked_for_its_gpus_and_nothing_of_them_is_taken() {
    let gpu = Gpu::new();
    let retained = gpu.calls("cuDevicePrimaryCtxRetain");
    let probe = GpuProbe::run();
    assert_eq!((probe.cuda_version.as_deref(), probe.reason), (Some("13.0"), None));
    let GpuFacts { index, name, memory_bytes, pci_bus_id } = &probe.devices[1];
    assert_eq!((probe.devices.len(), *index, name.as_str(), pci_bus_id.as_str()), (2, 1, "Fake GPU 1", "0000:11:00.0"));
    assert!(*memory_bytes > 0);
    gpu.fail("cuDeviceTotalMem_v2", 1, 999);
    let partly = GpuProbe::run();
    assert_eq!(partly.devices.len(), 1, "what can be told is told");
    assert!(partly.reason.is_some_and(|reason| reason.contains("cuDeviceTotalMem")));
    assert_eq!(gpu.calls("cuDevicePrimaryCtxRetain"), retained);
    gpu.clear();
}
