//! Imported tensors.

use std::io::ErrorKind;
use std::ptr;
use std::sync::atomic::Ordering;

use deepnvme_mem::Device;
use deepnvme_mem::dlpack::abi::{FLAG_READ_ONLY, FLAG_SUBBYTE_PADDED};
use deepnvme_mem::dlpack::{DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, import, release};

use crate::foreign::{F32, floats, foreign, free_foreign};

#[test]
fn a_transposed_tensor_is_read_in_its_own_order() {
    let (managed, freed) = foreign::<DLManagedTensor>(floats(0..6), &[3, 2], &[1, 3], |_| {});
    // SAFETY: a live tensor of six floats, taken once.
    let imported = unsafe { import(managed) }.unwrap();
    assert_eq!((imported.dtype(), imported.device().unwrap()), (F32, Device::Host));
    assert_eq!((&imported.layout().shape, &imported.layout().stride_bytes), (&vec![3, 2], &vec![4, 12]));
    let region = imported.into_region().unwrap();
    let mut bytes = vec![0; 24];
    region.copy_to_slice(0, &mut bytes);
    assert_eq!(bytes, floats([0, 3, 1, 4, 2, 5]));

    let elsewhere = region.clone();
    drop(region);
    assert_eq!(freed.load(Ordering::SeqCst), 0, "a clone still needs it");
    std::thread::spawn(move || drop(elsewhere)).join().unwrap();
    assert_eq!(freed.load(Ordering::SeqCst), 1);
}

#[test]
fn a_tensor_without_strides_is_contiguous_and_takes_writes() {
    let (managed, freed) = foreign::<DLManagedTensorVersioned>(floats(0..7), &[2, 3], &[], |tensor| {
        tensor.byte_offset = 4;
    });
    // SAFETY: a live tensor of seven floats without its first, taken once.
    let imported = unsafe { import(managed) }.unwrap();
    // SAFETY: `imported` keeps the tensor alive.
    let data = unsafe { (*managed).dl_tensor.data }.addr();
    assert_eq!((imported.addr(), imported.byte_offset()), (data + 4, 4));
    let region = imported.into_region_mut().unwrap();
    assert!(region.is_contiguous() && region.len() == 24);
    region.copy_from_slice(20, &floats([60]));
    let mut last = [0; 4];
    region.region().copy_to_slice(20, &mut last);
    assert_eq!(f32::from_ne_bytes(last), 60.0);
    drop(region);
    assert_eq!(freed.load(Ordering::SeqCst), 1);
}

#[test]
fn a_flipped_tensor_starts_at_its_highest_address() {
    let (managed, _) = foreign::<DLManagedTensor>(floats(0..4), &[4], &[-1], |tensor| tensor.byte_offset = 12);
    // SAFETY: a live tensor of four floats in reverse order, taken once.
    let region = unsafe { import(managed) }.unwrap().into_region().unwrap();
    let mut bytes = vec![0; 16];
    region.copy_to_slice(0, &mut bytes);
    assert_eq!(bytes, floats([3, 2, 1, 0]));
}

/// Imports an invalid tensor, which must be refused with a message that contains `hint`, without being taken.
#[track_caller]
fn refused(kind: ErrorKind, hint: &str, change: impl FnOnce(&mut DLTensor)) {
    let (managed, freed) = foreign::<DLManagedTensor>(floats(0..6), &[2, 3], &[3, 1], change);
    // SAFETY: a live tensor. `import` refuses each of these before it reads an element, or an entry that a list lacks.
    let error = unsafe { import(managed) }.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(hint), "{error}");
    assert_eq!(freed.load(Ordering::SeqCst), 0, "a refused tensor is not taken");
    // SAFETY: it was not taken.
    unsafe { release(ptr::NonNull::new(managed).unwrap()) };
    assert_eq!(freed.load(Ordering::SeqCst), 1);
}

