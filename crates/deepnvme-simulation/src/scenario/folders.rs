//! Create folders on the machine's disks, and find files that nothing may remove.

use std::path::{Path, PathBuf};

use super::context::Context;
use crate::world::folder::Folder;
use crate::world::tree::Node;

/// Creates folders, each on its own disk.
pub(super) fn make_folders(context: &Context, count: usize) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut state = context.world.state();
    for disk in 0..count {
        let tree = &mut state.tree;
        let path = PathBuf::from(format!("/d{disk}/models"));
        let made = tree.find(&path, false).and_then(|place| {
            let inode = tree.make(Node::Folder(Folder::default()), disk, 0o755, true)?;
            tree.set_names(place.folder, vec![(place.name, Some(inode))]);
            // A symbolic link to the folder.
            let link = tree.make(Node::Link(path.clone()), disk, 0o777, true)?;
            tree.set_names(place.folder, vec![("link".into(), Some(link))]);
            let all = tree.last_change();
            tree.sync(place.folder, &[], all)
        });
        debug_assert!(made.is_ok(), "an empty disk has room");
        folders.push(path);
    }
    folders
}

/// Returns whether a file may be a user's, so that nothing may remove it. Without unnamed files, a new file's first
/// name proves nothing: the writer may die at that moment, or a power cut may revert the rename.
pub(super) fn may_be_foreign(context: &Context, path: &Path) -> bool {
    let is_new = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".deepnvme-tmp-new-"));
    is_new && !context.world.state().setup.has_unnamed
}
