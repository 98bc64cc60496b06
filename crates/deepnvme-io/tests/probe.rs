//! The probe's results here, and with system calls that are really forbidden.
//!
//! Tests of forbidden calls run themselves again in a child process, which gives up the right first.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "helpers of tests fail like tests")]

mod common;

use std::process::Command;

use deepnvme_io::backend::{self, BackendKind, BackendSetup};
use deepnvme_io::probe::{Availability, Probe};
use deepnvme_io::{
    Access, BackendChoice, Config, DirectMode, Engine, ErrorKind, OpenOptions, SubmitMode, TensorFile, WriteOptions,
};
use deepnvme_mem::{Buffer, Region, RegistrableRange};

/// Set in a child: the name of the test to run.
const CHILD: &str = "DEEPNVME_TEST_CHILD";
const URING: [libc::c_long; 3] = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const SKIP_UNLESS_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const SKIP_UNLESS_GREATER: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
/// The offsets of the call number and of the first argument in a filter's input.
const NUMBER: u32 = 0;
const FIRST_ARGUMENT: u32 = 16;

fn step(code: u16, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf, k }
}

fn refuse(errno: libc::c_int) -> libc::sock_filter {
    step(RETURN, 0, libc::SECCOMP_RET_ERRNO | errno as u32)
}

/// Makes `calls` fail with `errno` on this thread and the threads it starts, permanently.
fn forbid(calls: &[libc::c_long], errno: libc::c_int) {
    let refusals = calls.iter().flat_map(|&call| [step(SKIP_UNLESS_EQUAL, 1, call as u32), refuse(errno)]);
    install([step(LOAD, 0, NUMBER)].into_iter().chain(refusals).collect());
}

/// Makes queues with more than `entries` fail, permanently: rings with `ENOMEM`, AIO queues with `EAGAIN`.
fn forbid_queues_beyond(entries: u32) {
    let mut program = Vec::new();
    for (call, errno) in [(libc::SYS_io_uring_setup, libc::ENOMEM), (libc::SYS_io_setup, libc::EAGAIN)] {
        program.extend([step(LOAD, 0, NUMBER), step(SKIP_UNLESS_EQUAL, 3, call as u32)]);
        program.extend([step(LOAD, 0, FIRST_ARGUMENT), step(SKIP_UNLESS_GREATER, 1, entries), refuse(errno)]);
    }
    install(program);
}

/// Installs a filter on this thread and the threads it starts, permanently. Calls that it does not refuse are allowed.
fn install(mut program: Vec<libc::sock_filter>) {
    program.push(step(RETURN, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: both calls only read their arguments, and the filter's steps live until they return.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter),
        ]
    };
    assert_eq!(results, [0, 0], "no filter: {}", std::io::Error::last_os_error());
}

