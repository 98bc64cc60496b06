//! Write mutations of a file, and load each.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::read::{Reader, Verify};
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::Target;
use deepnvme_io::mem::{Buffer, Region, RegionMut};
use deepnvme_io::{Config, DirectMode, Engine};
use deepnvme_testkit::guard::InputReporter;
use serde_json::Value;

use crate::common::{plan_safetensors, random};
use crate::json::mutate;

pub(crate) const MUTATIONS: u64 = 5000;

pub(crate) type Tensors = Vec<(String, Vec<u8>)>;

pub(crate) fn engine() -> Engine {
    Engine::new(Config { direct: DirectMode::Disabled, workers: 1, ..Config::default() }).unwrap()
}

pub(crate) fn load(engine: &Engine, reader: Reader) -> Result<Tensors> {
    let reader = Arc::new(reader);
    let wanted: Vec<usize> = (0..reader.extents().len()).collect();
    let buffers = reader.load_buffers(&wanted);
    let targets: Vec<RegionMut> =
        buffers.iter().map(|buffer| Buffer::zeroed(buffer.bytes as usize).unwrap().into_region()).collect();
    let views: Vec<Region> = targets.iter().map(RegionMut::region).collect();
    reader.start(engine, buffers.iter().cloned().zip(targets).collect())?.finish(Verify::Full, &Progress::default())?;
    let mut tensors: Tensors = reader.extents().iter().map(|extent| (extent.name.clone(), Vec::new())).collect();
    for (buffer, view) in buffers.iter().zip(&views) {
        for member in &buffer.members {
            let mut bytes = vec![0; reader.extents()[member.extent].bytes as usize];
            view.copy_to_slice(member.at as usize, &mut bytes);
            tensors[member.extent].1 = bytes;
        }
    }
    tensors.sort();
    Ok(tensors)
}

pub(crate) fn load_file(engine: &Engine, path: &Path) -> Result<Tensors> {
    load(engine, Reader::open(engine, &Target::from(&path.to_path_buf()))?)
}

pub(crate) fn saved(folder: &Path, name: &str, sizes: &[usize]) -> PathBuf {
    let path = folder.join(name);
    let storages: Vec<Vec<u8>> = sizes.iter().map(|bytes| random(*bytes, *bytes as u64)).collect();
    let save = plan_safetensors(&path, &storages, SaveOptions::default());
    save.run(Arc::new(engine()), &Target::from(&path), Arc::default()).unwrap();
    path
}

/// Writes one mutation after the other and loads each.
pub(crate) fn attack(
    guard: &InputReporter,
    before: &Value,
    write: impl Fn(&Value),
    load: impl Fn() -> Result<Tensors>,
) {
    let write_next = |dice: &mut fastrand::Rng| {
        let mut document = before.clone();
        for _ in 0..=dice.u8(..3) {
            mutate(&mut document, dice);
        }
        write(&document);
        document
    };
    attack_each(guard, 7, write_next, load, |_| ());
}

/// Any bytes give the same tensors or an error that names the file.
pub(crate) fn attack_bytes(
    guard: &InputReporter,
    path: &Path,
    whole: &[u8],
    mutate: impl Fn(&mut Vec<u8>, &mut fastrand::Rng),
    load: impl Fn() -> Result<Tensors>,
) {
    let write_next = |dice: &mut fastrand::Rng| {
        let mut file = whole.to_vec();
        for _ in 0..=dice.u8(..3) {
            mutate(&mut file, dice);
        }
        std::fs::write(path, file).unwrap();
        "random bytes"
    };
    let check = |error: &Error| assert!(error.to_string().contains(&*path.to_string_lossy()), "{error}");
    attack_each(guard, 11, write_next, load, check);
}

/// Writes a mutation in each round, which loads as the same tensors, or with an error in most rounds.
fn attack_each<W: Display>(
    guard: &InputReporter,
    seed: u64,
    write_next: impl Fn(&mut fastrand::Rng) -> W,
    load: impl Fn() -> Result<Tensors>,
    check: impl Fn(&Error),
) {
    let sound = load().unwrap();
    let (mut refused, mut dice) = (0, fastrand::Rng::with_seed(seed));
    for round in 0..MUTATIONS {
        guard.begin(round);
        let written = write_next(&mut dice);
        match load() {
            Ok(tensors) => assert!(tensors == sound, "mutation {round} gives other tensors: {written}"),
            Err(error) => {
                check(&error);
                refused += 1;
            }
        }
    }
    assert!(refused > MUTATIONS / 2, "{refused} were refused");
}
