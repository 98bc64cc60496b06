//! Saved contents: plain bytes, or checkpoints by the real code that saves and loads them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::read::{INDEX_SUFFIX, Reader, Verify, find_set};
use deepnvme_checkpoint::write::{Record, Save, SaveOptions, Saved, Staging, Tensor};
use deepnvme_checkpoint::{Error, Progress, Result, convert};
use deepnvme_file::Target;
use deepnvme_file::{
    self, Replacement,
    replace::{Member, SetReplacement, resolve, retire_set},
};
use deepnvme_format::file_list;
use deepnvme_format::pickle::{PickleWriter, TensorView};
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_format::{Dtype, Signs};
use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::{Access, DirectMode, Durability, Engine, Error as IoError, OpenOptions, WriteMode, WriteOptions, fs};
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;
use serde_json::{Map, json};

use super::payload::{self, Version};

/// Maximum shards of a checkpoint.
const SHARDS_MAX: usize = 3;
/// Maximum thread switches between a save's start and its cancellation.
const CANCEL_SWITCHES_MAX: u64 = 200;
/// The key of the random moment of a cancellation.
const CANCEL_KEY: u64 = 0x7374_6f70;
/// The key of the random choice of one file in place of shards.
const ONE_FILE_KEY: u64 = 0x006f_6e65;
/// The key of the random bytes of tensors.
const TENSORS_KEY: u64 = 0x7465_6e73;

/// The kind of saved content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Content {
    /// Bytes, in one request to the engine.
    Bytes,
    /// A torch archive.
    Archive,
    /// A safetensors file.
    Safetensors,
    /// Several safetensors files and their index, or one file that replaces them: the Rust part of
    /// `save(max_shard_bytes=...)`.
    Shards,
    /// A torch archive that `convert` makes of a safetensors file.
    Converted,
}

/// Written content without its final name.
pub(super) enum UncommittedSave {
    /// One file or stripe set, with the checkpoint's sizes.
    File(Replacement, Option<Saved>),
    /// Shards under private names, and the text of their index.
    Shards(SetReplacement, String),
    /// One file that makes the shards of this index obsolete.
    FileOverShards(Replacement, PathBuf),
}

/// Keys of an index's record of its own files.
const RECORD: [&str; 2] = ["metadata", "deepnvme.owned"];

impl UncommittedSave {
    /// Renames it to its final name.
    pub(super) fn commit(self, durability: Durability) -> Result<()> {
        match self {
            Self::File(file, _) => file.commit(durability == Durability::Full)?,
            Self::Shards(set, index) => drop(set.commit_text(&index)?),
            Self::FileOverShards(file, index) => {
                file.commit(durability == Durability::Full)?;
                // The new file counts, even if the old ones remain.
                let _ = retire_set(&index, &RECORD);
            }
        }
        Ok(())
    }
}

/// Content found under a name.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum FoundContent {
    /// No file.
    Missing,
    /// This version, complete and alone.
    Saved(Version),
    /// Anything else.
    Foreign(String),
}

/// Parameters of one save.
#[derive(Clone)]
pub(super) struct SaveRequest<'a> {
    /// Engine to use.
    pub(super) engine: &'a Arc<Engine>,
    /// Destination.
    pub(super) target: &'a Target,
    /// Seed; with the version it determines the content.
    pub(super) seed: u64,
    pub(super) version: Version,
    pub(super) durability: Durability,
    /// Staging memory of a checkpoint.
    pub(super) staging: Option<Staging>,
    /// Whether the save is cancelled on the way.
    pub(super) is_cancelled: bool,
}

impl Content {
    /// Writes everything under a private name. A cancelled save may fail.
    pub(super) fn write(self, request: &SaveRequest<'_>) -> Result<UncommittedSave> {
        if self == Self::Bytes {
            return write_bytes(request).map(|replacement| UncommittedSave::File(replacement, None));
        }
        let tensors = tensors(request.seed, request.version);
        let options =
            SaveOptions { durability: request.durability, has_checksums: true, staging: request.staging.clone() };
        let progress = Arc::new(Progress::default());
        let canceller = start_canceller(request, &progress);
        let written = if self == Self::Shards && is_one_file(request.seed, request.version) {
            let save = Self::Safetensors.plan(&request.target.path(), &tensors, options);
            save.and_then(|save| save.write(Arc::clone(request.engine), request.target, progress))
                .map(|(_, replacement)| UncommittedSave::FileOverShards(replacement, index_of(&request.target.path())))
        } else if self == Self::Shards {
            write_shards(request, &tensors, &options, &progress)
        } else {
            let save = self.plan(&request.target.path(), &tensors, options);
            save.and_then(|save| save.write(Arc::clone(request.engine), request.target, progress))
                .map(|(saved, replacement)| UncommittedSave::File(replacement, Some(saved)))
        };
        if let Some(canceller) = canceller {
            let _ = canceller.join();
        }
        written
    }

