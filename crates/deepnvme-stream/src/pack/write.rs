//! Writes the new file in one pass: reads, encodes on several cores, hashes and writes. The header contains the encoded
//! lengths, so it is written last, into space reserved for its maximum length.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use deepnvme_checkpoint::{Error, Progress, Result};
use deepnvme_file::{FileWriter, Replacement, Target};
use deepnvme_format::Dtype;
use deepnvme_format::checksums::{self, CHUNK_BYTES, Frame, Hasher, chunk_count};
use deepnvme_format::safetensors::{
    HEADER_BYTES_MAX, LENGTH_BYTES, PACKED_KEY, PADDING_BYTES_MIN, write_header_checksum,
};
use deepnvme_io::{Durability, Engine};
use serde::Serialize;

use super::container::{self, TensorRecord};
use super::encoding::{Encoding, dtype};
use super::model::{ChunkRead, Model, SourceTensor, refused};
use super::order::{TensorKey, TensorOrder, order};

use crate::sync::{AtomicUsize, thread};
use deepnvme_io::start_thread;

const PAGE_BYTES: u64 = deepnvme_io::mem::PAGE_BYTES;
/// Reads in flight while a chunk is encoded.
const READS_AHEAD: usize = 2;
/// More threads than this would wait for the disk.
const THREADS_MAX: usize = 16;

/// The order of a model's tensors in the new file.
pub(super) fn layout(model: &Model, encodings: &[Encoding]) -> TensorOrder {
    let pairs = model.tensors.iter().zip(encodings);
    let keys = pairs.map(|(SourceTensor { name, bytes, dtype, .. }, encoding)| TensorKey {
        name,
        bytes: *bytes,
        item_bytes: dtype.bytes(),
        is_encoded: encoding.is_encoded(),
    });
    order(&keys.collect::<Vec<_>>())
}

/// A tensor that has been written.
struct Written {
    tensor: usize,
    /// Offset from the first tensor.
    begin: u64,
    bytes: u64,
    lengths: Vec<u64>,
    chunk_checksums: Vec<u64>,
}

/// A packing that is about to be written.
pub(super) struct Job<'a> {
    pub(super) engine: &'a Arc<Engine>,
    pub(super) model: &'a Model,
    /// The encoding of each tensor.
    pub(super) encodings: &'a [Encoding],
    /// The path that the new file gets in the private folder.
    pub(super) target: &'a Target,
    pub(super) progress: &'a Progress,
}

/// Writes all tensors to the new file. Returns its length.
pub(super) fn write(job: &Job<'_>, new: Replacement) -> Result<u64> {
    let Job { engine, model, encodings, target, progress } = *job;
    let TensorOrder { tensors, groups, .. } = layout(model, encodings);
    let header_bytes = LENGTH_BYTES + header_bytes_max(model, encodings, &tensors) + PADDING_BYTES_MIN;
    let data_offset = header_bytes.next_multiple_of(PAGE_BYTES);
    if data_offset - LENGTH_BYTES > HEADER_BYTES_MAX {
        return Err(refused(&target.path(), "its header would be longer than the format allows".into()));
    }
    progress.expect(model.tensors.iter().map(|tensor| tensor.bytes).sum());
    let mut writer = FileWriter::replacing(Arc::clone(engine), new, Durability::Full)?;
    writer.write(&vec![b' '; data_offset as usize])?;
    let mut written = Vec::with_capacity(tensors.len());
    let mut reads = Reads::new(engine, model, encodings, &tensors);
    for group in groups {
        for at in group.clone() {
            let (tensor, begin) = (tensors[at], writer.position() - data_offset);
            let mut hashing = HashingWriter {
                writer: &mut writer,
                chunk_checksums: Vec::new(),
                hasher: Hasher::default(),
                chunk_left: CHUNK_BYTES,
            };
            let mut lengths = Vec::new();
            let (item_bytes, encoding) = (model.tensors[tensor].dtype.bytes() as usize, &encodings[tensor]);
            let mut left = model.tensors[tensor].bytes;
            while left > 0 {
                progress.check()?;
                let (buffer, range) = reads.next()?.wait()?;
                let bytes = &buffer.as_slice()[range];
                let parts = encode(encoding, bytes, encoding.part_bytes(item_bytes)).map_err(|error| {
                    let what = format!("the tensor {:?} cannot be encoded: {error}", model.tensors[tensor].name);
                    refused(&model.path(tensor), what)
                })?;
                for part in parts {
                    hashing.write(&part)?;
                    lengths.push(part.len() as u64);
                }
                left -= bytes.len() as u64;
                progress.advance(bytes.len() as u64);
            }
            // Each group begins at a page. Encoded tensors may have padding at their end; other tensors may not.
            if at + 1 == group.end && encoding.is_encoded() {
                let end = hashing.writer.position();
                hashing.write(&vec![0; (end.next_multiple_of(PAGE_BYTES) - end) as usize])?;
            }
            let chunk_checksums = hashing.finish();
            written.push(Written {
                tensor,
                begin,
                bytes: writer.position() - data_offset - begin,
                lengths,
                chunk_checksums,
            });
        }
    }
    let bytes = writer.position();
    let mut header = (data_offset - LENGTH_BYTES).to_le_bytes().to_vec();
    let frame = Frame { file_bytes: bytes, index_offset: 0, index_bytes: data_offset };
    header.extend(header_text(model, encodings, &written, frame).as_bytes());
    debug_assert!(header.len() as u64 <= data_offset, "the bound is one");
    header.resize(data_offset as usize, b' ');
    write_header_checksum(&mut header);
    writer.overwrite(0, header)?;
    writer.commit()?;
    Ok(bytes)
}

