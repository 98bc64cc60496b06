//! The plan of the new file, and its records that are copied unchanged.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use deepnvme_format::archive::{PICKLE, STORAGES};
use deepnvme_format::checksums::METADATA_KEY;
use deepnvme_format::pickle::{PickleWriter, TensorView};
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_format::state::{self, View};
use deepnvme_io::Engine;
use deepnvme_io::mem::{Region, Strided};

use super::entries::TensorEntry;
use crate::error::{Error, Result};
use crate::read::{FileMetadata, Reader};
use crate::write::{DataSource, FileBytes, FileView, Place, Record, Save, SaveOptions, StorageCache, Tensor};

/// The minimum that torch requires besides the objects and their storages.
const VERSION: (&str, &[u8]) = ("version", b"3\n");
const BYTE_ORDER: (&str, &[u8]) = ("byteorder", b"little");

/// A record of the new file that equals a whole record of the old one.
pub(super) struct UnchangedRecord {
    pub(super) record: usize,
    pub(super) reader: usize,
    pub(super) extent: usize,
}

/// Plans a safetensors file. Tensors that share memory are stored separately.
pub(super) fn safetensors(
    engine: &Arc<Engine>,
    path: &Path,
    readers: &[Arc<Reader>],
    entries: Vec<TensorEntry>,
    options: SaveOptions,
) -> Result<(Save, Vec<UnchangedRecord>)> {
    let last = Arc::new(StorageCache::default());
    let mut sources: HashMap<String, (usize, usize)> = HashMap::new();
    let mut tensors = Vec::with_capacity(entries.len());
    for entry in entries {
        let storage = whole(engine, readers, entry.reader, entry.tensor.storage);
        let at = entry.tensor.view.offset * entry.tensor.dtype.bytes();
        let data = if entry.is_contiguous() && entry.tensor.signs.are_plain() {
            let start = storage.range.start + at;
            if entry.tensor.bytes() == storage.range.end - storage.range.start {
                sources.insert(entry.tensor.name.clone(), (entry.reader, entry.tensor.storage));
            }
            Place::File(FileBytes { range: start..start + entry.tensor.bytes(), ..storage }).into()
        } else {
            let unsupported = |why: String| {
                let text = format!("the tensor {:?}: {why}", entry.tensor.name);
                Error::format(readers[entry.reader].path(), deepnvme_format::Error::Unsupported(text))
            };
            let layout = layout(&entry).map_err(|error| unsupported(error.to_string()))?;
            let view = FileView { storage, offset_bytes: at as usize, layout, last: Arc::clone(&last) };
            let source = DataSource::from(Place::View(view));
            let signed = source.with_signs(entry.tensor.dtype, entry.tensor.signs);
            signed.map_err(unsupported)?
        };
        let state::Tensor { name, dtype, view: View { shape, .. }, .. } = entry.tensor;
        tensors.push(Tensor { spec: TensorSpec { name, dtype, shape }, data });
    }
    let save = Save::safetensors(path, tensors, metadata(readers), options)?;
    let copied = save.names().enumerate().filter_map(|(record, name)| {
        sources.get(name).map(|(reader, extent)| UnchangedRecord { record, reader: *reader, extent: *extent })
    });
    let copied = copied.collect();
    Ok((save, copied))
}

/// Returns the metadata that Hugging Face's loaders expect, and the metadata of the old files.
fn metadata(readers: &[Arc<Reader>]) -> Vec<(String, String)> {
    let mut metadata = vec![("format".to_owned(), "pt".to_owned())];
    for reader in readers {
        let FileMetadata::Safetensors { header } = reader.file_metadata() else { continue };
        let texts = header.metadata.iter().filter(|(key, _)| key != METADATA_KEY);
        for (key, text) in texts {
            if !metadata.iter().any(|(known, _)| known == key) {
                metadata.push((key.clone(), text.clone()));
            }
        }
    }
    metadata
}

/// Plans a torch archive of a flat dict. Tensors that share a storage keep sharing it.
pub(super) fn archive(
    engine: &Arc<Engine>,
    path: &Path,
    readers: &[Arc<Reader>],
    entries: &[TensorEntry],
    options: SaveOptions,
) -> Result<(Save, Vec<UnchangedRecord>)> {
    let mut pickle = PickleWriter::default();
    // Storages by file and extent. The first tensor's type becomes the storage's type.
    let mut keys: HashMap<(usize, usize), (usize, deepnvme_format::Dtype)> = HashMap::new();
    let mut order = Vec::new();
    pickle.raw(b"}(");
    for entry in entries {
        let next = keys.len();
        let place = (entry.reader, entry.tensor.storage);
        let (key, dtype) = *keys.entry(place).or_insert((next, entry.tensor.dtype));
        if dtype != entry.tensor.dtype {
            let text = format!("the tensor {:?} sees another one's memory as a different type", entry.tensor.name);
            return Err(Error::format(path, deepnvme_format::Error::Unsupported(text)));
        }
        if key == next {
            order.push(place);
        }
        if entry.tensor.name.len() > state::NAME_BYTES_MAX {
            let (start, most) = (entry.tensor.name.chars().take(40).collect::<String>(), state::NAME_BYTES_MAX);
            let text =
                format!("the name of the tensor {start:?}... has more than {most} bytes, too many for an archive");
            return Err(Error::format(path, deepnvme_format::Error::Unsupported(text)));
        }
        pickle.text(&entry.tensor.name);
        pickle.tensor(&TensorView {
            key,
            dtype,
            storage_elements: readers[entry.reader].extents()[entry.tensor.storage].bytes / dtype.bytes(),
            offset: entry.tensor.view.offset,
            shape: &entry.tensor.view.shape,
            strides: &entry.tensor.view.strides,
            requires_grad: false,
            signs: entry.tensor.signs,
        });
    }
    pickle.raw(b"u");
    let fixed =
        |(name, bytes): (&str, &[u8])| Record { name: name.into(), data: Region::from_vec(bytes.to_vec()).into() };
    let mut records = vec![fixed((PICKLE, &pickle.finish())), fixed(BYTE_ORDER)];
    let mut copied = Vec::with_capacity(order.len());
    for (key, (reader, extent)) in order.into_iter().enumerate() {
        copied.push(UnchangedRecord { record: records.len(), reader, extent });
        let data = Place::File(whole(engine, readers, reader, extent)).into();
        records.push(Record { name: format!("{STORAGES}{key}"), data });
    }
    records.push(fixed(VERSION));
    Ok((Save::archive(path, records, options)?, copied))
}

/// Returns all data of an extent.
fn whole(engine: &Arc<Engine>, readers: &[Arc<Reader>], reader: usize, extent: usize) -> FileBytes {
    let extent = &readers[reader].extents()[extent];
    let (engine, file) = (Arc::clone(engine), Arc::clone(readers[reader].file()));
    FileBytes { engine, file, range: extent.data_offset..extent.end() }
}

fn layout(entry: &TensorEntry) -> std::io::Result<Strided> {
    let item_bytes = entry.tensor.dtype.bytes();
    let shape = entry.tensor.view.shape.iter().map(|size| *size as usize).collect();
    // The stride of a one-element dimension is unused and may be any number.
    let stride = |(size, stride): (&u64, &u64)| if *size > 1 { (stride * item_bytes) as isize } else { 0 };
    let strides = entry.tensor.view.shape.iter().zip(&entry.tensor.view.strides).map(stride).collect();
    Strided::new(shape, strides, item_bytes as usize)
}
