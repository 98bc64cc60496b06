//! A full verify covers every byte of a file: each is changed in turn, and each change is reported.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::read::{Coverage, Reader, Verify};
use deepnvme_checkpoint::write::{Save, SaveOptions, Tensor};
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::Target;
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::{Header, LENGTH_BYTES, TensorSpec};
use deepnvme_io::mem::{Buffer, Region, RegionMut};
use deepnvme_io::{Config, DirectMode, Engine};

use crate::common::{engine, plan_archive, plan_safetensors, random, write_safetensors};

type Metadata = Vec<(String, String)>;

/// Loads the file with full verification, then runs a full verify like `deepnvme verify`.
fn check(engine: &Engine, path: &Path) -> Result<()> {
    let open = || Reader::open(engine, &Target::from(&path.to_path_buf()));
    load(engine, &Arc::new(open()?), Verify::Full)?;
    open()?.verify_all(engine, &Progress::default())?;
    Ok(())
}

fn load(engine: &Engine, reader: &Arc<Reader>, verify: Verify) -> Result<()> {
    let wanted: Vec<usize> = (0..reader.extents().len()).collect();
    let arenas = reader.load_buffers(&wanted);
    let targets: Vec<RegionMut> =
        arenas.iter().map(|arena| Buffer::zeroed(arena.bytes as usize).unwrap().into_region()).collect();
    reader.start(engine, arenas.into_iter().zip(targets).collect())?.finish(verify, &Progress::default())
}

fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> Tensor {
    let bytes = shape.iter().product::<u64>() * dtype.bytes();
    let spec = TensorSpec { name: name.into(), dtype, shape: shape.to_vec() };
    Tensor { spec, data: Region::from_vec(random(bytes as usize, bytes)).into() }
}

fn save(folder: &Path, name: &str, plan: impl FnOnce(&Path) -> Save) -> PathBuf {
    let path = folder.join(name);
    plan(&path).run(engine(), &Target::from(&path), Arc::default()).unwrap();
    path
}

fn safetensors(path: &Path, tensors: Vec<Tensor>, metadata: Metadata) -> Save {
    Save::safetensors(path, tensors, metadata, SaveOptions::default()).unwrap()
}

#[test]
fn every_changed_byte_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text = |key: &str, text: &str| (key.to_owned(), text.to_owned());
    let long = random(300 << 10, 1);
    let files = [
        save(folder, "plain.safetensors", |path| {
            safetensors(path, vec![tensor("w", Dtype::F32, &[2, 3]), tensor("\"b", Dtype::I16, &[5])], Vec::new())
        }),
        save(folder, "texts.safetensors", |path| {
            let metadata = vec![text("format", "pt"), text("a", "\u{e4}\"\\ "), text("deepnvme.checksum", "x")];
            safetensors(path, vec![tensor("w", Dtype::U8, &[7])], metadata)
        }),
        save(folder, "empty.safetensors", |path| {
            safetensors(path, vec![tensor("e", Dtype::F32, &[0, 3]), tensor("f", Dtype::F32, &[3, 0])], Vec::new())
        }),
        save(folder, "nothing.safetensors", |path| safetensors(path, Vec::new(), Vec::new())),
        save(folder, "small.pt", |path| {
            plan_archive(path, &[random(100, 1), Vec::new(), random(64, 2)], SaveOptions::default())
        }),
        save(folder, "nothing.pt", |path| plan_archive(path, &[], SaveOptions::default())),
        save(folder, "large.pt", |path| {
            plan_archive(path, &[random(9, 1), long, random(9, 2)], SaveOptions::default())
        }),
    ];
    // Recently written pages are read from the page cache.
    let engine = Engine::new(Config { direct: DirectMode::Disabled, workers: 1, ..Config::default() }).unwrap();
    for path in files {
        check(&engine, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let long = bytes.len() > 100_000;
        for (at, byte) in bytes.iter().enumerate() {
            // In long data, test every thousandth byte only.
            if long && (8192..bytes.len() - 12_000).contains(&at) && at % 1000 > 0 {
                continue;
            }
            // Other white space, the other case of a letter, or any other byte.
            let others = [if *byte == b' ' { b'\n' } else { byte ^ 0x20 }, byte ^ (1 + (at * 37 % 255) as u8)];
            for (index, other) in others.into_iter().enumerate() {
                file.write_all_at(&[other], at as u64).unwrap();
                let checked = |checked: Result<()>| match checked {
                    Err(Error::Io(error)) => panic!("{}: byte {at} as {other:#x}: {error}", path.display()),
                    Err(_) => {}
                    Ok(()) => panic!("{}: byte {at} of {} as {other:#x} is not noticed", path.display(), bytes.len()),
                };
                let open = Reader::open(&engine, &Target::from(&path));
                checked(match (at + index) % 2 {
                    0 => open.and_then(|reader| load(&engine, &Arc::new(reader), Verify::Full)),
                    _ => open.and_then(|mut reader| reader.verify_all(&engine, &Progress::default()).map(drop)),
                });
            }
            file.write_all_at(&[*byte], at as u64).unwrap();
        }
        check(&engine, &path).unwrap();
    }
}

