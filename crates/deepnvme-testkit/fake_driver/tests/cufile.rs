//! The calls of cuFile that wait for their transfer: on real files, with random bytes, and with the error codes of
//! `cufile.h`.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use common::api::{Description, DriverProperties, FileError};
use common::codes::{cuda, cufile, refused};
use common::files::{MIB, Setting, ok, setting, setting_with_stream};
use common::{FakeDriver, SLOW_US, at, made, pattern, same};

/// A length that no block size divides.
const ODD: usize = MIB + 4321;

#[test]
fn bytes_go_to_the_file_and_come_back() {
    let Setting { fake_driver, file, handle, _folder } = setting();
    let (from, to) = (fake_driver.alloc_with(2 * MIB, 7), fake_driver.alloc(2 * MIB));
    assert_eq!((fake_driver.cuFileBufRegister)(to, 2 * MIB, 0), ok());
    assert_eq!((fake_driver.cuFileWrite)(handle, from, MIB, 4096, 0), MIB as isize);
    assert_eq!((fake_driver.cuFileRead)(handle, to, MIB, 4096, 8192), MIB as isize);
    same(&fake_driver.peek(to + 8192, MIB), &pattern(7, MIB));
    assert_eq!((fake_driver.count("unaligned_io"), fake_driver.count("unregistered_io")), (0, 1));
    assert_eq!((fake_driver.cuFileWrite)(handle, from, ODD, 777, 13), ODD as isize);
    assert_eq!((fake_driver.cuFileRead)(handle, to, ODD, 777, 5), ODD as isize);
    same(&fake_driver.peek(to + 5, ODD), &pattern(7, 2 * MIB)[13..13 + ODD]);
    assert_eq!(fake_driver.count("unaligned_io"), 2);
    let mut seen = vec![0; 4096 * 3];
    let aligned = seen.as_ptr().align_offset(4096);
    assert_eq!(file.read_at(&mut seen[aligned..aligned + 4096], 0).unwrap(), 4096);
    assert_eq!(seen[aligned..aligned + 777], pattern(1, 777), "bytes before the range have changed");
    assert_eq!(
        (fake_driver.cuFileRead)(handle, to, MIB, (2 * MIB - 100) as i64, 0),
        100,
        "a read ends at the end of the file"
    );
    let host = fake_driver.pinned(5000);
    assert_eq!((fake_driver.cuFileRead)(handle, at(host) as u64, 5000, 777, 0), 5000);
    same(host, &pattern(7, 2 * MIB)[13..5013]);
    assert_eq!((fake_driver.cuFileBufDeregister)(to), ok());
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn wrong_arguments_have_the_codes_of_cufile_h() {
    let Setting { fake_driver, file, handle, _folder } = setting();
    let memory = fake_driver.alloc(10_000);
    let read =
        |handle, base, bytes, file_offset, offset| (fake_driver.cuFileRead)(handle, base, bytes, file_offset, offset);
    assert_eq!(read(handle + 16, memory, 1, 0, 0), refused(cufile::HANDLE_NOT_REGISTERED));
    assert_eq!(read(handle, memory, 10_001, 0, 0), refused(cufile::CUDA_POINTER_RANGE_ERROR));
    assert_eq!(read(handle, memory, 1, 0, 10_000), refused(cufile::CUDA_POINTER_INVALID));
    assert_eq!(read(handle, 4096, 1, 0, 0), refused(cufile::CUDA_POINTER_INVALID));
    assert_eq!(read(handle, memory, 1, -1, 0), refused(cufile::INVALID_VALUE));
    assert_eq!((fake_driver.cuFileBufRegister)(memory, 10_001, 0).err, cufile::CUDA_POINTER_RANGE_ERROR);
    assert_eq!((fake_driver.cuFileBufRegister)(memory, 8000, 0), ok());
    assert_eq!((fake_driver.cuFileBufRegister)(memory, 100, 0).err, cufile::MEMORY_ALREADY_REGISTERED);
    assert_eq!(read(handle, memory, 8001, 0, 0), refused(cufile::INVALID_MAPPING_RANGE));
    assert_eq!((fake_driver.cuFileBufDeregister)(memory + 1).err, cufile::INVALID_VALUE);
    let again = Description { kind: 1, fd: file.as_raw_fd().into(), operations: 0 };
    assert_eq!((fake_driver.cuFileHandleRegister)(&mut 0, &again).err, cufile::HANDLE_ALREADY_REGISTERED);
    assert_eq!(
        (fake_driver.cuFileHandleRegister)(&mut 0, &Description { kind: 2, ..again }).err,
        cufile::INVALID_VALUE
    );
    assert_eq!(
        (fake_driver.cuFileHandleRegister)(&mut 0, &Description { fd: 9999, ..again }).err,
        cufile::INVALID_VALUE
    );
    let folder = File::open("/").unwrap();
    let folder = Description { fd: folder.as_raw_fd().into(), ..again };
    assert_eq!((fake_driver.cuFileHandleRegister)(&mut 0, &folder).err, cufile::INVALID_FILE_TYPE);
    fake_driver.enter(1);
    assert_eq!(read(handle, memory, 1, 0, 0), refused(cufile::CUDA_CONTEXT_MISMATCH), "the memory belongs to device 0");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!((fake_driver.cuFileRead)(handle, memory, 1, 0, 0), refused(cufile::INVALID_CONTEXT_ERROR));
        });
    });
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn the_driver_is_opened_first_and_closed_last() {
    let fake_driver = FakeDriver::with_context();
    let memory = fake_driver.alloc(4096);
    assert_eq!((fake_driver.cuFileBufRegister)(memory, 4096, 0).err, cufile::DRIVER_NOT_INITIALIZED);
    assert_eq!((fake_driver.cuFileDriverClose_v2)().err, cufile::DRIVER_NOT_INITIALIZED);
    assert_eq!((fake_driver.cuFileDriverSetMaxPinnedMemSize)(8), ok());
    assert_eq!((fake_driver.cuFileDriverSetMaxCacheSize)(7).err, cufile::INVALID_VALUE);
    assert_eq!(((fake_driver.cuFileDriverOpen)(), (fake_driver.cuFileDriverOpen)()), (ok(), ok()));
    assert_eq!(((fake_driver.cuFileUseCount)(), fake_driver.live("cufile_drivers")), (2, 2));
    let mut properties = DriverProperties::default();
    assert_eq!((fake_driver.cuFileDriverGetProperties)(&mut properties), ok());
    assert_eq!((properties.major, properties.status_flags, properties.max_pinned), (2, 16, 8));
    assert_eq!(made(|out| (fake_driver.cuFileGetVersion)(out).err), 15000);
    let large = fake_driver.alloc(8193);
    assert_eq!((fake_driver.cuFileBufRegister)(large, 8193, 0).err, cufile::GPU_MEMORY_PINNING_FAILED);
    assert_eq!((fake_driver.cuFileBufRegister)(memory, 4096, 0), ok());
    assert_eq!(((fake_driver.cuFileDriverClose)(), fake_driver.violations()), (ok(), String::new()));
    assert_eq!((fake_driver.cuFileDriverClose_v2)(), ok());
    assert_eq!(fake_driver.violations(), "lifetime: cuFile was closed with 1 buffers left");
}

