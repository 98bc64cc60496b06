//! Take the lock of a folder, and clean up after killed writers.

use deepnvme_io::fs;

use super::lock::{Holder, Lock, Taken};
use super::state::{History, locked};
use super::{plan, private};
use crate::error::Result;

/// The result of taking the lock.
#[derive(Debug, Default)]
pub struct Claim {
    /// Checkpoints in the folder that the manifest does not list. They stay.
    pub unlisted: Vec<String>,
    /// Whether the file system lacks locks.
    pub is_unlocked: bool,
}

impl History {
    /// Takes the lock unless this process or another one with the same token holds it. After taking it, the leader of
    /// several processes reads the manifest again, and any process cleans up after killed writers. On a file system
    /// without locks, the leader reads the manifest, and nothing is cleaned up.
    ///
    /// # Errors
    /// `Locked` if another process saves into the folder, `Manifest` if the manifest is damaged, or `Io`.
    pub fn claim(&self, holder: &Holder, is_leader: bool) -> Result<Claim> {
        let _turn = locked(&self.turn);
        self.refuse_link()?;
        if locked(&self.lock).as_ref().is_some_and(Lock::is_there) {
            return Ok(Claim::default());
        }
        // If this process has a lock, its file was removed: lock the new one.
        drop(locked(&self.lock).take());
        let mut claim = Claim::default();
        match Lock::take(&self.folder, holder)? {
            Taken::Held(lock) => *locked(&self.lock) = Some(lock),
            Taken::Shared => return Ok(claim),
            Taken::Unsupported => claim.is_unlocked = true,
        }
        if is_leader {
            let read = self.read_file();
            if read.is_err() {
                drop(locked(&self.lock).take());
            }
            self.adopt(read?);
        }
        let manifest = self.manifest();
        let names = fs::entries(&self.folder).map_err(|errno| self.refused("list", errno))?;
        claim.unlisted = plan::unlisted(&manifest, &names);
        // Without a lock, private files may be in use by another writer.
        if !claim.is_unlocked {
            private::remove_leftovers(&self.folder, &names, |name| manifest.knows(name));
        }
        Ok(claim)
    }

    /// Lists the files in the folder whose names look like checkpoints, and that the manifest does not list. Empty if
    /// the folder cannot be read.
    #[must_use]
    pub fn unlisted(&self) -> Vec<String> {
        fs::entries(&self.folder).map_or_else(|_| Vec::new(), |names| plan::unlisted(&self.manifest(), &names))
    }

    /// Returns whether this process holds the lock.
    #[must_use]
    pub fn is_claimed(&self) -> bool {
        locked(&self.lock).is_some()
    }

    /// Releases the lock.
    pub fn release(&self) {
        let _turn = locked(&self.turn);
        drop(locked(&self.lock).take());
    }

    /// In a forked child: closes the lock file, which the parent still holds. Never waits.
    pub fn abandon(&self) {
        if let Ok(mut lock) = self.lock.try_lock() {
            drop(lock.take());
        }
    }
}
