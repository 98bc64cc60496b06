//! Estimates the gain of packing: encodes and decodes a sample of the tensors, and measures the disk.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_checkpoint::{Error, Result};
use deepnvme_file::stripe_set::STRIPE_BYTES_DEFAULT;
use deepnvme_file::{Replacement, StripeSet, Target};
use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{Durability, Engine, Error as IoError, ErrorKind, OpenOptions, TensorFile, WriteOptions, fs};
use serde::Serialize;

use super::encoding::{Encoding, EncodingMode, float};
use super::model::{Model, SourceTensor};
use super::sample::Sample;
use super::write;
use crate::decode_pool;
use crate::sync::Instant;

/// Smaller tensors are kept: each would need a conversion of its own.
const ENCODED_BYTES_MIN: u64 = if cfg!(simulated) { 1 << 10 } else { 64 << 10 };
/// Encodings that save less are not used.
const WORTH: f64 = 0.97;
/// The assumed share of the present read time that computing takes. Decoding has to fit into the rest. Models that
/// compute longer gain less, and none beyond `Estimate::compute_s_max`.
const COMPUTING: f64 = 0.5;
/// Bytes written and read to measure the disk.
const SCRATCH_BYTES_MAX: u64 = 256 << 20;
const SCRATCH_STEP: usize = if cfg!(simulated) { 16 << 10 } else { 8 << 20 };
/// Largest usual alignment of direct I/O.
const SCRATCH_BLOCK: u64 = 4096;
/// Reads in flight while the disk is measured.
const READS_IN_FLIGHT: usize = 4;
const SCRATCH_NAME: &str = ".deepnvme-pack-speed";

/// The tensors with one encoding.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct EncodingTotals {
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes in the old files.
    pub bytes: u64,
    /// Their estimated bytes in the new file.
    pub packed_bytes: u64,
}

/// The estimated gain of packing.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Estimate {
    /// Tensors by encoding: `keep`, `cast`, `lossless`, `int8`, `fp8`.
    pub encodings: BTreeMap<&'static str, EncodingTotals>,
    /// Bytes of all tensors in the old files.
    pub bytes: u64,
    /// Estimated bytes in the new file.
    pub packed_bytes: u64,
    /// Number of layers, by tensor names.
    pub layers: usize,
    /// Average number of file ranges per layer in the old files; one in the new file.
    pub file_ranges: f64,
    /// Read speed in the new folder, or of all disks together; that of the old files if there is no room to measure it.
    pub disk_gb_per_s: f64,
    /// Decoding speed of all threads; `None` if nothing is decoded.
    pub decode_gb_per_s: Option<f64>,
    /// Threads that decode while a model runs.
    pub threads: usize,
    /// The longest compute time per pass for which packing pays off: the time to read the old files, less the time to
    /// decode the new one. `None` if nothing is decoded.
    pub compute_s_max: Option<f64>,
    /// The present disk-bound speed of a pass, in bytes of the old files.
    pub now_gb_per_s: f64,
    /// The same speed after packing.
    pub packed_gb_per_s: f64,
}

/// The measured speed of this machine.
pub(super) struct Speeds {
    /// Bytes per second.
    disk: f64,
    threads: usize,
}

/// The encoding of each tensor, and the estimate.
pub(super) struct EncodingPlan {
    pub(super) encodings: Vec<Encoding>,
    pub(super) estimate: Estimate,
}

/// Measures the read speed where the new file will be, or that of the model if there is no room for a trial.
pub(super) fn speeds(engine: &Engine, model: &Model, target: &Path, disks: &[PathBuf]) -> Result<Speeds> {
    let scratch = if disks.is_empty() {
        let place = target.ancestors().skip(1).find(|folder| fs::is_folder(folder)).unwrap_or(Path::new("."));
        vec![place.join(SCRATCH_NAME)]
    } else {
        disks.iter().map(|disk| disk.join(SCRATCH_NAME)).collect()
    };
    let total: u64 = model.tensors.iter().map(|tensor| tensor.bytes).sum();
    // Whole blocks, so that direct I/O needs no second descriptor: the file has no name to open it by.
    let bytes = total.clamp(1, SCRATCH_BYTES_MAX).next_multiple_of(SCRATCH_BLOCK) as usize;
    let disk = match scratch_speed(engine, model, &scratch, bytes) {
        // The new file is smaller than the old one, and may fit where the trial does not.
        Err(Error::Io(error)) if error.kind() == ErrorKind::NoSpace => source_speed(engine, model, bytes as u64)?,
        measured => measured?,
    };
    Ok(Speeds { disk, threads: decode_pool::decoding_threads() })
}

