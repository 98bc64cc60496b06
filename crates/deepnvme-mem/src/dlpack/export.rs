//! Exports memory as a DLPack tensor.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::abi::{DLDataType, DLDevice, DLTensor};
use super::managed::Managed;
use crate::device::Device;
use crate::region_mut::RegionMut;
use crate::strided::Strided;

/// A tensor for another library. It is freed when dropped, unless it is taken.
pub struct Exported<M: Managed> {
    managed: NonNull<M>,
}

// SAFETY: the pointer owns boxes with a `RegionMut` and two vectors, which may be sent to and dropped on any thread.
unsafe impl<M: Managed> Send for Exported<M> {}

impl<M: Managed> Exported<M> {
    /// Returns the pointer for a capsule. From then on the tensor's deleter or [`release`] frees the memory.
    #[must_use]
    pub fn into_raw(self) -> NonNull<M> {
        ManuallyDrop::new(self).managed
    }
}

impl<M: Managed> Drop for Exported<M> {
    fn drop(&mut self) {
        // SAFETY: the tensor is alive, since it was not taken, and is freed once.
        unsafe { release(self.managed) }
    }
}

impl<M: Managed> fmt::Debug for Exported<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exported({:?})", self.managed)
    }
}

/// Exports the first bytes of `memory` as a contiguous tensor. The deleter drops `memory`, on whatever thread it is
/// called.
///
/// ```
/// use deepnvme_mem::Buffer;
/// use deepnvme_mem::dlpack::{DLDataType, DLManagedTensor, export};
/// let memory = Buffer::locked(4096)?.into_region();
/// let tensor = export::<DLManagedTensor>(memory, &[64, 64], DLDataType::U8)?;
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// `InvalidInput` if the memory is not contiguous or too small for the shape, the shape has too many dimensions, or
/// elements do not fill whole bytes.
pub fn export<M: Managed>(memory: RegionMut, shape: &[usize], dtype: DLDataType) -> io::Result<Exported<M>> {
    let refuse = |message: String| io::Error::new(io::ErrorKind::InvalidInput, message);
    let item_bytes = dtype.item_bytes().ok_or_else(|| refuse(format!("{dtype:?} does not fill whole bytes")))?;
    let layout = Strided::contiguous(shape.to_vec(), item_bytes)?;
    if !memory.is_contiguous() {
        return Err(refuse("only contiguous memory can be made a tensor; copy it first".to_owned()));
    }
    if layout.total_bytes() > memory.len() {
        let (needed, given) = (layout.total_bytes(), memory.len());
        return Err(refuse(format!("a tensor of shape {shape:?} takes {needed} bytes, the memory has {given}")));
    }
    let counts = shape.iter().map(|count| i64::try_from(*count)).collect::<Result<Vec<i64>, _>>();
    let counts = counts.map_err(|_| refuse(format!("shape {shape:?} does not fit DLPack's 64 bits")))?;
    let in_items = |bytes: &isize| (*bytes / item_bytes as isize) as i64;
    let strides = layout.stride_bytes.iter().map(in_items).collect();
    let (data, device) = (memory.raw.start().cast(), dl_device(memory.device()));
    let mut context = Box::new(ExportContext { counts, strides, _memory: memory });
    let tensor = DLTensor {
        data,
        device,
        ndim: shape.len() as i32,
        dtype,
        shape: context.counts.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let managed = Box::new(M::assemble(tensor, Box::into_raw(context).cast(), delete::<M>));
    // SAFETY: a box is not null.
    let managed = unsafe { NonNull::new_unchecked(Box::into_raw(managed)) };
    Ok(Exported { managed })
}

/// Calls the deleter of a tensor, if it has one.
///
/// # Safety
/// `managed` is a live managed tensor that is not freed elsewhere, and neither it nor its memory is used afterwards.
pub unsafe fn release<M: Managed>(managed: NonNull<M>) {
    // SAFETY: `managed` is live and nothing else frees it, as the caller of `release` ensures. The reference ends
    // before the deleter frees the tensor.
    unsafe {
        let deleter = managed.as_ref().deleter();
        if let Some(deleter) = deleter {
            deleter(managed.as_ptr());
        }
    }
}

/// The owner of an exported tensor's shape, strides and memory.
struct ExportContext {
    counts: Vec<i64>,
    strides: Vec<i64>,
    _memory: RegionMut,
}

/// The deleter of every exported tensor.
///
/// # Safety
/// `managed` was created by `export` and is passed here once.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: DLPack calls the deleter once, with the pointer from `export`: a box whose context is another box.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager_ctx().cast::<ExportContext>()));
    }
}

fn dl_device(device: Device) -> DLDevice {
    match device {
        Device::Host => DLDevice { device_type: DLDevice::CPU, device_id: 0 },
        Device::Cuda { index } => DLDevice { device_type: DLDevice::CUDA, device_id: index as i32 },
    }
}
