//! The loaded stand-in, as tests of other crates ask it: one for the process, one test at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;

use crate::library_path;

/// The right to use the process's stand-in: faults and counters are the process's, so that tests take turns.
pub struct Loaded {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

impl Loaded {
    /// Loads it at the first call, and has the code under test find it as the driver and as cuFile; waits for its turn,
    /// and forgets faults, counters and violations.
    ///
    /// # Panics
    /// When it has not been built.
    #[must_use]
    pub fn alone() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = LIBRARY.get_or_init(|| {
            let path = library_path();
            // SAFETY: whoever tests takes its turn before anything else, so that nobody looks at the environment yet.
            unsafe {
                std::env::set_var("DEEPNVME_LIBCUDA", &path);
                std::env::set_var("DEEPNVME_LIBCUFILE", &path);
            }
            // SAFETY: loading it runs nothing but the start of Rust's library.
            unsafe { Library::new(&path) }.expect("the stand-in is built with the test that wants it")
        });
        let loaded = Self { library, _alone: alone };
        // SAFETY: the function has this type.
        assert_eq!(unsafe { loaded.function::<unsafe extern "C" fn(c_uint) -> c_int>("cuInit")(0) }, 0);
        loaded.clear();
        loaded
    }

    /// One of its functions.
    ///
    /// # Safety
    /// The symbol has this type.
    ///
    /// # Panics
    /// When there is none of that name.
    #[must_use]
    pub unsafe fn function<F: Copy>(&self, symbol: &str) -> F {
        // SAFETY: passed on to the caller.
        *unsafe { self.library.get::<F>(symbol.as_bytes()) }.unwrap()
    }

    /// Forgets faults, counters and violations.
    pub fn clear(&self) {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn()>("standin_clear")() };
    }

    /// Lets the call of `symbol` that comes `after` calls from now fail with `code`, once.
    pub fn fail(&self, symbol: &str, after: u32, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_uint, c_int);
        let symbol = text(symbol);
        // SAFETY: the function has this type.
        unsafe { self.function::<Fail>("standin_fail")(symbol.as_ptr(), after, code) };
    }

    /// Lets every call of `symbol` fail with `code` from now on.
    pub fn fail_always(&self, symbol: &str, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int);
        let symbol = text(symbol);
        // SAFETY: the function has this type.
        unsafe { self.function::<Fail>("standin_fail_always")(symbol.as_ptr(), code) };
    }

    /// How often `symbol` was called.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        let symbol = text(symbol);
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> u64>("standin_calls")(symbol.as_ptr()) }
    }

    /// How many things of a kind have not been given back.
    #[must_use]
    pub fn live(&self, kind: &str) -> i64 {
        let kind = text(kind);
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> i64>("standin_live")(kind.as_ptr()) }
    }

    /// What a counter has come to.
    #[must_use]
    pub fn count(&self, counter: &str) -> u64 {
        let counter = text(counter);
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> u64>("standin_count")(counter.as_ptr()) }
    }

    /// What a real GPU would have suffered from; nothing is what it ought to be.
    ///
    /// # Panics
    /// When it is no text.
    #[must_use]
    pub fn violations(&self) -> String {
        type Violations = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        let mut text = vec![0; 1 << 16];
        // SAFETY: the function has this type, and writes as many bytes at the most.
        let length = unsafe { self.function::<Violations>("standin_violations")(text.as_mut_ptr().cast(), text.len()) };
        text.truncate(length);
        String::from_utf8(text).unwrap()
    }

    /// Changes memory of a device at once, past everything.
    ///
    /// # Panics
    /// When the device has no such memory.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        type Poke = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
        // SAFETY: the function has this type, and looks at so many bytes.
        let code = unsafe { self.function::<Poke>("standin_poke")(at, bytes.as_ptr().cast(), bytes.len()) };
        assert_eq!(code, 0, "{} bytes at {at:#x}", bytes.len());
    }

    /// What memory of a device holds now.
    ///
    /// # Panics
    /// When the device has no such memory.
    #[must_use]
    pub fn peek(&self, at: u64, bytes: usize) -> Vec<u8> {
        type Peek = unsafe extern "C" fn(u64, *mut c_void, usize) -> c_int;
        let mut seen = vec![0; bytes];
        // SAFETY: the function has this type, and fills so many bytes.
        let code = unsafe { self.function::<Peek>("standin_peek")(at, seen.as_mut_ptr().cast(), bytes) };
        assert_eq!(code, 0, "{bytes} bytes at {at:#x}");
        seen
    }
}

fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}
