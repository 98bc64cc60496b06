//! Explains a refusal with a reason and a remedy, from a few facts about the process.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::backend::BackendKind;
use crate::error::Error;
use crate::fs::system_text;

/// The bit number of `CAP_SYS_ADMIN` in a capability set.
const CAP_SYS_ADMIN: u32 = 21;
/// The system calls of each interface, for a policy that has to allow them.
const URING_CALLS: &str = "io_uring_setup, io_uring_enter and io_uring_register";
const AIO_CALLS: &str = "io_setup, io_submit, io_getevents, io_cancel and io_destroy";

/// Possible causes of a refusal.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Facts {
    /// The sysctl `kernel.io_uring_disabled`: 0 allows all, 1 allows one group, 2 forbids all.
    uring_disabled: Option<u32>,
    /// Whether a seccomp filter applies to this process.
    has_seccomp: bool,
    /// Whether this process may use `io_uring` at level 1 of that sysctl: it has `CAP_SYS_ADMIN`, or is in the group
    /// of the sysctl `kernel.io_uring_group`.
    is_exempt: bool,
    /// `RLIMIT_MEMLOCK` in bytes. `None` without a limit.
    memlock_bytes: Option<u64>,
}

/// A reason and a remedy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Explanation {
    pub(super) reason: String,
    pub(super) remedy: String,
}

impl Facts {
    /// Reads the facts of the calling thread from `/proc`, since filters are per thread. Unreadable facts get the
    /// harmless value.
    pub(super) fn gather() -> Self {
        let status = system_text("/proc/thread-self/status").unwrap_or_default();
        let field = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map_or("", str::trim)
        };
        let capabilities = u64::from_str_radix(field("CapEff"), 16).unwrap_or(0);
        let is_admin = capabilities >> CAP_SYS_ADMIN & 1 == 1;
        // The kernel compares the group for file access, the last of four, and the supplementary groups.
        let mut groups = field("Gid").split_whitespace().skip(3).chain(field("Groups").split_whitespace());
        let uring_group = read("/proc/sys/kernel/io_uring_group");
        Self {
            uring_disabled: read("/proc/sys/kernel/io_uring_disabled").parse().ok(),
            has_seccomp: field("Seccomp") == "2",
            is_exempt: is_admin || groups.any(|group| group == uring_group),
            memlock_bytes: getrlimit(Resource::Memlock).current,
        }
    }
}

/// Returns the used and total AIO ops of the system.
pub(super) fn aio_use() -> String {
    format!("{} of {} system-wide ops in use", read("/proc/sys/fs/aio-nr"), read("/proc/sys/fs/aio-max-nr"))
}

fn read(path: &str) -> String {
    system_text(path).map_or("?".into(), |text| text.trim().to_owned())
}

/// Explains why `kind` does not work, from the kernel's error.
pub(super) fn explain(kind: BackendKind, error: &Error, facts: &Facts) -> Explanation {
    let errno = error.errno().map(Errno::from_raw_os_error);
    let call = error.operation();
    match (kind, errno) {
        (BackendKind::Uring, Some(Errno::NOSYS)) => missing_call(call, "5.6", "CONFIG_IO_URING", facts),
        (BackendKind::Aio, Some(Errno::NOSYS)) => missing_call(call, "4.18", "CONFIG_AIO", facts),
        (BackendKind::Uring, Some(Errno::PERM)) => uring_forbidden(call, facts),
        (BackendKind::Uring, Some(Errno::ACCESS)) => forbidden(&format!("{call}: EACCES"), URING_CALLS, facts),
        (_, Some(Errno::PERM)) => forbidden(&format!("{call}: EPERM"), AIO_CALLS, facts),
        (_, Some(Errno::ACCESS)) => forbidden(&format!("{call}: EACCES"), AIO_CALLS, facts),
        (BackendKind::Uring, Some(Errno::NOMEM)) => {
            let limit = facts.memlock_bytes.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes >> 10));
            Explanation {
                reason: format!("the kernel has no memory for the ring ({call}: ENOMEM; RLIMIT_MEMLOCK is {limit})"),
                remedy: "raise the limit of locked memory (`ulimit -l`), or lower queue_depth or workers".into(),
            }
        }
        (BackendKind::Aio, Some(Errno::AGAIN)) => Explanation {
            reason: format!("the system's AIO ops are used up ({call}: EAGAIN)"),
            remedy: "raise /proc/sys/fs/aio-max-nr, for instance `sysctl -w fs.aio-max-nr=1048576`".into(),
        },
        _ => Explanation { reason: error.to_string(), remedy: error.detail().into() },
    }
}

fn missing_call(call: &str, since: &str, option: &str, facts: &Facts) -> Explanation {
    let hidden = if facts.has_seccomp { ", or a seccomp filter hides it" } else { "" };
    Explanation {
        reason: format!("this kernel does not have it ({call}: ENOSYS){hidden}"),
        remedy: format!("use Linux {since} or later, built with {option}, outside of sandboxes that lack it"),
    }
}

