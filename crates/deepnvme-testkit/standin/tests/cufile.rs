//! cuFile, the calls that wait: real files, random bytes, and the errors of the header.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use common::api::{Description, DriverProperties, FileError};
use common::files::{MIB, Setting, ok, setting};
use common::{NON_BLOCKING, SLOW_US, Standin, at, made, pattern, same};

/// A transfer in pieces whose ends are aligned to nothing.
const ODD: usize = MIB + 4321;

#[test]
fn bytes_go_to_the_file_and_come_back() {
    let Setting { standin, file, handle, _folder } = setting();
    let (from, to) = (standin.alloc_with(2 * MIB, 7), standin.alloc(2 * MIB));
    assert_eq!((standin.cuFileBufRegister)(to, 2 * MIB, 0), ok());
    assert_eq!((standin.cuFileWrite)(handle, from, MIB, 4096, 0), MIB as isize);
    assert_eq!((standin.cuFileRead)(handle, to, MIB, 4096, 8192), MIB as isize);
    same(&standin.peek(to + 8192, MIB), &pattern(7, MIB));
    assert_eq!((standin.count("unaligned_io"), standin.count("unregistered_io")), (0, 1));
    assert_eq!((standin.cuFileWrite)(handle, from, ODD, 777, 13), ODD as isize);
    assert_eq!((standin.cuFileRead)(handle, to, ODD, 777, 5), ODD as isize);
    same(&standin.peek(to + 5, ODD), &pattern(7, 2 * MIB)[13..13 + ODD]);
    assert_eq!(standin.count("unaligned_io"), 2);
    let mut seen = vec![0; 4096 * 3];
    let aligned = seen.as_ptr().align_offset(4096);
    assert_eq!(file.read_at(&mut seen[aligned..aligned + 4096], 0).unwrap(), 4096);
    assert_eq!(seen[aligned..aligned + 777], pattern(1, 777), "what was there before it");
    assert_eq!((standin.cuFileRead)(handle, to, MIB, (2 * MIB - 100) as i64, 0), 100, "where the file ends");
    let host = standin.pinned(5000);
    assert_eq!((standin.cuFileRead)(handle, at(host) as u64, 5000, 777, 0), 5000);
    same(host, &pattern(7, 2 * MIB)[13..5013]);
    assert_eq!((standin.cuFileBufDeregister)(to), ok());
    assert_eq!(standin.violations(), "");
}

#[test]
fn what_is_wrong_has_the_code_of_the_header() {
    let Setting { standin, file, handle, _folder } = setting();
    let memory = standin.alloc(10_000);
    let read =
        |handle, base, bytes, file_offset, offset| (standin.cuFileRead)(handle, base, bytes, file_offset, offset);
    assert_eq!(read(handle + 16, memory, 1, 0, 0), -5027);
    assert_eq!(read(handle, memory, 10_001, 0, 0), -5014);
    assert_eq!(read(handle, memory, 1, 0, 10_000), -5012);
    assert_eq!(read(handle, 4096, 1, 0, 0), -5012);
    assert_eq!(read(handle, memory, 1, -1, 0), -5022);
    assert_eq!((standin.cuFileBufRegister)(memory, 10_001, 0).err, 5014);
    assert_eq!((standin.cuFileBufRegister)(memory, 8000, 0), ok());
    assert_eq!((standin.cuFileBufRegister)(memory, 100, 0).err, 5023);
    assert_eq!(read(handle, memory, 8001, 0, 0), -5017);
    assert_eq!((standin.cuFileBufDeregister)(memory + 1).err, 5022);
    let again = Description { kind: 1, fd: file.as_raw_fd().into(), operations: 0 };
    assert_eq!((standin.cuFileHandleRegister)(&mut 0, &again).err, 5028);
    assert_eq!((standin.cuFileHandleRegister)(&mut 0, &Description { kind: 2, ..again }).err, 5022);
    assert_eq!((standin.cuFileHandleRegister)(&mut 0, &Description { fd: 9999, ..again }).err, 5022);
    let folder = File::open("/").unwrap();
    let folder = Description { fd: folder.as_raw_fd().into(), ..again };
    assert_eq!((standin.cuFileHandleRegister)(&mut 0, &folder).err, 5018);
    standin.enter(1);
    assert_eq!(read(handle, memory, 1, 0, 0), -5015, "the memory is device 0's");
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!((standin.cuFileRead)(handle, memory, 1, 0, 0), -5047));
    });
    assert_eq!(standin.violations(), "");
}

