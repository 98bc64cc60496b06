//! A GPU and its context.

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::Handle;
use crate::capture::RelaxedCapture;
use crate::driver::Driver;
use crate::error::Result;

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: c_int = 11;

/// A GPU with its primary context retained. The CUDA runtime uses the same context, so torch's streams and memory
/// belong to it.
#[derive(Debug)]
pub struct Device {
    driver: &'static Driver,
    index: u32,
    device: c_int,
    context: Handle,
    /// The longest distance between rows of a 2-D copy, in bytes.
    pitch_max: usize,
}

// SAFETY: a context handle may be used from any thread; each use makes it current first.
unsafe impl Send for Device {}
// SAFETY: the value is immutable, and a context handle may be used from several threads: each use makes it current on
// its own thread.
unsafe impl Sync for Device {}

impl Device {
    /// Retains the primary context of a GPU, by CUDA's index of visible devices.
    ///
    /// # Errors
    /// The driver's error, for example that the device does not exist.
    pub fn new(driver: &'static Driver, index: u32) -> Result<Self> {
        let functions = &driver.functions;
        let _capture = RelaxedCapture::enter(driver);
        let (mut device, mut context, mut pitch_max) = (0, ptr::null_mut(), 0);
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: all pointers are to local values.
        unsafe {
            driver.check("cuDeviceGet", (functions.device_get)(&raw mut device, ordinal))?;
            let code = (functions.device_attribute)(&raw mut pitch_max, MAX_PITCH, device);
            driver.check("cuDeviceGetAttribute", code)?;
            driver.check("cuDevicePrimaryCtxRetain", (functions.context_retain)(&raw mut context, device))?;
        }
        let pitch_max = usize::try_from(pitch_max).unwrap_or(0);
        Ok(Self { driver, index, device, context, pitch_max })
    }

    /// Returns the device index.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn pitch_max(&self) -> usize {
        self.pitch_max
    }

    /// Makes the device current on this thread until the guard is dropped. Meanwhile no call of this thread invalidates
    /// a CUDA graph that another thread captures.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enter(&self) -> Result<Current<'_>> {
        let on_this_thread = PhantomData;
        if OWN_THREAD.get() != OwnThread::No {
            return Ok(Current { device: self, leave: Leave::Restore(self.enter_own_thread()?), on_this_thread });
        }
        let capture = RelaxedCapture::enter(self.driver);
        self.push()?;
        Ok(Current { device: self, leave: Leave::Pop(capture), on_this_thread })
    }

    fn push(&self) -> Result<()> {
        // SAFETY: the guard of the caller borrows this value, which retains the context.
        self.driver.check("cuCtxPushCurrent", unsafe { (self.driver.functions.context_push)(self.context) })
    }

    /// Makes the device current on a thread of the library. Returns the context that was current before, if it was a
    /// different one.
    fn enter_own_thread(&self) -> Result<Option<Handle>> {
        let functions = &self.driver.functions;
        let own = OwnThread::Current { context: self.context.addr(), releases: RELEASES.load(Ordering::Relaxed) };
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a local value.
        self.driver.check("cuCtxGetCurrent", unsafe { (functions.context_get)(&raw mut current) })?;
        // Code of others may have set another context meanwhile: an owner of memory that is dropped here, for instance.
        if OWN_THREAD.get() == own && current == self.context {
            return Ok(None);
        }
        if OWN_THREAD.get() == OwnThread::Fresh {
            // The mode of a thread lasts until the thread ends.
            std::mem::forget(RelaxedCapture::enter(self.driver));
        }
        self.set(self.context)?;
        OWN_THREAD.set(own);
        Ok((!current.is_null() && current != self.context).then_some(current))
    }

    fn set(&self, context: Handle) -> Result<()> {
        // SAFETY: the context is retained by this value, or was current on this thread. The driver refuses one that has
        // been destroyed.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.functions.context_set)(context) })
    }
}

/// Declares the current thread as one of the library. The last device stays current there, so that not every call
/// enters and leaves a context.
pub fn own_this_thread() {
    if OWN_THREAD.get() == OwnThread::No {
        OWN_THREAD.set(OwnThread::Fresh);
    }
}

/// Whether a thread belongs to the library, and which context it entered last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OwnThread {
    No,
    Fresh,
    /// The address of the context, and the releases of devices at that time: a later context may have the same address.
    Current {
        context: usize,
        releases: u64,
    },
}

/// Number of devices released so far.
static RELEASES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static OWN_THREAD: Cell<OwnThread> = const { Cell::new(OwnThread::No) };
}

impl Drop for Device {
    fn drop(&mut self) {
        let _capture = RelaxedCapture::enter(self.driver);
        // First: a thread that sees the address of a new context must not take it for this one.
        RELEASES.fetch_add(1, Ordering::Relaxed);
        // SAFETY: releases the context that `new` retained, once. An error means that the driver is shut down, and
        // the context with it.
        let _ = unsafe { (self.driver.functions.context_release)(self.device) };
    }
}

/// A device that is current on this thread.
#[derive(Debug)]
pub struct Current<'a> {
    device: &'a Device,
    leave: Leave,
    /// The context must be left on the same thread.
    on_this_thread: PhantomData<*const ()>,
}

/// The action at the end of a guard.
#[derive(Debug)]
enum Leave {
    /// Pops the context, then restores the capture mode.
    #[expect(dead_code, reason = "its drop restores the mode")]
    Pop(RelaxedCapture),
    /// On a thread of the library: the device stays current, unless another context was current before. That one is set
    /// again.
    Restore(Option<Handle>),
}

impl Current<'_> {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.device
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        match self.leave {
            Leave::Pop(_) => {
                let mut popped = ptr::null_mut();
                // SAFETY: the pointer is to a local value. The context to pop is this guard's: all callers of `enter`
                // keep their guard in a local variable, so guards are dropped in reverse order.
                let _ = unsafe { (self.device.driver.functions.context_pop)(&raw mut popped) };
            }
            Leave::Restore(Some(before)) => {
                let _ = self.device.set(before);
            }
            Leave::Restore(None) => {}
        }
    }
}
