//! A simulated file system instead of the kernel's. Each call goes to the world that the calling thread has entered.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_simulation_runtime::thread::{self, WorldId};
use rustix::fs::OFlags;

use super::stat::{AclKind, Space, Stat};
use crate::op::Errno;

thread_local! {
    static WORLDS: RefCell<BTreeMap<WorldId, Arc<dyn Calls>>> = const { RefCell::new(BTreeMap::new()) };
}

/// Routes the calls of this OS thread's simulated threads in world `number` to `world`.
pub fn enter(number: WorldId, world: Arc<dyn Calls>) {
    let before = WORLDS.with_borrow_mut(|worlds| worlds.insert(number, world));
    drop(before);
}

/// Removes a world.
pub fn leave(number: WorldId) {
    let before = WORLDS.with_borrow_mut(|worlds| worlds.remove(&number));
    drop(before);
}

fn current() -> Option<Arc<dyn Calls>> {
    WORLDS.with_borrow(|worlds| worlds.get(&thread::world()).cloned())
}

/// An open file and an offset in it.
pub type At<'a> = (BorrowedFd<'a>, u64);

macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        /// The calls of a world. `kernel` documents them.
        pub trait Calls {
            $(
                /// See the function of the same name.
                ///
                /// # Errors
                /// As that function.
                fn $name(&self $(, $argument: $type)*) -> Result<$answer, Errno>;
            )*
        }

        $(
            /// Calls the world that was entered.
            ///
            /// # Errors
            /// The world's error, or `NOSYS` outside of all worlds.
            pub fn $name($($argument: $type),*) -> Result<$answer, Errno> {
                match current() {
                    Some(world) => world.$name($($argument),*),
                    None => Err(Errno::NOSYS),
                }
            }
        )*
    };
}

calls! {
    fn open(path: &Path, flags: OFlags, mode: u32) -> OwnedFd;
    fn open_unnamed(folder: &Path) -> OwnedFd;
    fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> OwnedFd;
    fn link(file: BorrowedFd<'_>, path: &Path) -> ();
    fn link_path(from: &Path, to: &Path) -> ();
    fn resolved_path(file: BorrowedFd<'_>) -> PathBuf;
    fn real_path(path: &Path) -> PathBuf;
    fn rename(from: &Path, to: &Path) -> ();
    fn rename_new(from: &Path, to: &Path) -> ();
    fn unlink(path: &Path) -> ();
    fn make_folder(path: &Path, mode: u32) -> ();
    fn remove_folder(path: &Path) -> ();
    fn entries(folder: &Path) -> Vec<OsString>;
    fn stat(path: &Path) -> Stat;
    fn stat_link(path: &Path) -> Stat;
    fn stat_of(file: BorrowedFd<'_>) -> Stat;
    fn lock(file: BorrowedFd<'_>) -> ();
    fn try_lock(file: BorrowedFd<'_>) -> bool;
    fn unlock(file: BorrowedFd<'_>) -> ();
    fn set_mode(file: BorrowedFd<'_>, mode: u32) -> ();
    fn truncate(file: BorrowedFd<'_>, bytes: u64) -> ();
    fn allocate(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> ();
    fn sync(file: BorrowedFd<'_>) -> ();
    fn space(file: BorrowedFd<'_>) -> Space;
    fn file_system(file: BorrowedFd<'_>) -> u32;
    fn open_flags(file: BorrowedFd<'_>) -> OFlags;
    fn set_open_flags(file: BorrowedFd<'_>, flags: OFlags) -> ();
    fn read_at(file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> usize;
    fn write_at(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> usize;
    fn advise_random(file: BorrowedFd<'_>) -> ();
    fn cached_pages(file: BorrowedFd<'_>, range: &Range<u64>) -> u64;
    fn copy_between(source: At<'_>, target: At<'_>, bytes: usize) -> usize;
    fn open_in_memory(name: &str) -> OwnedFd;
    fn random_bits() -> u128;
}

/// Changes nothing: simulated files have one group.
///
/// # Errors
/// None.
pub fn set_group(_: BorrowedFd<'_>, _: u32) -> Result<(), Errno> {
    Ok(())
}

/// Simulated files have no access control lists.
#[must_use]
pub fn access_list(_: &Path, _: AclKind) -> Option<Vec<u8>> {
    None
}
