//! GPU memory through bounce buffers: correct bytes, in stream order, even with driver failures. The fake driver copies
//! late and records misuse.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

mod capture;
mod fake_driver;
mod files;
mod memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_io::op::Direction;
use deepnvme_io::{BackendChoice, Config, DirectMode, Engine, ErrorKind, ReadItem, WriteItem, WriteOptions};
use deepnvme_mem::{Region, RegionMut, StreamHandle, Strided};
use fake_driver::{Gpu, GpuMemory, pattern};
use files::{folder, on_host, open, read, set_up, write};

const CHOICES: [BackendChoice; 3] = [BackendChoice::Uring, BackendChoice::Aio, BackendChoice::Threads];

fn config(backend: BackendChoice) -> Config {
    Config { backend, workers: 2, queue_depth: 8, block_bytes: 16384, ..Config::default() }
}

#[test]
fn every_size_and_place_comes_back_under_every_backend() {
    let (gpu, folder) = (Gpu::new(), folder());
    for (number, backend) in CHOICES.into_iter().enumerate() {
        let Ok(engine) = Engine::new(config(backend)) else { continue };
        for direct in [DirectMode::Preferred, DirectMode::Disabled] {
            let file = open(&folder.path().join(format!("{number}-{direct:?}")), direct);
            for (seed, (bytes, offset)) in
                [(1, 0), (511, 3), (4096, 4096), (16384, 512), (16385, 16383), (100_001, 0), (300_000, 77_777)]
                    .into_iter()
                    .enumerate()
            {
                let device = seed as u32 % 2;
                let memory = gpu.memory(device, bytes, seed as u64);
                let (_, wrote) = engine.write(&file, offset, memory.region(), WriteOptions::default()).unwrap().wait();
                assert_eq!(wrote.unwrap().bytes, bytes as u64);
                let seen = on_host(&engine, &file, offset, bytes);
                assert!(seen == pattern(seed as u64, bytes), "written: {backend:?} {direct:?} {bytes} at {offset}");
                let other = gpu.memory(1 - device, bytes, 99);
                let (returned, read) = engine.read(&file, offset, other.region_mut()).unwrap().wait();
                assert_eq!(read.unwrap().bytes, bytes as u64);
                assert_eq!(returned.unwrap().len(), bytes);
                assert!(
                    gpu.peek(&other) == pattern(seed as u64, bytes),
                    "read: {backend:?} {direct:?} {bytes} at {offset}"
                );
            }
        }
        let stats = engine.stats();
        assert_eq!(stats.bytes_to_gpu, stats.bytes_from_gpu);
        assert!(stats.gpu_copies > 100, "{} copies", stats.gpu_copies);
        assert_eq!(stats.staged_reason, None);
        assert!(stats.pool_bytes <= engine.config().pool_bound_bytes());
    }
    assert_eq!(gpu.count("pageable_copies"), 0, "the slots are registered");
}

/// Returns rows and columns of a matrix, a transposed one, and one with a step.
fn layouts() -> Vec<(usize, Strided)> {
    let layout = |shape: &[usize], stride_bytes: &[isize], item_bytes| Strided {
        shape: shape.to_vec(),
        stride_bytes: stride_bytes.to_vec(),
        item_bytes,
    };
    vec![
        (0, layout(&[300, 200], &[1024, 4], 4)),
        (16, layout(&[256, 300], &[4, 1024], 4)),
        (8, layout(&[50, 3, 60], &[2048, 512, 8], 2)),
        (400_000, layout(&[100, 16], &[-2048, 4], 4)),
        (0, layout(&[3, 10], &[300_000, 64], 64)),
    ]
}

