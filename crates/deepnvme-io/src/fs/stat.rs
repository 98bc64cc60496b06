//! What the kernel says of files and file systems: plain values.

/// What a name refers to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link, where it was not followed.
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

impl Kind {
    /// With its article, for errors.
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
            Self::Unknown => "no regular file",
        }
    }
}

/// Which file it is: no two files have the same identity while both exist.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Identity {
    /// The file system.
    pub device: u64,
    /// The file in it.
    pub inode: u64,
}

/// What the kernel knows of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// What it is.
    pub kind: Kind,
    /// Which one it is.
    pub identity: Identity,
    /// Its length.
    pub bytes: u64,
    /// How many names it has.
    pub links: u64,
    /// Permission bits, with setuid, setgid and sticky.
    pub mode: u32,
    /// Who owns it.
    pub user: u32,
    /// When its bytes last changed, in nanoseconds since 1970.
    pub modified_ns: i128,
    /// When it was created, in nanoseconds since 1970, where the file system keeps that.
    pub born_ns: Option<u64>,
    /// Alignment of memory and of offsets for direct I/O, in bytes, where the kernel tells. Zeros: there is none.
    pub direct_alignment: Option<(u32, u32)>,
}

/// How much room a file system has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Bytes that an ordinary user may still take.
    pub free_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}