#[test]
fn the_driver_is_opened_first_and_closed_last() {
    let standin = Standin::with_context();
    let memory = standin.alloc(4096);
    assert_eq!((standin.cuFileBufRegister)(memory, 4096, 0).err, 5001);
    assert_eq!((standin.cuFileDriverClose_v2)().err, 5001);
    assert_eq!((standin.cuFileDriverSetMaxPinnedMemSize)(8), ok());
    assert_eq!((standin.cuFileDriverSetMaxCacheSize)(7).err, 5022);
    assert_eq!(((standin.cuFileDriverOpen)(), (standin.cuFileDriverOpen)()), (ok(), ok()));
    assert_eq!(((standin.cuFileUseCount)(), standin.live("cufile_drivers")), (2, 2));
    let mut properties = DriverProperties::default();
    assert_eq!((standin.cuFileDriverGetProperties)(&mut properties), ok());
    assert_eq!((properties.major, properties.status_flags, properties.max_pinned), (2, 16, 8));
    assert_eq!(made(|out| (standin.cuFileGetVersion)(out).err), 15000);
    let large = standin.alloc(8193);
    assert_eq!((standin.cuFileBufRegister)(large, 8193, 0).err, 5036);
    assert_eq!((standin.cuFileBufRegister)(memory, 4096, 0), ok());
    assert_eq!(((standin.cuFileDriverClose)(), standin.violations()), (ok(), String::new()));
    assert_eq!((standin.cuFileDriverClose_v2)(), ok());
    assert_eq!(standin.violations(), "lifetime: cuFile was closed with 1 buffers left");
}

#[test]
fn calls_are_not_ordered_behind_streams() {
    let Setting { standin, file: _file, handle, _folder } = setting();
    let (stream, memory) = (standin.stream(NON_BLOCKING), standin.alloc(MIB));
    assert_eq!((standin.standin_fill_kernel)(stream, memory, MIB, 3, SLOW_US), 0);
    assert_eq!((standin.cuFileWrite)(handle, memory, MIB, 0, 0), MIB as isize);
    assert!(standin.violations().contains("race: standin_fill_kernel"), "{}", standin.violations());
    (standin.standin_clear)();
    assert_eq!((standin.cuStreamSynchronize)(stream), 0);
    assert_eq!((standin.cuFileWrite)(handle, memory, MIB, 0, 0), MIB as isize);
    assert_eq!((standin.cuMemsetD8Async)(memory, 0, MIB, stream), 0);
    assert_eq!(standin.violations(), "");
}

#[test]
fn faults_of_transfers_are_errors_of_the_system_or_of_cufile() {
    let Setting { standin, file: _file, handle, _folder } = setting();
    let memory = standin.alloc(MIB);
    let read = || (standin.cuFileRead)(handle, memory, MIB, 0, 0);
    standin.fail("cuFileRead", 0, libc::EIO);
    standin.fail("cuFileRead", 1, 5030);
    assert_eq!((read(), std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EIO)));
    assert_eq!(read(), -5030);
    standin.fail("cuFileRead@short", 0, 12_345);
    assert_eq!((read(), read()), (12_345, MIB as isize));
    standin.fail("cuFileBufRegister", 0, 5036);
    standin.fail("cuFileBufRegister", 1, 2);
    let buffer = || (standin.cuFileBufRegister)(memory, MIB, 0);
    assert_eq!(buffer(), FileError { err: 5036, cu_err: 0 });
    assert_eq!(buffer(), FileError { err: 5011, cu_err: 2 });
    assert_eq!((buffer(), standin.live("cufile_buffers")), (ok(), 1));
}

#[test]
fn what_is_registered_must_stay() {
    let Setting { standin, file, handle, _folder } = setting();
    let memory = standin.alloc(MIB);
    assert_eq!((standin.cuFileBufRegister)(memory, MIB, 0), ok());
    assert_eq!((standin.cuMemFree_v2)(memory), 0);
    (standin.cuFileHandleDeregister)(handle + 16);
    let stream = standin.stream(0);
    assert_eq!((standin.cuFileStreamRegister)(stream, 0), ok());
    assert_eq!((standin.cuStreamDestroy_v2)(stream), 0);
    drop(file);
    assert_eq!((standin.cuFileRead)(handle, standin.alloc(10), 10, 0, 0), -1);
    (standin.cuFileHandleDeregister)(handle);
    assert_eq!(standin.live("cufile_handles"), 0);
    let violations = standin.violations();
    let found: Vec<&str> = violations.lines().collect();
    assert_eq!(found.len(), 4, "{violations}");
    let said = ["registered with cuFile", "which is none", "destroyed while registered", "closed while registered"];
    assert!(found.iter().zip(said).all(|(line, said)| line.contains(said)), "{violations}");
}
