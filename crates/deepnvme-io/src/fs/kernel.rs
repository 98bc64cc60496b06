//! The real file system, one function per call.

use std::ffi::OsString;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    self as calls, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RawDir, RenameFlags, Statx,
    StatxFlags,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::stat::{AclKind, FileId, FileKind, Space, Stat};
use crate::backend::cachestat;
use crate::backend::close::close;
use crate::op::Errno;

/// Bytes of directory entries per request.
const ENTRIES_BYTES: usize = 32 << 10;
/// Signals that may interrupt an allocation.
const INTERRUPTS_MAX: u32 = 8;

/// Opens a path, close-on-exec. `mode` is for a file that is created.
///
/// # Errors
/// The kernel's error.
pub fn open(path: &Path, flags: OFlags, mode: u32) -> Result<OwnedFd, Errno> {
    if flags.intersects(OFlags::CREATE | OFlags::TMPFILE.difference(OFlags::DIRECTORY)) {
        step("create", || path.to_path_buf())?;
    }
    beyond_standard(repeat(|| calls::open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode)))?)
}

/// Returns the same file with a descriptor above the standard streams. A process may have closed those, and libraries
/// that print to them would write into the file.
fn beyond_standard(file: OwnedFd) -> Result<OwnedFd, Errno> {
    const FIRST: i32 = 3;
    if file.as_raw_fd() >= FIRST { Ok(file) } else { rustix::io::fcntl_dupfd_cloexec(&file, FIRST) }
}

/// Creates an unnamed file in a folder, readable and writable by its owner.
///
/// # Errors
/// `OPNOTSUPP`, `ISDIR` or `NOENT` if the file system or kernel has no unnamed files, or other errors of the kernel.
pub fn open_unnamed(folder: &Path) -> Result<OwnedFd, Errno> {
    open(folder, OFlags::TMPFILE | OFlags::RDWR, 0o600)
}

/// Opens a second, independent open file description of the same file.
///
/// # Errors
/// The kernel's error.
pub fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
    open(&descriptor_path(file), flags, 0)
}

/// Links an unnamed open file to `path`, which must be free.
///
/// # Errors
/// `EXIST` if the name is taken, or other errors of the kernel.
pub fn link(file: BorrowedFd<'_>, path: &Path) -> Result<(), Errno> {
    step("link", || path.to_path_buf())?;
    calls::linkat(CWD, descriptor_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW)
}

/// Adds a second name to a file. The name must be free.
///
/// # Errors
/// `EXIST` if the name is taken. `PERM` or `OPNOTSUPP` if files can only have one name.
pub fn link_path(from: &Path, to: &Path) -> Result<(), Errno> {
    step("link", || to.to_path_buf())?;
    calls::link(from, to)
}

/// Returns the kernel's path of an open file.
///
/// # Errors
/// The kernel's error.
pub fn resolved_path(file: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
    let name = calls::readlink(descriptor_path(file), Vec::new())?;
    Ok(OsString::from_vec(name.into_bytes()).into())
}

/// Creates an unnamed file in memory.
///
/// # Errors
/// The kernel's error, for instance if a container's filter refuses the call.
pub fn open_in_memory(name: &str) -> Result<OwnedFd, Errno> {
    beyond_standard(calls::memfd_create(name, calls::MemfdFlags::CLOEXEC)?)
}

/// Resolves a path without `.`, `..` and links.
///
/// # Errors
/// The kernel's error, for instance if the path does not exist.
pub fn real_path(path: &Path) -> Result<PathBuf, Errno> {
    std::fs::canonicalize(path).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Renames a file, and replaces any existing file of the new name.
///
/// # Errors
/// The kernel's error.
pub fn rename(from: &Path, to: &Path) -> Result<(), Errno> {
    step("rename", || to.to_path_buf())?;
    calls::rename(from, to)
}

/// Renames a file. The new name must be free.
///
/// # Errors
/// `EXIST` if the name is taken. `INVAL` or `NOSYS` if the file system or kernel does not support it.
pub fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    step("rename", || to.to_path_buf())?;
    calls::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)
}

