//! Creates folders on the machine's disks.

use std::path::PathBuf;

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
            // Scenarios also reach the folder through a link.
            let link = tree.make(Node::Link(path.clone()), disk, 0o777, true)?;
            tree.set_names(place.folder, vec![("link".into(), Some(link))]);
            let all = tree.last_change();
            tree.sync(place.folder, &[], all)
        });
        debug_assert!(made.is_ok(), "an empty disk has space");
        folders.push(path);
    }
    folders
}
