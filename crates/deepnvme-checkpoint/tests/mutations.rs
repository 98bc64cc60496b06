//! Thousands of reproducible mutations of metadata. Each changes a meaning: a number, a name, a type, a count or a
//! depth. A full verify then gives the same tensors or a typed error.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod fuzz_bodies;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::history::{History, Holder, MANIFEST};
use deepnvme_checkpoint::read::{Reader, Verify, find_set};
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::{StripeSet, Target};
use deepnvme_format::archive::{Plan, RecordSpec};
use deepnvme_format::checksums::{CHUNK_BYTES, METADATA_KEY};
use deepnvme_format::set;
use deepnvme_io::mem::{Buffer, Region, RegionMut};
use deepnvme_io::{Config, DirectMode, Engine};
use deepnvme_testkit::guard::{Guard, guarded};
use serde_json::{Map, Value, json};

use crate::common::{pickle, plan_archive, plan_safetensors, random};

const MUTATIONS: u64 = 5000;
const NUMBERS: [u64; 9] = [0, 1, 7, 255, 4096, 1 << 32, i64::MAX as u64, u64::MAX - 1, u64::MAX];
const TEXTS: [&str; 8] =
    ["", "F64", "I32", "../x", "/etc/passwd", "__metadata__", "deepnvme.checksums", "\u{0}\u{1f600}"];

/// Changes one thing in a document.
fn mutate(value: &mut Value, dice: &mut fastrand::Rng) {
    // Descend three times out of four.
    if dice.u8(..4) > 0 {
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                let at = dice.usize(..entries.len());
                return mutate(entries.values_mut().nth(at).unwrap(), dice);
            }
            Value::Array(items) if !items.is_empty() => {
                let at = dice.usize(..items.len());
                return mutate(&mut items[at], dice);
            }
            // JSON inside a JSON string.
            Value::String(text) => {
                if let Ok(mut inner) = serde_json::from_str::<Value>(text)
                    && !inner.is_number()
                {
                    mutate(&mut inner, dice);
                    *text = inner.to_string();
                    return;
                }
            }
            _ => {}
        }
    }
    match value {
        Value::Number(number) => {
            let number = number.as_u64().unwrap_or(0);
            *value = match dice.u8(..5) {
                0 => number.wrapping_add(1).into(),
                1 => number.wrapping_sub(1).into(),
                2 => (-1).into(),
                3 => (number as f64 + 0.5).into(),
                _ => NUMBERS[dice.usize(..NUMBERS.len())].into(),
            };
        }
        Value::String(text) => match dice.u8(..5) {
            0 => text.push('0'),
            1 => drop(text.pop()),
            2 => *text = TEXTS[dice.usize(..TEXTS.len())].into(),
            3 => *text = text.repeat(100),
            _ => {
                let other = if text.contains('0') { text.replacen('0', "1", 1) } else { text.to_uppercase() };
                *text = other;
            }
        },
        Value::Array(items) => match dice.u8(..4) {
            0 => drop(items.pop()),
            1 => items.reverse(),
            2 => items.push(items.first().cloned().unwrap_or(Value::Null)),
            _ => *items = vec![json!(1); 70],
        },
        Value::Object(entries) => {
            let key = entries.keys().nth(dice.usize(..entries.len().max(1))).cloned().unwrap_or_default();
            let taken = entries.remove(&key);
            match dice.u8(..4) {
                0 => {}
                1 => drop(entries.insert(TEXTS[dice.usize(..TEXTS.len())].into(), taken.unwrap_or(Value::Null))),
                2 => drop(entries.insert(format!("{key}x"), taken.unwrap_or(Value::Null))),
                _ => {
                    let other = entries.values().next().cloned().unwrap_or(Value::Null);
                    entries.insert(key, other);
                }
            }
        }
        _ => *value = nested(dice.usize(1..2000)),
    }
}

fn nested(depth: usize) -> Value {
    (0..depth.min(100)).fold(Value::Null, |inner, _| json!([inner]))
}

type Tensors = Vec<(String, Vec<u8>)>;

fn engine() -> Engine {
    Engine::new(Config { direct: DirectMode::Disabled, workers: 1, ..Config::default() }).unwrap()
}