#[test]
fn calls_are_not_ordered_behind_streams() {
    let (Setting { fake_driver, file: _file, handle, _folder }, stream, memory) = setting_with_stream(MIB);
    assert_eq!((fake_driver.fake_driver_fill_kernel)(stream, memory, MIB, 3, SLOW_US), 0);
    assert_eq!((fake_driver.cuFileWrite)(handle, memory, MIB, 0, 0), MIB as isize);
    assert!(fake_driver.violations().contains("race: fake_driver_fill_kernel"), "{}", fake_driver.violations());
    (fake_driver.fake_driver_clear)();
    assert_eq!((fake_driver.cuStreamSynchronize)(stream), 0);
    assert_eq!((fake_driver.cuFileWrite)(handle, memory, MIB, 0, 0), MIB as isize);
    assert_eq!((fake_driver.cuMemsetD8Async)(memory, 0, MIB, stream), 0);
    assert_eq!(fake_driver.violations(), "");
}

#[test]
fn faults_of_transfers_are_errors_of_the_system_or_of_cufile() {
    let Setting { fake_driver, file: _file, handle, _folder } = setting();
    let memory = fake_driver.alloc(MIB);
    let read = || (fake_driver.cuFileRead)(handle, memory, MIB, 0, 0);
    fake_driver.fail("cuFileRead", 0, libc::EIO);
    fake_driver.fail("cuFileRead", 1, cufile::INTERNAL_ERROR);
    assert_eq!((read(), std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EIO)));
    assert_eq!(read(), refused(cufile::INTERNAL_ERROR));
    fake_driver.fail("cuFileRead@short", 0, 12_345);
    assert_eq!((read(), read()), (12_345, MIB as isize));
    fake_driver.fail("cuFileBufRegister", 0, cufile::GPU_MEMORY_PINNING_FAILED);
    fake_driver.fail("cuFileBufRegister", 1, cuda::OUT_OF_MEMORY);
    let buffer = || (fake_driver.cuFileBufRegister)(memory, MIB, 0);
    assert_eq!(buffer(), FileError { err: cufile::GPU_MEMORY_PINNING_FAILED, cu_err: 0 });
    assert_eq!(buffer(), FileError { err: cufile::CUDA_DRIVER_ERROR, cu_err: cuda::OUT_OF_MEMORY });
    assert_eq!((buffer(), fake_driver.live("cufile_buffers")), (ok(), 1));
}

