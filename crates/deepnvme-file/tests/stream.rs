//! File streams: complete or absent, and readable in any order.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use deepnvme_file::replace::TEMPORARY_MARKER;
use deepnvme_file::{BUFFER_BYTES, BUFFERS, FileReader, FileWriter, StripeSet, Target, Temporary};
use deepnvme_io::{Config, Durability, Engine, ErrorKind};
use deepnvme_testkit::rng::random_bytes as random;

fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config::default()).unwrap())
}

fn write(engine: &Arc<Engine>, target: &Target, pieces: &[&[u8]], durability: Durability) {
    let mut writer = FileWriter::create(Arc::clone(engine), target, durability).unwrap();
    let mut position = 0;
    for piece in pieces {
        writer.write(piece).unwrap();
        position += piece.len() as u64;
        assert_eq!(writer.position(), position);
    }
    writer.commit().unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn pieces_are_written_to_one_file() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let path = folder.path().join("file");
    let target = Target::from(&path);
    for (seed, bytes) in
        [0, 1, 4095, 4096, 100_000, BUFFER_BYTES, BUFFER_BYTES * (BUFFERS + 2) + 12_345, 777].into_iter().enumerate()
    {
        let data = random(bytes, seed as u64);
        let third = bytes / 3;
        let durability = [Durability::None, Durability::Data, Durability::Full][seed % 3];
        write(
            &engine,
            &target,
            &[&data[..third], &[], &data[third..third + third / 7], &data[third + third / 7..]],
            durability,
        );
        assert!(fs::read(&path).unwrap() == data, "{bytes} bytes over a file of another length");
    }
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn a_writer_that_is_dropped_leaves_the_old_file_and_nothing_else() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    let mut writer = FileWriter::create(Arc::clone(&engine), &Target::from(&path), Durability::Full).unwrap();
    writer.write(&random(BUFFER_BYTES * 3, 1)).unwrap();
    let temporary = names(folder.path()).into_iter().find(|name| name.contains(TEMPORARY_MARKER)).unwrap();
    let mode = fs::metadata(folder.path().join(temporary)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "temporaries are private");
    drop(writer);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn permissions_and_links_survive_a_replacement() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let (path, link) = (folder.path().join("file"), folder.path().join("link"));
    fs::write(&path, "old").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    write(&engine, &Target::from(&link), &[b"new"], Durability::None);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn a_leftover_is_removed_and_a_living_one_is_not() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let path = folder.path().join("file");
    let target = Target::from(&path);
    // As a killed process leaves it: named and unlocked.
    let leftover = Temporary::new(&path).unwrap();
    deepnvme_io::fs::unlock(leftover.file()).unwrap();
    std::mem::forget(leftover);
    let mut living = FileWriter::create(Arc::clone(&engine), &target, Durability::None).unwrap();
    living.write(b"living").unwrap();
    assert_eq!(names(folder.path()).len(), 1, "the leftover is gone");
    write(&engine, &target, &[b"other"], Durability::None);
    assert_eq!(names(folder.path()).len(), 2);
    living.commit().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"living");
}

#[test]
fn reads_in_any_order_agree_with_the_file() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let path = folder.path().join("file");
    let data = random(BUFFER_BYTES * 5 + 4321, 5);
    fs::write(&path, &data).unwrap();
    let mut reader = FileReader::open(engine, &Target::from(&path)).unwrap();
    assert_eq!(reader.len(), data.len() as u64);
    let mut seed = 7u64;
    for step in 0..300u64 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let in_order = step % 60 < 40;
        let at = if in_order { (step % 60) as usize * 100_000 } else { (seed >> 33) as usize % (data.len() + 100) };
        let mut out = vec![0; (seed >> 40) as usize % 150_000];
        let expected = &data[at.min(data.len())..(at + out.len()).min(data.len())];
        assert_eq!(reader.read_at(at as u64, &mut out).unwrap(), expected.len());
        assert!(&out[..expected.len()] == expected, "at {at}");
    }
}

#[test]
fn a_stripe_set_is_replaced_at_once() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let parts = vec![folder.path().join("a"), folder.path().join("b")];
    let set = StripeSet::new(parts, 65_536).unwrap();
    let target = Target::Stripes(set.clone());
    for bytes in [1_000_001, 70_000] {
        let data = random(bytes, bytes as u64);
        write(&engine, &target, &[&data], Durability::Full);
        for target in [&target, &Target::from(set.manifest_path())] {
            let mut reader = FileReader::open(Arc::clone(&engine), target).unwrap();
            let mut out = vec![0; bytes + 10];
            assert_eq!(reader.read_at(0, &mut out).unwrap(), bytes);
            assert!(out[..bytes] == data);
        }
        assert_eq!(names(folder.path()).len(), 3, "two parts and the manifest: {:?}", names(folder.path()));
    }
    let mut abandoned = FileWriter::create(Arc::clone(&engine), &target, Durability::None).unwrap();
    abandoned.write(b"half").unwrap();
    drop(abandoned);
    assert_eq!(names(folder.path()).len(), 3);
    assert_eq!(FileReader::open(engine, &target).unwrap().len(), 70_000);
}

#[test]
fn a_folder_that_is_missing_or_a_target_that_is_a_folder_is_named() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let missing = folder.path().join("no/file");
    let error = FileWriter::create(Arc::clone(&engine), &Target::from(&missing), Durability::None).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::NotFound, Some(missing.as_path())));
    let error = FileWriter::create(engine, &Target::from(folder.path()), Durability::None).unwrap_err();
    assert_eq!(error.path(), Some(folder.path()));
}

#[test]
fn a_writer_whose_engine_refuses_a_buffer_is_unusable() {
    let (engine, folder) = (engine(), tempfile::tempdir().unwrap());
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    for overwrites in [false, true] {
        let mut writer = FileWriter::create(Arc::clone(&engine), &Target::from(&path), Durability::None).unwrap();
        writer.write(b"begin").unwrap();
        engine.close();
        let data = random(BUFFER_BYTES * 2, 1);
        let refused = if overwrites { writer.overwrite(0, b"B".to_vec()) } else { writer.write(&data) };
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
        // Small enough for a buffer of its own, which would be written without the bytes before it.
        assert_eq!(writer.write(b"end").unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(writer.commit().unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
    assert_eq!(names(folder.path()), ["file"]);
}