#[test]
fn inconsistent_tensors_are_refused() {
    static NEGATIVE: [i64; 2] = [2, -3];
    static HUGE: [i64; 2] = [i64::MAX, i64::MAX];
    let list = |list: &'static [i64; 2]| list.as_ptr().cast_mut();
    refused(ErrorKind::InvalidInput, "dimensions", |tensor| {
        tensor.ndim = -1;
    });
    refused(ErrorKind::InvalidInput, "dimensions", |tensor| {
        tensor.ndim = 65;
    });
    refused(ErrorKind::InvalidInput, "no valid list", |tensor| {
        tensor.shape = ptr::null_mut();
    });
    refused(ErrorKind::InvalidInput, "no valid list", |tensor| {
        tensor.strides = ptr::without_provenance_mut(3);
    });
    refused(ErrorKind::InvalidInput, "out of range", |tensor| {
        tensor.shape = list(&NEGATIVE);
    });
    refused(ErrorKind::InvalidInput, "exceeds any memory", |tensor| {
        tensor.shape = list(&HUGE);
    });
    refused(ErrorKind::InvalidInput, "exceed any memory", |tensor| {
        tensor.strides = list(&HUGE);
    });
    refused(ErrorKind::InvalidInput, "null pointer", |tensor| {
        tensor.data = ptr::null_mut();
    });
    refused(ErrorKind::InvalidInput, "address space", |tensor| {
        tensor.byte_offset = u64::MAX - 8;
    });
    refused(ErrorKind::InvalidInput, "address space", |tensor| {
        (tensor.data, tensor.strides) = (ptr::without_provenance_mut(8), list(&NEGATIVE));
    });
    refused(ErrorKind::InvalidInput, "address space", |tensor| {
        // Two rows on, three items back: the lowest item would lie at address zero.
        (tensor.data, tensor.strides) = (ptr::without_provenance_mut(24), list(&NEGATIVE));
    });
    refused(ErrorKind::Unsupported, "whole bytes", |tensor| {
        tensor.dtype.bits = 0;
    });
    refused(ErrorKind::Unsupported, "whole bytes", |tensor| {
        tensor.dtype.bits = 4;
    });
}

#[test]
fn invalid_addresses_are_refused() {
    for managed in [ptr::null_mut::<DLManagedTensor>(), ptr::without_provenance_mut(4097)] {
        // SAFETY: neither address is read: one is null, the other unaligned.
        let error = unsafe { import(managed) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn empty_tensors_need_no_memory() {
    let (managed, freed) = foreign::<DLManagedTensor>(Vec::new(), &[0, 9], &[1 << 60, -7], |tensor| {
        tensor.data = ptr::null_mut();
    });
    // SAFETY: a live tensor without elements, taken once.
    let region = unsafe { import(managed) }.unwrap().into_region_mut().unwrap();
    assert!(region.is_empty());
    region.copy_from_slice(0, &[]);
    drop(region);
    assert_eq!(freed.load(Ordering::SeqCst), 1);
}

#[test]
fn foreign_devices_are_named_or_refused() {
    let device_of = |device_type, device_id| {
        let device = DLDevice { device_type, device_id };
        let (managed, _) = foreign::<DLManagedTensor>(floats(0..1), &[], &[], |tensor| tensor.device = device);
        // SAFETY: a live tensor of one float, taken once.
        let imported = unsafe { import(managed) }.unwrap();
        assert_eq!(imported.dl_device(), device);
        imported.device()
    };
    assert_eq!(device_of(DLDevice::CUDA_HOST, 1).unwrap(), Device::Host);
    assert_eq!(device_of(DLDevice::CUDA, 3).unwrap(), Device::Cuda { index: 3 });
    assert_eq!(device_of(DLDevice::CUDA, -1).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(device_of(8, 0).unwrap_err().to_string().contains("device type 8"));
}

#[test]
fn flags_and_versions_are_respected() {
    let with = |change: fn(&mut DLManagedTensorVersioned)| {
        let (managed, freed) = foreign::<DLManagedTensorVersioned>(floats(0..2), &[2], &[1], |_| {});
        // SAFETY: a live, unshared tensor, taken once.
        let imported = unsafe {
            change(&mut *managed);
            import(managed)
        };
        (imported, managed, freed)
    };
    let (imported, _, freed) = with(|managed| managed.flags = FLAG_READ_ONLY);
    let imported = imported.unwrap();
    assert!(imported.is_read_only());
    assert_eq!(imported.into_region_mut().unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert_eq!(freed.load(Ordering::SeqCst), 1, "the refused tensor had been taken already");

    let (imported, managed, freed) = with(|managed| managed.version.major = 2);
    assert!(imported.unwrap_err().to_string().contains("DLPack 2.1"));
    assert_eq!(freed.load(Ordering::SeqCst), 0);
    // SAFETY: it was not taken.
    unsafe { release(ptr::NonNull::new(managed).unwrap()) };

    let (imported, ..) = with(|managed| {
        managed.flags = FLAG_SUBBYTE_PADDED;
        managed.dl_tensor.dtype.bits = 4;
    });
    assert_eq!(imported.unwrap().layout().item_bytes, 1);
}

#[test]
fn a_tensor_without_a_deleter_is_left_alone() {
    let (managed, freed) = foreign::<DLManagedTensor>(floats(0..2), &[2], &[1], |_| {});
    // SAFETY: a live tensor, taken once and freed here by its own deleter afterwards.
    unsafe {
        (*managed).deleter = None;
        drop(import(managed).unwrap());
        assert_eq!(freed.load(Ordering::SeqCst), 0);
        free_foreign(managed);
    }
    assert_eq!(freed.load(Ordering::SeqCst), 1);
}
