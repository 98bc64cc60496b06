//! DLPack's table of C functions, to inspect another library's tensors without calling Python.
//!
//! A producer offers the table as a capsule in the attribute `__dlpack_c_exchange_api__` of its tensor type (DLPack
//! 1.3, torch 2.10). Only the two functions used here are typed.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use super::abi::{DLDevice, DLPackVersion, DLTensor, VERSION};

/// `DLPackExchangeAPI`. It lives as long as the process.
#[repr(C)]
#[derive(Debug)]
pub struct ExchangeApi {
    version: DLPackVersion,
    previous: *const c_void,
    allocate: *const c_void,
    export_owned: *const c_void,
    import_owned: *const c_void,
    /// Describes a tensor that the producer keeps owning. Returns 0, or -1 with a Python exception set.
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int>,
    /// Stores the stream that the calling thread gives work to. The arguments are the type of a device, its index, and
    /// where to store the stream. Returns 0, or -1 with a Python exception set.
    current_work_stream: Option<unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: an immutable table of functions.
unsafe impl Send for ExchangeApi {}
// SAFETY: the table is immutable: a shared one is only read.
unsafe impl Sync for ExchangeApi {}

impl ExchangeApi {
    /// The name of the capsule.
    pub const CAPSULE_NAME: &CStr = c"dlpack_exchange_api";

    /// Returns the table of a capsule. `None` if it has another major version or cannot describe a tensor in place.
    ///
    /// # Safety
    /// The pointer comes from a capsule of [`Self::CAPSULE_NAME`] whose producer keeps the table forever.
    #[must_use]
    pub unsafe fn from_capsule(pointer: NonNull<c_void>) -> Option<&'static Self> {
        // SAFETY: the pointer is to a table, as the caller of `from_capsule` ensures, and the table of every major
        // version starts with its version.
        let version = unsafe { pointer.cast::<DLPackVersion>().read() };
        if version.major != VERSION.major {
            return None;
        }
        // SAFETY: the capsule's producer keeps the table forever, as the caller of `from_capsule` ensures, and its
        // version is the one of this struct.
        let api: &'static Self = unsafe { pointer.cast().as_ref() };
        api.describe.is_some().then_some(api)
    }

    /// Describes a tensor of the producer. Returns `None` on failure, with a Python exception set. Shape and strides
    /// belong to the producer and are valid until the tensor can change.
    ///
    /// # Safety
    /// The object is alive and of the type whose table this is, and the GIL is held.
    #[must_use]
    pub unsafe fn describe(&self, object: NonNull<c_void>) -> Option<DLTensor> {
        let mut tensor = MaybeUninit::uninit();
        // SAFETY: the object is alive and of this table's type, and the GIL is held, as the caller of `describe`
        // ensures. There is room for the description.
        let code = unsafe { self.describe?(object.as_ptr(), tensor.as_mut_ptr()) };
        // SAFETY: 0 means that the producer initialised the struct.
        (code == 0).then(|| unsafe { tensor.assume_init() })
    }

    /// Returns the handle of the stream that the calling thread gives work to on a device; 0 is the default stream.
    /// `None` if the producer does not tell; it may have set a Python exception.
    ///
    /// # Safety
    /// The GIL is held.
    #[must_use]
    pub unsafe fn current_work_stream(&self, device: DLDevice) -> Option<usize> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the GIL is held, as the caller of `current_work_stream` ensures, and the pointer is to a local value.
        let code = unsafe { self.current_work_stream?(device.device_type, device.device_id, &raw mut stream) };
        (code == 0).then(|| stream.addr())
    }
}

#[cfg(test)]
mod tests {
    use std::mem::size_of;
    use std::ptr;

    use super::*;

    /// # Safety
    /// As DLPack's function, but the object is only an address.
    unsafe extern "C" fn describe(object: *mut c_void, tensor: *mut DLTensor) -> c_int {
        if object.addr() == 1 {
            return -1;
        }
        // SAFETY: the caller has room for a tensor, for which all zero bits are valid.
        unsafe { tensor.write_bytes(0, 1) };
        0
    }

    /// # Safety
    /// As DLPack's function.
    unsafe extern "C" fn stream(device_type: c_int, device: i32, stream: *mut *mut c_void) -> c_int {
        if device_type != DLDevice::CUDA {
            return -1;
        }
        // SAFETY: the caller has room for a pointer.
        unsafe { stream.write(ptr::without_provenance_mut(100 + device as usize)) };
        0
    }

    fn table(major: u32, describe: Option<unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> c_int>) -> ExchangeApi {
        let none = ptr::null();
        let version = DLPackVersion { major, minor: 9 };
        let (previous, allocate, export_owned, import_owned) = (none, none, none, none);
        let current_work_stream = Some(stream as _);
        ExchangeApi { version, previous, allocate, export_owned, import_owned, describe, current_work_stream }
    }

    #[test]
    #[cfg(target_pointer_width = "64")]
    fn the_layout_matches_c() {
        let fields = offsets!(ExchangeApi: version, previous, allocate, describe, current_work_stream);
        assert_eq!((fields, size_of::<ExchangeApi>()), ([0, 8, 16, 40, 48], 56));
    }

    #[test]
    fn other_versions_and_incomplete_tables_are_rejected() {
        let wanted = [(1, Some(describe as _), true), (2, Some(describe as _), false), (1, None, false)];
        for (major, function, is_usable) in wanted {
            let table = table(major, function);
            // SAFETY: the table is valid and not used after this block.
            let found = unsafe { ExchangeApi::from_capsule(NonNull::from(&table).cast()) };
            assert_eq!(found.is_some(), is_usable);
        }
    }

    #[test]
    fn the_stream_of_a_device() {
        let table = table(1, Some(describe));
        let stream = |device_type| {
            // SAFETY: this function needs no GIL.
            unsafe { table.current_work_stream(DLDevice { device_type, device_id: 5 }) }
        };
        assert_eq!((stream(DLDevice::CUDA), stream(DLDevice::CPU)), (Some(105), None));
        let table = ExchangeApi { current_work_stream: None, ..table };
        // SAFETY: there is no function to call.
        assert_eq!(unsafe { table.current_work_stream(DLDevice { device_type: 2, device_id: 5 }) }, None);
    }

    #[test]
    fn a_failure_is_not_a_tensor() {
        let table = table(1, Some(describe));
        let object = |address| NonNull::new(ptr::without_provenance_mut(address)).unwrap();
        // SAFETY: this `describe` reads only the address.
        let (refused, described) = unsafe { (table.describe(object(1)), table.describe(object(2))) };
        assert!(refused.is_none());
        assert_eq!(described.unwrap().ndim, 0);
    }
}
