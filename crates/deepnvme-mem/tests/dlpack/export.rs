//! Exported tensors.

use std::io::ErrorKind;
use std::ptr;
use std::sync::Arc;

use deepnvme_mem::dlpack::{DLDataType, DLManagedTensor, DLManagedTensorVersioned, Managed, export, import};
use deepnvme_mem::{Buffer, Device, Owner, RegionMut};

use crate::foreign::F32;

/// Memory with a weak reference that dies when it is freed.
fn owned(bytes: usize) -> (RegionMut, std::sync::Weak<Buffer>) {
    let buffer = Arc::new(Buffer::zeroed(bytes).unwrap());
    let (address, freed) = (buffer.addr(), Arc::downgrade(&buffer));
    let owner: Owner = buffer;
    // SAFETY: the owner is the buffer, whose slices are not used.
    let region = unsafe { RegionMut::from_raw(ptr::with_exposed_provenance_mut(address), bytes, Device::Host, owner) };
    (region, freed)
}

fn export_and_import_again<M: Managed>() {
    let (memory, freed) = owned(4096);
    let address = memory.addr();
    let exported = export::<M>(memory, &[3, 2, 4], F32).unwrap();
    let managed = exported.into_raw();
    // SAFETY: the tensor was just exported and is taken once.
    let imported = unsafe { import(managed.as_ptr()) }.unwrap();
    assert_eq!((imported.addr(), imported.dtype(), imported.is_read_only()), (address, F32, false));
    assert_eq!((&imported.layout().shape, &imported.layout().stride_bytes), (&vec![3, 2, 4], &vec![32, 16, 4]));
    let region = imported.into_region_mut().unwrap();
    assert!(region.is_contiguous() && region.len() == 96);
    region.copy_from_slice(0, &[7; 96]);
    assert!(freed.upgrade().is_some());
    std::thread::spawn(move || drop(region)).join().unwrap();
    assert!(freed.upgrade().is_none(), "the deleter dropped the memory");
}

#[test]
fn both_forms_round_trip() {
    export_and_import_again::<DLManagedTensor>();
    export_and_import_again::<DLManagedTensorVersioned>();
}

#[test]
fn an_untaken_tensor_frees_itself() {
    let (memory, freed) = owned(64);
    drop(export::<DLManagedTensor>(memory, &[64], DLDataType::U8).unwrap());
    assert!(freed.upgrade().is_none());
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let refused = |shape: &[usize], dtype| {
        let (memory, freed) = owned(64);
        let error = export::<DLManagedTensor>(memory, shape, dtype).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(freed.upgrade().is_none(), "the memory was dropped, not leaked");
        error.to_string()
    };
    assert!(refused(&[65], DLDataType::U8).contains("takes 65 bytes, the memory has 64"));
    assert!(refused(&[usize::MAX, 2], DLDataType::U8).contains("exceeds any memory"));
    assert!(refused(&[1; 65], DLDataType::U8).contains("more than 64"));
    assert!(refused(&[1], DLDataType { code: DLDataType::INT, bits: 4, lanes: 1 }).contains("whole bytes"));
    assert!(refused(&[0, usize::MAX], DLDataType::U8).contains("64 bits"));
}

#[test]
fn an_empty_tensor_and_a_gpu_tensor_can_be_exported() {
    let exported = export::<DLManagedTensor>(Buffer::zeroed(0).unwrap().into_region(), &[0, 4], F32).unwrap();
    // SAFETY: the tensor was just exported and is taken once.
    let imported = unsafe { import(exported.into_raw().as_ptr()) }.unwrap();
    assert!(imported.into_region().unwrap().is_empty());

    // SAFETY: the address of a GPU that does not exist is never dereferenced.
    let memory = unsafe {
        RegionMut::from_raw(ptr::without_provenance_mut(1 << 20), 64, Device::Cuda { index: 1 }, Arc::new(()))
    };
    let exported = export::<DLManagedTensor>(memory, &[16], F32).unwrap();
    // SAFETY: `exported` is a live tensor that nothing has taken, and its memory is never dereferenced.
    let imported = unsafe { import(exported.into_raw().as_ptr()) }.unwrap();
    assert_eq!(imported.device().unwrap(), Device::Cuda { index: 1 });
}
