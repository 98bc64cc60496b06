//! The lock on an index while its set is replaced.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use deepnvme_io::fs::{self, OFlags};
use deepnvme_io::op::Errno;
use deepnvme_io::{Error, ErrorKind, Result};

use crate::sync::{Instant, thread};

/// How long a commit waits for another commit of the same set.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);

const LOCK_STEP: Duration = Duration::from_millis(2);

/// Opens and locks the current index. `Some(None)`: there is no index. `None`: the index changed meanwhile. Fails with
/// `Busy` if another process holds the index for over a minute.
pub(super) fn lock_current(index: &Path) -> Result<Option<Option<Locked>>> {
    let refused = |errno| Error::os("replace", errno).at_path(index);
    let file = match fs::open(index, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0) {
        Err(Errno::NOENT) => return Ok(Some(None)),
        file => file.map_err(refused)?,
    };
    let file = Locked(file);
    let began = Instant::now();
    // On a file system without locks, the later of two commits wins, and the other's members stay.
    while fs::try_lock(file.0.as_fd()) == Ok(false) {
        if began.elapsed() > LOCK_WAIT_MAX {
            let detail = "another process is replacing this set, and does not finish; end it, or wait for it";
            return Err(Error::new(ErrorKind::Busy, "replace", detail).at_path(index));
        }
        thread::sleep(LOCK_STEP);
    }
    let identity = fs::stat_of(file.0.as_fd()).map_err(refused)?.identity;
    Ok(fs::stat_link(index).is_ok_and(|stat| stat.identity == identity).then_some(Some(file)))
}

/// A locked index. Unlocks explicitly: after a fork the child shares the lock, so closing would not release it.
pub(super) struct Locked(pub(super) OwnedFd);

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = fs::unlock(self.0.as_fd());
    }
}