/// Removes a name of a file that is not a folder.
///
/// # Errors
/// The kernel's error.
pub fn unlink(path: &Path) -> Result<(), Errno> {
    step("unlink", || path.to_path_buf())?;
    calls::unlink(path)
}

/// Creates a folder.
///
/// # Errors
/// The kernel's error.
pub fn make_folder(path: &Path, mode: u32) -> Result<(), Errno> {
    step("make", || path.to_path_buf())?;
    calls::mkdir(path, Mode::from_raw_mode(mode))
}

/// Removes an empty folder.
///
/// # Errors
/// `NOTEMPTY` if it is not empty, or other errors of the kernel.
pub fn remove_folder(path: &Path) -> Result<(), Errno> {
    step("remove", || path.to_path_buf())?;
    calls::rmdir(path)
}

/// Returns the names in a folder, without `.` and `..`, in any order.
///
/// # Errors
/// The kernel's error, even of the close: the names may then be incomplete.
pub fn entries(folder: &Path) -> Result<Vec<OsString>, Errno> {
    names_in(open(folder, OFlags::RDONLY | OFlags::DIRECTORY, 0)?)
}

/// Returns the names in an open folder, and closes it. An error while listing must not look like the end of the list.
pub(super) fn names_in(opened: OwnedFd) -> Result<Vec<OsString>, Errno> {
    let mut buffer = vec![MaybeUninit::uninit(); ENTRIES_BYTES];
    let mut names = Vec::new();
    let mut listing = RawDir::new(opened.as_fd(), &mut buffer);
    while let Some(entry) = listing.next() {
        let entry = match entry {
            Err(Errno::INTR) => continue,
            entry => entry?,
        };
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(std::ffi::OsStr::from_bytes(name).to_os_string());
        }
    }
    close(opened)?;
    Ok(names)
}

/// Returns the metadata of a path's target.
///
/// # Errors
/// The kernel's error.
pub fn stat(path: &Path) -> Result<Stat, Errno> {
    described(CWD, path, AtFlags::empty())
}

