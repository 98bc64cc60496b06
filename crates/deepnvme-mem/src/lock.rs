//! Locking memory into RAM, and what the kernel answered, kept as a value.

use std::fs;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{mlock, munlock};
use rustix::process::{Resource, getrlimit};

/// Whether memory is locked into RAM, and why not where it is not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LockState {
    /// The pages stay in RAM until the memory is freed.
    Locked,
    /// Locking was asked for and refused; the memory is ordinary and works all the same.
    Plain {
        /// What was asked, which limit stood in the way, and what to do about it.
        reason: String,
    },
    /// Nobody asked for locked memory.
    NotAsked,
}

/// The most of the available RAM that may be locked at once. The superuser has no limit of its own, so that asking for
/// all there is would end in the kernel killing a process.
const AVAILABLE_PERCENT_MAX: u64 = 90;

/// Locks `len` bytes from `start` on. All pages are brought into RAM at once, by the calling thread, so that
/// they come from its NUMA node. Never fails: a refusal is an answer too.
pub(crate) fn lock(start: NonNull<u8>, len: usize) -> LockState {
    let available_kib = table_kib("/proc/meminfo", "MemAvailable:");
    if let Some(reason) = available_kib.and_then(|available_kib| beyond_ram(len, available_kib)) {
        return LockState::Plain { reason };
    }
    // SAFETY: the caller's live mapping; locking changes no byte of it.
    match unsafe { mlock(start.as_ptr().cast(), len) } {
        Ok(()) => LockState::Locked,
        Err(errno) => {
            // Some refusals leave pages half locked. Ordinary memory is to be ordinary in full.
            // SAFETY: the same live mapping as above.
            let _ = unsafe { munlock(start.as_ptr().cast(), len) };
            LockState::Plain { reason: refusal(len, errno) }
        }
    }
}

/// Why `len` bytes are too many to lock on a machine with so much RAM left, if they are.
fn beyond_ram(len: usize, available_kib: u64) -> Option<String> {
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
    let in_words = |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    let locked = table_kib("/proc/self/status", "VmLck:").unwrap_or(0);
    let cause = std::io::Error::from(errno);
    format!(
        "mlock of {len} bytes was refused ({cause}): RLIMIT_MEMLOCK is {} (hard limit {}) and {locked} KiB are locked \
         already; raise it with `ulimit -l {}` or more, or `LimitMEMLOCK=` of the service, or `--ulimit memlock=-1` \
         of the container",
        in_words(limit.current),
        in_words(limit.maximum),
        (len as u64).div_ceil(1024) + locked,
    )
}

/// The number behind `name` in one of the kernel's `Name:  123 kB` tables.
fn table_kib(table: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(table).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_ram_is_never_locked() {
        assert_eq!(beyond_ram(900 << 10, 1000), None);
        let reason = beyond_ram(901 << 10, 1000).unwrap();
        assert!(reason.contains("1000 KiB") && reason.contains("922624 bytes"), "{reason}");
        assert!(beyond_ram(usize::MAX, 1 << 40).is_some());
        assert_eq!(beyond_ram(0, 0), None);
    }

    #[test]
    fn the_tables_of_the_kernel_are_understood() {
        assert!(table_kib("/proc/meminfo", "MemTotal:").unwrap() > 1000);
        assert!(table_kib("/proc/self/status", "VmLck:").is_some());
        assert_eq!(table_kib("/proc/meminfo", "NoSuchLine:"), None);
        assert_eq!(table_kib("/proc/no-such-table", "MemTotal:"), None);
    }
}