fn load(engine: &Engine, reader: Reader) -> Result<Tensors> {
    let reader = Arc::new(reader);
    let wanted: Vec<usize> = (0..reader.extents().len()).collect();
    let arenas = reader.load_buffers(&wanted);
    let targets: Vec<RegionMut> =
        arenas.iter().map(|arena| Buffer::zeroed(arena.bytes as usize).unwrap().into_region()).collect();
    let views: Vec<Region> = targets.iter().map(RegionMut::region).collect();
    reader.start(engine, arenas.iter().cloned().zip(targets).collect())?.finish(Verify::Full, &Progress::default())?;
    let mut tensors: Tensors = reader.extents().iter().map(|extent| (extent.name.clone(), Vec::new())).collect();
    for (arena, view) in arenas.iter().zip(&views) {
        for member in &arena.members {
            let mut bytes = vec![0; reader.extents()[member.extent].bytes as usize];
            view.copy_to_slice(member.at as usize, &mut bytes);
            tensors[member.extent].1 = bytes;
        }
    }
    tensors.sort();
    Ok(tensors)
}

fn load_file(engine: &Engine, path: &Path) -> Result<Tensors> {
    load(engine, Reader::open(engine, &Target::from(&path.to_path_buf()))?)
}

fn saved(folder: &Path, name: &str, sizes: &[usize]) -> PathBuf {
    let path = folder.join(name);
    let storages: Vec<Vec<u8>> = sizes.iter().map(|bytes| random(*bytes, *bytes as u64)).collect();
    let save = plan_safetensors(&path, &storages, SaveOptions::default());
    save.run(Arc::new(engine()), &Target::from(&path), Arc::default()).unwrap();
    path
}

/// Writes one mutation after the other and loads each.
fn attack(guard: &Guard, before: &Value, write: impl Fn(&Value), load: impl Fn() -> Result<Tensors>) {
    let sound = load().unwrap();
    let (mut refused, mut dice) = (0, fastrand::Rng::with_seed(7));
    for round in 0..MUTATIONS {
        guard.begin(round);
        let mut document = before.clone();
        for _ in 0..=dice.u8(..3) {
            mutate(&mut document, &mut dice);
        }
        write(&document);
        match load() {
            Ok(tensors) => assert!(tensors == sound, "mutation {round} gives other tensors: {document}"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > MUTATIONS / 2, "{refused} were refused");
}

fn header_of(path: &Path) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let json_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + json_bytes]).unwrap(), bytes[8 + json_bytes..].to_vec())
}

/// Writes the header in our form, so that only its meaning differs.
fn write_header(path: &Path, header: &Value, data: &[u8]) {
    let mut text = header.to_string().into_bytes();
    text.resize((text.len() + 16).next_multiple_of(4096) - 8, b' ');
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend(text);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

#[test]
fn headers() {
    guarded("headers", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = saved(folder.path(), "a.safetensors", &[100, 0, 3]);
        let (header, data) = header_of(&path);
        attack(guard, &header, |document| write_header(&path, document, &data), || load_file(&engine, &path));
    });
}

#[test]
fn checksums() {
    guarded("checksums", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = saved(folder.path(), "a.safetensors", &[100, CHUNK_BYTES as usize + 1]);
        let (mut header, data) = header_of(&path);
        let checksums: Value = serde_json::from_str(header["__metadata__"][METADATA_KEY].as_str().unwrap()).unwrap();
        header["__metadata__"][METADATA_KEY] = Value::Null;
        let write = |document: &Value| {
            let mut header = header.clone();
            header["__metadata__"][METADATA_KEY] = document.to_string().into();
            write_header(&path, &header, &data);
        };
        attack(guard, &checksums, write, || load_file(&engine, &path));
    });
}

#[test]
fn lists_of_shards() {
    guarded("lists_of_shards", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let folder = folder.path();
        let (mut files, mut weight_map) = (Map::new(), Map::new());
        for (name, bytes) in [("a.safetensors", 100), ("b.safetensors", 50)] {
            let reader = Reader::open(&engine, &Target::from(&saved(folder, name, &[bytes]))).unwrap();
            let crc64 = format!("{:016x}", reader.index_crc64(&engine).unwrap());
            files.insert(name.into(), json!({ "bytes": reader.file_bytes(), "index_crc64": crc64 }));
            weight_map.insert(format!("t0{name}"), name.into());
        }
        let list = folder.join("model.safetensors.index.json");
        let metadata = json!({ set::CHECKSUM_KEY: set::BLANK, set::FILES_KEY: files });
        let text = json!({ "metadata": metadata, "weight_map": weight_map });
        // A space after each colon, as Python writes it.
        let sealed = |text: &str| set::seal(&text.replace("\":\"", "\": \"")).unwrap();
        let text = sealed(&text.to_string());
        std::fs::write(&list, &text).unwrap();
        let load = || {
            let set = find_set(&list)?;
            set.check()?;
            // A list without a checksum may claim anything.
            if set.list.as_ref().is_none_or(|list| list.state != set::State::Sound) {
                return Err(Error::Interrupted);
            }
            let mut tensors = Tensors::new();
            for file in set.files {
                let reader = Reader::open(&engine, &Target::Path(file.path))?;
                reader.compare_identity(&engine, file.identity.unwrap())?;
                tensors.extend(load(&engine, reader)?);
            }
            Ok(tensors)
        };
        let write = |document: &Value| std::fs::write(&list, document.to_string().replace("\":\"", "\": \"")).unwrap();
        attack(guard, &serde_json::from_str(&text).unwrap(), write, load);
    });
}