#[test]
fn strided_tensors() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Threads));
    for (seed, (at, layout)) in layouts().into_iter().enumerate() {
        let memory = gpu.memory(0, 1_000_000, seed as u64);
        // The expected bytes, by the same layout in host memory.
        let mut host = gpu.peek(&memory);
        let flat = Region::from_vec(host.clone()).view(at, &layout).unwrap();
        let mut expected = vec![0; flat.len()];
        flat.copy_to_slice(0, &mut expected);
        write(&engine, &file, 5, memory.strided(at, layout.clone()));
        let mut seen = on_host(&engine, &file, 5, expected.len());
        assert!(seen == expected, "written: {layout:?}");

        let fresh = pattern(1000 + seed as u64, expected.len());
        write(&engine, &file, 5, Region::from_vec(fresh.clone()));
        read(&engine, &file, 5, memory.strided_mut(at, layout.clone()));
        let after = gpu.peek(&memory);
        let again = Region::from_vec(after.clone()).view(at, &layout).unwrap();
        again.copy_to_slice(0, &mut seen);
        assert!(seen == fresh, "read: {layout:?}");
        // Bytes between the elements are unchanged.
        let mut marks = vec![false; host.len()];
        memory.strided(at, layout.clone()).visit_rows(0, seen.len(), |rows| {
            for address in rows.addresses() {
                let start = address - memory.region().addr();
                marks[start..start + rows.bytes].fill(true);
            }
        });
        assert_eq!(marks.iter().filter(|mark| **mark).count(), seen.len(), "each byte once: {layout:?}");
        host.iter_mut().zip(&after).zip(&marks).filter(|(_, mark)| **mark).for_each(|((old, new), _)| *old = *new);
        assert!(host == after, "between the elements: {layout:?}");
    }
}

/// A stream, and memory that it fills with pattern 2 after some microseconds.
fn late(gpu: &Gpu, device: u32, bytes: usize, delay_us: u64) -> (StreamHandle, GpuMemory) {
    let (stream, memory) = (gpu.stream(device), gpu.memory(device, bytes, 1));
    gpu.fill(stream, &memory, 2, delay_us);
    (stream, memory)
}

#[test]
fn a_write_waits_for_earlier_work_of_its_stream() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Auto));
    let (stream, memory) = late(&gpu, 1, 200_000, 60_000);
    let began = Instant::now();
    let pending = engine.write(&file, 0, memory.region().after(stream), WriteOptions::default()).unwrap();
    assert!(began.elapsed() < Duration::from_millis(30), "who submits does not wait");
    // Another request whose memory is ready goes first.
    engine
        .write(&file, 1 << 20, Region::from_vec(vec![7; 100_000]), WriteOptions::default())
        .unwrap()
        .wait()
        .1
        .unwrap();
    assert!(began.elapsed() < Duration::from_millis(55), "nobody else waits");
    pending.wait().1.unwrap();
    let seen = on_host(&engine, &file, 0, 200_000);
    assert!(seen == pattern(2, 200_000), "what the kernel made, not what was there before");
    assert_eq!(engine.stats().gpu_waits, 1);
    drop(engine);
    gpu.end_stream(1, stream);
}

#[test]
fn a_read_does_not_overwrite_memory_that_a_kernel_reads() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Auto));
    let bytes = pattern(3, 150_000);
    write(&engine, &file, 0, Region::from_vec(bytes.clone()));
    let stream = gpu.stream(0);
    let (memory, other) = (gpu.memory(0, 150_000, 1), gpu.memory(0, 150_000, 2));
    gpu.copy(stream, &other, &memory, 50_000);
    read(&engine, &file, 0, memory.region_mut().after(stream));
    assert!(gpu.peek(&memory) == bytes);
    assert!(gpu.peek(&other) == pattern(1, 150_000), "what was there before the read");
    // Work launched now sees the bytes of the read, on any stream.
    let second = gpu.stream(0);
    gpu.copy(second, &other, &memory, 0);
    gpu.end_stream(0, second);
    assert!(gpu.peek(&other) == bytes);
    drop(engine);
    gpu.end_stream(0, stream);
}

#[test]
fn a_request_that_waits_for_its_stream_can_be_cancelled_and_an_engine_dropped() {
    let (gpu, folder, engine, file) = set_up(config(BackendChoice::Auto));
    let (stream, memory) = late(&gpu, 0, 50_000, 80_000);
    let write = || engine.write(&file, 0, memory.region().after(stream), WriteOptions::default()).unwrap();
    let (cancelled, kept) = (write(), write());
    assert!(cancelled.cancel());
    let (returned, outcome) = cancelled.wait();
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(returned.is_some());
    // Dropping the engine finishes accepted requests.
    drop(engine);
    assert_eq!(kept.wait().1.unwrap().bytes, 50_000);
    assert!(std::fs::read(folder.path().join("file")).unwrap() == pattern(2, 50_000));
    gpu.end_stream(0, stream);
}

