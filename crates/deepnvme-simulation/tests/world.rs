//! Test the model itself: files and folders after a power cut.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

use deepnvme_simulation::world::folder::Folder;
use deepnvme_simulation::world::journal::Journal;
use deepnvme_simulation::world::tree::{Losses, NameLosses, Node, Tree};
use deepnvme_testkit::rng::Rng;
use deepnvme_testkit::sectors::SECTOR_BYTES;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Write { offset: usize, bytes: Vec<u8>, is_reported: bool },
    Resize(usize),
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    let write = (0..3000_usize, prop::collection::vec(any::<u8>(), 1..2000), any::<bool>());
    prop_oneof![
        4 => write.prop_map(|(offset, bytes, is_reported)| Step::Write { offset, bytes, is_reported }),
        1 => (0..4000_usize).prop_map(Step::Resize),
        2 => Just(Step::Sync),
    ]
}

fn write(content: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    if content.len() < offset + bytes.len() {
        content.resize(offset + bytes.len(), 0);
    }
    content[offset..offset + bytes.len()].copy_from_slice(bytes);
}

proptest! {
    /// A file whose changes were all reported and then synced keeps its content after any power cut.
    #[test]
    fn a_synced_file_survives_as_it_is(steps in prop::collection::vec(step(), 0..12), seed: u64, keep in 0_u32..1001) {
        let (mut journal, mut content, mut id) = (Journal::default(), Vec::new(), 0);
        for step in steps {
            id += 1;
            match step {
                Step::Write { offset, bytes, .. } => {
                    write(&mut content, offset, &bytes);
                    journal.wrote(id, offset, bytes, true);
                }
                Step::Resize(bytes) => {
                    content.resize(bytes, 0);
                    journal.resized(id, bytes);
                }
                Step::Sync => {
                    let promised = journal.promised();
                    journal.sync(&promised);
                    prop_assert_eq!(journal.unsynced(), 0);
                    prop_assert_eq!(&journal.crash_image(&mut Rng::new(seed), keep), &content);
                }
            }
        }
    }

    /// Each sector of a fixed-length file's image comes from some write or from the durable content.
    #[test]
    fn no_sector_is_a_mixture(steps in prop::collection::vec(step(), 0..12), seed: u64) {
        let durable = vec![0_u8; 8 * SECTOR_BYTES];
        let mut journal = Journal::of(durable.clone());
        let mut contents = vec![durable];
        for (id, step) in steps.into_iter().enumerate() {
            if let Step::Write { offset, mut bytes, is_reported } = step {
                // Whole sectors, so that their earlier content does not matter.
                let offset = offset / SECTOR_BYTES * SECTOR_BYTES;
                bytes.resize(SECTOR_BYTES, 1);
                journal.wrote(id as u64, offset, bytes.clone(), is_reported);
                let mut content = contents[0].clone();
                write(&mut content, offset, &bytes);
                contents.push(content);
            }
        }
        let image = journal.crash_image(&mut Rng::new(seed), 300);
        prop_assert!(image.len() == 8 * SECTOR_BYTES);
        for (index, sector) in image.chunks(SECTOR_BYTES).enumerate() {
            let at = index * SECTOR_BYTES..(index + 1) * SECTOR_BYTES;
            prop_assert!(contents.iter().any(|content| &content[at.clone()] == sector));
        }
    }

    /// A name replaced by renames always exists after a power cut, as one of its files.
    #[test]
    fn a_replaced_name_is_never_missing(renames in 1_u64..8, seed: u64, keep in 0_u32..1001) {
        let mut folder = Folder::default();
        let name = OsString::from("a");
        folder.change(0, vec![(name.clone(), Some(100))]);
        folder.sync(0);
        for index in 1..=renames {
            let temporary = OsString::from(format!("t{index}"));
            folder.change(2 * index, vec![(temporary.clone(), Some(100 + index))]);
            folder.change(2 * index + 1, vec![(temporary, None), (name.clone(), Some(100 + index))]);
        }
        let mut rng = Rng::new(seed);
        folder.crash(|_| rng.chance(keep));
        let left = folder.get(&name).unwrap();
        prop_assert!((100..=100 + renames).contains(&left));
        // No file has two names.
        let files: BTreeSet<u64> = folder.names().values().copied().collect();
        prop_assert_eq!(files.len(), folder.names().len());
    }
}

