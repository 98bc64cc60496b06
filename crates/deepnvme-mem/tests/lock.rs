//! Locking memory under limits. Limits and locked bytes belong to a process, so each test runs in a child process,
//! without root's exemption from limits.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use std::env;
use std::fs;
use std::process::{Command, Stdio};

use deepnvme_mem::{Buffer, LockState, Pool};
use rustix::process::{Resource, Rlimit, getuid, setrlimit};

/// Set in the child process of a test.
const CHILD: &str = "DEEPNVME_MEM_TEST_CHILD";

/// Runs `body` in a child process that has no `CAP_IPC_LOCK` and may lock `limit_bytes`.
fn under_limit(test: &str, limit_bytes: u64, body: fn()) {
    if env::var_os(CHILD).is_some() {
        let limit = Rlimit { current: Some(limit_bytes), maximum: Some(limit_bytes) };
        setrlimit(Resource::Memlock, limit).unwrap();
        return body();
    }
    let this = env::current_exe().unwrap();
    let mut command = if getuid().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "--"]).arg(this);
        command
    } else {
        Command::new(this)
    };
    if getuid().is_root() && Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!(
            "SKIPPED {test}: the superuser has no limits, and `setpriv` (util-linux) is not there to give them up"
        );
        return;
    }
    let output = command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "the child failed:\n{said}\n{complained}");
}

/// Returns the KiB that this process has locked.
fn locked_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn reason(state: &LockState) -> &str {
    match state {
        LockState::Refused { reason } => reason,
        other => panic!("the kernel should have refused, not {other:?}"),
    }
}

#[test]
fn locks_within_the_limit_and_unlocks_when_dropped() {
    under_limit("locks_within_the_limit_and_unlocks_when_dropped", 1 << 20, || {
        let mut buffer = Buffer::locked(512 << 10).unwrap();
        assert_eq!(buffer.lock_state(), &LockState::Locked);
        assert_eq!(locked_kib(), 512);
        buffer.as_mut_slice().fill(1);
        let region = buffer.into_region();
        assert_eq!(locked_kib(), 512, "a region of it stays locked");
        drop(region);
        assert_eq!(locked_kib(), 0);
    });
}

#[test]
fn a_refusal_names_the_limit_and_the_remedy() {
    under_limit("a_refusal_names_the_limit_and_the_remedy", 64 << 10, || {
        let small = Buffer::locked(16 << 10).unwrap();
        assert_eq!(small.lock_state(), &LockState::Locked);
        let mut buffer = Buffer::locked(1 << 20).unwrap();
        let reason = reason(buffer.lock_state());
        for part in ["1048576 bytes", "RLIMIT_MEMLOCK is 65536 bytes", "16 KiB are locked", "`ulimit -l 1040`"] {
            assert!(reason.contains(part), "`{part}` is missing: {reason}");
        }
        assert_eq!(locked_kib(), 16, "nothing is left half locked");
        buffer.as_mut_slice().fill(9);
        assert!(buffer.as_slice().iter().all(|byte| *byte == 9), "ordinary memory works all the same");
    });
}

#[test]
fn a_limit_of_zero_is_reported() {
    under_limit("a_limit_of_zero_is_reported", 0, || {
        let buffer = Buffer::locked(4096).unwrap();
        assert!(reason(buffer.lock_state()).contains("RLIMIT_MEMLOCK is 0 bytes"));
        assert_eq!(Buffer::locked(0).unwrap().lock_state(), &LockState::Locked, "nothing is always locked");
    });
}

#[test]
fn a_pool_reports_its_lock_state() {
    under_limit("a_pool_reports_its_lock_state", 1 << 20, || {
        assert_eq!(Pool::new(4096, 4, false).unwrap().lock_state(), LockState::NotRequested);
        let locked = Pool::new(64 << 10, 8, true).unwrap();
        assert_eq!((locked.lock_state(), locked_kib()), (LockState::Locked, 512));
        let plain = Pool::new(1 << 20, 2, true).unwrap();
        assert!(reason(&plain.lock_state()).contains("2097152 bytes"));
        plain.try_take().unwrap().as_mut_slice().fill(3);
        drop(locked);
        assert_eq!(locked_kib(), 0);
    });
}
