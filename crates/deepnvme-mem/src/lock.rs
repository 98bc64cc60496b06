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

/// Locks `len` bytes from `start` on. All pages are brought into RAM at once, by the calling thread, so that
/// they come from its NUMA node. Never fails: a refusal is an answer too.
pub(crate) fn lock(start: NonNull<u8>, len: usize) -> LockState {
    // The superuser has no limit, so that asking for more than there is would end in the kernel killing a process.
    if let Some(available) =
        status_kib("/proc/meminfo", "MemAvailable:").filter(|kib| *kib < len as u64 / 1024)
    {
        let reason = format!(
            "locking {len} bytes needs more RAM than the {available} KiB available; ask for less"
        );
        return LockState::Plain { reason };
    }
    // SAFETY: the caller's live mapping; locking changes no byte of it.
    match unsafe { mlock(start.as_ptr().cast(), len) } {
        Ok(()) => LockState::Locked,
        Err(errno) => {
            // Some refusals leave pages half locked. Ordinary memory is to be ordinary in full.
            // SAFETY: the same live mapping as above.
            let _ = unsafe { munlock(start.as_ptr().cast(), len) };
            LockState::Plain {
                reason: refusal(len, errno),
            }
        }
    }
}

fn refusal(len: usize, errno: Errno) -> String {
    let limit = getrlimit(Resource::Memlock);
    let in_words =
        |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
    let locked = status_kib("/proc/self/status", "VmLck:").unwrap_or(0);
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
fn status_kib(table: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(table).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim_end().parse().ok()
}