/// Runs `body` in a child process, after `prepare`.
fn in_child(test: &str, prepare: impl FnOnce(), body: impl FnOnce()) {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        prepare();
        body();
        println!("child of {test} is through");
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args([test, "--exact", "--nocapture"]).env(CHILD, test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the child failed:\n{text}");
    assert!(text.contains(&format!("child of {test} is through")), "the child ran nothing:\n{text}");
}

/// Runs `body` in a child process in which `calls` fail with `errno`.
fn behind_filter(test: &str, calls: &[libc::c_long], errno: libc::c_int, body: fn()) {
    in_child(test, || forbid(calls, errno), body);
}

/// Writes and reads a file of odd size with an engine of the given choice. Returns the backend that ran.
fn engine_round_trip(backend: BackendChoice) -> BackendKind {
    let data: Vec<u8> = (0..3_000_001u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let engine = Engine::new(Config { backend, ..Config::default() }).unwrap();
    let options = OpenOptions { access: Access::ReadWrite, create: true, direct: DirectMode::Preferred };
    let file = TensorFile::open(&folder.path().join("data"), options).unwrap();
    let (_, written) = engine.write(&file, 0, Region::from_vec(data.clone()), WriteOptions::default()).unwrap().wait();
    assert_eq!(written.unwrap().bytes, data.len() as u64);
    let target = Buffer::zeroed(data.len()).unwrap().into_region();
    let (target, read) = engine.read(&file, 0, target).unwrap().wait();
    assert_eq!(read.unwrap().bytes, data.len() as u64);
    let buffer = target.unwrap().into_buffer().unwrap();
    assert!(buffer.as_slice() == data, "other bytes came back");
    engine.backend_kind()
}

/// Checks that a feature does not work, because its calls fail with `wanted`, and that it says why and what to do.
fn assert_refused(availability: &Availability, wanted: i32, why: &str, what_to_do: &str) {
    match availability {
        Availability::Missing { errno, reason, remedy } => {
            assert_eq!(*errno, Some(wanted));
            assert!(reason.contains(why) && remedy.contains(what_to_do), "{reason}; {remedy}");
        }
        Availability::Works { detail } => {
            panic!("it works, although its calls are forbidden: {detail}")
        }
    }
}

#[test]
fn threads_work_everywhere_and_every_answer_says_something() {
    let probe = Probe::run();
    assert!(probe.threads.works(), "{:?}", probe.threads);
    for kind in [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads] {
        match probe.of(kind).unwrap() {
            Availability::Works { detail } => assert!(!detail.is_empty()),
            Availability::Missing { reason, remedy, .. } => {
                assert!(!reason.is_empty() && !remedy.is_empty());
            }
        }
    }
    assert!(probe.of(BackendKind::Simulated).is_none());
}

#[test]
fn the_first_that_works_is_chosen_and_a_choice_is_honoured() {
    let works = |detail: &str| Availability::Works { detail: detail.into() };
    let missing = |reason: &str| Availability::Missing {
        errno: Some(1),
        reason: reason.into(),
        remedy: format!("allow {reason}"),
    };
    let all = Probe { uring: works("flags"), aio: works("limits"), threads: works("number") };
    let kind_of = |probe: &Probe, choice| probe.choose(choice).map(|(kind, _)| kind).map_err(|error| error.kind());
    assert_eq!(kind_of(&all, BackendChoice::Auto), Ok(BackendKind::Uring));
    assert_eq!(kind_of(&all, BackendChoice::Aio), Ok(BackendKind::Aio));
    assert_eq!(kind_of(&all, BackendChoice::Threads), Ok(BackendKind::Threads));
    let some = Probe { uring: missing("rings"), ..all };
    let (kind, why) = some.choose(BackendChoice::Auto).unwrap();
    assert_eq!(kind, BackendKind::Aio);
    assert!(why.contains("limits") && why.contains("rings") && why.contains("allow rings"), "{why}");
    let error = some.choose(BackendChoice::Uring).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("rings; allow rings"), "{error}");
    let least = Probe { aio: missing("aio"), ..some };
    assert_eq!(kind_of(&least, BackendChoice::Auto), Ok(BackendKind::Threads));
    let none = Probe { threads: missing("threads"), ..least };
    assert_eq!(kind_of(&none, BackendChoice::Auto), Err(ErrorKind::Unsupported));
}

#[test]
fn falls_back_to_aio_where_a_filter_forbids_io_uring() {
    behind_filter(
        "falls_back_to_aio_where_a_filter_forbids_io_uring",
        &[libc::SYS_io_uring_setup],
        libc::EPERM,
        || {
            let probe = Probe::run();
            assert_refused(&probe.uring, libc::EPERM, "seccomp", "io_uring_setup");
            assert!(probe.aio.works() && probe.threads.works(), "{probe:?}");
            assert_eq!(engine_round_trip(BackendChoice::Auto), BackendKind::Aio);
            let error = Engine::new(Config { backend: BackendChoice::Uring, ..Config::default() }).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("seccomp"), "{error}");
        },
    );
}

#[test]
fn falls_back_to_threads_where_the_kernel_has_neither() {
    let calls = [&URING[..], &[libc::SYS_io_setup]].concat();
    behind_filter("falls_back_to_threads_where_the_kernel_has_neither", &calls, libc::ENOSYS, || {
        let probe = Probe::run();
        for missing in [&probe.uring, &probe.aio] {
            assert_refused(missing, libc::ENOSYS, "does not have it", "use Linux");
        }
        assert_eq!(engine_round_trip(BackendChoice::Auto), BackendKind::Threads);
        assert!(Engine::new(Config { backend: BackendChoice::Aio, ..Config::default() }).is_err());
    });
}

