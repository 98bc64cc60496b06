//! cuFile's own count of the paths that transfers took: nvidia-fs, peer-to-peer, or copies through the host.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use super::CuFile;
use super::statistics_functions::{Functions, TransferCounts};

/// The level that counts by GPU and by path.
const LEVEL: c_int = 3;

/// Held while counting: the level belongs to the process.
static TURN: Mutex<()> = Mutex::new(());

/// Counts transfers by GPU until this is dropped, and restores the user's level then.
struct Counting<'a> {
    functions: &'a Functions,
    level_before: c_int,
}

impl<'a> Counting<'a> {
    fn start(functions: &'a Functions) -> Option<Self> {
        let mut level_before = 0;
        // SAFETY: the pointer is to a local value, the level is a valid one, and the driver is open while `CuFile`
        // lives.
        unsafe {
            if (functions.get_level)(&raw mut level_before).code != 0 || (functions.set_level)(LEVEL).code != 0 {
                return None;
            }
            let counting = Self { functions, level_before };
            ((functions.start)().code == 0).then_some(counting)
        }
    }
}

impl Drop for Counting<'_> {
    fn drop(&mut self) {
        // SAFETY: the level was the library's own, and the driver is open while `CuFile` lives.
        unsafe {
            // Statistics that the user has switched on go on.
            if self.level_before == 0 {
                let _ = (self.functions.stop)();
            }
            let _ = (self.functions.set_level)(self.level_before);
        }
    }
}

impl CuFile {
    /// Returns whether the library can count transfers by their paths.
    #[must_use]
    pub fn has_statistics(&self) -> bool {
        self.functions().statistics.is_some()
    }

    /// Calls `transfers`. Returns its result, and cuFile's count of all transfers in this direction meanwhile,
    /// including those of other code in the process. The count is `None` if the library has no statistics, or does not
    /// give them.
    pub fn counted<T>(&self, is_read: bool, transfers: impl FnOnce() -> T) -> (T, Option<TransferCounts>) {
        let functions = self.functions().statistics.as_ref();
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let counting = functions.and_then(Counting::start);
        let counts = || counting.as_ref()?.functions.counts(is_read);
        let before = counts();
        let result = transfers();
        let difference = before.zip(counts()).map(|(before, after)| TransferCounts {
            nvidia_fs: after.nvidia_fs.saturating_sub(before.nvidia_fs),
            peer_to_peer: after.peer_to_peer.saturating_sub(before.peer_to_peer),
            posix: after.posix.saturating_sub(before.posix),
        });
        (result, difference)
    }
}
