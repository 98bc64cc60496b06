//! States on GPUs: saves equal those from host memory, and loads fill GPU memory. Uses a fake driver.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
#[path = "../../deepnvme-io/tests/gpu/fake_driver.rs"]
mod fake_driver;

use std::path::Path;
use std::sync::Arc;

use deepnvme_checkpoint::read::{Reader, Verify};
use deepnvme_checkpoint::write::{DataSource, Record, Save, SaveOptions, Tensor};
use deepnvme_checkpoint::{Error, Progress};
use deepnvme_file::Target;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_format::{Dtype, Signs};
use deepnvme_io::mem::Region;
use deepnvme_io::{Engine, ErrorKind};

use crate::common::{engine, plan_archive, plan_safetensors};
use crate::fake_driver::{Gpu, GpuMemory, pattern};

/// Returns the GPUs, a folder and an engine. They are dropped in reverse order.
fn set_up() -> (Gpu, tempfile::TempDir, Arc<Engine>) {
    (Gpu::new(), tempfile::tempdir().unwrap(), engine())
}

const SIZES: [usize; 8] = [0, 1, 5000, 70_000, 300_000, 1 << 20, (3 << 20) + 17, 900];

/// Alternates between GPU and host memory. Saves must wait for the streams of the GPU memory.
fn states(gpu: &Gpu) -> (Vec<Vec<u8>>, Vec<Option<GpuMemory>>) {
    let plain: Vec<_> = SIZES.iter().enumerate().map(|(i, bytes)| pattern((i as u64) << 32, *bytes)).collect();
    let on_gpu = |(i, bytes): (usize, &usize)| (i % 3 != 2).then(|| gpu.memory(i as u32 % 2, *bytes, (i as u64) << 32));
    (plain, SIZES.iter().enumerate().map(on_gpu).collect())
}

fn origin(engine: &Engine, plain: &[u8], memory: Option<&GpuMemory>) -> DataSource {
    DataSource::memory(engine, memory.map_or_else(|| Region::from_vec(plain.to_vec()), GpuMemory::region))
}

fn run(save: Save, engine: &Arc<Engine>, path: &Path) -> Result<(), Error> {
    save.run(Arc::clone(engine), &Target::from(path), Arc::default()).map(drop)
}

fn plan(engine: &Engine, path: &Path, plain: &[Vec<u8>], memories: &[Option<GpuMemory>]) -> Save {
    let tensor = |(index, bytes): (usize, &Vec<u8>)| Tensor {
        spec: TensorSpec { name: format!("t{index}"), dtype: Dtype::U8, shape: vec![bytes.len() as u64] },
        data: origin(engine, bytes, memories[index].as_ref()),
    };
    Save::safetensors(path, plain.iter().enumerate().map(tensor).collect(), Vec::new(), SaveOptions::default()).unwrap()
}

#[test]
fn the_file_is_the_same() {
    let (gpu, folder, engine) = set_up();
    let (plain, memories) = states(&gpu);
    let (ours, other) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
    run(plan(&engine, &ours, &plain, &memories), &engine, &ours).unwrap();
    run(plan_safetensors(&other, &plain, SaveOptions::default()), &engine, &other).unwrap();
    assert!(std::fs::read(&ours).unwrap() == std::fs::read(&other).unwrap());
    assert_eq!(gpu.count("pageable_copies"), 0, "the slots of a save are known to the driver");

    let (ours, other) = (folder.path().join("x/a.pt"), folder.path().join("y/a.pt"));
    std::fs::create_dir(folder.path().join("x")).unwrap();
    std::fs::create_dir(folder.path().join("y")).unwrap();
    let record = |(index, bytes): (usize, &Vec<u8>)| Record {
        name: format!("data/{index}"),
        data: origin(&engine, bytes, memories[index].as_ref()),
    };
    let records: Vec<Record> = plain.iter().enumerate().map(record).collect();
    run(Save::archive(&ours, records, SaveOptions::default()).unwrap(), &engine, &ours).unwrap();
    let record = |(index, bytes): (usize, &Vec<u8>)| Record {
        name: format!("data/{index}"),
        data: Region::from_vec(bytes.clone()).into(),
    };
    let records: Vec<Record> = plain.iter().enumerate().map(record).collect();
    run(Save::archive(&other, records, SaveOptions::default()).unwrap(), &engine, &other).unwrap();
    assert!(std::fs::read(&ours).unwrap() == std::fs::read(&other).unwrap());
}

