//! A file, folder, link or pipe of the simulated world.

use std::ffi::OsString;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::folder::{Folder, Inode};
use super::journal::Journal;

/// What lies under a name.
#[derive(Clone, Debug)]
pub enum Node {
    /// A regular file.
    File(Journal),
    /// A folder.
    Folder(Folder),
    /// A symbolic link.
    Link(PathBuf),
    /// A named pipe, as a stand-in for all that is neither of these.
    Pipe,
}

/// What is known of a file, folder, link or pipe.
#[derive(Clone, Debug)]
pub struct About {
    /// What it is.
    pub node: Node,
    /// Which disk it lies on.
    pub disk: usize,
    /// Permission bits.
    pub mode: u32,
    /// When it was made.
    pub born_ns: u64,
    /// When its bytes last changed.
    pub modified_ns: u64,
    /// How many names it has.
    pub links: u64,
    /// Whether somebody else than the code under test made it.
    pub is_foreign: bool,
    /// Where it has its name.
    pub at: Option<(Inode, OsString)>,
}

/// A file, folder, link or pipe.
#[derive(Debug)]
pub struct Entry {
    pub(super) about: About,
    pub(super) memory: OwnedFd,
    /// A copy of its bytes, since they last changed.
    pub(super) copied: Option<Arc<Vec<u8>>>,
}

impl Entry {
    pub(super) fn new(about: About, memory: OwnedFd) -> Self {
        Self { about, memory, copied: None }
    }
}

impl Deref for Entry {
    type Target = About;

    fn deref(&self) -> &About {
        &self.about
    }
}

impl DerefMut for Entry {
    fn deref_mut(&mut self) -> &mut About {
        &mut self.about
    }
}
