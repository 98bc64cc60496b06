//! GPU transfers through cuFile, with a fake driver: whole pages directly, ragged edges and refused transfers through
//! bounce buffers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "gpu/fake_driver.rs"]
mod fake_driver;
#[path = "gpu/files.rs"]
mod files;

use std::sync::Arc;

use deepnvme_io::{
    BackendChoice, Config, DirectMode, Engine, ErrorKind, ReadItem, WindowMode, WriteItem, WriteOptions,
};
use deepnvme_mem::{Region, Strided};
use fake_driver::{Gpu, pattern};
use files::{config, folder, on_host, open, read, set_up, write};

const CHOICES: [BackendChoice; 3] = [BackendChoice::Uring, BackendChoice::Aio, BackendChoice::Threads];

#[test]
fn every_size_and_place_is_read_back_with_every_backend() {
    let (gpu, folder) = (Gpu::new(), folder());
    for (number, backend) in CHOICES.into_iter().enumerate() {
        let Ok(engine) = Engine::new(Config { backend, ..config(DirectMode::Required) }) else { continue };
        let file = open(&folder.path().join(format!("{number}")), DirectMode::Required);
        let places = [(100, 0), (64 << 10, 0), (1 << 20, 4096), ((1 << 20) + 17, 0), (700_001, 4096), (1 << 20, 77)];
        for (seed, (bytes, offset)) in places.into_iter().enumerate() {
            let seed = (seed as u64) << 32;
            let memory = gpu.memory(0, bytes, seed);
            if offset == 77 {
                // Up to here, memory and file have the same alignment. In this last case they have not.
                assert_eq!(gpu.count("unaligned_io"), 0, "cuFile gets whole pages only");
            }
            write(&engine, &file, offset, memory.region());
            assert!(on_host(&engine, &file, offset, bytes) == pattern(seed, bytes), "{backend:?} {bytes} at {offset}");
            let other = gpu.memory(1, bytes, 99);
            read(&engine, &file, offset, other.region_mut());
            assert!(gpu.peek(&other) == pattern(seed, bytes), "{backend:?} {bytes} at {offset}");
        }
        let stats = engine.stats();
        assert!(stats.bytes_gds > 6 << 20, "{} through cuFile", stats.bytes_gds);
        assert!(stats.bytes_to_gpu > 0, "ragged edges through bounce buffers");
        assert_eq!(stats.gds_reason, None);
        gpu.clear();
    }
}

#[test]
fn neighbours_of_a_ragged_write_stay() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Preferred));
    write(&engine, &file, 0, Region::from_vec(vec![5; 1 << 20]));
    let memory = gpu.memory(0, 500_000, 1);
    write(&engine, &file, 1001, memory.region());
    let seen = on_host(&engine, &file, 0, 1 << 20);
    assert!(seen[1001..501_001] == pattern(1, 500_000));
    assert!(seen[..1001].iter().chain(&seen[501_001..]).all(|byte| *byte == 5));
}

#[test]
fn transfers_that_cufile_refuses_use_bounce_buffers() {
    // Strided memory, many small tensors, and files without direct I/O.
    let (gpu, folder, engine, file) = set_up(config(DirectMode::Preferred));
    let memory = gpu.memory(0, 1 << 20, 1);
    let layout = Strided { shape: vec![1000, 100], stride_bytes: vec![1000, 1], item_bytes: 1 };
    let again = layout.clone();
    write(&engine, &file, 0, memory.strided(0, layout));
    let expected: Vec<u8> = pattern(1, 1 << 20).chunks(1000).take(1000).flat_map(|row| row[..100].to_vec()).collect();
    assert!(on_host(&engine, &file, 0, 100_000) == expected);
    let items = (0..100).map(|index| WriteItem {
        file: Arc::clone(&file),
        offset: index * 10_000,
        source: gpu.memory(0, 10_000, index << 32).region(),
    });
    engine.write_batch(items.collect(), WriteOptions::default()).unwrap().wait().1.unwrap();
    let targets: Vec<_> = (0..100).map(|_| gpu.memory(1, 10_000, 7)).collect();
    let items = targets.iter().enumerate().map(|(index, target)| ReadItem {
        file: Arc::clone(&file),
        offset: index as u64 * 10_000,
        target: target.region_mut(),
    });
    engine.read_batch(items.collect()).unwrap().wait().1.unwrap();
    for (index, target) in targets.iter().enumerate() {
        assert!(gpu.peek(target) == pattern((index as u64) << 32, 10_000), "{index}");
    }
    let buffered = open(&folder.path().join("buffered"), DirectMode::Disabled);
    write(&engine, &buffered, 0, memory.region());
    assert!(on_host(&engine, &buffered, 0, 1 << 20) == pattern(1, 1 << 20));
    let stats = engine.stats();
    assert_eq!(stats.bytes_gds, 0);
    assert!(stats.gds_reason.unwrap().contains("no direct I/O"));
    let strict = Engine::new(config(DirectMode::Required)).unwrap();
    let error = strict.write(&buffered, 0, memory.region(), WriteOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("no direct I/O") && text.contains("buffered") && text.contains("required"), "{text}");
    // Edges and strides always use bounce buffers, whatever the file.
    write(&strict, &file, 0, memory.strided(0, again));
}

