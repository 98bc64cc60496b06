//! Atomic replacement: a name refers to the old content or to the new one, even after a crash.
//!
//! - `replacement` replaces one file or stripe set.
//! - `set` replaces several files and the index that lists them.
//! - `manifest` writes the manifest of a new stripe set.
//! - `folder` is a folder that gets its name once it is complete.
//! - `temporary` is a private file whose name proves its identity. A temporary that another process left is removed
//!   only if its name states its own inode and creation time, it belongs to this user, and no process holds its lock.

mod folder;
mod manifest;
mod replacement;
mod set;
mod temporary;

pub use folder::{PrivateFolder, remove_leftover_folders};
pub use replacement::{PART_MARKER, Replacement, replace_small};
pub use set::{Member, Retired, SetReplacement, remove_whole_set, retire_set};
pub use temporary::{TEMPORARY_MARKER, Temporary, UNPROVEN_MARKER, current_path, remove_leftovers, resolve};