    /// Plans the file of these tensors.
    pub(super) fn plan(self, path: &Path, tensors: &[Vec<u8>], options: SaveOptions) -> Result<Save> {
        let region = |bytes: &Vec<u8>| payload::region_with(bytes).region().into();
        if self != Self::Archive {
            let tensors = tensors.iter().enumerate().map(tensor);
            return Save::safetensors(path, tensors.collect(), Vec::new(), options);
        }
        let mut records = vec![
            Record { name: "data.pkl".into(), data: Region::from_vec(pickle(tensors)).into() },
            Record { name: "byteorder".into(), data: Region::from_vec(b"little".to_vec()).into() },
        ];
        let record = |(index, bytes): (usize, &Vec<u8>)| Record { name: format!("data/{index}"), data: region(bytes) };
        records.extend(tensors.iter().enumerate().map(record));
        Save::archive(path, records, options)
    }

    /// Returns the memory of a version's state, with each record on its own pages.
    pub(super) fn state_bytes(self, seed: u64, version: Version) -> u64 {
        let records = match self {
            Self::Bytes => vec![payload::content(seed, version).len()],
            _ => tensors(seed, version).iter().map(Vec::len).collect(),
        };
        // The pickle and the byte order are two more.
        let pages = records.iter().map(|bytes| (bytes + 64).div_ceil(4096) as u64).sum::<u64>() + 2;
        pages * 4096
    }

    /// Returns whether anything exists under this name.
    pub(super) fn exists(self, path: &Path) -> bool {
        let exists = |path: &Path| fs::exists(path).unwrap_or(true);
        exists(path) || (self == Self::Shards && exists(&index_of(path)))
    }

    /// Reads a name with all checks.
    pub(super) fn read(self, engine: &Arc<Engine>, target: &Target, seed: u64) -> Result<FoundContent> {
        let target = match target {
            Target::Stripes(set) => Target::from(set.manifest_path()),
            path => path.clone(),
        };
        if !self.exists(&target.path()) {
            return Err(IoError::os("open", Errno::NOENT).at_path(target.path()).into());
        }
        if self == Self::Bytes {
            let bytes = read_bytes(engine, &target)?;
            let text = || format!("{} bytes that nobody saved", bytes.len());
            return Ok(
                payload::recognise(seed, &bytes).map_or_else(|| FoundContent::Foreign(text()), FoundContent::Saved)
            );
        }
        let found = match self {
            Self::Shards => load_shards(engine, &target.path())?,
            _ => load(engine, Reader::open(engine, &target)?)?,
        };
        Ok(recognise(seed, &found))
    }
}

/// Starts a thread that cancels a save on the way, if it is to be cancelled.
fn start_canceller(request: &SaveRequest<'_>, progress: &Arc<Progress>) -> Option<thread::JoinHandle<()>> {
    request.is_cancelled.then(|| {
        let (progress, mut rng) = (Arc::clone(progress), Rng::keyed(request.seed, &[CANCEL_KEY, request.version]));
        thread::spawn(move || {
            (0..rng.below(CANCEL_SWITCHES_MAX)).for_each(|_| thread::yield_now());
            progress.stop();
        })
    })
}

/// Makes the file of a version by converting another one. A conversion that is cancelled late succeeds.
pub(super) fn convert_from(source: &Path, request: &SaveRequest<'_>) -> Result<()> {
    let options = SaveOptions { durability: request.durability, has_checksums: true, staging: request.staging.clone() };
    let progress = Arc::new(Progress::default());
    let canceller = start_canceller(request, &progress);
    let converted = convert(request.engine, source, &request.target.path(), options, &progress);
    if let Some(canceller) = canceller {
        let _ = canceller.join();
    }
    converted.map(drop)
}