/// Returns the metadata of a path, without following a link at its end.
///
/// # Errors
/// The kernel's error.
pub fn stat_link(path: &Path) -> Result<Stat, Errno> {
    described(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
}

/// Returns the metadata of an open file.
///
/// # Errors
/// The kernel's error.
pub fn stat_of(file: BorrowedFd<'_>) -> Result<Stat, Errno> {
    described(file, Path::new(""), AtFlags::EMPTY_PATH)
}

/// Locks an open file for exclusive use (`flock`). Waits until the lock is free.
///
/// # Errors
/// The kernel's error, for instance if the file system has no locks.
pub fn lock(file: BorrowedFd<'_>) -> Result<(), Errno> {
    repeat(|| calls::flock(file, FlockOperation::LockExclusive))
}

/// Locks an open file as [`lock`] does, but without waiting. Returns whether the lock was free.
///
/// # Errors
/// As [`lock`].
pub fn try_lock(file: BorrowedFd<'_>) -> Result<bool, Errno> {
    match repeat(|| calls::flock(file, FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Releases the lock, even for duplicates of the descriptor.
///
/// # Errors
/// As [`lock`].
pub fn unlock(file: BorrowedFd<'_>) -> Result<(), Errno> {
    repeat(|| calls::flock(file, FlockOperation::Unlock))
}

/// Sets the permission bits.
///
/// # Errors
/// The kernel's error.
pub fn set_mode(file: BorrowedFd<'_>, mode: u32) -> Result<(), Errno> {
    step("mode", || resolved_path(file).unwrap_or_default())?;
    calls::fchmod(file, Mode::from_raw_mode(mode))
}

/// Sets the group of a file.
///
/// # Errors
/// The kernel's error: `PERM` if the user is no member of the group.
pub fn set_group(file: BorrowedFd<'_>, group: u32) -> Result<(), Errno> {
    calls::fchown(file, None, Some(calls::Gid::from_raw(group)))
}

/// Returns the access control list of a file, or the one that new files in a folder get. `None` if there is none, or it
/// cannot be read.
#[must_use]
pub fn access_list(path: &Path, kind: AclKind) -> Option<Vec<u8>> {
    let name = match kind {
        AclKind::Access => "system.posix_acl_access",
        AclKind::Default => "system.posix_acl_default",
    };
    // No list is longer than an attribute.
    let mut list = vec![0; 1 << 16];
    let bytes = calls::getxattr(path, name, &mut list[..]).ok()?;
    list.truncate(bytes);
    Some(list)
}

/// Sets the length of a file.
///
/// # Errors
/// The kernel's error.
pub fn truncate(file: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
    step("truncate", || resolved_path(file).unwrap_or_default())?;
    repeat(|| calls::ftruncate(file, bytes))
}

/// Allocates a range, and extends a shorter file to the end of the range.
///
/// # Errors
/// `OPNOTSUPP`, `NOSYS` or `INVAL` if the file system does not support it, `NOSPC`, or other errors of the kernel.
/// `OPNOTSUPP` also if signals interrupt it again and again: tmpfs then starts anew each time.
pub fn allocate(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<(), Errno> {
    for _ in 0..INTERRUPTS_MAX {
        match calls::fallocate(file, FallocateFlags::empty(), offset, bytes) {
            Err(Errno::INTR) => {}
            allocated => return allocated,
        }
    }
    Err(Errno::OPNOTSUPP)
}

/// Waits until a file or folder is on the disk.
///
/// # Errors
/// The kernel's error.
pub fn sync(file: BorrowedFd<'_>) -> Result<(), Errno> {
    step("sync", || resolved_path(file).unwrap_or_default())?;
    repeat(|| calls::fsync(file))
}

/// Returns the space of an open file's file system.
///
/// # Errors
/// The kernel's error.
pub fn space(file: BorrowedFd<'_>) -> Result<Space, Errno> {
    let stat = calls::fstatvfs(file)?;
    Ok(Space { free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize), block_bytes: stat.f_bsize })
}

/// Returns the type number of an open file's file system.
///
/// # Errors
/// The kernel's error.
pub fn file_system(file: BorrowedFd<'_>) -> Result<u32, Errno> {
    Ok(calls::fstatfs(file)?.f_type as u32)
}

/// Returns the status flags of a descriptor (`F_GETFL`).
///
/// # Errors
/// The kernel's error.
pub fn open_flags(file: BorrowedFd<'_>) -> Result<OFlags, Errno> {
    calls::fcntl_getfl(file)
}

/// Sets the status flags of a descriptor (`F_SETFL`).
///
/// # Errors
/// The kernel's error.
pub fn set_open_flags(file: BorrowedFd<'_>, flags: OFlags) -> Result<(), Errno> {
    calls::fcntl_setfl(file, flags)
}

/// Reads a few bytes, such as metadata. Returns the bytes read.
///
/// # Errors
/// The kernel's error.
pub fn read_at(file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    repeat(|| rustix::io::pread(file, &mut *bytes, offset))
}

/// Advises the kernel that reads with this descriptor are random: they bring no other pages into the page cache than
/// those asked for, one by one.
///
/// # Errors
/// The kernel's error.
pub fn advise_random(file: BorrowedFd<'_>) -> Result<(), Errno> {
    calls::fadvise(file, 0, None, calls::Advice::Random)
}

/// Returns how many pages of a byte range are in the page cache.
///
/// # Errors
/// The kernel's error if it does not report it: before Linux 6.5, in a sandbox, or for another user's files.
pub fn cached_pages(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<u64, Errno> {
    cachestat::cached_pages(file, range)
}

/// Writes a few bytes, such as metadata. Returns the bytes written.
///
/// # Errors
/// The kernel's error.
pub fn write_at(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Result<usize, Errno> {
    step("write", || resolved_path(file).unwrap_or_default())?;
    repeat(|| rustix::io::pwrite(file, bytes, offset))
}

/// Copies bytes between two files in the kernel, each from its offset. Returns the bytes copied.
///
/// # Errors
/// The kernel's error. Many file systems do not support it.
pub fn copy_between(
    (source, mut source_offset): (BorrowedFd<'_>, u64),
    (target, mut target_offset): (BorrowedFd<'_>, u64),
    bytes: usize,
) -> Result<usize, Errno> {
    // An interrupted call has copied nothing.
    repeat(|| calls::copy_file_range(source, Some(&mut source_offset), target, Some(&mut target_offset), bytes))
}

/// Returns unpredictable bits, for names.
///
/// # Errors
/// The kernel's error.
pub fn random_bits() -> Result<u128, Errno> {
    let mut bytes = [0; 16];
    let mut done = 0;
    while done < bytes.len() {
        done += repeat(|| getrandom(&mut bytes[done..], GetRandomFlags::empty()))?;
    }
    Ok(u128::from_ne_bytes(bytes))
}

#[cfg(feature = "crash-steps")]
use super::crash::step;

/// Tests simulate a crash here.
#[cfg(not(feature = "crash-steps"))]
#[inline]
#[expect(clippy::unnecessary_wraps, reason = "in tests it fails")]
fn step(_what: &str, _path: impl FnOnce() -> PathBuf) -> Result<(), Errno> {
    Ok(())
}

fn repeat<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            answer => return answer,
        }
    }
}

fn descriptor_path(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn described(at: BorrowedFd<'_>, path: &Path, flags: AtFlags) -> Result<Stat, Errno> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::DIOALIGN;
    match calls::statx(at, path, flags, mask) {
        Ok(found) => Ok(of_statx(&found)),
        // Old kernels lack the call, and filters of containers refuse it.
        Err(Errno::NOSYS | Errno::PERM) if flags.contains(AtFlags::EMPTY_PATH) => by_fstat(at),
        Err(Errno::NOSYS | Errno::PERM) => calls::statat(at, path, flags).map(of_stat),
        Err(errno) => Err(errno),
    }
}

/// Uses the older call, which has no creation time and no alignment.
pub(super) fn by_fstat(file: BorrowedFd<'_>) -> Result<Stat, Errno> {
    calls::fstat(file).map(of_stat)
}

fn of_statx(found: &Statx) -> Stat {
    let mask = StatxFlags::from_bits_retain(found.stx_mask);
    let born = found.stx_btime;
    let nanoseconds = |seconds: i64, rest: u32| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
    Stat {
        kind: kind(FileType::from_raw_mode(found.stx_mode.into())),
        identity: FileId {
            device: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
        },
        bytes: found.stx_size,
        links: found.stx_nlink.into(),
        mode: u32::from(found.stx_mode) & 0o7777,
        user: found.stx_uid,
        group: found.stx_gid,
        modified_ns: nanoseconds(found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
        born_ns: mask
            .contains(StatxFlags::BTIME)
            .then(|| u64::try_from(nanoseconds(born.tv_sec, born.tv_nsec)).ok())
            .flatten(),
        direct_alignment: mask
            .contains(StatxFlags::DIOALIGN)
            .then_some((found.stx_dio_mem_align, found.stx_dio_offset_align)),
    }
}

#[allow(clippy::unnecessary_cast, clippy::cast_lossless, reason = "the fields differ between CPUs")]
fn of_stat(found: calls::Stat) -> Stat {
    Stat {
        kind: kind(FileType::from_raw_mode(found.st_mode)),
        identity: FileId { device: found.st_dev as u64, inode: found.st_ino as u64 },
        bytes: found.st_size as u64,
        links: found.st_nlink as u64,
        mode: found.st_mode as u32 & 0o7777,
        user: found.st_uid,
        group: found.st_gid,
        modified_ns: i128::from(found.st_mtime as i64) * 1_000_000_000 + i128::from(found.st_mtime_nsec as i64),
        born_ns: None,
        direct_alignment: None,
    }
}

fn kind(found: FileType) -> FileKind {
    match found {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Folder,
        FileType::Symlink => FileKind::Link,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::CharacterDevice => FileKind::CharacterDevice,
        FileType::Fifo => FileKind::Pipe,
        FileType::Socket => FileKind::Socket,
        _ => FileKind::Unknown,
    }
}