/// Opens a file striped over new files near these paths, which have no names by then: they disappear at the end, also
/// if the process is killed.
fn open_scratch(engine: &Engine, paths: &[PathBuf]) -> Result<Arc<TensorFile>> {
    let named =
        paths.iter().map(|path| Replacement::new(&Target::Path(path.clone()))).collect::<Result<Vec<_>, _>>()?;
    let direct = engine.config().direct;
    if let [file] = named.as_slice() {
        return Ok(file.open(direct)?);
    }
    let parts = named.iter().map(|file| file.temporary().path()).collect();
    let set = StripeSet::new(parts, STRIPE_BYTES_DEFAULT)?;
    // Dropping the private files removes their names.
    Ok(deepnvme_file::open(&Target::Stripes(set), OpenOptions::to_fill(direct))?)
}

/// Writes weights to scratch files, and measures how fast they are read.
fn scratch_speed(engine: &Engine, model: &Model, scratch: &[PathBuf], bytes: usize) -> Result<f64> {
    // Use real weights: some disks are faster with zeros.
    let largest = (0..model.tensors.len()).max_by_key(|index| model.tensors[*index].bytes).unwrap_or(0);
    let some = model.read(engine, largest, &(0..model.tensors[largest].bytes.min(SCRATCH_STEP as u64)))?;
    // A model whose tensors are all empty.
    let some = if some.is_empty() { vec![0] } else { some };
    let buffer = |len| Buffer::zeroed(len).map_err(|error| IoError::from_io("allocate", &error));
    let mut content = buffer(SCRATCH_STEP)?;
    content.as_mut_slice().chunks_mut(some.len()).for_each(|part| part.copy_from_slice(&some[..part.len()]));
    let content: Region = content.into_region().region();
    let file = open_scratch(engine, scratch)?;
    let steps: Vec<(u64, usize)> =
        (0..bytes).step_by(SCRATCH_STEP).map(|at| (at as u64, SCRATCH_STEP.min(bytes - at))).collect();
    for (at, len) in &steps {
        engine.write(&file, *at, content.clone().slice(0..*len), WriteOptions::default())?.wait().1?;
    }
    engine.sync(&file, Durability::Data)?;
    let (began, mut in_flight, mut spare) = (Instant::now(), VecDeque::new(), Vec::new());
    for (at, len) in steps {
        if in_flight.len() == READS_IN_FLIGHT {
            spare.extend(finish(&mut in_flight)?);
        }
        let memory = spare.pop().filter(|memory: &Buffer| memory.len() == len);
        let memory = memory.map_or_else(|| buffer(len), Ok)?;
        in_flight.push_back(engine.read(&file, at, memory.into_region())?);
    }
    while !in_flight.is_empty() {
        finish(&mut in_flight)?;
    }
    Ok(bytes as f64 / began.elapsed().as_secs_f64().max(1e-9))
}

/// Measures how fast the model itself is read.
fn source_speed(engine: &Engine, model: &Model, bytes_max: u64) -> Result<f64> {
    let (began, mut in_flight, mut bytes) = (Instant::now(), VecDeque::new(), 0);
    'tensors: for (index, tensor) in model.tensors.iter().enumerate() {
        for start in (0..tensor.bytes).step_by(SCRATCH_STEP) {
            if bytes >= bytes_max {
                break 'tensors;
            }
            let part = start..(start + SCRATCH_STEP as u64).min(tensor.bytes);
            bytes += part.end - part.start;
            in_flight.push_back(model.start(engine, index, &part)?);
            if in_flight.len() == READS_IN_FLIGHT
                && let Some(read) = in_flight.pop_front()
            {
                read.wait()?;
            }
        }
    }
    in_flight.into_iter().try_for_each(|read| read.wait().map(drop))?;
    Ok(bytes as f64 / began.elapsed().as_secs_f64().max(1e-9))
}

fn finish(reads: &mut VecDeque<deepnvme_io::Transfer<deepnvme_io::mem::RegionMut>>) -> Result<Option<Buffer>> {
    let Some(read) = reads.pop_front() else { return Ok(None) };
    let (memory, transfer) = read.wait();
    transfer?;
    Ok(memory.and_then(|memory| memory.into_buffer().ok()))
}