#[test]
fn signs_are_flipped_on_the_way_from_a_gpu_and_from_host_memory() {
    let (gpu, folder, engine) = set_up();
    let (path, bytes) = (folder.path().join("a.safetensors"), (5 << 20) + 8);
    let (plain, memory) = (pattern(3, bytes), gpu.memory(0, bytes, 3));
    let tensor = |name: &str, memory, signs| Tensor {
        spec: TensorSpec { name: name.into(), dtype: Dtype::Complex64, shape: vec![bytes as u64 / 8] },
        data: origin(&engine, &plain, memory).with_signs(Dtype::Complex64, signs).unwrap(),
    };
    let (conj, neg) = (Signs { is_conj: true, is_neg: false }, Signs { is_conj: false, is_neg: true });
    let tensors = vec![
        tensor("a", Some(&memory), conj),
        tensor("b", None, conj),
        tensor("c", Some(&memory), neg),
        tensor("d", None, neg),
    ];
    run(Save::safetensors(&path, tensors, Vec::new(), SaveOptions::default()).unwrap(), &engine, &path).unwrap();

    let flipped = |numbers: usize| {
        let sign =
            |(at, byte): (usize, &u8)| if at % 8 == 7 || at % 8 + numbers * 4 == 7 { byte ^ 0x80 } else { *byte };
        plain.iter().enumerate().map(sign).collect::<Vec<u8>>()
    };
    let (conj, neg) = (flipped(0), flipped(1));
    let file = std::fs::read(&path).unwrap();
    assert!(file[file.len() - 4 * bytes..] == [&conj[..], &conj, &neg, &neg].concat());
    Reader::open(&engine, &Target::from(path.as_path())).unwrap().verify_all(&engine, &Progress::default()).unwrap();
}

#[test]
fn a_save_waits_for_the_streams_and_copies_no_tensor_as_a_whole() {
    let (gpu, folder, engine) = set_up();
    let path = folder.path().join("a.safetensors");
    let stream = gpu.stream(0);
    let memory = gpu.memory(0, 5 << 20, 1);
    gpu.fill(stream, &memory, 2, 50_000);
    let tensor = Tensor {
        spec: TensorSpec { name: "t".into(), dtype: Dtype::U8, shape: vec![5 << 20] },
        data: DataSource::memory(&engine, memory.region().after(stream)),
    };
    let save = Save::safetensors(&path, vec![tensor], Vec::new(), SaveOptions::default()).unwrap();
    // Work launched after the save was planned is not waited for. It must not touch the tensor, as on the CPU.
    run(save, &engine, &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[bytes.len() - (5 << 20)..] == pattern(2, 5 << 20), "what the kernel made");
    drop(engine);
    gpu.end_stream(0, stream);
}

#[test]
fn loads_fill_gpus_and_are_compared_there() {
    let (gpu, folder, engine) = set_up();
    let plain: Vec<_> = SIZES.iter().enumerate().map(|(i, bytes)| pattern((i as u64) << 32, *bytes)).collect();
    for name in ["a.safetensors", "a.pt"] {
        let path = folder.path().join(name);
        let options = SaveOptions::default();
        let save = if name == "a.pt" {
            plan_archive(&path, &plain, options)
        } else {
            plan_safetensors(&path, &plain, options)
        };
        run(save, &engine, &path).unwrap();
        for damaged in [false, true] {
            if damaged {
                let mut bytes = std::fs::read(&path).unwrap();
                let at = bytes.windows(32).rposition(|window| window == &plain[5][1000..1032]).unwrap();
                bytes[at] ^= 1;
                std::fs::write(&path, bytes).unwrap();
            }
            let reader = Arc::new(Reader::open(&engine, &Target::from(&path)).unwrap());
            let wanted: Vec<usize> = (0..reader.extents().len()).collect();
            let arenas = reader.load_buffers(&wanted);
            let memories: Vec<_> = arenas
                .iter()
                .map(|arena| gpu.memory(arena.offset as u32 / 4096 % 2, arena.bytes as usize, 9))
                .collect();
            let targets = arenas.iter().cloned().zip(memories.iter().map(GpuMemory::region_mut)).collect();
            let loaded = reader.start(&engine, targets).unwrap().finish(Verify::Full, &Progress::default());
            if damaged {
                let error = loaded.unwrap_err().to_string();
                assert!(error.contains("t5") || error.contains("data/5"), "{error}");
                continue;
            }
            loaded.unwrap();
            let mut seen = 0;
            for (arena, memory) in arenas.iter().zip(&memories) {
                let bytes = gpu.peek(memory);
                for member in &arena.members {
                    let extent = &reader.extents()[member.extent];
                    let at = member.at as usize;
                    if let Some(index) = extent.name.strip_prefix('t').and_then(|index| index.parse::<usize>().ok()) {
                        assert!(bytes[at..at + extent.bytes as usize] == plain[index], "{name} {index}");
                        seen += 1;
                    }
                }
            }
            assert!(seen > 5 || name == "a.pt", "{seen}");
        }
    }
}

#[test]
fn a_driver_that_refuses_leaves_the_old_file() {
    let (gpu, folder, engine) = set_up();
    let path = folder.path().join("a.safetensors");
    let (plain, memories) = states(&gpu);
    run(plan_safetensors(&path, &plain[..2], SaveOptions::default()), &engine, &path).unwrap();
    let before = std::fs::read(&path).unwrap();
    for (call, after) in [("cuMemcpyDtoHAsync_v2", 0), ("cuMemcpyDtoHAsync_v2", 3), ("cuStreamQuery", 1)] {
        let save = plan(&engine, &path, &plain, &memories);
        gpu.clear();
        gpu.fail(call, after, 700);
        match run(save, &engine, &path).unwrap_err() {
            Error::Io(error) => assert_eq!(error.kind(), ErrorKind::Device, "{call}"),
            other => panic!("{call}: {other}"),
        }
        gpu.clear();
        assert!(std::fs::read(&path).unwrap() == before, "{call}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "{call}: nothing is left of the new one");
    }
    run(plan(&engine, &path, &plain, &memories), &engine, &path).unwrap();
}