#[test]
fn a_refusal_sends_the_file_through_bounce_buffers_or_ends_the_request() {
    let (gpu, folder) = (Gpu::new(), folder());
    for window in [WindowMode::Sliding, WindowMode::Drain] {
        for (call, code) in [("cuFileWrite", 5008), ("cuFileHandleRegister", 5018), ("cuFileRead", 5034)] {
            let engine = Engine::new(Config { window, ..config(DirectMode::Preferred) }).unwrap();
            let path = folder.path().join(call);
            let file = open(&path, DirectMode::Preferred);
            let memory = gpu.memory(0, 3 << 20, 2);
            gpu.fail(call, 0, code);
            write(&engine, &file, 0, memory.region());
            let other = gpu.memory(0, 3 << 20, 3);
            read(&engine, &file, 0, other.region_mut());
            assert!(gpu.peek(&other) == pattern(2, 3 << 20), "{call}");
            let reason = engine.stats().gds_reason.unwrap();
            assert!(reason.contains(&code.to_string()), "{call}: {reason}");
            drop((engine, file));
            std::fs::remove_file(&path).unwrap();

            let engine = Engine::new(Config { window, ..config(DirectMode::Required) }).unwrap();
            let file = open(&path, DirectMode::Preferred);
            gpu.fail(call, 0, code);
            let wrote = engine.write(&file, 0, memory.region(), WriteOptions::default()).unwrap().wait().1;
            let read = wrote.and_then(|_| engine.read(&file, 0, other.region_mut()).unwrap().wait().1);
            let error = read.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{call}: {error}");
            let text = error.to_string();
            assert!(text.contains(&code.to_string()) && text.contains("gds=\"preferred\""), "{call}: {text}");
            assert!(text.contains(call), "it names the file: {text}");
            drop((engine, file));
            gpu.clear();
        }
    }
}

#[test]
fn disk_errors_keep_their_kind() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    write(&engine, &file, 0, Region::from_vec(pattern(1, 300_000)));
    let memory = gpu.memory(0, 1 << 20, 2);
    let error = engine.read(&file, 0, memory.region_mut()).unwrap().wait().1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
}

#[test]
fn short_transfers_are_continued() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    let memory = gpu.memory(0, 1 << 20, 2);
    let before = engine.stats().short_ops;
    gpu.fail("cuFileWrite@short", 0, 8192);
    write(&engine, &file, 0, memory.region());
    assert_eq!(engine.stats().short_ops, before + 1);
    assert!(on_host(&engine, &file, 0, 1 << 20) == gpu.peek(&memory));
}

#[test]
fn without_cufile_the_request_says_so_or_goes_through_bounce_buffers() {
    let (gpu, folder) = (Gpu::new(), folder());
    let memory = gpu.memory(0, 1 << 20, 2);
    gpu.fail("cuFileDriverOpen", 0, 5001);
    let engine = Engine::new(config(DirectMode::Required)).unwrap();
    let file = open(&folder.path().join("file"), DirectMode::Preferred);
    let error = engine.write(&file, 0, memory.region(), WriteOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("cuFile does not start"), "{error}");
    // Host memory needs no cuFile.
    write(&engine, &file, 0, Region::from_vec(vec![1; 100_000]));
    drop(engine);
    gpu.fail("cuFileDriverOpen", 0, 5001);
    let engine = Engine::new(config(DirectMode::Preferred)).unwrap();
    write(&engine, &file, 0, memory.region());
    assert!(on_host(&engine, &file, 0, 1 << 20) == pattern(2, 1 << 20));
    let stats = engine.stats();
    assert_eq!(stats.bytes_gds, 0);
    assert!(stats.gds_reason.unwrap().contains("5001"));
}

#[test]
fn a_write_waits_for_its_stream() {
    let (gpu, _folder, engine, file) = set_up(config(DirectMode::Required));
    let stream = gpu.stream(0);
    let memory = gpu.memory(0, 1 << 20, 1);
    gpu.fill(stream, &memory, 2, 40_000);
    write(&engine, &file, 0, memory.region().after(stream));
    assert!(on_host(&engine, &file, 0, 1 << 20) == pattern(2, 1 << 20));
    assert_eq!(engine.stats().bytes_gds, 1 << 20);
    drop((engine, file));
    gpu.end_stream(0, stream);
}

#[test]
fn blocks_are_as_large_as_cufile_takes_them_and_fit_bounce_buffers_when_it_does_not() {
    let (gpu, folder) = (Gpu::new(), folder());
    let with_block_bytes = |block_bytes| Config { block_bytes, queue_depth: 4, ..config(DirectMode::Preferred) };
    let bytes = 24 << 20;
    let expected_bytes = pattern(3, bytes);
    let memory = gpu.memory(0, bytes, 3);
    for (block_bytes, expected) in [(2 << 20, 16), (1 << 20, 24), (256 << 10, 96)] {
        let engine = Engine::new(with_block_bytes(block_bytes)).unwrap();
        let path = folder.path().join(format!("{block_bytes}"));
        let file = open(&path, DirectMode::Required);
        write(&engine, &file, 0, memory.region());
        assert_eq!((engine.stats().ops, engine.stats().bytes_gds), (expected, bytes as u64), "{block_bytes}");
        // Each kind of refusal, in the middle of a transfer.
        for (call, after) in [("cuFileRead", 5), ("cuFileRead", 0), ("cuFileHandleRegister", 0)] {
            let file = open(&path, DirectMode::Required);
            let target = gpu.memory(1, bytes, 4);
            gpu.fail(call, after, 5008);
            read(&engine, &file, 0, target.region_mut());
            assert!(gpu.peek(&target) == expected_bytes, "{call} {block_bytes}");
            gpu.clear();
        }
        let stats = engine.stats();
        assert!(stats.bytes_to_gpu > 0 && stats.bytes_read == 3 * bytes as u64);
        drop((engine, file));
    }
}