#[test]
fn every_byte_more_or_less_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let files = [
        save(folder, "small.safetensors", |path| {
            safetensors(path, vec![tensor("w", Dtype::F32, &[2, 3]), tensor("e", Dtype::F32, &[0, 3])], Vec::new())
        }),
        save(folder, "small.pt", |path| {
            plan_archive(path, &[random(100, 1), Vec::new(), random(64, 2)], SaveOptions::default())
        }),
    ];
    let engine = Engine::new(Config { direct: DirectMode::Disabled, workers: 1, ..Config::default() }).unwrap();
    let zeros = vec![0; 5000];
    for path in files {
        check(&engine, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for at in 0..=bytes.len() {
            let (before, after) = bytes.split_at(at);
            let less = &after[after.len().min([1, 7][at % 2])..];
            let more: &[u8] = [&zeros[..1], b" ", &zeros, b"changed"][at % 4];
            for changed in [[before, less].concat(), [before, more, after].concat()] {
                if changed == bytes {
                    continue;
                }
                std::fs::write(&path, &changed).unwrap();
                let now = format!("{}: {} bytes, changed at {at}", path.display(), changed.len());
                let loaded = Reader::open(&engine, &Target::from(&path))
                    .and_then(|reader| load(&engine, &Arc::new(reader), Verify::Full));
                assert!(loaded.is_err(), "{now}: loaded");
                let verified = Reader::open(&engine, &Target::from(&path))
                    .and_then(|mut reader| reader.verify_all(&engine, &Progress::default()));
                assert!(verified.is_err(), "{now}: verified");
            }
        }
    }
}

/// Rewrites a file as other writers do: the same metadata in a header that is padded to eight bytes.
fn rewritten(path: &Path, data: &[u8], shape: &[u64], extra: usize) {
    let bytes = std::fs::read(path).unwrap();
    let json_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = Header::parse(&bytes[8..8 + json_bytes], bytes.len() as u64).unwrap();
    let metadata: serde_json::Map<_, _> =
        header.metadata.iter().map(|(key, text)| (key.clone(), text.clone().into())).collect();
    let mut metadata = serde_json::Value::from(metadata);
    metadata["extra"] = "x".repeat(extra).into();
    let header = serde_json::json!({
        "__metadata__": metadata,
        "w": { "dtype": "U8", "shape": shape, "data_offsets": [0, data.len()] },
    });
    write_safetensors(path, &header, data, |len| len.next_multiple_of(8));
}

#[test]
fn checksums_of_another_file_are_known_as_such() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
    // One of these lengths places the first tensor at our offset.
    for extra in (0..4096).step_by(8) {
        let path = save(folder.path(), "a.safetensors", |path| {
            safetensors(path, vec![tensor("w", Dtype::U8, &[100])], Vec::new())
        });
        rewritten(&path, &random(100, 7), &[100], extra);
        let reader = Arc::new(Reader::open(&engine, &Target::from(&path)).unwrap());
        assert_eq!((reader.coverage(), reader.has_checksums()), (Coverage::Stale, false), "{extra}");
        load(&engine, &reader, Verify::Sample).unwrap();
        let refused = load(&engine, &reader, Verify::Full).unwrap_err();
        assert!(matches!(refused, Error::NoChecksums { is_stale: true, .. }), "{refused}");
        assert!(refused.to_string().contains("made for another file"), "{refused}");
    }
}