#[test]
fn registered_memory_files_and_streams_must_stay_alive() {
    let Setting { fake_driver, file, handle, _folder } = setting();
    // Leave lower descriptors free: after `file` is closed, no file of another test gets its number.
    let below: Vec<File> = (0..64).map(|_| file.try_clone().unwrap()).collect();
    let file = file.try_clone().unwrap();
    drop(below);
    (fake_driver.cuFileHandleDeregister)(handle);
    let mut handle = 0;
    let description = Description { kind: 1, fd: file.as_raw_fd().into(), operations: 0 };
    assert_eq!((fake_driver.cuFileHandleRegister)(&mut handle, &description), ok());
    let memory = fake_driver.alloc(MIB);
    assert_eq!((fake_driver.cuFileBufRegister)(memory, MIB, 0), ok());
    assert_eq!((fake_driver.cuMemFree_v2)(memory), 0);
    (fake_driver.cuFileHandleDeregister)(handle + 16);
    let stream = fake_driver.stream(0);
    assert_eq!((fake_driver.cuFileStreamRegister)(stream, 0), ok());
    assert_eq!((fake_driver.cuStreamDestroy_v2)(stream), 0);
    drop(file);
    assert_eq!((fake_driver.cuFileRead)(handle, fake_driver.alloc(10), 10, 0, 0), -1);
    (fake_driver.cuFileHandleDeregister)(handle);
    assert_eq!(fake_driver.live("cufile_handles"), 0);
    let violations = fake_driver.violations();
    let found: Vec<&str> = violations.lines().collect();
    assert_eq!(found.len(), 4, "{violations}");
    let said = ["registered with cuFile", "which is none", "destroyed while registered", "closed while registered"];
    assert!(found.iter().zip(said).all(|(line, said)| line.contains(said)), "{violations}");
}

