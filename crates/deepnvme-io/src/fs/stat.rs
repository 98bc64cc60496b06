//! Metadata of files and file systems: plain values.

/// The type of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link that was not followed.
    Link,
    /// A block device.
    BlockDevice,
    /// A character device.
    CharacterDevice,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
    /// Anything else.
    Unknown,
}

impl FileKind {
    /// Returns the name with its article, for errors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::File => "a regular file",
            Self::Folder => "a folder",
            Self::Link => "a symbolic link",
            Self::BlockDevice => "a block device",
            Self::CharacterDevice => "a character device",
            Self::Pipe => "a pipe",
            Self::Socket => "a socket",
            Self::Unknown => "a file of unknown type",
        }
    }
}

/// The kind of an access control list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AclKind {
    /// The list of the file itself.
    Access,
    /// The list that new files in a folder get.
    Default,
}

/// Identifies a file: two existing files never have the same one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct FileId {
    /// The file system.
    pub device: u64,
    /// The file in the file system.
    pub inode: u64,
}

/// The metadata of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// The type.
    pub kind: FileKind,
    /// The identity.
    pub identity: FileId,
    /// Length in bytes.
    pub bytes: u64,
    /// Number of names.
    pub links: u64,
    /// Permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    /// The owner.
    pub user: u32,
    /// The group.
    pub group: u32,
    /// Last modification, in nanoseconds since 1970.
    pub modified_ns: i128,
    /// Creation, in nanoseconds since 1970, if the file system records it.
    pub born_ns: Option<u64>,
    /// Alignment of memory and offsets for direct I/O, in bytes, if the kernel reports it. Zeros mean no direct I/O.
    pub direct_alignment: Option<(u32, u32)>,
}

/// The space of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Bytes available to an ordinary user.
    pub free_bytes: u64,
    /// Bytes per block.
    pub block_bytes: u64,
}
