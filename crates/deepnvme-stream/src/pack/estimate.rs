//! What packing would gain: a sample of the tensors is encoded and decoded, and the disk is read.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use deepnvme_checkpoint::Result;
use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::stream::Replacement;
use deepnvme_io::stripe::STRIPE_BYTES_DEFAULT;
use deepnvme_io::{Durability, Engine, Error as IoError, StripeSet, Target, WriteOptions, fs};
use serde::Serialize;

use super::encoding::{Mode, Recipe, float};
use super::model::{Entry, Model};
use super::sample::Sample;
use super::write;
use crate::decode_pool;
use crate::sync::Instant;

/// What has fewer bytes is kept as it is: it would be a conversion of its own.
const ENCODED_BYTES_MIN: u64 = if cfg!(simulated) { 1 << 10 } else { 64 << 10 };
/// What saves less is not worth another form.
const WORTH: f64 = 0.97;
/// What is assumed of computing: that it takes so much of the time that reading takes now. Decoding has to be hidden by the
/// rest; whoever computes longer gains less, and beyond `Forecast::compute_s_max` nothing.
const COMPUTING: f64 = 0.5;
/// What is written and read to learn the speed of a disk.
const SCRATCH_BYTES_MAX: u64 = 256 << 20;
const SCRATCH_STEP: usize = if cfg!(simulated) { 16 << 10 } else { 8 << 20 };
const SCRATCH_NAME: &str = ".deepnvme-pack-speed";

/// Tensors of one form.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Share {
    /// How many.
    pub tensors: usize,
    /// Their bytes in the old files.
    pub bytes: u64,
    /// What is expected of the new one.
    pub packed_bytes: u64,
}

/// What packing would gain, as far as a sample can tell.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Forecast {
    /// Tensors by what becomes of them: `keep`, `cast`, `lossless`, `int8`, `fp8`.
    pub forms: BTreeMap<&'static str, Share>,
    /// Bytes of all tensors in the old files.
    pub bytes: u64,
    /// What is expected of the new one.
    pub packed_bytes: u64,
    /// Layers, by the names.
    pub layers: usize,
    /// Stretches of files that a layer is in now; in the new file it is one.
    pub stretches: f64,
    /// Reading in the new folder, or from all disks at once.
    pub disk_gb_s: f64,
    /// Decoding by all threads at once; `None` where nothing is.
    pub decode_gb_s: Option<f64>,
    /// Threads that decode while a model runs.
    pub threads: usize,
    /// Packing gains time as long as computing takes less than this for a pass through the model: reading all of it hides
    /// computing now, decoding comes on top of it then. `None` where nothing is decoded.
    pub compute_s_max: Option<f64>,
    /// The model passes through memory at that speed now, in bytes of the old files, if the disk is all that limits it.
    pub now_gb_s: f64,
    /// And would at that.
    pub packed_gb_s: f64,
}

/// What is known of this machine.
pub(super) struct Speeds {
    /// Bytes a second.
    disk: f64,
    threads: usize,
}

/// What is done to each tensor, and what that would gain.
pub(super) struct Plan {
    pub(super) recipes: Vec<Recipe>,
    pub(super) forecast: Forecast,
}

/// Measures how fast files are read where the new one will be.
pub(super) fn speeds(engine: &Engine, model: &Model, target: &Path, disks: &[PathBuf]) -> Result<Speeds> {
    let scratch = if disks.is_empty() {
        let place = target.ancestors().skip(1).find(|folder| fs::is_folder(folder)).unwrap_or(Path::new("."));
        Target::Path(place.join(SCRATCH_NAME))
    } else {
        let parts = disks.iter().map(|disk| disk.join(SCRATCH_NAME)).collect();
        Target::Stripes(StripeSet::new(parts, STRIPE_BYTES_DEFAULT)?)
    };
    let total: u64 = model.tensors.iter().map(|entry| entry.bytes).sum();
    let bytes = total.clamp(1, SCRATCH_BYTES_MAX) as usize;
    // Real weights: some disks are faster with zeros.
    let largest = (0..model.tensors.len()).max_by_key(|index| model.tensors[*index].bytes).unwrap_or(0);
    let some = model.read(engine, largest, &(0..model.tensors[largest].bytes.min(SCRATCH_STEP as u64)))?;
    let buffer = |len| Buffer::zeroed(len).map_err(|error| IoError::from_io("allocate", &error));
    let mut content = buffer(SCRATCH_STEP)?;
    content.as_mut_slice().chunks_mut(some.len().max(1)).for_each(|part| part.copy_from_slice(&some[..part.len()]));
    let content: Region = content.into_region().region();
    // Never given its name: it is gone when this ends.
    let replacement = Replacement::new(&scratch)?;
    let file = replacement.open(engine.config().direct)?;
    let steps: Vec<(u64, usize)> =
        (0..bytes).step_by(SCRATCH_STEP).map(|at| (at as u64, SCRATCH_STEP.min(bytes - at))).collect();
    for (at, len) in &steps {
        engine.write(&file, *at, content.clone().slice(0..*len), WriteOptions::default())?.wait().1?;
    }
    engine.sync(&file, Durability::Data)?;
    let (began, mut on_their_way, mut spare) = (Instant::now(), VecDeque::new(), Vec::new());
    for (at, len) in steps {
        if on_their_way.len() == 4 {
            spare.extend(finish(&mut on_their_way)?);
        }
        let memory = spare.pop().filter(|memory: &Buffer| memory.len() == len);
        let memory = memory.map_or_else(|| buffer(len), Ok)?;
        on_their_way.push_back(engine.read(&file, at, memory.into_region())?);
    }
    while !on_their_way.is_empty() {
        finish(&mut on_their_way)?;
    }
    let disk = bytes as f64 / began.elapsed().as_secs_f64().max(1e-9);
    Ok(Speeds { disk, threads: decode_pool::hands() })
}