/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`.
const ALLOW_COMPAT_MODE: i32 = 1;
/// Counters of the third level of statistics: byte offsets in the struct, divided by the size of a counter.
const NVIDIA_FS_READS: usize = (1032 + 64) / 8;
const POSIX_READS: usize = (1032 + 72) / 8;
const POSIX_WRITES: usize = (1032 + 176) / 8;

#[test]
fn a_file_without_a_direct_path_is_copied_and_counted_or_refused() {
    let Setting { fake_driver, file, handle, _folder } = setting();
    let memory = fake_driver.alloc(MIB);
    let mut numbers = [0_u64; 625];
    let mut level = 7;
    assert_eq!(
        (fake_driver.cuFileSetParameterBool)(ALLOW_COMPAT_MODE, false).err,
        cufile::DRIVER_ALREADY_OPEN,
        "parameters are set before the driver is opened"
    );
    assert_eq!(
        (fake_driver.cuFileGetStatsL3)(numbers.as_mut_ptr()).err,
        cufile::INVALID_VALUE,
        "statistics of level 3 need that level"
    );
    assert_eq!((fake_driver.cuFileSetStatsLevel)(4).err, cufile::INVALID_VALUE);
    assert_eq!((fake_driver.cuFileSetStatsLevel)(3), ok());
    assert_eq!((fake_driver.cuFileGetStatsLevel)(&mut level), ok());
    assert_eq!((fake_driver.cuFileStatsStart)(), ok());
    assert_eq!((fake_driver.cuFileRead)(handle, memory, 4096, 0, 0), 4096);
    (fake_driver.cuFileHandleDeregister)(handle);
    fake_driver.fail("cuFileHandleRegister@unsupported", 0, 1);
    let description = Description { kind: 1, fd: file.as_raw_fd().into(), operations: 0 };
    let copied = made_file(&fake_driver, &description);
    assert_eq!((fake_driver.cuFileRead)(copied, memory, 4096, 0, 0), 4096);
    assert_eq!((fake_driver.cuFileWrite)(copied, memory, 4096, 0, 0), 4096);
    assert_eq!((fake_driver.cuFileGetStatsL3)(numbers.as_mut_ptr()), ok());
    assert_eq!((level, numbers[1024 / 8] as u32), (3, 2));
    assert_eq!([NVIDIA_FS_READS, POSIX_READS, POSIX_WRITES].map(|place| numbers[place]), [1, 1, 1]);
    assert_eq!(((fake_driver.cuFileStatsReset)(), (fake_driver.cuFileStatsStop)()), (ok(), ok()));
    (fake_driver.cuFileHandleDeregister)(copied);
    assert_eq!((fake_driver.cuFileDriverClose)(), ok());

    assert_eq!((fake_driver.cuFileSetParameterBool)(ALLOW_COMPAT_MODE, false), ok());
    assert_eq!((fake_driver.cuFileDriverOpen)(), ok());
    fake_driver.fail("cuFileHandleRegister@unsupported", 0, 1);
    assert_eq!((fake_driver.cuFileHandleRegister)(&mut 0, &description).err, cufile::IO_NOT_SUPPORTED);
    (fake_driver.cuFileHandleDeregister)(made_file(&fake_driver, &description));
    assert_eq!(fake_driver.violations(), "");
}

fn made_file(fake_driver: &FakeDriver, description: &Description) -> u64 {
    let mut handle = 0;
    assert_eq!((fake_driver.cuFileHandleRegister)(&mut handle, description), ok());
    handle
}

#[test]
fn an_old_copy_lacks_the_new_functions_only() {
    let folder = tempfile::tempdir().unwrap();
    let copy = deepnvme_fake_driver::old_copy(folder.path()).unwrap();
    // SAFETY: loading it runs only the start-up code of Rust's standard library.
    let library = unsafe { libloading::Library::new(copy) }.unwrap();
    // SAFETY: the symbols are looked up, not called.
    let has = |name: &[u8]| unsafe { library.get::<*const ()>(name) }.is_ok();
    assert!(has(b"cuFileDriverOpen") && has(b"cuFileBatchIOSubmit") && has(b"cuInit"));
    assert!(!has(b"cuFileSetParameterBool") && !has(b"cuFileGetStatsL3"));
    std::mem::forget(library);
}
