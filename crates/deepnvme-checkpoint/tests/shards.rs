//! Several writers produce the same file as one writer.

#![allow(clippy::unwrap_used)]

mod common;

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};

use deepnvme_checkpoint::write::{Save, SaveOptions, create, shard_ranges};
use deepnvme_checkpoint::{Error, Progress};
use deepnvme_file::{Replacement, StripeSet, Target};
use deepnvme_io::{Access, DirectMode, OpenOptions, TensorFile};
use proptest::prelude::*;

use crate::common::{engine, plan_archive, plan_safetensors, random};

type PlanOf = fn(&Path, &[Vec<u8>], SaveOptions) -> Save;

/// Returns the file of a shard, and the offset in the whole file of its first byte.
type Place = Box<dyn Fn(usize) -> (Arc<TensorFile>, u64) + Sync>;

/// Writes each shard on a thread, as a process with the same state would.
fn write_together(save: &(dyn Fn() -> Save + Sync), ranges: &[Range<u64>], place: &Place) {
    let (checksums, barrier) = (Mutex::new(vec![Vec::new(); ranges.len()]), Barrier::new(ranges.len()));
    std::thread::scope(|scope| {
        for (writer, range) in ranges.iter().enumerate() {
            let (checksums, barrier) = (&checksums, &barrier);
            scope.spawn(move || {
                let (file, base) = place(writer);
                let shard = Arc::new(save()).start_shard(engine(), file, range.clone(), base, Arc::default()).unwrap();
                checksums.lock().unwrap()[writer] = shard.checksums();
                barrier.wait();
                let mut others = checksums.lock().unwrap().clone();
                others.remove(writer);
                shard.finish(&others).unwrap();
            });
        }
    });
}

fn alone(save: Save, path: &Path) -> Vec<u8> {
    save.run(engine(), &Target::from(path), Arc::default()).unwrap();
    std::fs::read(path).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn one_file_of_many_writers(
        sizes in proptest::collection::vec(prop_oneof![0usize..5000, 200_000usize..3_000_000], 1..12),
        cuts in proptest::collection::btree_set(0u64..2000, 0..5),
        is_archive: bool,
        has_checksums: bool,
        seed: u64,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.file");
        let storages: Vec<Vec<u8>> =
            sizes.iter().enumerate().map(|(index, bytes)| random(*bytes, seed ^ index as u64)).collect();
        let plan: PlanOf = if is_archive { plan_archive } else { plan_safetensors };
        let save = || plan(&path, &storages, SaveOptions { has_checksums, ..SaveOptions::default() });
        let expected = alone(save(), &path);
        std::fs::remove_file(&path).unwrap();

        let bytes = save().bytes();
        prop_assert_eq!(save().layout_crc64(), save().layout_crc64());
        let mut borders: Vec<u64> = cuts.iter().map(|cut| cut * 4096).filter(|cut| *cut < bytes).collect();
        borders.extend([0, bytes]);
        borders.sort_unstable();
        let ranges: Vec<Range<u64>> = borders.windows(2).map(|pair| pair[0]..pair[1]).collect();
        let (replacement, _) = create(&engine(), &Target::from(&path), bytes).unwrap();
        let temporary = replacement.temporary();
        let place: Place = Box::new(move |_| {
            (deepnvme_file::open(&temporary, OpenOptions::to_fill(DirectMode::Preferred)).unwrap(), 0)
        });
        write_together(&save, &ranges, &place);
        prop_assert!(!path.exists());
        replacement.commit(true).unwrap();
        prop_assert!(std::fs::read(&path).unwrap() == expected);
    }
}

#[test]
fn part_files_are_a_stripe_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pt");
    let storages: Vec<Vec<u8>> = (0..4).map(|index| random(23 << 20 | 1234, index)).collect();
    let save = || plan_archive(&path, &storages, SaveOptions::default());
    let expected = alone(save(), &path);
    let ranges = shard_ranges(expected.len() as u64, 4);
    assert_eq!(ranges.len(), 4);
    let parts: Vec<_> = (0..4).map(|index| folder.path().join(format!("part-{index}"))).collect();
    let created: Vec<(Replacement, Arc<TensorFile>)> = parts
        .iter()
        .zip(&ranges)
        .map(|(part, range)| create(&engine(), &Target::from(part), range.end - range.start).unwrap())
        .collect();
    let files: Vec<_> = created.iter().map(|(_, file)| Arc::clone(file)).collect();
    let bases: Vec<u64> = ranges.iter().map(|range| range.start).collect();
    write_together(&save, &ranges, &(Box::new(move |writer| (Arc::clone(&files[writer]), bases[writer])) as Place));
    for (replacement, _) in created {
        replacement.commit(true).unwrap();
    }
    let joined: Vec<u8> = parts.iter().flat_map(|part| std::fs::read(part).unwrap()).collect();
    assert!(joined == expected, "cat of the parts is the file");
    let set = StripeSet::new(parts, ranges[0].end).unwrap();
    let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
    assert_eq!(
        deepnvme_file::open(&Target::Stripes(set.clone()), options).unwrap().len().unwrap(),
        expected.len() as u64
    );
    let mut reader = deepnvme_checkpoint::read::Reader::open(&engine(), &Target::Stripes(set)).unwrap();
    reader.verify_all(&engine(), &Progress::default()).unwrap();
}

#[test]
fn other_states_have_other_layouts_and_sums_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pt");
    let save = |sizes: &[usize]| {
        let storages: Vec<Vec<u8>> = sizes.iter().map(|bytes| random(*bytes, *bytes as u64)).collect();
        plan_archive(&path, &storages, SaveOptions::default())
    };
    assert_ne!(save(&[1 << 20, 5]).layout_crc64(), save(&[1 << 20, 6]).layout_crc64());
    let whole = save(&[8 << 20]);
    let bytes = whole.bytes();
    let (replacement, file) = create(&engine(), &Target::from(&path), bytes).unwrap();
    for others in [
        Vec::new(),
        vec![vec![1; 40]],
        vec![vec![0; 7]],
        vec![[0, u64::MAX, u64::MAX, 0, 0].map(u64::to_le_bytes).concat()],
    ] {
        let shard = Arc::new(save(&[8 << 20]));
        let shard = shard.start_shard(engine(), Arc::clone(&file), 0..4 << 20, 0, Arc::default()).unwrap();
        assert!(matches!(shard.finish(&others), Err(Error::Format { .. })), "the other half is not known");
    }
    drop(replacement);
    assert!(!path.exists());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