fn finish(reads: &mut VecDeque<deepnvme_io::Pending<deepnvme_io::mem::RegionMut>>) -> Result<Option<Buffer>> {
    let Some(read) = reads.pop_front() else { return Ok(None) };
    let (memory, transfer) = read.wait();
    transfer?;
    Ok(memory.and_then(|memory| memory.into_buffer().ok()))
}

/// Decides what is done to each tensor.
pub(super) fn plan(engine: &Engine, model: &Model, mode: Mode, speeds: &Speeds) -> Result<Plan> {
    let wanted: Vec<Recipe> = model.tensors.iter().map(|entry| wanted(entry, mode)).collect();
    let sample = Sample::take(engine, model, &wanted, speeds.threads)?;
    let decode = sample.decoded_bytes_s();
    let is_fast = mode != Mode::Auto || decode.is_some_and(|decode| is_hidden(decode, speeds.disk));
    let mut forecast = Forecast {
        forms: BTreeMap::new(),
        bytes: 0,
        packed_bytes: 0,
        layers: 0,
        stretches: 0.0,
        disk_gb_s: speeds.disk / 1e9,
        decode_gb_s: decode.map(|speed| speed / 1e9),
        threads: speeds.threads,
        compute_s_max: None,
        now_gb_s: speeds.disk / 1e9,
        packed_gb_s: 0.0,
    };
    let (mut recipes, mut decoded) = (Vec::with_capacity(wanted.len()), 0);
    for (entry, recipe) in model.tensors.iter().zip(wanted) {
        let ratio = sample.ratio(entry, &recipe);
        let is_worth = !recipe.is_encoded() || (ratio < WORTH && is_fast);
        let (recipe, packed) =
            if is_worth { (recipe, (entry.bytes as f64 * ratio) as u64) } else { (Recipe::Keep, entry.bytes) };
        let share = forecast.forms.entry(name_of(&recipe)).or_default();
        *share = Share {
            tensors: share.tensors + 1,
            bytes: share.bytes + entry.bytes,
            packed_bytes: share.packed_bytes + packed,
        };
        forecast.bytes += entry.bytes;
        forecast.packed_bytes += packed;
        decoded += if recipe.is_encoded() { entry.bytes } else { 0 };
        recipes.push(recipe);
    }
    let read_s = forecast.packed_bytes as f64 / speeds.disk;
    let decode_s = decode.map_or(0.0, |decode| decoded as f64 / decode);
    if decoded > 0 && decode.is_some() {
        forecast.compute_s_max = Some((forecast.bytes as f64 / speeds.disk - decode_s).max(0.0));
    }
    forecast.packed_gb_s = forecast.bytes as f64 / read_s.max(decode_s).max(1e-9) / 1e9;
    let order = write::layout(model, &recipes);
    let layers: Vec<_> = order.layers().collect();
    let stretches: usize = layers.iter().map(|group| model.stretches(&order.tensors[(*group).clone()])).sum();
    forecast.layers = layers.len();
    forecast.stretches = stretches as f64 / layers.len().max(1) as f64;
    Ok(Plan { recipes, forecast })
}

/// Whether decoding fits into what computing leaves of the time that the disk takes now, and gains by it.
fn is_hidden(decode_bytes_s: f64, disk_bytes_s: f64) -> bool {
    COMPUTING / disk_bytes_s + 1.0 / decode_bytes_s < WORTH / disk_bytes_s
}

/// What the mode asks for, before anything is measured.
fn wanted(entry: &Entry, mode: Mode) -> Recipe {
    let Some(float) = float(entry.dtype) else { return Recipe::Keep };
    let is_large = entry.bytes >= ENCODED_BYTES_MIN;
    match mode {
        Mode::Auto | Mode::Lossless if is_large => Recipe::pack(float, &entry.shape),
        Mode::Quantised(code, group) if is_large => {
            Recipe::quantise(code, group, float, &entry.shape).unwrap_or(Recipe::Keep)
        }
        Mode::Cast(to) if to != float => Recipe::Cast { from: float, to },
        _ => Recipe::Keep,
    }
}

fn name_of(recipe: &Recipe) -> &'static str {
    match recipe {
        Recipe::Keep => "keep",
        Recipe::Cast { .. } => "cast",
        Recipe::Pack { .. } => "lossless",
        Recipe::Quantise { scheme, .. } if scheme.code == deepnvme_codec::quant::Code::Int8 => "int8",
        Recipe::Quantise { .. } => "fp8",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_chosen_where_decoding_is_twice_as_fast_as_the_disk() {
        assert!(is_hidden(5e9, 2e9));
        assert!(!is_hidden(4e9, 2e9));
        assert!(!is_hidden(1e9, 2e9));
        assert!(is_hidden(1e9, 0.2e9));
    }
}
