//! The free space near a path, for errors of full disks. A module of its own, since `error` uses it and `fs` uses
//! `error`.

use std::path::Path;

/// The reason why a file system is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shortage {
    /// It has too few free bytes, which these are.
    Bytes { free: u64 },
    /// It has no free inode: it can hold no more files.
    Inodes,
}

/// Returns the shortage of the file system that has this path, or else its folder. `None` if the kernel does not say.
pub(crate) fn shortage(path: &Path) -> Option<Shortage> {
    // Simulated disks are not the kernel's.
    if cfg!(simulated) {
        return None;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let space = rustix::fs::statvfs(path).or_else(|_| rustix::fs::statvfs(folder)).ok()?;
    let free = available(space.f_bavail, space.f_blocks).saturating_mul(space.f_frsize);
    // File systems without a fixed number of inodes report none at all.
    let has_no_inode = space.f_files > 0 && space.f_ffree == 0;
    Some(if has_no_inode { Shortage::Inodes } else { Shortage::Bytes { free } })
}

/// Returns the free blocks. Some file systems subtract their reserve from fewer blocks, and wrap around.
fn available(free_blocks: u64, blocks: u64) -> u64 {
    if free_blocks > blocks { 0 } else { free_blocks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_larger_than_the_free_space_leaves_nothing() {
        assert_eq!((available(7, 9), available(u64::MAX - 3, 9)), (7, 0));
    }

    #[test]
    fn a_name_in_the_current_folder_and_a_missing_folder() {
        assert!(matches!(shortage(Path::new("file")), Some(Shortage::Bytes { .. })));
        assert_eq!(shortage(Path::new("/no/such/folder/file")), None);
    }
}