#[test]
fn checksums_that_are_given_as_metadata_are_left_out() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
    let first =
        save(folder.path(), "a.safetensors", |path| plan_safetensors(path, &[random(9, 1)], SaveOptions::default()));
    let bytes = std::fs::read(&first).unwrap();
    let json_bytes = u64::from_le_bytes(bytes[..LENGTH_BYTES as usize].try_into().unwrap()) as usize;
    let metadata = Header::parse(&bytes[8..8 + json_bytes], bytes.len() as u64).unwrap().metadata;
    assert!(!metadata.is_empty());
    for has_checksums in [true, false] {
        let options = SaveOptions { has_checksums, ..SaveOptions::default() };
        let second = save(folder.path(), "b.safetensors", |path| {
            Save::safetensors(path, vec![tensor("w", Dtype::U8, &[50])], metadata.clone(), options).unwrap()
        });
        let mut reader = Reader::open(&engine, &Target::from(&second)).unwrap();
        assert_eq!(reader.coverage(), if has_checksums { Coverage::File } else { Coverage::Nothing });
        assert_eq!(reader.verify_all(&engine, &Progress::default()).is_ok(), has_checksums);
    }
    let twice = vec![("a".to_owned(), String::new()), ("a".to_owned(), String::new())];
    assert!(Save::safetensors(&first, Vec::new(), twice, SaveOptions::default()).is_err());
}

#[test]
fn stats_say_how_much_was_compared() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
    let path = save(folder.path(), "a.safetensors", |path| {
        plan_safetensors(path, &[random(40 << 20, 1), random(3 << 20, 2)], SaveOptions::default())
    });
    let all = 43 << 20;
    let mut compared = Vec::new();
    for verify in [Verify::Off, Verify::Sample, Verify::Auto, Verify::Full] {
        let before = engine.stats();
        let reader = Arc::new(Reader::open(&engine, &Target::from(&path)).unwrap());
        load(&engine, &reader, verify).unwrap();
        let after = engine.stats();
        compared.push(after.bytes_compared - before.bytes_compared);
        assert_eq!(compared[compared.len() - 1] + after.bytes_not_compared - before.bytes_not_compared, all);
    }
    assert_eq!((compared[0], compared[1], compared[3]), (0, 2 << 20, all));
    assert!((compared[1]..=all).contains(&compared[2]), "{compared:?}");
    // A small file is always compared completely.
    let path = save(folder.path(), "b.pt", |path| plan_archive(path, &[random(100, 1)], SaveOptions::default()));
    let reader = Arc::new(Reader::open(&engine, &Target::from(&path)).unwrap());
    let before = engine.stats();
    load(&engine, &reader, Verify::Auto).unwrap();
    assert_eq!(engine.stats().bytes_compared - before.bytes_compared, 100);
}

#[test]
fn no_memory_is_asked_for_an_index_that_a_sparse_file_claims() {
    let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
    let path = save(folder.path(), "a.pt", |path| plan_archive(path, &[random(100, 1)], SaveOptions::default()));
    let sound = std::fs::read(&path).unwrap();
    // A malicious file: its directory claims to lie at the end of an empty terabyte.
    let far: u64 = 1 << 40;
    let end = sound.len() - 98;
    let directory = u64::from_le_bytes(sound[end + 48..end + 56].try_into().unwrap());
    let moved = |at: usize| (u64::from_le_bytes(sound[at..at + 8].try_into().unwrap()) + far).to_le_bytes();
    let mut tail = sound[directory as usize..].to_vec();
    let (end, directory) = (end - directory as usize, directory as usize);
    tail[end + 48..end + 56].copy_from_slice(&moved(directory + end + 48));
    tail[end + 64..end + 72].copy_from_slice(&moved(directory + end + 64));
    tail[end + 92..end + 96].copy_from_slice(&u32::MAX.to_le_bytes());
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(directory as u64).unwrap();
    file.write_all_at(&tail, directory as u64 + far).unwrap();
    let reader = Reader::open(&engine, &Target::from(&path)).unwrap();
    // Its checksums were made for a file of another length.
    assert!(reader.check_metadata().is_err());
    let refused = reader.index_crc64(&engine).unwrap_err();
    assert!(refused.to_string().contains("the index of a file has at most"), "{refused}");
}
