//! Snapshots of all disks, without open descriptors. Snapshots share the bytes of unchanged files.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::folder::Inode;
use super::journal::ChangeId;
use super::tree::{InodeEntry, Metadata, Node, Tree, memory_of, new_memory, write_whole};

/// Bytes of a file.
type Content = Arc<Vec<u8>>;

/// All disks at a moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    entries: Vec<(Inode, Metadata, Option<Content>)>,
    roots: Vec<Inode>,
    next_inode: Inode,
    last_change: ChangeId,
    now_ns: u64,
}

impl Snapshot {
    /// Creates disks with the snapshot's contents.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn restored(&self) -> Result<Tree, Errno> {
        let (mut entries, mut by_memory) = (BTreeMap::new(), HashMap::new());
        for (inode, metadata, content) in &self.entries {
            let memory = new_memory()?;
            by_memory.insert(memory_of(memory.as_fd())?, *inode);
            if let Some(content) = content {
                write_whole(memory.as_fd(), content)?;
            }
            entries.insert(*inode, InodeEntry::new(metadata.clone(), memory));
        }
        let Self { roots, next_inode, last_change, now_ns, .. } = self;
        let (roots, next_inode, last_change, now_ns) = (roots.clone(), *next_inode, *last_change, *now_ns);
        Ok(Tree { entries, by_memory, roots, next_inode, last_change, now_ns })
    }
}

impl Tree {
    /// Takes a snapshot of the disks.
    ///
    /// # Errors
    /// If the kernel refuses to read.
    pub fn snapshot(&mut self) -> Result<Snapshot, Errno> {
        let inodes: Vec<Inode> = self.entries.keys().copied().collect();
        let mut entries = Vec::with_capacity(inodes.len());
        for inode in inodes {
            let copied = match self.entry(inode)? {
                entry if !matches!(entry.node, Node::File(_)) => None,
                entry if entry.copied.is_some() => entry.copied.clone(),
                _ => {
                    let copied = Some(Arc::new(self.content(inode)?));
                    self.entry_mut(inode)?.copied.clone_from(&copied);
                    copied
                }
            };
            entries.push((inode, (**self.entry(inode)?).clone(), copied));
        }
        let Self { roots, next_inode, last_change, now_ns, .. } = self;
        let (roots, next_inode, last_change, now_ns) = (roots.clone(), *next_inode, *last_change, *now_ns);
        Ok(Snapshot { entries, roots, next_inode, last_change, now_ns })
    }
}
