//! Tensors of another library.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use deepnvme_mem::dlpack::{DLDataType, DLDevice, DLTensor, Managed};

/// Single-precision numbers.
pub(crate) const F32: DLDataType = DLDataType { code: DLDataType::FLOAT, bits: 32, lanes: 1 };

/// A tensor of another library that counts how often it is freed.
struct Foreign {
    bytes: Vec<u8>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    freed: Arc<AtomicUsize>,
}

/// The deleter of such tensors.
///
/// # Safety
/// `managed` was created by `foreign` and is passed here once.
pub(crate) unsafe extern "C" fn free_foreign<M: Managed>(managed: *mut M) {
    // SAFETY: `foreign` created both boxes, and a deleter is called once, as the count shows.
    unsafe {
        let managed = Box::from_raw(managed);
        let foreign = Box::from_raw(managed.manager_ctx().cast::<Foreign>());
        foreign.freed.fetch_add(1, Ordering::SeqCst);
    }
}

/// Creates a tensor of `bytes` that `change` may modify. Returns it with the count of deleter calls.
pub(crate) fn foreign<M: Managed>(
    bytes: Vec<u8>,
    shape: &[i64],
    strides: &[i64],
    change: impl FnOnce(&mut DLTensor),
) -> (*mut M, Arc<AtomicUsize>) {
    let freed = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&freed);
    let mut owner = Box::new(Foreign { bytes, shape: shape.to_vec(), strides: strides.to_vec(), freed: counter });
    let mut tensor = DLTensor {
        data: owner.bytes.as_mut_ptr().cast(),
        device: DLDevice { device_type: DLDevice::CPU, device_id: 0 },
        ndim: shape.len() as i32,
        dtype: F32,
        shape: owner.shape.as_mut_ptr(),
        strides: if strides.is_empty() { ptr::null_mut() } else { owner.strides.as_mut_ptr() },
        byte_offset: 0,
    };
    change(&mut tensor);
    let owner: *mut c_void = Box::into_raw(owner).cast();
    (Box::into_raw(Box::new(M::assemble(tensor, owner, free_foreign::<M>))), freed)
}

/// Returns the bytes of small numbers as `f32`.
pub(crate) fn floats(values: impl IntoIterator<Item = u16>) -> Vec<u8> {
    values.into_iter().flat_map(|value| f32::from(value).to_ne_bytes()).collect()
}