#[test]
fn unreported_writes_are_not_promised() {
    let mut journal = Journal::default();
    journal.wrote(1, 0, vec![1; 600], false);
    let promised = journal.promised();
    journal.report(1);
    journal.sync(&promised);
    assert_eq!(journal.unsynced(), 1, "the sync began before the writer knew");
    let images: BTreeSet<usize> = (0..100).map(|seed| journal.crash_image(&mut Rng::new(seed), 300).len()).collect();
    assert!(images.contains(&0) && images.contains(&600) && images.contains(&512), "{images:?}");
}

#[test]
fn links_and_dots_lead_where_they_should() {
    let mut tree = Tree::new(2).unwrap();
    let disk = tree.find(Path::new("/d0"), true).unwrap().inode.unwrap();
    let folder = tree.make(Node::Folder(Folder::default()), 0, 0o755, false).unwrap();
    let link = tree.make(Node::Link("/d0/folder".into()), 0, 0o777, false).unwrap();
    let looping = tree.make(Node::Link("loop".into()), 0, 0o777, false).unwrap();
    let file = tree.make(Node::File(Journal::default()), 0, 0o644, false).unwrap();
    tree.set_names(disk, vec![("folder".into(), Some(folder)), ("link".into(), Some(link))]);
    tree.set_names(disk, vec![("loop".into(), Some(looping))]);
    tree.set_names(folder, vec![("file".into(), Some(file))]);
    for path in ["/d0/folder/file", "/d0/link/file", "/d0/link/../folder/./file", "/d1/../d0/link/file"] {
        assert_eq!(tree.find(Path::new(path), true).unwrap().inode, Some(file), "{path}");
    }
    assert_eq!(tree.find(Path::new("/d0/link"), false).unwrap().inode, Some(link));
    assert_eq!(tree.find(Path::new("/d0/link"), true).unwrap().inode, Some(folder));
    assert_eq!(tree.find(Path::new("/d0/loop"), true).unwrap_err(), rustix::io::Errno::LOOP);
    assert_eq!(tree.find(Path::new("/d0/none/file"), true).unwrap_err(), rustix::io::Errno::NOENT);
    assert_eq!(tree.find(Path::new("/d0/folder/file/x"), true).unwrap_err(), rustix::io::Errno::NOTDIR);
    assert_eq!(tree.path_of(file).unwrap(), Path::new("/d0/folder/file"));
}

#[test]
fn a_crash_keeps_synced_files_and_forgets_unnamed_ones() {
    let mut tree = Tree::new(1).unwrap();
    let disk = tree.find(Path::new("/d0"), true).unwrap().inode.unwrap();
    let make = |tree: &mut Tree, name: &str| {
        let file = tree.make(Node::File(Journal::of(b"old".to_vec())), 0, 0o644, false).unwrap();
        tree.set_names(disk, vec![(name.into(), Some(file))]);
        file
    };
    let kept = make(&mut tree, "kept");
    let all = tree.last_change();
    tree.sync(disk, &[], all).unwrap();
    let lost = make(&mut tree, "lost");
    tree.crash(&mut Rng::new(1), Losses { kept_per_mille: 0, names: NameLosses::Any }).unwrap();
    assert_eq!(tree.content(kept).unwrap(), b"old");
    assert!(tree.entry(lost).is_err());
    let names: Vec<_> = tree.walk().into_iter().map(|(path, _)| path).collect();
    assert_eq!(names, [Path::new("/d0"), Path::new("/d0/kept")]);
}
