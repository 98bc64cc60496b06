//! Memory of a GPU as cuFile wants to be told of it.

/// A stretch of memory by the address that it is registered by, and how far behind that it begins: cuFile knows registered memory
/// by its first byte only, and takes any other address for memory that it has not been told of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSpan {
    /// Where the registered memory begins; of other memory, where the stretch itself does.
    pub base: usize,
    /// From there to the first byte of the stretch.
    pub skip: usize,
    /// Its length.
    pub bytes: usize,
}

impl DeviceSpan {
    /// A stretch of memory that is not registered.
    #[must_use]
    pub const fn unregistered(address: usize, bytes: usize) -> Self {
        Self { base: address, skip: 0, bytes }
    }
}
