//! Tables in JSON: safetensors headers, indexes, sidecars.

use std::collections::HashSet;
use std::path::{Component, Path};

use deepnvme_format::checksums::{self, CHUNK_BYTES, Frame, METADATA_KEY, Sidecar, chunk_count};
use deepnvme_format::file_list::{self, SealState};
use deepnvme_format::safetensors::{Header, Index, LENGTH_BYTES, SafetensorsPlan, Tensor, TensorSpec};
use deepnvme_format::{Dtype, Error};

/// Checks a safetensors file, and a header alone with a file of the size that it states.
pub(crate) fn safetensors(file: &[u8]) {
    if let Some((length, rest)) = file.split_first_chunk() {
        if let Ok(bytes) = Header::json_bytes(*length, file.len() as u64) {
            header(&rest[..bytes as usize], file.len() as u64);
        }
        header_of_its_size(rest);
    }
    header_of_its_size(file);
}

fn header_of_its_size(json: &[u8]) {
    let no_file = u64::MAX;
    if let Err(Error::Corrupt { offset, what }) = Header::parse(json, no_file)
        && what.starts_with("the tensors end at byte")
    {
        assert!(header(json, offset), "{what}");
    }
}

fn header(json: &[u8], file_bytes: u64) -> bool {
    let Ok(header) = Header::parse(json, file_bytes) else { return false };
    let mut at = LENGTH_BYTES + json.len() as u64;
    for tensor in &header.tensors {
        assert_eq!(tensor.offset, at, "{tensor:?}");
        super::assert_countable(&tensor.shape, tensor.dtype.bytes());
        assert_eq!(u128::from(tensor.bytes), super::exact_bytes(&tensor.shape, tensor.dtype.bytes()));
        at += tensor.bytes;
    }
    assert_eq!(at, file_bytes);
    let names: HashSet<&str> = header.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names.len(), header.tensors.len());
    if let Some((_, text)) = header.metadata.iter().find(|(key, _)| key == METADATA_KEY) {
        sums(text.as_bytes());
    }
    write_again(&header);
    true
}

/// Lays out the same tensors, with checksums if they fit the memory of the test.
fn write_again(header: &Header) {
    let spec =
        |tensor: &Tensor| TensorSpec { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() };
    let specs: Vec<TensorSpec> = header.tensors.iter().map(spec).collect();
    let metadata: Vec<_> = header.metadata.iter().filter(|(key, _)| key != METADATA_KEY).cloned().collect();
    let all_bytes: u128 = header.tensors.iter().map(|tensor| u128::from(tensor.bytes)).sum();
    let has_sums = all_bytes < u128::from(100 * CHUNK_BYTES);
    let Ok(plan) = SafetensorsPlan::new(specs, metadata.clone(), has_sums) else { return };
    let chunks = |tensor: &Tensor| if has_sums { vec![7; chunk_count(tensor.bytes)] } else { Vec::new() };
    let chunks: Vec<Vec<u64>> = plan.tensors().iter().map(chunks).collect();
    let bytes = plan.header(&chunks.iter().map(Vec::as_slice).collect::<Vec<_>>());
    assert_eq!(bytes.len() as u64, plan.data_offset());
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let json_bytes = Header::json_bytes(*length, plan.file_bytes()).unwrap();
    let again = Header::parse(&rest[..json_bytes as usize], plan.file_bytes()).unwrap();
    let known =
        |tensor: &Tensor| -> (String, Dtype, Vec<u64>) { (tensor.name.clone(), tensor.dtype, tensor.shape.clone()) };
    let sorted = |tensors: &[Tensor]| {
        let mut all: Vec<_> = tensors.iter().map(known).collect();
        all.sort();
        all
    };
    assert_eq!(sorted(&again.tensors), sorted(&header.tensors));
    assert_eq!(again.metadata[..metadata.len()], metadata);
    assert_eq!(again.metadata.len(), metadata.len() + usize::from(has_sums));
}

/// Checks an index of several files, and its file list.
pub(crate) fn index_json(json: &[u8]) {
    list(json);
    let Ok(index) = Index::parse(json) else { return };
    let mut names = HashSet::new();
    for (name, file) in &index.weight_map {
        assert!(names.insert(name));
        let parts: Vec<Component<'_>> = Path::new(file).components().collect();
        assert!(matches!(parts[..], [Component::Normal(part)] if part == file.as_str()), "{file:?}");
        assert!(!file.contains('\0'));
    }
    let pairs = index.weight_map.iter().map(|(name, file)| (name.clone(), serde_json::Value::from(file.as_str())));
    let again = serde_json::json!({ "weight_map": pairs.collect::<serde_json::Map<_, _>>() }).to_string();
    let mut again = Index::parse(again.as_bytes()).unwrap().weight_map;
    let mut wanted = index.weight_map;
    again.sort();
    wanted.sort();
    assert_eq!(again, wanted);
}

/// Checks the files and the checksum of a list.
fn list(json: &[u8]) {
    let state = file_list::seal_state(json);
    if let Ok(files) = file_list::files(json) {
        let names: HashSet<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.len() == files.len() && names.iter().all(|name| Path::new(name).components().count() == 1));
    }
    if let Ok(text) = std::str::from_utf8(json)
        && let Ok(with_checksum) = file_list::write_checksum(text)
    {
        assert!(
            with_checksum.len() == text.len()
                && file_list::seal_state(with_checksum.as_bytes()) == SealState::Sealed
                && state != SealState::Sealed
        );
    }
}

/// Checks a sidecar.
pub(crate) fn sums(text: &[u8]) {
    let Ok(side_car) = checksums::decode(text) else { return };
    let Sidecar { records, index } = side_car;
    let names: HashSet<&str> = records.iter().map(|record| record.name.as_str()).collect();
    assert_eq!(names.len(), records.len());
    assert!(records.iter().map(|record| 16 * record.chunks.len()).sum::<usize>() <= text.len());
    let frame = index.map_or_else(Frame::default, |index| index.frame);
    let again = checksums::encode(records.iter().map(|record| (record.name.as_str(), record.chunks.as_slice())), frame);
    let again = checksums::decode(again.as_bytes()).unwrap();
    assert_eq!((&again.records, again.index.map(|index| index.frame)), (&records, Some(frame)));
}
