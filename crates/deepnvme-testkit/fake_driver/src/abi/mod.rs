//! The C boundary: result codes and handles of `cuda.h`, checked pointers, and panics. `cufile` has what `cufile.h` adds.
//!
//! [`Out`] and [`In`] have the layout of a C pointer. Only a C caller creates them ([`Out::at`] restores one of these),
//! so the exported functions need no unsafe code to use them.

pub(crate) mod cufile;

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `CUresult`.
pub(crate) type Code = i32;
/// `CUdevice`: an ordinal.
pub(crate) type Device = i32;
/// `CUcontext`, `CUstream`, `CUevent`: numbers that are never reused, so stale handles are detected.
pub(crate) type Handle = u64;
/// The result of a call; the error is its code.
pub(crate) type Outcome<T = ()> = Result<T, Code>;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
pub(crate) const CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
pub(crate) const HOST_MEMORY_NOT_REGISTERED: Code = 713;
pub(crate) const NOT_PERMITTED: Code = 800;
pub(crate) const NOT_SUPPORTED: Code = 801;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;
pub(crate) const CAPTURE_INVALIDATED: Code = 901;
pub(crate) const CAPTURE_IMPLICIT: Code = 906;
pub(crate) const UNKNOWN: Code = 999;

/// `CUhostFn`.
pub(crate) type HostFn = Option<unsafe extern "C" fn(*mut c_void)>;

/// A pointer to space for a `T`, from C.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> fmt::Debug for Out<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl<T> Out<T> {
    /// Returns whether the pointer is null.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the address, to pass the pointer to another thread.
    pub(crate) fn address(self) -> usize {
        self.0.expose_provenance()
    }

    /// Restores a pointer from [`Out::address`].
    pub(crate) fn at(address: usize) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address))
    }

    /// Writes a value; a null pointer is an error.
    pub(crate) fn put(self, value: T) -> Outcome {
        self.put_at(0, value)
    }

    /// Writes an element of an array.
    pub(crate) fn put_at(self, index: usize, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: only C creates an `Out`, which `Out::at` may restore, with space for the documented result. Alignment
        // and previous contents are not assumed.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// Reads the current value, for in-out parameters.
    pub(crate) fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

/// A pointer to a `T` or an array of them, from C.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Returns whether the pointer is null.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Reads the value; a null pointer is an error.
    pub(crate) fn get(&self) -> Outcome<T> {
        self.get_at(0)
    }

    /// Reads an element of an array.
    pub(crate) fn get_at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: only C creates an `In` (or the `Out` of `Out::get`), with a value or an array of the stated length.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

impl In<c_char> {
    /// Reads a C string, replacing invalid UTF-8.
    pub(crate) fn text(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the functions require a string that ends with a zero byte.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// Returns the result of the body, or `None` if it panicked. The panic was already printed. No panic may cross the C
/// boundary.
pub(crate) fn without_panic<T>(body: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(body)).ok()
}