/// Chooses the encoding of each tensor, and estimates the gain.
pub(super) fn plan(engine: &Engine, model: &Model, mode: EncodingMode, speeds: &Speeds) -> Result<EncodingPlan> {
    let wanted: Vec<Encoding> = model.tensors.iter().map(|tensor| wanted(tensor, mode)).collect();
    let sample = Sample::take(engine, model, &wanted, speeds.threads)?;
    let decode = sample.decoded_bytes_s();
    let is_fast = mode != EncodingMode::Auto || decode.is_some_and(|decode| is_hidden(decode, speeds.disk));
    let mut estimate = Estimate {
        encodings: BTreeMap::new(),
        bytes: 0,
        packed_bytes: 0,
        layers: 0,
        file_ranges: 0.0,
        disk_gb_per_s: speeds.disk / 1e9,
        decode_gb_per_s: decode.map(|speed| speed / 1e9),
        threads: speeds.threads,
        compute_s_max: None,
        now_gb_per_s: speeds.disk / 1e9,
        packed_gb_per_s: 0.0,
    };
    let (mut encodings, mut decoded) = (Vec::with_capacity(wanted.len()), 0);
    for (tensor, encoding) in model.tensors.iter().zip(wanted) {
        let ratio = sample.ratio(tensor, &encoding);
        let is_worth = !encoding.is_encoded() || (ratio < WORTH && is_fast);
        let (encoding, packed) =
            if is_worth { (encoding, (tensor.bytes as f64 * ratio) as u64) } else { (Encoding::Keep, tensor.bytes) };
        let totals = estimate.encodings.entry(name_of(&encoding)).or_default();
        *totals = EncodingTotals {
            tensors: totals.tensors + 1,
            bytes: totals.bytes + tensor.bytes,
            packed_bytes: totals.packed_bytes + packed,
        };
        estimate.bytes += tensor.bytes;
        estimate.packed_bytes += packed;
        decoded += if encoding.is_encoded() { tensor.bytes } else { 0 };
        encodings.push(encoding);
    }
    let read_s = estimate.packed_bytes as f64 / speeds.disk;
    let decode_s = decode.map_or(0.0, |decode| decoded as f64 / decode);
    if decoded > 0 && decode.is_some() {
        estimate.compute_s_max = Some((estimate.bytes as f64 / speeds.disk - decode_s).max(0.0));
    }
    estimate.packed_gb_per_s = estimate.bytes as f64 / read_s.max(decode_s).max(1e-9) / 1e9;
    let order = write::layout(model, &encodings);
    let layers: Vec<_> = order.layers().collect();
    let file_ranges: usize = layers.iter().map(|group| model.file_ranges(&order.tensors[(*group).clone()])).sum();
    estimate.layers = layers.len();
    estimate.file_ranges = file_ranges as f64 / layers.len().max(1) as f64;
    Ok(EncodingPlan { encodings, estimate })
}

/// Whether decoding fits into the time that computing leaves, and still saves time.
fn is_hidden(decode_bytes_s: f64, disk_bytes_s: f64) -> bool {
    COMPUTING / disk_bytes_s + 1.0 / decode_bytes_s < WORTH / disk_bytes_s
}

/// The encoding that the mode requests, before any measurement.
fn wanted(tensor: &SourceTensor, mode: EncodingMode) -> Encoding {
    let Some(float) = float(tensor.dtype) else { return Encoding::Keep };
    let is_large = tensor.bytes >= ENCODED_BYTES_MIN;
    match mode {
        EncodingMode::Auto | EncodingMode::Lossless if is_large => Encoding::pack(float, &tensor.shape),
        EncodingMode::Quantised(code, group) if is_large => {
            Encoding::quantise(code, group, float, &tensor.shape).unwrap_or(Encoding::Keep)
        }
        EncodingMode::Cast(to) if to != float => Encoding::Cast { from: float, to },
        _ => Encoding::Keep,
    }
}

fn name_of(encoding: &Encoding) -> &'static str {
    match encoding {
        Encoding::Keep => "keep",
        Encoding::Cast { .. } => "cast",
        Encoding::Pack { .. } => "lossless",
        Encoding::Quantise { scheme, .. } if scheme.code == deepnvme_codec::quant::CodeType::Int8 => "int8",
        Encoding::Quantise { .. } => "fp8",
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
