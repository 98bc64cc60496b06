//! Names of streams of GPUs.

/// A stream of a GPU, by the handle that its driver and torch have for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StreamHandle(usize);

impl StreamHandle {
    /// The default stream of a device, which is always there.
    pub const DEFAULT: Self = Self(0);

    /// Names a stream.
    ///
    /// # Safety
    /// The handle is 0, 1 or 2, which are the default streams of CUDA, or that of a stream of this process that is not
    /// destroyed before the last use of this name: a driver looks behind any other number as if a stream were there.
    #[must_use]
    pub const unsafe fn from_raw(handle: usize) -> Self {
        Self(handle)
    }

    /// The handle.
    #[must_use]
    pub const fn as_raw(self) -> usize {
        self.0
    }
}
