//! A stripe set is one logical file over several.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::fs;
use std::sync::Arc;

use deepnvme_file::{StripeSet, Target, open};
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Access, Config, DirectMode, Durability, Engine, OpenOptions, TensorFile, WriteMode, WriteOptions};
use deepnvme_testkit::data::read_back;
use deepnvme_testkit::rng::random_bytes as random;

fn write(engine: &Engine, file: &Arc<TensorFile>, offset: u64, bytes: &[u8], options: WriteOptions) {
    let source = Region::from_vec(bytes.to_vec());
    assert_eq!(engine.write(file, offset, source, options).unwrap().wait().1.unwrap().bytes, bytes.len() as u64);
}

#[test]
fn a_stripe_set_is_one_file_over_several() {
    let engine = Engine::new(Config { workers: 2, queue_depth: 4, block_bytes: 16384, ..Config::default() }).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let parts: Vec<_> = (0..3).map(|index| folder.path().join(format!("disk{index}"))).collect();
    let set = StripeSet::new(parts.clone(), 8192).unwrap();
    let options = OpenOptions { access: Access::ReadWrite, create: true, direct: DirectMode::Preferred };
    let file = open(&Target::Stripes(set.clone()), options).unwrap();
    let data = random(300_007, 17);
    let whole = WriteOptions { mode: WriteMode::WholeFile, durability: Durability::Full };
    write(&engine, &file, 0, &data, whole);
    assert_eq!(file.len().unwrap(), data.len() as u64);
    write(&engine, &file, 12_345, &data[..20_000], WriteOptions::default());
    let mut expected = data;
    expected.copy_within(0..20_000, 12_345);
    let options = OpenOptions { access: Access::Read, create: false, ..options };
    let by_name = open(&Target::from(set.manifest_path()), options).unwrap();
    assert!(read_back(&engine, &by_name, 0, expected.len()) == expected);
    assert!(read_back(&engine, &by_name, 99_999, 100_001) == expected[99_999..200_000]);
    for (index, part) in parts.iter().enumerate() {
        let bytes = fs::read(part).unwrap();
        let first = index * 8192;
        assert!(bytes[..8192] == expected[first..first + 8192], "RAID-0 order");
    }
    let past_end = engine.read(&by_name, 299_000, RegionMut::from_vec(vec![0; 5000])).unwrap().wait().1;
    let error = past_end.unwrap_err();
    assert!(error.to_string().contains("of which 1007 are there"), "{error}");
}

#[test]
fn reading_through_the_cache_never_crosses_a_stripe() {
    let engine = Engine::new(Config::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let parts = ["a", "b"].map(|name| folder.path().join(name)).to_vec();
    let options = OpenOptions { access: Access::ReadWrite, create: true, direct: DirectMode::Preferred };
    let file = open(&Target::Stripes(StripeSet::new(parts, 4096).unwrap()), options).unwrap();
    let data = random(20_000, 3);
    write(&engine, &file, 0, &data, WriteOptions { mode: WriteMode::WholeFile, durability: Durability::None });
    let mut done = 1000;
    while done < data.len() {
        let target = RegionMut::from_vec(vec![0; 9000]);
        let bytes = file.read_through_cache(done as u64, &target.region()).unwrap();
        assert!((1..=4096).contains(&bytes));
        let mut found = vec![0; 9000];
        target.region().copy_to_slice(0, &mut found);
        assert!(found[..bytes] == data[done..done + bytes]);
        done += bytes;
    }
    assert_eq!(file.read_through_cache(20_000, &RegionMut::from_vec(vec![0; 9]).region()).unwrap(), 0);
}

#[test]
fn a_moved_set_has_its_own_parts() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (folder.path().join("here"), folder.path().join("there"));
    std::fs::create_dir(&here).unwrap();
    let set_in = |folder: &std::path::Path| StripeSet::new(vec![folder.join("p0"), folder.join("p1")], 4096).unwrap();
    set_in(&here).write_manifest().unwrap();
    std::fs::rename(&here, &there).unwrap();
    let found = StripeSet::from_manifest(&set_in(&there).manifest_path()).unwrap();
    assert_eq!(found, set_in(&there));
    // Parts in other folders keep their paths.
    let spread = StripeSet::new(vec![there.join("a"), folder.path().join("b")], 4096).unwrap();
    spread.write_manifest().unwrap();
    assert_eq!(StripeSet::from_manifest(&spread.manifest_path()).unwrap(), spread);
}
