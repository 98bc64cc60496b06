//! Power cuts: a file with its final name is complete on disk, regardless of the order of its writes.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_file::Target;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::{BackendFactory, Config, Durability, Engine};
use deepnvme_testkit::scheduled_backend::SimDisk;

use crate::common::{plan_archive, plan_safetensors, random};

const SEEDS: u64 = 25;
const IMAGES: u64 = 20;

fn on_disk(disk: &SimDisk) -> Arc<Engine> {
    let disk = disk.clone();
    let factory: BackendFactory = Arc::new(move |setup| {
        let carrier = deepnvme_io::backend::open(BackendKind::Threads, setup)?;
        Ok(Box::new(disk.backend(setup, carrier)))
    });
    Arc::new(Engine::with_backends(Config { workers: 2, ..Config::default() }, factory).unwrap())
}

fn inode(path: &Path) -> u64 {
    fs::metadata(path).unwrap().ino()
}

/// Spins until the name refers to another file, then samples the states that a power cut could leave of it.
fn watch(path: &Path, before: u64, disk: &SimDisk) -> Vec<Vec<u8>> {
    while inode(path) == before {
        std::hint::spin_loop();
    }
    let file = File::open(path).unwrap();
    (0..IMAGES).map(|seed| disk.crash_image(&file, seed).unwrap()).collect()
}

fn save_and_watch(seed: u64, durability: Durability) -> (Vec<Vec<u8>>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.file");
    fs::write(&path, "the old one").unwrap();
    let disk = SimDisk::new(seed);
    let plan = if seed.is_multiple_of(2) { plan_archive } else { plan_safetensors };
    let storages = [random(1_300_000, seed), random(500, seed + 1), random(300_000, seed + 2)];
    let save = plan(&path, &storages, SaveOptions { durability, ..SaveOptions::default() });
    let before = inode(&path);
    let images = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&path, before, &disk));
        let saved = save.run(on_disk(&disk), &Target::from(&path), Arc::default());
        if saved.is_err() {
            // Otherwise the watcher would hang.
            fs::remove_file(&path).unwrap();
        }
        saved.unwrap();
        watcher.join().unwrap()
    });
    (images, fs::read(&path).unwrap())
}

#[test]
fn only_a_file_on_the_disk_gets_its_name() {
    for seed in 0..SEEDS {
        for durability in [Durability::Data, Durability::Full] {
            let (images, whole) = save_and_watch(seed, durability);
            assert_eq!(images.len() as u64, IMAGES);
            assert!(images.iter().all(|image| *image == whole), "seed {seed}: a name without all its bytes");
        }
    }
}

/// Shows that the test above can fail: without durability, a power cut may leave any state.
#[test]
fn a_save_without_durability_can_be_torn() {
    let torn = (0..SEEDS).any(|seed| {
        let (images, whole) = save_and_watch(seed, Durability::None);
        images.iter().any(|image| *image != whole)
    });
    assert!(torn);
}
