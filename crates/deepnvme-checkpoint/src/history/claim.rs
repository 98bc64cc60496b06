//! The claim to a folder: its lock, and the cleanup after killed writers.

use deepnvme_io::fs;

use super::lock::{Holder, Lock, LockOutcome};
use super::state::History;
use super::{private, retention};
use crate::error::Result;
use crate::sync::lock;

/// The result of taking the lock. Empty if this process, or another one of its group, already holds it.
#[derive(Debug, Default)]
pub struct Claim {
    /// Checkpoints in the folder that the manifest does not list. They stay.
    pub unlisted: Vec<String>,
    /// Whether the file system lacks locks.
    pub lacks_locks: bool,
}

impl History {
    /// Takes the lock unless this process or another one of its group holds it. After taking it, the leader of
    /// several processes reads the manifest again, and any process cleans up after killed writers. On a file system
    /// without locks, the leader reads the manifest, and nothing is cleaned up. A claim that fails holds no lock.
    ///
    /// # Errors
    /// `Locked` if another process saves into the folder, `Manifest` if the manifest is damaged, or `Io`.
    pub fn claim(&self, holder: &Holder, is_leader: bool) -> Result<Claim> {
        let _turn = lock(&self.turn);
        self.refuse_link()?;
        if lock(&self.lock).as_ref().is_some_and(Lock::is_there) {
            return Ok(Claim::default());
        }
        // If this process has a lock, its file was removed: lock the new one.
        drop(lock(&self.lock).take());
        let lacks_locks = match Lock::take(&self.folder, holder)? {
            LockOutcome::Held(taken) => {
                // Store it immediately: a child that is forked from here on must find and close it.
                *lock(&self.lock) = Some(taken);
                false
            }
            LockOutcome::Shared => return Ok(Claim::default()),
            LockOutcome::Unsupported => true,
        };
        let unlisted = self.take_over(is_leader, lacks_locks);
        if unlisted.is_err() {
            // Otherwise the next claim would find the lock held, and skip the steps that failed here.
            drop(lock(&self.lock).take());
        }
        Ok(Claim { unlisted: unlisted?, lacks_locks })
    }

    /// Reads the manifest if this process is the leader, and cleans up. Returns the unlisted checkpoints.
    fn take_over(&self, is_leader: bool, lacks_locks: bool) -> Result<Vec<String>> {
        if is_leader {
            self.adopt(self.read_file()?);
        }
        let manifest = self.manifest();
        let names = fs::entries(&self.folder).map_err(|errno| self.refused("list", errno))?;
        let unlisted = retention::unlisted(&manifest, &names);
        // Without a lock, private files may be in use by another writer.
        if !lacks_locks {
            let known = manifest.names();
            private::remove_leftovers(&self.folder, &names, |name| known.contains(name));
        }
        Ok(unlisted)
    }

    /// Lists the files in the folder whose names look like checkpoints, and that the manifest does not list. Empty if
    /// the folder cannot be read.
    #[must_use]
    pub fn unlisted(&self) -> Vec<String> {
        fs::entries(&self.folder).map_or_else(|_| Vec::new(), |names| retention::unlisted(&self.manifest(), &names))
    }

    /// Returns whether this process holds the lock.
    #[must_use]
    pub fn is_claimed(&self) -> bool {
        lock(&self.lock).is_some()
    }

    /// Releases the lock.
    pub fn release(&self) {
        let _turn = lock(&self.turn);
        drop(lock(&self.lock).take());
    }

    /// Closes the lock file in a forked child, while the parent still holds it. Never waits.
    pub fn abandon(&self) {
        if let Ok(mut lock) = self.lock.try_lock() {
            drop(lock.take());
        }
    }
}