#[test]
fn one_batch_over_the_host_and_two_gpus() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Auto));
    let sizes = [5000, 3, 40_000, 4096, 700, 9, 100_000, 1234];
    let expected: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, bytes)| pattern(i as u64, *bytes)).collect();
    let memories: Vec<_> =
        sizes.iter().enumerate().map(|(i, bytes)| gpu.memory(i as u32 % 2, *bytes, i as u64)).collect();
    let mut offset = 100;
    let mut offsets = Vec::new();
    let mut items = Vec::new();
    for (number, memory) in memories.iter().enumerate() {
        let source = if number % 3 == 2 { Region::from_vec(expected[number].clone()) } else { memory.region() };
        items.push(WriteItem { file: Arc::clone(&file), offset, source });
        offsets.push(offset);
        offset += memory.bytes as u64;
    }
    engine.write_batch(items, WriteOptions::default()).unwrap().wait().1.unwrap();
    let targets: Vec<_> =
        sizes.iter().enumerate().map(|(i, bytes)| gpu.memory((i as u32 + 1) % 2, *bytes, 77)).collect();
    let item = |number: usize| {
        let on_host = number % 4 == 1;
        let target = if on_host { RegionMut::from_vec(vec![0; sizes[number]]) } else { targets[number].region_mut() };
        ReadItem { file: Arc::clone(&file), offset: offsets[number], target }
    };
    let (returned, read) = engine.read_batch((0..sizes.len()).map(item).collect()).unwrap().wait();
    read.unwrap();
    for (number, region) in returned.unwrap().into_iter().enumerate() {
        let seen = if number % 4 == 1 {
            let mut bytes = vec![0; sizes[number]];
            region.region().copy_to_slice(0, &mut bytes);
            bytes
        } else {
            gpu.peek(&targets[number])
        };
        assert!(seen == expected[number], "item {number}");
    }
}

/// Fails every driver call of the engine at its first, second and fifth use.
#[test]
fn whatever_the_driver_refuses_is_an_error_and_leaves_nothing() {
    const CALLS: [&str; 12] = [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuStreamQuery",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamCreate",
        "cuMemHostRegister_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpy2DAsync_v2",
    ];
    let (gpu, folder) = (Gpu::new(), folder());
    let mut refused = 0;
    for call in CALLS {
        for after in [0, 1, 4] {
            let file = open(&folder.path().join("file"), DirectMode::Preferred);
            let engine = Engine::new(config(BackendChoice::Auto)).unwrap();
            engine
                .write(&file, 0, Region::from_vec(vec![1; 200_000]), WriteOptions::default())
                .unwrap()
                .wait()
                .1
                .unwrap();
            let memory = gpu.memory(0, 150_000, 5);
            let layout = Strided { shape: vec![300, 100], stride_bytes: vec![400, 1], item_bytes: 1 };
            gpu.clear();
            gpu.fail(call, after, 700);
            let wrote =
                engine.write(&file, 0, memory.region(), WriteOptions::default()).map(|pending| pending.wait().1);
            let filled = engine.read(&file, 0, memory.region_mut()).map(|pending| pending.wait().1);
            let strided = engine.write(&file, 0, memory.strided(0, layout), WriteOptions::default());
            let strided = strided.map(|pending| pending.wait().1);
            for outcome in [wrote, filled, strided] {
                if let Err(error) | Ok(Err(error)) = outcome {
                    refused += 1;
                    let text = error.to_string();
                    assert_eq!(error.kind(), ErrorKind::Device, "{call}: {text}");
                    assert!(text.contains("700"), "{call}: {text}");
                    assert!(text.contains("file"), "it names the file: {text}");
                }
            }
            gpu.clear();
            // The engine continues to work.
            gpu.poke(&memory, &pattern(6, 150_000));
            write(&engine, &file, 0, memory.region());
            let seen = std::fs::read(folder.path().join("file")).unwrap();
            assert!(seen[..150_000] == pattern(6, 150_000) && seen[150_000..] == [1; 50_000], "{call}");
            drop((engine, memory));
            gpu.assert_clean();
            assert_eq!(gpu.live("device_allocations"), 0, "{call}");
        }
    }
    assert!(refused > 15, "{refused}");
}

