//! A fake driver for each test: a copy of the library that only this test has loaded, with a context that is current.

#![allow(dead_code, reason = "every test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "these are tests")]

pub(crate) mod api;
pub(crate) mod codes;
pub(crate) mod files;

use std::ffi::{CString, c_void};
use std::ops::Deref;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) use api::Api;
pub(crate) use deepnvme_fake_driver::pattern;
use libloading::Library;

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;
/// Long enough to show work that a test does not wait for.
pub(crate) const SLOW_US: u64 = 150_000;

/// A loaded fake driver.
pub(crate) struct FakeDriver {
    api: Api,
}

impl Deref for FakeDriver {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

impl FakeDriver {
    /// Loads a copy of its own; nothing is initialised.
    pub(crate) fn load() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let copy = deepnvme_fake_driver::private_copy(folder.path()).unwrap();
        // SAFETY: loading it runs only the start-up code of Rust's standard library.
        let library = unsafe { Library::new(copy) }.unwrap();
        let api = Api::of(&library);
        std::mem::forget(library);
        Self { api }
    }

    /// Loads one, initialises it, and makes the context of device 0 current.
    pub(crate) fn with_context() -> Self {
        let fake_driver = Self::load();
        assert_eq!((fake_driver.cuInit)(0), 0);
        fake_driver.enter(0);
        fake_driver
    }

    /// Makes the context of a device current on this thread, and returns it.
    pub(crate) fn enter(&self, device: i32) -> u64 {
        let context = made(|out| (self.cuDevicePrimaryCtxRetain)(out, device));
        assert_eq!((self.cuCtxSetCurrent)(context), 0);
        context
    }

    pub(crate) fn stream(&self, flags: u32) -> u64 {
        made(|out| (self.cuStreamCreate)(out, flags))
    }

    pub(crate) fn event(&self) -> u64 {
        made(|out| (self.cuEventCreate)(out, 0))
    }

    pub(crate) fn alloc(&self, bytes: usize) -> u64 {
        made(|out| (self.cuMemAlloc_v2)(out, bytes))
    }

    /// Device memory that holds the pattern of a seed.
    pub(crate) fn alloc_with(&self, bytes: usize, seed: u64) -> u64 {
        let at = self.alloc(bytes);
        assert_eq!((self.fake_driver_poke)(at, pattern(seed, bytes).as_ptr().addr(), bytes), 0);
        at
    }

    /// Allocates pinned host memory. It is valid until the test frees it.
    pub(crate) fn pinned(&self, bytes: usize) -> &'static mut [u8] {
        let address = made(|out: &mut usize| (self.cuMemHostAlloc)(out, bytes, 0));
        // SAFETY: the fake driver has just allocated `bytes` bytes there. No test uses the slice after it frees them.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), bytes) }
    }

    /// Returns the present bytes of device memory.
    pub(crate) fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        let mut seen = vec![0; bytes];
        assert_eq!((self.fake_driver_peek)(at, seen.as_mut_ptr().expose_provenance(), bytes), 0);
        seen
    }

    pub(crate) fn violations(&self) -> String {
        let length = (self.fake_driver_violations)(std::ptr::null_mut(), 0);
        let mut text = vec![0; length + 1];
        assert_eq!((self.fake_driver_violations)(text.as_mut_ptr(), text.len()), length);
        text.truncate(length);
        String::from_utf8(text).unwrap()
    }

    pub(crate) fn live(&self, kind: &str) -> i64 {
        (self.fake_driver_live)(c(kind).as_ptr())
    }

    pub(crate) fn count(&self, counter: &str) -> u64 {
        (self.fake_driver_count)(c(counter).as_ptr())
    }

    pub(crate) fn calls(&self, symbol: &str) -> u64 {
        (self.fake_driver_calls)(c(symbol).as_ptr())
    }

    pub(crate) fn fail(&self, symbol: &str, after: u32, code: i32) {
        (self.fake_driver_fail)(c(symbol).as_ptr(), after, code);
    }
}

/// Returns the value that a successful function writes through its first argument.
pub(crate) fn made<T: Default>(call: impl FnOnce(&mut T) -> i32) -> T {
    let mut out = T::default();
    assert_eq!(call(&mut out), 0);
    out
}

/// Asserts that bytes are the same, without printing all of them.
pub(crate) fn same(left: &[u8], right: &[u8]) {
    assert_eq!(left.len(), right.len());
    let first = left.iter().zip(right).position(|(left, right)| left != right);
    assert_eq!(first, None, "the first byte that differs, of {}", left.len());
}

/// The address of a slice, to hand out.
pub(crate) fn at(bytes: &mut [u8]) -> usize {
    bytes.as_mut_ptr().expose_provenance()
}

pub(crate) fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

/// Runs an ignored test of this file in a process of its own, with an environment of its own.
pub(crate) fn in_child(test: &str, environment: &[(&str, &str)]) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--test-threads=1"]).envs(environment.iter().copied());
    command.output().unwrap().status
}

/// The signal that ended a process.
pub(crate) fn signal_of(status: ExitStatus) -> Option<i32> {
    status.signal()
}

/// A host function: adds one to a counter.
pub(crate) extern "C" fn count_up(counter: *mut c_void) {
    // SAFETY: the tests hand over a counter that outlives the stream's work.
    unsafe { &*counter.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}
