//! A fake driver with cuFile open, and a file to read from.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use super::api::{Description, FileError};
use super::{FakeDriver, NON_BLOCKING, made, pattern};

pub(crate) const MIB: usize = 1 << 20;

/// A fake driver with cuFile open, and a file with the pattern of seed 1, opened for direct I/O if its file system
/// supports that.
pub(crate) struct Setting {
    pub(crate) fake_driver: FakeDriver,
    pub(crate) file: File,
    pub(crate) handle: u64,
    pub(crate) _folder: tempfile::TempDir,
}

/// Success.
pub(crate) fn ok() -> FileError {
    FileError { err: 0, cu_err: 0 }
}

/// Creates the setting.
pub(crate) fn setting() -> Setting {
    let fake_driver = FakeDriver::with_context();
    assert_eq!((fake_driver.cuFileDriverOpen)(), ok());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    std::fs::write(&path, pattern(1, 2 * MIB)).unwrap();
    let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path);
    // A file system without direct I/O is still good for everything else here.
    let file = open(libc::O_DIRECT).or_else(|_| open(0)).unwrap();
    let handle = register(&fake_driver, &file);
    Setting { fake_driver, file, handle, _folder: folder }
}

/// Creates the setting, a stream and device memory.
pub(crate) fn setting_with_stream(bytes: usize) -> (Setting, u64, u64) {
    let setting = setting();
    let (stream, memory) = (setting.fake_driver.stream(NON_BLOCKING), setting.fake_driver.alloc(bytes));
    (setting, stream, memory)
}

/// Registers a file.
fn register(fake_driver: &FakeDriver, file: &File) -> u64 {
    let description = Description { kind: 1, fd: file.as_raw_fd().into(), operations: 0 };
    made(|out| (fake_driver.cuFileHandleRegister)(out, &description).err)
}