/// Encodes all parts of a chunk, in parallel.
pub(super) fn encode(encoding: &Encoding, bytes: &[u8], part_bytes: usize) -> deepnvme_codec::Result<Vec<Vec<u8>>> {
    let parts: Vec<&[u8]> = bytes.chunks(part_bytes).collect();
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get).min(THREADS_MAX);
    let threads = if *encoding == Encoding::Keep { 1 } else { cores.min(parts.len()) };
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = parts.get(index) else { return Ok(done) };
            done.push((index, encoding.encode(part)?));
        }
    };
    let mut done: Vec<(usize, Vec<u8>)> = Vec::with_capacity(parts.len());
    thread::scope(|scope| {
        let builder = || thread::Builder::new().name("deepnvme-pack".into());
        let start = |_| start_thread(|| builder().spawn_scoped(scope, work)).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        done.extend(work()?);
        for other in others {
            let lost = || deepnvme_codec::Error::Invalid("a thread that packed has panicked".into());
            done.extend(other.join().map_err(|_| lost())??);
        }
        Ok::<(), deepnvme_codec::Error>(())
    })?;
    done.sort_unstable_by_key(|(index, _)| *index);
    Ok(done.into_iter().map(|(_, part)| part).collect())
}

/// Writes a tensor, and hashes it chunk by chunk.
struct HashingWriter<'a> {
    writer: &'a mut FileWriter,
    chunk_checksums: Vec<u64>,
    hasher: Hasher,
    /// Bytes until the end of the chunk.
    chunk_left: u64,
}

impl HashingWriter<'_> {
    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.writer.write(bytes)?;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(self.chunk_left as usize));
            self.hasher.update(now);
            self.chunk_left -= now.len() as u64;
            bytes = later;
            if self.chunk_left == 0 {
                self.end_chunk();
            }
        }
        Ok(())
    }

    fn end_chunk(&mut self) {
        self.chunk_checksums.push(std::mem::take(&mut self.hasher).finish().crc64);
        self.chunk_left = CHUNK_BYTES;
    }

    fn finish(mut self) -> Vec<u64> {
        if self.chunk_left < CHUNK_BYTES {
            self.end_chunk();
        }
        self.chunk_checksums
    }
}

/// The chunks of all tensors in their new order, some of them being read.
struct Reads<'a> {
    engine: &'a Engine,
    model: &'a Model,
    chunks: Box<dyn Iterator<Item = (usize, Range<u64>)> + 'a>,
    in_flight: VecDeque<ChunkRead>,
}

