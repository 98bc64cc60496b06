//! Loads return the saved data: any sizes, both formats, full verification.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::sync::Arc;

use deepnvme_checkpoint::read::{FileMetadata, Reader, Verify};
use deepnvme_checkpoint::write::{Save, SaveOptions, Saved, Staging, Tensor};
use deepnvme_checkpoint::{DamagedPart, Error, Progress};
use deepnvme_file::Target;
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::Engine;
use deepnvme_io::mem::{Buffer, Region, RegionMut};
use proptest::prelude::*;

use crate::common::{engine, plan_archive, plan_safetensors, random};

fn archive(path: &Path, storages: &[Vec<u8>], options: SaveOptions) -> Result<Saved, Error> {
    plan_archive(path, storages, options).run(engine(), &Target::from(path), Arc::default())
}

fn safetensors(path: &Path, storages: &[Vec<u8>], options: SaveOptions) -> Result<Saved, Error> {
    plan_safetensors(path, storages, options).run(engine(), &Target::from(path), Arc::default())
}

/// Loads all extents of a file, by name.
fn load(path: &Path, verify: Verify) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let engine = engine();
    let mut reader = Arc::new(Reader::open(&engine, &Target::from(&path.to_path_buf()))?);
    match arenas_of(&reader, &engine, verify) {
        Err(Error::HeaderLength { .. }) => {
            let wanted: Vec<usize> = (0..reader.extents().len()).collect();
            Arc::get_mut(&mut reader).unwrap().resolve(&engine, &wanted)?;
            arenas_of(&reader, &engine, verify)
        }
        other => other,
    }
}

fn arenas_of(reader: &Arc<Reader>, engine: &Engine, verify: Verify) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let wanted: Vec<usize> = (0..reader.extents().len()).collect();
    let arenas = reader.load_buffers(&wanted);
    let targets: Vec<RegionMut> =
        arenas.iter().map(|arena| Buffer::zeroed(arena.bytes as usize).unwrap().into_region()).collect();
    let views: Vec<Region> = targets.iter().map(RegionMut::region).collect();
    let loading = reader.start(engine, arenas.iter().cloned().zip(targets).collect())?;
    loading.finish(verify, &Progress::default())?;
    let mut all: Vec<(String, Vec<u8>)> =
        reader.extents().iter().map(|extent| (extent.name.clone(), Vec::new())).collect();
    for (arena, view) in arenas.iter().zip(&views) {
        for member in &arena.members {
            let mut bytes = vec![0; reader.extents()[member.extent].bytes as usize];
            view.copy_to_slice(member.at as usize, &mut bytes);
            all[member.extent].1 = bytes;
        }
    }
    Ok(all)
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![
        4 => 0..200usize,
        2 => 4000..4200usize,
        2 => (256usize << 10) - 3..(256 << 10) + 3,
        1 => (1usize << 20) - 5..(3 << 20) + 5,
    ];
    proptest::collection::vec(size, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn saved_tensors_are_loaded(sizes in sizes(), seed: u64, has_checksums: bool) {
        let folder = tempfile::tempdir().unwrap();
        let storages: Vec<_> = sizes.iter().enumerate().map(|(i, size)| random(*size, seed ^ i as u64)).collect();
        let staging = (seed % 2 == 0).then(|| Staging::new(seed % (8 << 20)).unwrap());
        let options = SaveOptions { durability: deepnvme_io::Durability::None, has_checksums, staging };
        let (pt, st) = (folder.path().join("a.pt"), folder.path().join("a.safetensors"));
        let pt_bytes = archive(&pt, &storages, options.clone()).unwrap();
        let st_bytes = safetensors(&st, &storages, options).unwrap();
        prop_assert_eq!(pt_bytes.bytes, std::fs::metadata(&pt).unwrap().len());
        prop_assert_eq!(st_bytes.bytes, std::fs::metadata(&st).unwrap().len());
        for (path, saved) in [(&pt, pt_bytes), (&st, st_bytes)] {
            let file = std::fs::read(path).unwrap();
            let index = &file[saved.index_offset as usize..(saved.index_offset + saved.index_bytes) as usize];
            prop_assert_eq!(deepnvme_format::checksums::checksums_of(index).crc64, saved.index_crc64);
        }
        let verified = |path: &Path| {
            let engine = engine();
            Reader::open(&engine, &Target::from(&path.to_path_buf())).unwrap().verify_all(&engine, &Progress::default())
        };
        let total: usize = sizes.iter().sum();
        prop_assert_eq!(verified(&pt).unwrap(), total as u64);
        match verified(&st) {
            Ok(bytes) => prop_assert!(has_checksums && bytes == total as u64),
            Err(Error::NoChecksums { .. }) => prop_assert!(!has_checksums),
            Err(other) => panic!("{other}"),
        }
        for (index, (name, bytes)) in load(&pt, Verify::Full).unwrap().into_iter().enumerate() {
            prop_assert_eq!(name, format!("data/{index}"));
            prop_assert_eq!(&bytes, &storages[index]);
        }
        let verify = if has_checksums { Verify::Full } else { Verify::Sample };
        for (name, bytes) in load(&st, verify).unwrap() {
            let index: usize = name[1..].parse().unwrap();
            prop_assert_eq!(&bytes, &storages[index]);
        }
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
    }
}