#[test]
fn lists_of_parts() {
    guarded("lists_of_parts", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), Arc::new(engine()));
        let (one, other) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
        let stripes = StripeSet::new(vec![one.clone(), other], 4096).unwrap();
        let save = plan_safetensors(&one, &[random(20_000, 1)], SaveOptions::default());
        save.run(Arc::clone(&engine), &Target::Stripes(stripes.clone()), Arc::default()).unwrap();
        let list = stripes.manifest_path();
        let load = || load(&engine, Reader::open(&engine, &Target::Stripes(StripeSet::from_manifest(&list)?))?);
        let mut before: Value = serde_json::from_slice(&std::fs::read(&list).unwrap()).unwrap();
        before[set::CHECKSUM_KEY] = set::BLANK.into();
        // With a valid checksum, if the document has a place for one.
        let write = |document: &Value| {
            let text = serde_json::to_string_pretty(document).unwrap();
            std::fs::write(&list, set::seal(&text).unwrap_or(text)).unwrap();
        };
        write(&before);
        attack(guard, &before, write, load);
    });
}

/// Offsets after a structure's signature, and widths, of its fields.
type Fields = (&'static [u8], &'static [(usize, usize)]);

const ZIP_FIELDS: [Fields; 5] = [
    (b"PK\x03\x04", &[(4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)]),
    (
        b"PK\x01\x02",
        &[(4, 2), (6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (42, 4)],
    ),
    (b"PK\x06\x06", &[(4, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)]),
    (b"PK\x06\x07", &[(4, 4), (8, 8), (16, 4)]),
    (b"PK\x05\x06", &[(4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)]),
];

/// Finds the structures of a ZIP file by their signatures.
fn structures(file: &[u8]) -> Vec<(usize, &'static [(usize, usize)])> {
    let known =
        |at: usize| ZIP_FIELDS.iter().find(|(mark, _)| file[at..].starts_with(mark)).map(|(_, fields)| (at, *fields));
    (0..file.len()).filter_map(known).collect()
}

/// Mutates a ZIP file: a field, the order or number of its structures, or its end.
fn mutate_zip(file: &mut Vec<u8>, dice: &mut fastrand::Rng) {
    let there = structures(file);
    let Some(&(at, fields)) = there.get(dice.usize(..there.len().max(1))) else { return file.clear() };
    let end_of = |at: usize| there.iter().map(|(other, _)| *other).find(|other| *other > at).unwrap_or(file.len());
    match dice.u8(..10) {
        0..=4 => {
            let (offset, width) = fields[dice.usize(..fields.len())];
            let Some(field) = file.get_mut(at + offset..at + offset + width) else { return };
            let mut wide = [0; 8];
            wide[..width].copy_from_slice(field);
            let number = u64::from_le_bytes(wide);
            let number = match dice.u8(..4) {
                0 => number.wrapping_add(1),
                1 => number.wrapping_sub(1),
                2 => number ^ 1 << dice.usize(..width * 8),
                _ => NUMBERS[dice.usize(..NUMBERS.len())],
            };
            field.copy_from_slice(&number.to_le_bytes()[..width]);
        }
        5 => file.truncate(dice.usize(..=file.len())),
        // Duplicates, removes or swaps a section.
        6 => {
            let section = file[at..end_of(at)].to_vec();
            drop(file.splice(at..at, section));
        }
        7 => drop(file.drain(at..end_of(at))),
        8 => {
            let other = there[dice.usize(..there.len())].0;
            let (first, last) = (at.min(other), at.max(other));
            let (one, two) = (file[first..end_of(first)].to_vec(), file[last..end_of(last)].to_vec());
            if first < last {
                drop(file.splice(last..last + two.len(), one.iter().copied()));
                drop(file.splice(first..first + one.len(), two));
            }
        }
        // Changes a byte of a name or of the data after it.
        _ => {
            let place = (at + 30 + dice.usize(..40)).min(file.len() - 1);
            file[place] = dice.u8(..);
        }
    }
}

/// Any bytes give the same tensors or an error.
fn attack_bytes(
    guard: &Guard,
    path: &Path,
    whole: &[u8],
    mutate: impl Fn(&mut Vec<u8>, &mut fastrand::Rng),
    load: impl Fn() -> Result<Tensors>,
) {
    let sound = load().unwrap();
    let (mut refused, mut dice) = (0, fastrand::Rng::with_seed(11));
    for round in 0..MUTATIONS {
        guard.begin(round);
        let mut file = whole.to_vec();
        for _ in 0..=dice.u8(..3) {
            mutate(&mut file, &mut dice);
        }
        std::fs::write(path, file).unwrap();
        match load() {
            Ok(tensors) => assert!(tensors == sound, "mutation {round} gives other tensors"),
            Err(error) => {
                assert!(error.to_string().contains(&*path.to_string_lossy()), "mutation {round}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused > MUTATIONS / 2, "{refused} were refused");
}

#[test]
fn archives() {
    guarded("archives", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = folder.path().join("a.pt");
        let save = plan_archive(&path, &[random(100, 1), Vec::new(), random(3, 2)], SaveOptions::default());
        save.run(Arc::new(self::engine()), &Target::from(&path), Arc::default()).unwrap();
        let whole = std::fs::read(&path).unwrap();
        attack_bytes(guard, &path, &whole, mutate_zip, || load_file(&engine, &path));
    });
}

/// Instructions, counted arguments, and prefixes of both.
const INSTRUCTIONS: [&[u8]; 28] = [
    b"(",
    b"t",
    b"]",
    b"}",
    b")",
    b"R",
    b"Q",
    b"b",
    b"s",
    b"u",
    b"e",
    b"a",
    b"0",
    b"2",
    b"N",
    b"q\x00",
    b"h\x00",
    b"j\xff\xff\xff\xff",
    b"K\x00",
    b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"X\xff\xff\xff\xff",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"cos\nsystem\n",
    b"\x93",
    b"\x91",
    b"\x90",
    b"\x81",
    b".",
];

fn mutate_pickle(pickle: &mut Vec<u8>, dice: &mut fastrand::Rng) {
    let at = dice.usize(..pickle.len().max(1)).min(pickle.len());
    let end = (at + dice.usize(1..20)).min(pickle.len());
    match dice.u8(..6) {
        0 | 1 => drop(pickle.splice(at..at, INSTRUCTIONS[dice.usize(..INSTRUCTIONS.len())].iter().copied())),
        2 => drop(pickle.splice(at..end, INSTRUCTIONS[dice.usize(..INSTRUCTIONS.len())].iter().copied())),
        3 => drop(pickle.drain(at..end)),
        4 => {
            let repeated = pickle[at..end].repeat(dice.usize(2..50));
            drop(pickle.splice(at..at, repeated));
        }
        _ => {
            if let Some(byte) = pickle.get_mut(at) {
                *byte = dice.u8(..);
            }
        }
    }
}

/// Builds an archive of these records, with a valid directory and checksums.
fn zipped(records: &[(&str, &[u8])]) -> Vec<u8> {
    let specs: Vec<RecordSpec<'_>> =
        records.iter().map(|(name, bytes)| RecordSpec { name, bytes: bytes.len() as u64 }).collect();
    let plan = Plan::new("a", &specs).unwrap();
    let checksums: Vec<u32> =
        records.iter().map(|(_, bytes)| deepnvme_format::checksums::checksums_of(bytes).crc32).collect();
    let mut file = Vec::new();
    for (index, (_, bytes)) in records.iter().enumerate() {
        let place = &plan.records()[index];
        file.resize(place.header_offset as usize, 0);
        file.extend(plan.header(index, checksums[index]));
        file.resize(place.data_offset as usize, 0);
        file.extend(*bytes);
    }
    file.resize(plan.index_offset() as usize, 0);
    file.extend(plan.index(&checksums));
    file
}

#[test]
fn pickles() {
    guarded("pickles", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = folder.path().join("a.pt");
        let storages = [random(100, 1), Vec::new(), random(3, 2)];
        let (whole, mut dice, mut refused) = (pickle(&storages), fastrand::Rng::with_seed(13), 0);
        let load = |pickle: &[u8]| {
            let names: Vec<String> = (0..storages.len()).map(|index| format!("data/{index}")).collect();
            let mut records = vec![("data.pkl", pickle), ("byteorder", b"little")];
            records.extend(names.iter().zip(&storages).map(|(name, bytes)| (name.as_str(), bytes.as_slice())));
            std::fs::write(&path, zipped(&records)).unwrap();
            let reader = Reader::open(&engine, &Target::from(&path))?;
            let all: Vec<usize> = (0..reader.extents().len()).collect();
            let arenas = reader.load_buffers(&all);
            let memory = |arena: &deepnvme_checkpoint::read::LoadBuffer| {
                Buffer::zeroed(arena.bytes as usize).unwrap().into_region()
            };
            let targets: Vec<_> = arenas.into_iter().map(|arena| (arena.clone(), memory(&arena))).collect();
            Arc::new(reader).start(&engine, targets)?.finish(Verify::Off, &Progress::default()).map(drop)
        };
        load(&whole).unwrap();
        for round in 0..MUTATIONS {
            guard.begin(round);
            let mut pickle = whole.clone();
            for _ in 0..=dice.u8(..3) {
                mutate_pickle(&mut pickle, &mut dice);
            }
            if let Err(error) = load(&pickle) {
                assert!(error.to_string().contains(&*path.to_string_lossy()), "mutation {round}: {error}");
                refused += 1;
            }
        }
        assert!(refused > MUTATIONS / 2, "{refused} were refused");
    });
}

/// No manifest removes a file other than a checkpoint that it retires, and errors name the manifest.
#[test]
fn manifests() {
    guarded("manifests", |guard| {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let foreign = ["notes.txt", "step-00000009.pt", ".step-00000001.pt.deepnvme-tmp-x", "deepnvme.json"];
        let own = ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt"];
        let contents: Vec<Vec<u8>> = (0..own.len()).map(|index| random(200, index as u64)).collect();
        let entry = |index: usize| {
            let crc64 = deepnvme_format::checksums::checksums_of(&contents[index][100..]).crc64;
            json!({ "file": own[index], "step": index + 1, "nbytes": 200, "time": "2026-01-01", "index_offset": 100,
                    "index_nbytes": 100, "index_crc64": format!("{crc64:016x}"), "torch": "2", "deepnvme": "0" })
        };
        let mut parts = entry(1);
        parts["parts"] = json!([{ "file": own[1], "nbytes": 200, "host": "a", "head_crc64": "0123456789abcdef" }]);
        parts["pending"] = json!({ own[1]: format!(".{}.deepnvme-tmp-7-x", own[1]) });
        let before = json!({ "version": 2, "checkpoints": [entry(0), parts], "retired": [entry(2)] });
        for name in foreign {
            std::fs::write(path(name), b"precious").unwrap();
        }
        let (mut dice, mut refused) = (fastrand::Rng::with_seed(17), 0);
        for round in 0..MUTATIONS {
            guard.begin(round);
            for (name, bytes) in own.iter().zip(&contents).filter(|(name, _)| !path(name).exists()) {
                std::fs::write(path(name), bytes).unwrap();
            }
            let mut document = before.clone();
            for _ in 0..=dice.u8(..3) {
                mutate(&mut document, &mut dice);
            }
            let mut text = document.to_string();
            if dice.u8(..10) == 0 {
                text.truncate(text.floor_char_boundary(dice.usize(..=text.len())));
            }
            std::fs::write(path(MANIFEST), &text).unwrap();
            let history = History::new(folder.path().to_path_buf(), None, false);
            let claimed = history.read().and_then(|_| history.claim(&Holder::new("x".into(), "y".into()), true));
            match claimed {
                Ok(_) => drop(history.settle()),
                Err(error) => {
                    assert!(error.to_string().contains(MANIFEST), "mutation {round}: {error}");
                    refused += 1;
                }
            }
            let retired = |name: &str| document["retired"].to_string().contains(name);
            for name in own.iter().filter(|name| !path(name).exists()) {
                assert!(retired(name), "mutation {round} has removed {name}: {document}");
            }
            for name in foreign {
                assert_eq!(std::fs::read(path(name)).unwrap(), b"precious", "mutation {round}: {document}");
            }
        }
        assert!(refused > MUTATIONS / 4, "{refused} were refused");
    });
}

/// Runs the fuzz body over its seeds and mutations of them.
#[test]
fn manifest_texts() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/history");
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(seeds).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    let seeds: Vec<Vec<u8>> = seeds.iter().map(|path| std::fs::read(path).unwrap()).collect();
    seeds.iter().for_each(|seed| fuzz_bodies::history(seed));
    let documents: Vec<Value> = seeds.iter().filter_map(|seed| serde_json::from_slice(seed).ok()).collect();
    let mut dice = fastrand::Rng::with_seed(19);
    for round in 0..4 * MUTATIONS as usize {
        let mut document = documents[round % documents.len()].clone();
        for _ in 0..=dice.u8(..3) {
            mutate(&mut document, &mut dice);
        }
        fuzz_bodies::history(document.to_string().as_bytes());
    }
}
