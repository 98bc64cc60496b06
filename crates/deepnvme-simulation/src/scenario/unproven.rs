//! Files with an unproven name: nothing shows that they are ours, so they stay, unlike leftovers.

use std::path::Path;

use deepnvme_file::replace::UNPROVEN_MARKER;

use super::context::Context;

/// Returns whether a file may be a user's, so that nothing may remove it.
///
/// Without unnamed files (`O_TMPFILE`), a new file has a first name that does not contain its inode. A writer that dies
/// before the next rename leaves it, as does a power cut that reverts this rename. Nothing can prove that it is ours.
pub(super) fn may_be_foreign(context: &Context, path: &Path) -> bool {
    has_unproven_name(path) && !context.world.state().setup.has_unnamed
}

/// Returns whether a new file or folder still has its first name, which does not contain its inode.
pub(super) fn has_unproven_name(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains(UNPROVEN_MARKER))
}