#[test]
fn a_recording_has_every_copy_once_and_each_after_or_before_its_transfer() {
    use deepnvme_io::trace::EventKind;
    let (gpu, folder) = (Gpu::new(), folder());
    for (number, backend) in CHOICES.into_iter().enumerate() {
        let Ok(engine) = Engine::new(config(backend)) else { continue };
        let file = open(&folder.path().join(format!("{number}")), DirectMode::Preferred);
        let memory = gpu.memory(1, 1 << 20, 5);
        let recording = engine.record().unwrap();
        write(&engine, &file, 0, memory.region());
        read(&engine, &file, 0, memory.region_mut());
        let recorded = recording.stop().unwrap();
        let stats = engine.stats();
        let (mut copies, mut bytes) = (0, [0, 0]);
        for event in &recorded.events {
            let EventKind::Copy { gpu, direction, bytes: copied, failed, .. } = &event.kind else { continue };
            assert_eq!((*gpu, *failed), (1, false));
            assert!(recorded.start_ns <= event.start_ns && event.start_ns <= event.end_ns);
            copies += 1;
            bytes[usize::from(*direction == Direction::Write)] += copied;
        }
        assert_eq!((copies, bytes), (stats.gpu_copies, [stats.bytes_to_gpu, stats.bytes_from_gpu]), "{backend:?}");
        assert!(copies >= 2 * (1 << 20) / 16384, "{backend:?}: a copy for each block");
        // A stream runs its copies in order.
        for worker in [Some(0), Some(1)] {
            let of_worker = recorded
                .events
                .iter()
                .filter(|event| matches!(event.kind, EventKind::Copy { worker: of, .. } if of == worker));
            let mut spans: Vec<_> = of_worker.map(|event| (event.start_ns, event.end_ns)).collect();
            spans.sort_unstable();
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{backend:?}: {spans:?}");
        }
    }
}

#[test]
fn memory_that_cannot_be_registered_is_staged_and_says_so() {
    let (gpu, folder, engine, file) = set_up(config(BackendChoice::Auto));
    let memory = gpu.memory(0, 100_000, 1);
    // Both workers.
    gpu.fail("cuMemHostRegister_v2", 0, 2);
    gpu.fail("cuMemHostRegister_v2", 1, 2);
    for _ in 0..20 {
        write(&engine, &file, 0, memory.region());
    }
    assert!(std::fs::read(folder.path().join("file")).unwrap() == pattern(1, 100_000));
    let reason = engine.stats().staged_reason.unwrap();
    assert!(reason.contains("cuMemHostRegister") && reason.contains("lower"), "{reason}");
}

#[test]
fn a_gpu_that_is_not_there() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Auto));
    let memory = gpu.memory(0, 100, 1);
    let elsewhere = memory.on_device(7);
    let error = engine.write(&file, 0, elsewhere, WriteOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(error.to_string().contains("cuDeviceGet"), "{error}");
}

#[test]
fn many_requests_share_the_slots() {
    let (gpu, _folder, engine, file) = set_up(config(BackendChoice::Auto));
    let count = 60;
    let memories: Vec<_> = (0..count).map(|i| gpu.memory(i % 2, 30_000 + i as usize, i.into())).collect();
    let each = || memories.iter().enumerate().map(|(i, memory)| (i as u64 * 40_000, memory));
    let writes: Vec<_> = each()
        .map(|(offset, memory)| engine.write(&file, offset, memory.region(), WriteOptions::default()).unwrap())
        .collect();
    for write in writes {
        write.wait().1.unwrap();
    }
    for memory in &memories {
        gpu.poke(memory, &vec![0; memory.bytes]);
    }
    let reads: Vec<_> =
        each().map(|(offset, memory)| engine.read(&file, offset, memory.region_mut()).unwrap()).collect();
    for read in reads {
        read.wait().1.unwrap();
    }
    for (i, memory) in memories.iter().enumerate() {
        assert!(gpu.peek(memory) == pattern(i as u64, memory.bytes), "request {i}");
    }
    let stats = engine.stats();
    assert!(stats.pool_bytes <= engine.config().pool_bound_bytes());
    assert_eq!(stats.bytes_to_gpu, memories.iter().map(|memory| memory.bytes as u64).sum::<u64>());
    drop(engine);
    assert_eq!(gpu.calls("cuMemHostRegister_v2"), 2, "once for each worker's slots");
}
