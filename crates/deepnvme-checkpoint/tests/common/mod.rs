//! States of random bytes to save.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test takes what it needs")]

use std::path::Path;
use std::sync::Arc;

use deepnvme_checkpoint::write::{Record, Save, SaveOptions, Tensor};
use deepnvme_format::Dtype;
use deepnvme_format::safetensors::TensorSpec;
use deepnvme_io::mem::Region;
use deepnvme_io::{Config, Engine};

pub fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(Config::default()).unwrap())
}

#[allow(unused_imports, reason = "not every test needs random bytes")]
pub use deepnvme_testkit::rng::random_bytes as random;

/// Writes a safetensors file with a header as other writers have it. `padded` returns its length from that of the text.
pub fn write_safetensors(path: &Path, header: &serde_json::Value, data: &[u8], padded: impl FnOnce(usize) -> usize) {
    let mut text = header.to_string().into_bytes();
    text.resize(padded(text.len()), b' ');
    let file = [&(text.len() as u64).to_le_bytes(), &text[..], data].concat();
    std::fs::write(path, file).unwrap();
}

/// Pickles a dict of one-dimensional uint8 tensors, each with its own storage.
pub fn pickle(storages: &[Vec<u8>]) -> Vec<u8> {
    let text = |text: &str| {
        let mut bytes = vec![b'X'];
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes
    };
    let int = |number: usize| {
        let mut bytes = vec![0x8a, 8];
        bytes.extend((number as u64).to_le_bytes());
        bytes
    };
    let mut bytes = b"\x80\x02}(".to_vec();
    for (index, storage) in storages.iter().enumerate() {
        bytes.extend(text(&format!("t{index}")));
        bytes.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        bytes.extend(text("storage"));
        bytes.extend(b"ctorch\nByteStorage\n");
        bytes.extend(text(&index.to_string()));
        bytes.extend(text("cpu"));
        bytes.extend(int(storage.len()));
        bytes.extend(b"tQK\x00");
        bytes.extend(int(storage.len()));
        bytes.extend(b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR");
    }
    bytes.extend(b"u.");
    bytes
}

pub fn plan_archive(path: &Path, storages: &[Vec<u8>], options: SaveOptions) -> Save {
    let mut records = vec![
        Record { name: "data.pkl".into(), data: Region::from_vec(pickle(storages)).into() },
        Record { name: "byteorder".into(), data: Region::from_vec(b"little".to_vec()).into() },
    ];
    records.extend(
        storages.iter().enumerate().map(|(index, bytes)| Record {
            name: format!("data/{index}"),
            data: Region::from_vec(bytes.clone()).into(),
        }),
    );
    Save::archive(path, records, options).unwrap()
}

pub fn plan_safetensors(path: &Path, storages: &[Vec<u8>], options: SaveOptions) -> Save {
    let tensor = |(index, bytes): (usize, &Vec<u8>)| Tensor {
        spec: TensorSpec { name: format!("t{index}"), dtype: Dtype::U8, shape: vec![bytes.len() as u64] },
        data: Region::from_vec(bytes.clone()).into(),
    };
    let tensors = storages.iter().enumerate().map(tensor).collect();
    Save::safetensors(path, tensors, Vec::new(), options).unwrap()
}
