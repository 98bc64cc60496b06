//! What crosses the C boundary: result codes, and pointers that are looked at before they are followed.
//!
//! [`Out`] and [`In`] have the layout of a C pointer. Only a caller on the other side of the boundary can make
//! one, so the exported functions need no unsafe code of their own to answer through them.

use std::ffi::{CStr, c_char, c_void};
use std::fmt;

/// `CUresult`.
pub(crate) type Code = i32;
/// `CUdevice`: an ordinal.
pub(crate) type Device = i32;
/// `CUcontext`, `CUstream`, `CUevent`: numbers that are never given out twice, so a stale one is always known.
pub(crate) type Handle = u64;
/// What a call ends with; the error is the code that it returns.
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
pub(crate) const UNKNOWN: Code = 999;

/// `CUhostFn`.
pub(crate) type HostFn = Option<unsafe extern "C" fn(*mut c_void)>;

/// A pointer to room for a `T`, out of C.
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
    /// Whether there is anywhere to write to.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address, to carry the pointer to another thread.
    pub(crate) fn address(self) -> usize {
        self.0.expose_provenance()
    }

    /// The pointer that [`Out::address`] was asked of.
    pub(crate) fn at(address: usize) -> Self {
        Self(std::ptr::with_exposed_provenance_mut(address))
    }

    /// Answers; a null pointer is the caller's mistake.
    pub(crate) fn put(self, value: T) -> Outcome {
        self.put_at(0, value)
    }

    /// Answers in the element `index` of an array.
    pub(crate) fn put_at(self, index: usize, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: only C makes an `Out`, and its contract is room for what the function documents; nothing is
        // assumed about alignment or about what was there.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// What stands there now, for parameters that go both ways.
    pub(crate) fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

/// A pointer to a `T`, or to an array of them, out of C.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Whether nothing was given.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// What stands there; a null pointer is the caller's mistake.
    pub(crate) fn get(&self) -> Outcome<T> {
        self.get_at(0)
    }

    /// The element `index` of an array.
    pub(crate) fn get_at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: only C makes an `In`, and its contract is a value, or an array as long as it says beside it.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

impl In<c_char> {
    /// A C string; what is not UTF-8 in it is replaced.
    pub(crate) fn text(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the contract of the functions that take one is a string that ends with a zero byte.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
