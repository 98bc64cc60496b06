//! Where memory lives: on the host or on a GPU, and the stream that orders the accesses to it.

/// Where memory lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Device {
    /// Memory of the host.
    Host,
    /// Memory of one GPU, copied by its driver.
    Cuda {
        /// The CUDA device index.
        index: u32,
    },
}

/// A stream of a GPU, identified by the handle of its driver (`stream.cuda_stream` in torch).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct StreamHandle(usize);

impl StreamHandle {
    /// The default stream of a device. It always exists.
    pub const DEFAULT: Self = Self(0);

    /// Creates a handle from its raw value.
    ///
    /// # Safety
    /// The handle is 0, 1 or 2 (CUDA's default streams), or a stream of this process that outlives the last use of
    /// the handle. The driver dereferences every other value.
    #[must_use]
    pub const unsafe fn from_raw(handle: usize) -> Self {
        Self(handle)
    }

    /// Returns the raw value.
    #[must_use]
    pub const fn as_raw(self) -> usize {
        self.0
    }
}