fn tensor((index, bytes): (usize, &Vec<u8>)) -> Tensor {
    let spec = TensorSpec { name: format!("t{index}"), dtype: Dtype::U8, shape: vec![bytes.len() as u64] };
    Tensor { spec, data: payload::region_with(bytes).region().into() }
}

/// Writes each shard under a private name. Returns them with the text of their index, which identifies each shard's
/// file.
fn write_shards(
    request: &SaveRequest<'_>,
    tensors: &[Vec<u8>],
    options: &SaveOptions,
    progress: &Arc<Progress>,
) -> Result<UncommittedSave> {
    let file = request.target.path();
    let index = index_of(&file);
    let count = tensors.len().min(SHARDS_MAX);
    let name = |number: usize| {
        let prefix = format!("model-{:05}-of-{count:05}-", number + 1);
        Member { prefix: index.with_file_name(prefix), suffix: ".safetensors".into() }
    };
    let members: Vec<Member> = (0..count).map(name).collect();
    deepnvme_file::replace::remove_leftovers(&resolve(&file)?);
    let set = SetReplacement::begin(&index, &members, &RECORD)?;
    let (mut weight_map, mut files) = (Map::new(), Map::new());
    for (number, (path, name)) in set.members().zip(set.names()).enumerate() {
        let own: Vec<(usize, &Vec<u8>)> = tensors.iter().enumerate().skip(number).step_by(count).collect();
        let target = name;
        let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        weight_map.extend(own.iter().map(|(index, _)| (format!("t{index}"), json!(name))));
        let save = Save::safetensors(path, own.into_iter().map(tensor).collect(), Vec::new(), options.clone())?;
        let saved = save.write_into(Arc::clone(request.engine), path, target, Arc::clone(progress))?;
        files.insert(name, json!({"bytes": saved.bytes, "index_crc64": format!("{:016x}", saved.index_crc64)}));
    }
    let mut metadata = json!({"total_size": 0, (file_list::FILES_KEY): files});
    // An existing file stays: nothing proves its origin.
    if let Ok(stat) = fs::stat(&file) {
        metadata[file_list::REPLACES_KEY] = json!({"bytes": stat.bytes, "modified_ns": stat.modified_ns as i64});
    }
    let text = json!({"metadata": metadata, "weight_map": weight_map}).to_string();
    Ok(UncommittedSave::Shards(set, text))
}

/// Returns whether a version is saved as one file, which replaces shards.
fn is_one_file(seed: u64, version: Version) -> bool {
    Rng::keyed(seed, &[ONE_FILE_KEY, version]).chance(400)
}

/// Returns the index path of a file name.
pub(super) fn index_of(file: &Path) -> PathBuf {
    let mut index = file.as_os_str().to_os_string();
    index.push(INDEX_SUFFIX);
    index.into()
}

/// Loads all tensors of a name's files, and checks each file against the index, if there is one.
fn load_shards(engine: &Arc<Engine>, path: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let found = find_set(path)?;
    found.check()?;
    let mut readers = Vec::new();
    for file in found.files {
        if found.list.is_some() && file.fingerprint.is_none() {
            return Err(IoError::invalid("the index does not say which file it means").at_path(path).into());
        }
        readers.push(file.open(engine)?);
    }
    let mut all = Vec::new();
    for reader in readers {
        all.extend(load(engine, reader)?);
    }
    Ok(all)
}

/// Returns the tensors of a version; the first one contains the version. Some are empty, some span several chunks.
pub(super) fn tensors(seed: u64, version: Version) -> Vec<Vec<u8>> {
    let mut rng = Rng::keyed(seed, &[TENSORS_KEY, version]);
    let mut tensors = vec![version.to_le_bytes().to_vec()];
    for _ in 0..rng.below(5) {
        let bytes = match rng.below(8) {
            0 => 0,
            1 | 2 => rng.within(1..600),
            3 => rng.within(1..4) * 4096,
            4 => rng.within(9000..30_000),
            _ => rng.within(600..9000),
        };
        let mut tensor = vec![0; bytes as usize];
        rng.fill(&mut tensor);
        tensors.push(tensor);
    }
    tensors
}

