//! Imports another library's tensor, after checking it.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::abi::{DLDataType, DLDevice, FLAG_READ_ONLY, FLAG_SUBBYTE_PADDED, VERSION};
use super::export::release;
use super::layout::{check_addresses, invalid, item_bytes, layout_of};
use super::managed::Managed;
use crate::device::Device;
use crate::raw_memory::Owner;
use crate::region::Region;
use crate::region_mut::RegionMut;
use crate::strided::Strided;

/// A tensor taken over from another library. Its deleter is called once, when this and every region of it are
/// dropped, on any thread.
#[derive(Debug)]
pub struct Imported {
    start: *mut u8,
    byte_offset: usize,
    layout: Strided,
    dtype: DLDataType,
    device: DLDevice,
    read_only: bool,
    owner: Owner,
}

// SAFETY: the owner, itself Send, keeps the address valid on every thread.
unsafe impl Send for Imported {}
// SAFETY: shared access only reads the description.
unsafe impl Sync for Imported {}

/// Takes over a managed tensor. On success the caller must rename its capsule, so that nothing else frees it. On
/// failure the tensor keeps its owner.
///
/// # Errors
/// `InvalidInput` if the pointer is null or not aligned, or the tensor is inconsistent (a negative number of dimensions
/// or too many, negative counts, no memory for its elements, strides that leave the address space). `Unsupported` for
/// elements that do not fill whole bytes and for another major version of DLPack.
///
/// # Safety
/// `managed` points at a live managed tensor of type `M` that was not taken yet. Its lists are null, not aligned, or
/// have `ndim` entries if that is 0 to 64. If this call succeeds, its elements are initialised and valid for reads (and writes, unless it is read-only) until the deleter
/// is called, which may happen on any thread. No Rust reference to its elements is used meanwhile.
pub unsafe fn import<M: Managed>(managed: *mut M) -> io::Result<Imported> {
    let managed = NonNull::new(managed).filter(|managed| managed.is_aligned());
    let managed = managed.ok_or_else(|| invalid("a DLPack tensor has no valid address"))?;
    // SAFETY: `managed` points at a live tensor of type `M`, as the caller of `import` ensures. The reference ends
    // before the struct can be freed.
    let (version, flags, tensor) = unsafe {
        let managed = managed.as_ref();
        (managed.version(), managed.flags(), managed.tensor())
    };
    if version.major != VERSION.major {
        let message = format!("DLPack {}.{} is not understood, only {}.x", version.major, version.minor, VERSION.major);
        return Err(io::Error::new(io::ErrorKind::Unsupported, message));
    }
    let item_bytes = item_bytes(tensor.dtype, flags & FLAG_SUBBYTE_PADDED != 0)?;
    // SAFETY: the lists are null, not aligned, or have `ndim` entries if that is 0 to 64, as the caller of `import` ensures.
    let layout = unsafe { layout_of(tensor, item_bytes) }?;
    let byte_offset =
        usize::try_from(tensor.byte_offset).map_err(|_| invalid("a tensor's offset exceeds any memory"))?;
    check_addresses(tensor.data.addr(), byte_offset, &layout)?;
    Ok(Imported {
        start: tensor.data.cast::<u8>().wrapping_add(byte_offset),
        byte_offset,
        layout,
        dtype: tensor.dtype,
        device: tensor.device,
        read_only: flags & FLAG_READ_ONLY != 0,
        owner: Arc::new(ImportOwner { managed }),
    })
}

impl Imported {
    /// Returns the address of the first element, `byte_offset` included.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.start.expose_provenance()
    }

    /// Returns the offset of the first element from the tensor's `data`. [`Imported::addr`] includes it.
    #[must_use]
    pub fn byte_offset(&self) -> usize {
        self.byte_offset
    }

    /// Returns shape, strides in bytes, and bytes of an element.
    #[must_use]
    pub fn layout(&self) -> &Strided {
        &self.layout
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DLDataType {
        self.dtype
    }

    /// Returns the device as DLPack describes it.
    #[must_use]
    pub fn dl_device(&self) -> DLDevice {
        self.device
    }

    /// Returns the device of the memory.
    ///
    /// # Errors
    /// `Unsupported` for devices other than the CPU (pinned by CUDA or not) and CUDA.
    pub fn device(&self) -> io::Result<Device> {
        match (self.device.device_type, u32::try_from(self.device.device_id)) {
            (DLDevice::CPU | DLDevice::CUDA_HOST, _) => Ok(Device::Host),
            (DLDevice::CUDA, Ok(index)) => Ok(Device::Cuda { index }),
            _ => {
                let DLDevice { device_type, device_id } = self.device;
                let message =
                    format!("memory of DLPack device type {device_type}, number {device_id}; copy it to the CPU");
                Err(io::Error::new(io::ErrorKind::Unsupported, message))
            }
        }
    }

    /// Returns whether the tensor is read-only. Before DLPack 1.0 tensors cannot state that.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Turns the tensor into a readable region.
    ///
    /// # Errors
    /// As for [`Imported::device`].
    pub fn into_region(self) -> io::Result<Region> {
        let device = self.device()?;
        // SAFETY: the elements are valid for reads until the deleter is called: that is a requirement of `import`,
        // which checked the layout. The region keeps the owner, which calls the deleter.
        Ok(unsafe { Region::from_strided(self.start, self.layout, device, self.owner) })
    }

    /// Turns the tensor into a writable region.
    ///
    /// # Errors
    /// As for [`Imported::device`]; `PermissionDenied` if the tensor is read-only.
    pub fn into_region_mut(self) -> io::Result<RegionMut> {
        if self.read_only {
            let message = "the tensor is read-only; copy it and use the copy";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        let device = self.device()?;
        // SAFETY: the elements are valid for writes until the deleter is called: that is a requirement of `import`,
        // which checked the layout. The region keeps the owner, which calls the deleter.
        Ok(unsafe { RegionMut::from_strided(self.start, self.layout, device, self.owner) })
    }
}

/// Frees a managed tensor when dropped.
struct ImportOwner<M: Managed> {
    managed: NonNull<M>,
}

// SAFETY: the deleter may run on any thread: that is a requirement of `import`.
unsafe impl<M: Managed> Send for ImportOwner<M> {}
// SAFETY: a shared `ImportOwner` gives no access.
unsafe impl<M: Managed> Sync for ImportOwner<M> {}

impl<M: Managed> Drop for ImportOwner<M> {
    fn drop(&mut self) {
        // SAFETY: the tensor was taken over once, and its last user is gone.
        unsafe { release(self.managed) }
    }
}
