//! Somebody else's tensor as our memory, believed only after it was checked.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::abi::{DLDataType, DLDevice, FLAG_READ_ONLY, FLAG_SUBBYTE_PADDED, VERSION};
use super::export::release;
use super::layout::{check_addresses, invalid, item_bytes, layout_of};
use super::managed::Managed;
use crate::region::Region;
use crate::region_mut::RegionMut;
use crate::span::{Device, Owner};
use crate::strided::Strided;

/// A tensor that was taken over from another library. Its deleter is called once, when this and every region made of
/// it are dropped, on whatever thread that is.
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

// SAFETY: the pointer is only an address, which the owner, itself Send, keeps valid on every thread.
unsafe impl Send for Imported {}
// SAFETY: shared access only reads the description.
unsafe impl Sync for Imported {}

/// Takes over a managed tensor. On success the capsule that it came in must be renamed, so that nobody else frees it.
/// On failure nothing was taken: whoever held the tensor still does.
///
/// # Errors
/// `InvalidInput` when the tensor contradicts itself (no or too many dimensions, negative counts, no memory for its
/// elements, strides that leave the address space), `Unsupported` for elements that do not fill whole bytes and for
/// another major version of DLPack.
///
/// # Safety
/// `managed` points at memory laid out as a live managed tensor of type `M`, that nobody has taken yet. Where its lists
/// are not null they have `ndim` entries; its elements are initialised, and valid for reads (and writes, unless it says
/// that it is read-only) until the deleter is called, which may happen on any thread. No Rust reference to its elements
/// is used meanwhile.
pub unsafe fn import<M: Managed>(managed: *mut M) -> io::Result<Imported> {
    let managed = NonNull::new(managed).filter(|managed| managed.is_aligned());
    let managed = managed.ok_or_else(|| invalid("a DLPack tensor has no valid address"))?;
    // SAFETY: the caller vouches for the struct; the reference is gone before anybody can free it.
    let (version, flags, tensor) = unsafe {
        let managed = managed.as_ref();
        (managed.version(), managed.flags(), managed.tensor())
    };
    if version.major != VERSION.major {
        let message = format!("DLPack {}.{} is not understood, only {}.x", version.major, version.minor, VERSION.major);
        return Err(io::Error::new(io::ErrorKind::Unsupported, message));
    }
    let item_bytes = item_bytes(tensor.dtype, flags & FLAG_SUBBYTE_PADDED != 0)?;
    // SAFETY: the caller vouches for the lists of the tensor.
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
        owner: Arc::new(Taken { managed }),
    })
}

impl Imported {
    /// The address of the first element, `byte_offset` included.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.start.expose_provenance()
    }

    /// How far the first element is from the address that the tensor named. Already part of [`Imported::addr`].
    #[must_use]
    pub fn byte_offset(&self) -> usize {
        self.byte_offset
    }

    /// Shape, strides in bytes, and bytes of an element.
    #[must_use]
    pub fn layout(&self) -> &Strided {
        &self.layout
    }

    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DLDataType {
        self.dtype
    }

    /// Where the memory lives, in DLPack's words.
    #[must_use]
    pub fn dl_device(&self) -> DLDevice {
        self.device
    }

    /// Where the memory lives.
    ///
    /// # Errors
    /// `Unsupported` for devices other than the processor (pinned by CUDA or not) and CUDA's.
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

    /// Whether the tensor must not be changed. Tensors from before DLPack 1.0 cannot say so.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The elements, to read.
    ///
    /// # Errors
    /// As for [`Imported::device`].
    pub fn into_region(self) -> io::Result<Region> {
        let device = self.device()?;
        // SAFETY: who called `import` vouched for the elements for as long as the owner lives.
        Ok(unsafe { Region::from_strided(self.start, self.layout, device, self.owner) })
    }

    /// The elements, to write to.
    ///
    /// # Errors
    /// As for [`Imported::device`]; `PermissionDenied` when the tensor is read-only.
    pub fn into_region_mut(self) -> io::Result<RegionMut> {
        if self.read_only {
            let message = "the tensor is read-only; copy it and use the copy";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        let device = self.device()?;
        // SAFETY: who called `import` vouched for the elements for as long as the owner lives.
        Ok(unsafe { RegionMut::from_strided(self.start, self.layout, device, self.owner) })
    }
}

/// A managed tensor that is ours to free.
struct Taken<M: Managed> {
    managed: NonNull<M>,
}

// SAFETY: who called `import` allowed the deleter on any thread.
unsafe impl<M: Managed> Send for Taken<M> {}
// SAFETY: a shared `Taken` gives access to nothing.
unsafe impl<M: Managed> Sync for Taken<M> {}

impl<M: Managed> Drop for Taken<M> {
    fn drop(&mut self) {
        // SAFETY: the tensor was taken over once, and its last user is gone.
        unsafe { release(self.managed) }
    }
}
