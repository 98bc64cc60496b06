//! Headers and checksums of safetensors files, and lists of several files.

use std::path::Path;
use std::sync::Arc;

use deepnvme_checkpoint::Error;
use deepnvme_checkpoint::read::{Reader, find_set};
use deepnvme_checkpoint::write::SaveOptions;
use deepnvme_file::{StripeSet, Target};
use deepnvme_format::checksums::{CHUNK_BYTES, METADATA_KEY};
use deepnvme_format::file_list;
use deepnvme_testkit::guard::run_limited;
use serde_json::{Map, Value, json};

use crate::attack::{Tensors, attack, engine, load, load_file, saved};
use crate::common::{plan_safetensors, random, write_safetensors};

fn header_of(path: &Path) -> (Value, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let json_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + json_bytes]).unwrap(), bytes[8 + json_bytes..].to_vec())
}

/// Writes the header in our form, so that only its meaning differs.
fn write_header(path: &Path, header: &Value, data: &[u8]) {
    write_safetensors(path, header, data, |len| (len + 16).next_multiple_of(4096) - 8);
}

#[test]
fn headers() {
    run_limited("safetensors::headers", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), engine());
        let path = saved(folder.path(), "a.safetensors", &[100, 0, 3]);
        let (header, data) = header_of(&path);
        attack(guard, &header, |document| write_header(&path, document, &data), || load_file(&engine, &path));
    });
}

#[test]
fn checksums() {
    run_limited("safetensors::checksums", |guard| {
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
    run_limited("safetensors::lists_of_shards", |guard| {
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
        let metadata = json!({ file_list::CHECKSUM_KEY: file_list::BLANK, file_list::FILES_KEY: files });
        let text = json!({ "metadata": metadata, "weight_map": weight_map });
        // A space after each colon, as Python writes it.
        let with_checksum = |text: &str| file_list::write_checksum(&text.replace("\":\"", "\": \"")).unwrap();
        let text = with_checksum(&text.to_string());
        std::fs::write(&list, &text).unwrap();
        let load = || {
            let set = find_set(&list)?;
            set.check()?;
            // A list without a checksum may claim anything.
            if set.list.as_ref().is_none_or(|list| list.state != file_list::SealState::Sealed) {
                return Err(Error::Interrupted);
            }
            let mut tensors = Tensors::new();
            for file in set.files {
                let reader = Reader::open(&engine, &Target::Path(file.path))?;
                reader.compare_fingerprint(&engine, file.fingerprint.unwrap())?;
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
    run_limited("safetensors::lists_of_parts", |guard| {
        let (folder, engine) = (tempfile::tempdir().unwrap(), Arc::new(engine()));
        let (one, other) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
        let stripes = StripeSet::new(vec![one.clone(), other], 4096).unwrap();
        let save = plan_safetensors(&one, &[random(20_000, 1)], SaveOptions::default());
        save.run(Arc::clone(&engine), &Target::Stripes(stripes.clone()), Arc::default()).unwrap();
        let list = stripes.manifest_path();
        let load = || load(&engine, Reader::open(&engine, &Target::Stripes(StripeSet::from_manifest(&list)?))?);
        let mut before: Value = serde_json::from_slice(&std::fs::read(&list).unwrap()).unwrap();
        before[file_list::CHECKSUM_KEY] = file_list::BLANK.into();
        // With a valid checksum, if the document has a place for one.
        let write = |document: &Value| {
            let text = serde_json::to_string_pretty(document).unwrap();
            std::fs::write(&list, file_list::write_checksum(&text).unwrap_or(text)).unwrap();
        };
        write(&before);
        attack(guard, &before, write, load);
    });
}
