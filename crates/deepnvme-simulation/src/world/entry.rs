//! A file, folder, link or pipe of the simulated world.

use std::ffi::OsString;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::folder::{Folder, Inode};
use super::journal::Journal;

/// The kind of an entry.
#[derive(Clone, Debug)]
pub enum Node {
    /// A regular file.
    File(Journal),
    /// A folder.
    Folder(Folder),
    /// A symbolic link.
    Link(PathBuf),
    /// A named pipe, which stands for all other kinds.
    Pipe,
}

/// Metadata of an entry.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// Kind of the entry.
    pub node: Node,
    /// Disk of the entry.
    pub disk: usize,
    /// Permission bits.
    pub mode: u32,
    /// Creation time.
    pub born_ns: u64,
    /// Time of the last change of its bytes.
    pub modified_ns: u64,
    /// Number of names.
    pub links: u64,
    /// Whether it was created outside the code under test.
    pub is_foreign: bool,
    /// Folder and name of the entry.
    pub at: Option<(Inode, OsString)>,
}

/// A file, folder, link or pipe: its metadata, and its bytes.
#[derive(Debug)]
pub struct InodeEntry {
    pub(super) metadata: Metadata,
    /// A memfd with its present bytes.
    pub(super) memory: OwnedFd,
    /// Copy of its bytes since their last change.
    pub(super) copied: Option<Arc<Vec<u8>>>,
}

impl InodeEntry {
    pub(super) fn new(metadata: Metadata, memory: OwnedFd) -> Self {
        Self { metadata, memory, copied: None }
    }
}

impl Deref for InodeEntry {
    type Target = Metadata;

    fn deref(&self) -> &Metadata {
        &self.metadata
    }
}

impl DerefMut for InodeEntry {
    fn deref_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }
}
