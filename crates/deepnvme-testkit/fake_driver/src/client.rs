//! The loaded fake driver, for tests of other crates: one per process, used by one test at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use crate::library::library_path;

/// Exclusive use of the process's fake driver. Faults and counters belong to the process, so tests take turns.
pub struct Loaded {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Loaded {
    /// Loads the library at the first call, and makes the code under test find it as the driver and as cuFile. Waits
    /// for exclusive use, and clears faults, counters and violations.
    ///
    /// # Panics
    /// If the library was not built, or `cuInit` fails.
    #[must_use]
    pub fn exclusive() -> Self {
        static EXCLUSIVE: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let alone = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = LIBRARY.get_or_init(|| {
            let path = library_path();
            // SAFETY: Rust's own reads of the environment take the lock of `set_var`. The driver's loader reads it in
            // C, but only after this: tests acquire exclusive use before they run code that loads the driver.
            unsafe {
                std::env::set_var("DEEPNVME_LIBCUDA", &path);
                std::env::set_var("DEEPNVME_LIBCUFILE", &path);
            }
            // SAFETY: loading it runs only Rust's initialisation.
            unsafe { Library::new(&path) }.expect("the fake driver is built with the test that wants it")
        });
        let loaded = Self { library, _alone: alone };
        // SAFETY: the function has this type.
        assert_eq!(unsafe { loaded.function::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit")(0) }, 0);
        loaded.clear();
        loaded
    }

    /// Returns one of its functions.
    ///
    /// # Safety
    /// The symbol has this type.
    ///
    /// # Panics
    /// If there is none of that name.
    #[must_use]
    pub unsafe fn function<F: Copy>(&self, symbol: &str) -> F {
        // SAFETY: the caller of `function` states the type of the symbol, which is the type in the C header that the
        // fake implements.
        *unsafe { self.library.get::<F>(symbol.as_bytes()) }.unwrap()
    }

    /// Clears faults, counters and violations.
    pub fn clear(&self) {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn()>("fake_driver_clear")() };
    }

    /// Makes one call of `symbol` fail with `code`, after `after` more calls.
    pub fn fail(&self, symbol: &str, after: u32, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_uint, c_int);
        let symbol = text(symbol);
        // SAFETY: the function has this type.
        unsafe { self.function::<Fail>("fake_driver_fail")(symbol.as_ptr(), after, code) };
    }

    /// Makes every call of `symbol` fail with `code` from now on.
    pub fn fail_always(&self, symbol: &str, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int);
        let symbol = text(symbol);
        // SAFETY: the function has this type.
        unsafe { self.function::<Fail>("fake_driver_fail_always")(symbol.as_ptr(), code) };
    }

    /// Returns the number of calls of `symbol`.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        let symbol = text(symbol);
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> u64>("fake_driver_calls")(symbol.as_ptr()) }
    }

    /// Returns the number of live objects of a kind.
    #[must_use]
    pub fn live(&self, kind: &str) -> i64 {
        let kind = text(kind);
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> i64>("fake_driver_live")(kind.as_ptr()) }
    }

    /// Asserts that the code under test has released everything but contexts and allocations, and never misused the
    /// driver.
    ///
    /// # Panics
    /// If it has not.
    pub fn assert_released(&self) {
        assert_eq!(self.violations(), "");
        for kind in [
            "streams",
            "events",
            "registrations",
            "cufile_handles",
            "cufile_buffers",
            "cufile_batches",
            "cufile_drivers",
        ] {
            assert_eq!(self.live(kind), 0, "{kind} that were not released");
        }
    }

    /// Returns a counter.
    #[must_use]
    pub fn count(&self, counter: &str) -> u64 {
        let counter = text(counter);
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> u64>("fake_driver_count")(counter.as_ptr()) }
    }

    /// Returns the first 64 KiB of the violations; empty if there are none.
    ///
    /// # Panics
    /// If the text is not UTF-8.
    #[must_use]
    pub fn violations(&self) -> String {
        type Violations = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        let mut text = vec![0; 1 << 16];
        // SAFETY: the function has this type, and writes at most that many bytes.
        let length =
            unsafe { self.function::<Violations>("fake_driver_violations")(text.as_mut_ptr().cast(), text.len()) };
        text.truncate(length);
        String::from_utf8(text).unwrap()
    }

    /// Writes device memory immediately, regardless of queued work.
    ///
    /// # Panics
    /// If the device has no such memory.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        type Poke = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
        // SAFETY: the function has this type, and reads that many bytes.
        let code = unsafe { self.function::<Poke>("fake_driver_poke")(at, bytes.as_ptr().cast(), bytes.len()) };
        assert_eq!(code, 0, "{} bytes at {at:#x}", bytes.len());
    }

    /// Reads device memory immediately.
    ///
    /// # Panics
    /// If the device has no such memory.
    #[must_use]
    pub fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        type Peek = unsafe extern "C" fn(u64, *mut c_void, usize) -> c_int;
        let mut seen = vec![0; bytes];
        // SAFETY: the function has this type, and writes that many bytes.
        let code = unsafe { self.function::<Peek>("fake_driver_peek")(at, seen.as_mut_ptr().cast(), bytes) };
        assert_eq!(code, 0, "{bytes} bytes at {at:#x}");
        seen
    }
}

fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}
