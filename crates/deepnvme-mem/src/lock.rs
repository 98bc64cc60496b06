//! Locking memory into RAM.

use std::fs;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{MlockFlags, mlock, mlock_with, munlock};
use rustix::process::{Resource, getrlimit};

/// Whether memory is locked into RAM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LockState {
    /// The pages stay in RAM until the memory is freed.
    Locked,
    /// The kernel refused to lock. The memory is ordinary and works as well.
    Refused {
        /// The request, the limit that prevented it, and the remedy.
        reason: String,
    },
    /// Locking was not requested.
    NotRequested,
}

/// Percent of the available RAM that may be locked at once. The kernel does not limit root, so locking everything would
/// invoke the OOM killer.
const AVAILABLE_PERCENT_MAX: u64 = 90;

/// Bytes to fault in with one system call. No other thread can map or unmap memory during the call.
const FAULT_BYTES: usize = 16 << 20;

/// Returns whether `len` bytes are too many to keep in RAM: more than nine tenths of what is available.
#[must_use]
pub fn exceeds_available(len: usize) -> bool {
    table_kib("/proc/meminfo", "MemAvailable:").is_some_and(|available_kib| exceeds_ram(len, available_kib).is_some())
}

/// Locks `len` bytes from `start` on. The calling thread faults in all pages, so they come from its NUMA node. A
/// refusal is a state, not an error.
pub(crate) fn lock(start: NonNull<u8>, len: usize) -> LockState {
    let available_kib = table_kib("/proc/meminfo", "MemAvailable:");
    if let Some(reason) = available_kib.and_then(|available_kib| exceeds_ram(len, available_kib)) {
        return LockState::Refused { reason };
    }
    // SAFETY: both callers pass a mapping that they own and that is alive. Locking changes no byte of it.
    match unsafe { lock_in_pieces(start, len) } {
        Ok(()) => LockState::Locked,
        Err(errno) => {
            // A refusal can leave some pages locked. Unlock them all.
            // SAFETY: both callers pass a mapping that they own and that is alive. Unlocking changes no byte of it.
            let _ = unsafe { munlock(start.as_ptr().cast(), len) };
            LockState::Refused { reason: refusal(len, errno) }
        }
    }
}

/// Locks `len` bytes, and faults in all pages. Other threads can map and unmap memory meanwhile.
///
/// # Safety
/// The bytes are in a mapping that the caller owns, and that is alive.
unsafe fn lock_in_pieces(start: NonNull<u8>, len: usize) -> Result<(), Errno> {
    // The whole range first, without its pages: if the limit is too low, no page is faulted in.
    // SAFETY: the caller owns this mapping, and it is alive. Locking changes no byte of it.
    if unsafe { mlock_with(start.as_ptr().cast(), len, MlockFlags::ONFAULT) }.is_err() {
        // The limit is too low, or the system has only this call.
        // SAFETY: the caller owns this mapping, and it is alive. Locking changes no byte of it.
        return unsafe { mlock(start.as_ptr().cast(), len) };
    }
    (0..len).step_by(FAULT_BYTES).try_for_each(|at| {
        // SAFETY: the piece ends within the `len` bytes of the caller's mapping, which is alive. Locking changes no byte.
        unsafe { mlock(start.as_ptr().add(at).cast(), FAULT_BYTES.min(len - at)) }
    })
}

/// Returns the reason if `len` bytes are too many to lock with this much RAM available.
fn exceeds_ram(len: usize, available_kib: u64) -> Option<String> {
    let most_kib = (u128::from(available_kib) * u128::from(AVAILABLE_PERCENT_MAX)) / 100;
    (len as u128 / 1024 > most_kib).then(|| {
        format!(
            "locking {len} bytes would take more than {AVAILABLE_PERCENT_MAX} % of the {available_kib} KiB of RAM that \
             are available; free some, or ask for less"
        )
    })
}

fn refusal(len: usize, errno: Errno) -> String {
    let limit = getrlimit(Resource::Memlock);
    let limit_text = |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    let locked = table_kib("/proc/self/status", "VmLck:").unwrap_or(0);
    let cause = std::io::Error::from(errno);
    format!(
        "mlock of {len} bytes was refused ({cause}): RLIMIT_MEMLOCK is {} (hard limit {}) and {locked} KiB are locked \
         already; raise it with `ulimit -l {}` or more, or `LimitMEMLOCK=` of the service, or `--ulimit memlock=-1` \
         of the container",
        limit_text(limit.current),
        limit_text(limit.maximum),
        (len as u64).div_ceil(1024) + locked,
    )
}

/// Parses the value of `name` in a kernel table with lines like `Name:  123 kB`.
fn table_kib(table: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(table).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_ram_stays_unlocked() {
        assert_eq!(exceeds_ram(900 << 10, 1000), None);
        let reason = exceeds_ram(901 << 10, 1000).unwrap();
        assert!(reason.contains("1000 KiB") && reason.contains("922624 bytes"), "{reason}");
        assert!(exceeds_ram(usize::MAX, 1 << 40).is_some());
        assert_eq!(exceeds_ram(0, 0), None);
    }

    #[test]
    fn kernel_tables_are_parsed() {
        assert!(table_kib("/proc/meminfo", "MemTotal:").unwrap() > 1000);
        assert!(table_kib("/proc/self/status", "VmLck:").is_some());
        assert_eq!(table_kib("/proc/meminfo", "NoSuchLine:"), None);
        assert_eq!(table_kib("/proc/no-such-table", "MemTotal:"), None);
    }
}
