//! Options of a write: its mode and durability.

/// The durability of a write when it is reported as done. Each level includes the previous ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The kernel has accepted the bytes. A power cut may lose them.
    #[default]
    None,
    /// The bytes and the size are on the device (`fdatasync`).
    Data,
    /// The bytes, the metadata and the file's name in its folder are on the device (`fsync` of both).
    Full,
}

/// How a write affects the rest of the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum WriteMode {
    /// Changes the range only. The file grows if the range ends beyond it.
    #[default]
    InPlace,
    /// Makes the file end where the write ends. Longer files are truncated, shorter ones are allocated first.
    WholeFile,
}

/// How a write treats its file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WriteOptions {
    /// Default `InPlace`.
    pub mode: WriteMode,
    /// Default `None`.
    pub durability: Durability,
}