impl<'a> Reads<'a> {
    fn new(engine: &'a Engine, model: &'a Model, encodings: &'a [Encoding], tensors: &'a [usize]) -> Self {
        let chunks = tensors.iter().flat_map(move |index| {
            let tensor = &model.tensors[*index];
            let step = encodings[*index].chunk_bytes(tensor.dtype.bytes() as usize) as u64;
            let begins = (0..tensor.bytes).step_by(step as usize);
            begins.map(move |begin| (*index, begin..tensor.bytes.min(begin + step)))
        });
        Self { engine, model, chunks: Box::new(chunks), in_flight: VecDeque::new() }
    }

    fn next(&mut self) -> Result<ChunkRead> {
        while self.in_flight.len() <= READS_AHEAD {
            let Some((tensor, part)) = self.chunks.next() else { break };
            self.in_flight.push_back(self.model.start(self.engine, tensor, &part)?);
        }
        let lost = || deepnvme_io::Error::invalid("more is written than there is to read");
        self.in_flight.pop_front().ok_or_else(|| Error::Io(lost()))
    }
}

#[derive(Serialize)]
struct Described<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: (u64, u64),
}

/// The JSON text of the header.
fn header_text(model: &Model, encodings: &[Encoding], written: &[Written], frame: Frame) -> String {
    let encoded = written.iter().filter(|each| encodings[each.tensor].is_encoded()).map(|each| {
        let SourceTensor { name, shape, .. } = &model.tensors[each.tensor];
        TensorRecord { name, shape, encoding: encodings[each.tensor], lengths: &each.lengths }
    });
    let packed = container::text(encoded);
    let chunk_checksums =
        written.iter().map(|each| (model.tensors[each.tensor].name.as_str(), each.chunk_checksums.as_slice()));
    let checksum_text = checksums::encode(chunk_checksums, frame);
    let is_packed = encodings.iter().any(Encoding::is_encoded);
    let own = is_packed.then_some((PACKED_KEY, packed.as_str()));
    let own = own.into_iter().chain([(checksums::METADATA_KEY, checksum_text.as_str())]);
    let mut metadata: serde_json::Map<String, serde_json::Value> =
        model.metadata.iter().map(|(key, text)| (key.clone(), text.as_str().into())).collect();
    metadata.entry("format").or_insert_with(|| "pt".into());
    metadata.extend(own.map(|(key, text)| (key.to_owned(), text.into())));
    let mut json = String::from("{\"__metadata__\":");
    json += &serde_json::Value::Object(metadata).to_string();
    for each in written {
        let SourceTensor { name, shape, dtype: old, .. } = &model.tensors[each.tensor];
        let bytes = [each.bytes];
        let (dtype, shape) = match encodings[each.tensor] {
            Encoding::Keep => (*old, shape.as_slice()),
            Encoding::Cast { to, .. } => (dtype(to), shape.as_slice()),
            Encoding::Pack { .. } | Encoding::Quantise { .. } => (Dtype::U8, bytes.as_slice()),
        };
        let dtype = dtype.safetensors_name().unwrap_or_default();
        let described = Described { dtype, shape, data_offsets: (each.begin, each.begin + each.bytes) };
        json += &format!(",{}:", serde_json::Value::from(name.as_str()));
        json += &serde_json::to_string(&described).unwrap_or_default();
    }
    json + "}"
}

/// The maximum length of the header: the text for the maximum length of every tensor.
fn header_bytes_max(model: &Model, encodings: &[Encoding], tensors: &[usize]) -> u64 {
    let mut begin = 0;
    let bound = |index: &usize| {
        let (tensor, encoding) = (&model.tensors[*index], &encodings[*index]);
        let part = encoding.part_bytes(tensor.dtype.bytes() as usize);
        let parts = tensor.bytes.div_ceil(part as u64);
        let each = encoding.stored_bytes_max(part) as u64;
        let bytes = parts * each + PAGE_BYTES;
        let lengths = if encoding.is_encoded() { vec![each; parts as usize] } else { Vec::new() };
        begin += bytes;
        Written { tensor: *index, begin, bytes, lengths, chunk_checksums: vec![0; chunk_count(bytes)] }
    };
    header_text(model, encodings, &tensors.iter().map(bound).collect::<Vec<_>>(), Frame::default()).len() as u64
}