/// Recognises the version of named tensors.
pub(super) fn recognise(seed: u64, found: &[(String, Vec<u8>)]) -> FoundContent {
    let named = |index: usize| found.iter().find(|(name, _)| name.trim_start_matches("data/") == index.to_string());
    let named = |index| named(index).or_else(|| found.iter().find(|(name, _)| *name == format!("t{index}")));
    let Some(version) = named(0).and_then(|(_, bytes)| bytes.as_slice().try_into().ok().map(Version::from_le_bytes))
    else {
        return FoundContent::Foreign(format!("{} tensors without a version", found.len()));
    };
    // Versions are small: a random number would imply any number of tensors.
    let expected = if version < 1 << 20 { tensors(seed, version) } else { Vec::new() };
    let is_whole = expected.len() == found.len()
        && expected.iter().enumerate().all(|(index, bytes)| named(index).is_some_and(|(_, found)| found == bytes));
    if is_whole {
        FoundContent::Saved(version)
    } else {
        FoundContent::Foreign(format!("tensors that are not all of version {version}"))
    }
}

/// Loads all tensors of a file with checksums, then verifies the whole file.
pub(super) fn load(engine: &Arc<Engine>, reader: Reader) -> Result<Vec<(String, Vec<u8>)>> {
    let mut reader = Arc::new(reader);
    let loaded = match load_once(engine, &reader) {
        Err(Error::HeaderLength { .. }) => {
            let wanted: Vec<usize> = (0..reader.extents().len()).collect();
            if let Some(reader) = Arc::get_mut(&mut reader) {
                reader.resolve(engine, &wanted)?;
            }
            load_once(engine, &reader)?
        }
        loaded => loaded?,
    };
    if let Some(mut reader) = Arc::into_inner(reader) {
        reader.verify_all(engine, &Progress::default())?;
    }
    Ok(loaded)
}

fn load_once(engine: &Arc<Engine>, reader: &Arc<Reader>) -> Result<Vec<(String, Vec<u8>)>> {
    let wanted: Vec<usize> = (0..reader.extents().len()).collect();
    let buffers = reader.load_buffers(&wanted);
    let targets: Vec<RegionMut> = buffers.iter().map(|buffer| payload::allocate(buffer.bytes as usize)).collect();
    let views: Vec<Region> = targets.iter().map(RegionMut::region).collect();
    let loading = reader.start(engine, buffers.iter().cloned().zip(targets).collect())?;
    loading.finish(Verify::Full, &Progress::default())?;
    let mut found: Vec<(String, Vec<u8>)> =
        reader.extents().iter().map(|extent| (extent.name.clone(), vec![0; extent.bytes as usize])).collect();
    for (buffer, view) in buffers.iter().zip(&views) {
        for member in &buffer.members {
            view.copy_to_slice(member.at as usize, &mut found[member.extent].1);
        }
    }
    Ok(found)
}

fn pickle(tensors: &[Vec<u8>]) -> Vec<u8> {
    let mut pickle = PickleWriter::default();
    pickle.raw(b"}(");
    for (index, bytes) in tensors.iter().enumerate() {
        let elements = bytes.len() as u64;
        pickle.text(&format!("t{index}"));
        pickle.tensor(&TensorView {
            key: index,
            dtype: Dtype::U8,
            storage_elements: elements,
            offset: 0,
            shape: &[elements],
            strides: &[1],
            requires_grad: false,
            signs: Signs::default(),
        });
    }
    pickle.raw(b"u");
    pickle.finish()
}

fn write_bytes(request: &SaveRequest<'_>) -> Result<Replacement> {
    let replacement = Replacement::new(request.target)?;
    let file = replacement.open(DirectMode::Preferred)?;
    let source = payload::region_with(&payload::content(request.seed, request.version)).region();
    let options = WriteOptions { durability: request.durability, mode: WriteMode::WholeFile };
    let pending = request.engine.write(&file, 0, source, options)?;
    if request.is_cancelled {
        pending.cancel();
    }
    pending.wait().1?;
    Ok(replacement)
}

fn read_bytes(engine: &Arc<Engine>, target: &Target) -> Result<Vec<u8>> {
    let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
    let file = deepnvme_file::open(target, options)?;
    let bytes = file.len()? as usize;
    let (memory, result) = engine.read(&file, 0, payload::allocate(bytes))?.wait();
    result?;
    let mut content = vec![0; bytes];
    if let Some(memory) = memory {
        memory.region().copy_to_slice(0, &mut content);
    }
    Ok(content)
}