#[test]
fn falls_back_where_only_short_queues_can_be_made() {
    let body = || {
        let probe = Probe::run();
        assert!(probe.aio.works(), "{:?}", probe.aio);
        assert_eq!(engine_round_trip(BackendChoice::Auto), BackendKind::Threads);
        let engine = Engine::new(Config::default()).unwrap();
        let reason = engine.backend_reason();
        assert!(reason.contains("ENOMEM") == probe.uring.works() && reason.contains("fs.aio-max-nr"), "{reason}");
        assert!(!engine.probe().uring.works() && !engine.probe().aio.works(), "{:?}", engine.probe());
        let error = Engine::new(Config { backend: BackendChoice::Aio, ..Config::default() }).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EAGAIN), "{error}");
    };
    in_child("falls_back_where_only_short_queues_can_be_made", || forbid_queues_beyond(8), body);
}

#[test]
fn without_statx_and_files_in_memory_everything_works() {
    let test = "without_statx_and_files_in_memory_everything_works";
    for errno in [libc::ENOSYS, libc::EPERM] {
        behind_filter(test, &[libc::SYS_statx, libc::SYS_memfd_create], errno, || {
            engine_round_trip(BackendChoice::Auto);
        });
    }
}

#[test]
fn falls_back_where_a_ring_can_be_made_but_not_entered() {
    if std::env::var_os(CHILD).is_none() && !Probe::run().uring.works() {
        return common::skipped("io_uring does not work here in the first place");
    }
    behind_filter(
        "falls_back_where_a_ring_can_be_made_but_not_entered",
        &[libc::SYS_io_uring_enter],
        libc::EPERM,
        || {
            assert_refused(&Probe::run().uring, libc::EPERM, "io_uring_enter", "");
            assert_eq!(engine_round_trip(BackendChoice::Auto), BackendKind::Aio);
        },
    );
}

#[test]
fn io_uring_works_without_registration() {
    behind_filter("io_uring_works_without_registration", &[libc::SYS_io_uring_register], libc::EPERM, || {
        match Probe::run().uring {
            Availability::Works { detail } => {
                assert!(detail.contains("files: no") && detail.contains("buffers: no"), "{detail}");
                assert_eq!(engine_round_trip(BackendChoice::Uring), BackendKind::Uring);
            }
            // Without io_uring on this machine, there is nothing to register with.
            Availability::Missing { reason, .. } => println!("SKIPPED: {reason}"),
        }
    });
}

/// Limits the locked memory of this thread and the threads it starts.
fn limit_locked_memory(limit_bytes: u64) {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    let header = Header { version: VERSION_3, pid: 0 };
    // Effective, permitted and inheritable capabilities, the first 32 and the others.
    let mut sets = [0u32; 6];
    let limit = libc::rlimit { rlim_cur: limit_bytes, rlim_max: limit_bytes };
    // SAFETY: the calls read and write their structures only, which have the kernel's layout.
    let results = unsafe {
        let got = libc::syscall(libc::SYS_capget, &raw const header, sets.as_mut_ptr());
        sets[0] &= !(1 << CAP_IPC_LOCK);
        let set = libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr());
        [got, set, libc::c_long::from(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit))]
    };
    assert_eq!(results, [0; 3], "{}", std::io::Error::last_os_error());
}

#[test]
fn io_uring_works_where_memory_cannot_be_pinned() {
    let body = || {
        let setup = BackendSetup { queue_depth: 8, submit: SubmitMode::Batch, worker_index: 0 };
        let Ok(mut backend) = backend::open(BackendKind::Uring, &setup) else {
            println!("SKIPPED: {:?}", Probe::run().uring);
            return;
        };
        let memory = |bytes| Buffer::zeroed(bytes).unwrap().into_region().region();
        assert!(
            !backend.register(&RegistrableRange::from(&memory(1 << 20))),
            "1 MiB was pinned where 256 KiB are allowed"
        );
        assert_eq!(engine_round_trip(BackendChoice::Uring), BackendKind::Uring);
    };
    in_child("io_uring_works_where_memory_cannot_be_pinned", || limit_locked_memory(256 << 10), body);
}
