//! The free space near a path, for errors of full disks. A module of its own, since `error` uses it and `fs` uses
//! `error`.

use std::path::Path;

/// Returns the free bytes of the file system that has this path, or else its folder. `None` if the kernel does not say.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    // Simulated disks are not the kernel's.
    if cfg!(simulated) {
        return None;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let space = rustix::fs::statvfs(path).or_else(|_| rustix::fs::statvfs(folder)).ok()?;
    Some(available(space.f_bavail, space.f_blocks).saturating_mul(space.f_frsize))
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
        assert!(free_bytes(Path::new("file")).is_some());
        assert_eq!(free_bytes(Path::new("/no/such/folder/file")), None);
    }
}