/// Explains EPERM, the only answer of the kernel if the sysctl forbids `io_uring`.
fn uring_forbidden(call: &str, facts: &Facts) -> Explanation {
    let allow = "`sysctl -w kernel.io_uring_disabled=0`";
    match facts.uring_disabled {
        Some(2) => Explanation {
            reason: format!("the sysctl kernel.io_uring_disabled is 2, which forbids it to everybody ({call}: EPERM)"),
            remedy: allow.into(),
        },
        Some(1) if !facts.is_exempt => Explanation {
            reason: format!(
                "the sysctl kernel.io_uring_disabled is 1, which forbids it to processes outside of the group \
                 kernel.io_uring_group ({call}: EPERM)"
            ),
            remedy: format!("{allow}, or put the user into that group"),
        },
        _ => forbidden(&format!("{call}: EPERM"), URING_CALLS, facts),
    }
}

/// Explains a failed call, such as "io_setup: EPERM", for a backend that needs `calls`.
fn forbidden(failure: &str, calls: &str, facts: &Facts) -> Explanation {
    if facts.has_seccomp {
        return Explanation {
            // Docker's default profile forbids io_uring since 2023, and allows native AIO.
            reason: match calls {
                URING_CALLS => {
                    format!("a seccomp filter forbids it ({failure}), as the default profiles of container runtimes do")
                }
                _ => format!("a seccomp filter forbids it ({failure})"),
            },
            remedy: format!("run the container with a seccomp profile that allows {calls}"),
        };
    }
    Explanation {
        reason: format!("the system's security policy forbids it ({failure})"),
        remedy: format!("allow {calls} in the policy of the security module (SELinux, AppArmor)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uring(errno: Errno, facts: &Facts) -> Explanation {
        explain(BackendKind::Uring, &Error::os("io_uring_setup", errno), facts)
    }

    #[test]
    fn tells_a_sysctl_from_a_filter_from_a_policy() {
        let with = |uring_disabled, has_seccomp, is_exempt| Facts {
            uring_disabled: Some(uring_disabled),
            has_seccomp,
            is_exempt,
            memlock_bytes: None,
        };
        let cases = [
            (with(2, true, true), "io_uring_disabled is 2", "io_uring_disabled=0"),
            (with(1, true, false), "io_uring_disabled is 1", "that group"),
            (with(1, true, true), "seccomp", "io_uring_register"),
            (with(0, true, false), "seccomp", "io_uring_register"),
            (with(0, false, false), "security policy", "SELinux"),
        ];
        for (facts, reason, remedy) in cases {
            let found = uring(Errno::PERM, &facts);
            assert!(found.reason.contains(reason) && found.remedy.contains(remedy), "{facts:?}: {found:?}");
        }
    }

    #[test]
    fn names_the_error_of_the_kernel() {
        let forbidden = Facts { uring_disabled: Some(2), ..Facts::default() };
        assert!(uring(Errno::PERM, &forbidden).reason.contains("(io_uring_setup: EPERM)"));
        // No sysctl answers with EACCES.
        let denied = uring(Errno::ACCESS, &forbidden);
        assert!(denied.reason.contains("security policy forbids it (io_uring_setup: EACCES)"), "{denied:?}");
        let filtered = uring(Errno::ACCESS, &Facts { has_seccomp: true, ..Facts::default() });
        assert!(filtered.reason.contains("seccomp filter forbids it (io_uring_setup: EACCES)"), "{filtered:?}");
        let aio = |errno| explain(BackendKind::Aio, &Error::os("io_setup", errno), &Facts::default()).reason;
        assert!(aio(Errno::ACCESS).contains("io_setup: EACCES") && aio(Errno::PERM).contains("io_setup: EPERM"));
        let facts = Facts { has_seccomp: true, ..Facts::default() };
        let filtered = explain(BackendKind::Aio, &Error::os("io_setup", Errno::PERM), &facts);
        assert!(!filtered.reason.contains("default profiles"), "{filtered:?}");
        assert!(filtered.remedy.contains("io_submit"), "{filtered:?}");
    }

    #[test]
    fn tells_an_old_kernel_from_little_memory() {
        let facts = Facts { memlock_bytes: Some(64 << 10), ..Facts::default() };
        assert!(uring(Errno::NOSYS, &facts).reason.contains("does not have it"));
        assert!(!uring(Errno::NOSYS, &facts).reason.contains("seccomp"));
        assert!(uring(Errno::NOMEM, &facts).reason.contains("RLIMIT_MEMLOCK is 64 KiB"));
        assert!(uring(Errno::NOMEM, &Facts::default()).reason.contains("unlimited"));
        let full = Error::os("io_setup", Errno::AGAIN).because("used up");
        assert!(explain(BackendKind::Aio, &full, &facts).remedy.contains("/proc/sys/fs/aio-max-nr"));
        let none = explain(BackendKind::Aio, &Error::os("io_setup", Errno::NOSYS), &facts);
        assert!(none.remedy.contains("CONFIG_AIO"));
    }

    #[test]
    fn gathers_facts_of_the_system() {
        let facts = Facts::gather();
        let level = facts.uring_disabled.map_or("?".into(), |level| level.to_string());
        assert_eq!(level, read("/proc/sys/kernel/io_uring_disabled"));
    }
}