#[test]
fn a_changed_byte_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let storages = [random(100, 1), random(3 << 20, 2), random(50_000, 3)];
    for (path, save) in [
        (folder.path().join("a.pt"), archive as fn(&Path, &[Vec<u8>], SaveOptions) -> Result<Saved, Error>),
        (folder.path().join("a.safetensors"), safetensors),
    ] {
        for has_checksums in [true, false] {
            save(&path, &storages, SaveOptions { has_checksums, ..SaveOptions::default() }).unwrap();
            let engine = engine();
            let reader = Reader::open(&engine, &Target::from(&path)).unwrap();
            let is_archive = matches!(reader.file_metadata(), FileMetadata::Archive { .. });
            let extent = reader.extents().iter().find(|extent| extent.bytes == 3 << 20).unwrap().clone();
            let mut bytes = std::fs::read(&path).unwrap();
            let damaged = extent.data_offset as usize + (2 << 20) + 17;
            bytes[damaged] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            load(&path, Verify::Off).unwrap();
            match load(&path, Verify::Full) {
                Err(Error::Damaged { part: DamagedPart::Record { name, .. }, offset, bytes, .. }) => {
                    assert_eq!(name, extent.name);
                    let (offset, bytes) = (offset as usize, bytes as usize);
                    assert!((offset..offset + bytes).contains(&damaged));
                    assert_eq!(bytes, if has_checksums { 1 << 20 } else { 3 << 20 });
                }
                Err(Error::NoChecksums { .. }) => assert!(!has_checksums && !is_archive),
                other => panic!("{other:?}"),
            }
            let mut reader = Reader::open(&engine, &Target::from(&path)).unwrap();
            let verified = reader.verify_all(&engine, &Progress::default());
            assert!(matches!(verified, Err(Error::Damaged { .. } | Error::NoChecksums { .. })), "{verified:?}");
        }
    }
}

#[test]
fn an_interrupted_save_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    safetensors(&path, &[random(1000, 1)], SaveOptions::default()).unwrap();
    let before = std::fs::read(&path).unwrap();
    let tensor = Tensor {
        spec: TensorSpec { name: "x".into(), dtype: Dtype::U8, shape: vec![5 << 20] },
        data: Region::from_vec(random(5 << 20, 2)).into(),
    };
    let progress = Progress::default();
    progress.stop();
    let save = Save::safetensors(&path, vec![tensor], Vec::new(), SaveOptions::default()).unwrap();
    let saved = save.run(engine(), &Target::from(&path), Arc::new(progress));
    assert!(matches!(saved, Err(Error::Interrupted)), "{saved:?}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn headers_can_be_read_beforehand() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pt");
    archive(&path, &[random(100, 1), random(300 << 10, 2), Vec::new()], SaveOptions::default()).unwrap();
    let engine = engine();
    let mut reader = Reader::open(&engine, &Target::from(&path)).unwrap();
    let before = reader.extents().to_vec();
    reader.resolve(&engine, &[0, 1, 2]).unwrap();
    assert_eq!(reader.extents(), before, "the directory's places are right");
}

#[test]
fn other_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    for (bytes, word) in [
        (&b""[..], "empty"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.rest", "torch.load"),
        (b"\x80\x04N.", "bare pickle"),
        (b"GGUF....", "GGUF"),
        (b"hello, world", "neither"),
        (b"PK\x03\x04 and then nothing", "interrupted"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", "states a header"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let error = Reader::open(&engine(), &Target::from(&path)).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(path.to_str().unwrap()), "{error}");
    }
}
