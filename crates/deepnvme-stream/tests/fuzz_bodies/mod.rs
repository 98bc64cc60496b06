//! The properties of any accepted header of packed weights, and of any configuration of a model that is packed.
#![allow(dead_code, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use std::collections::BTreeMap;

use deepnvme_format::safetensors::{Header, LENGTH_BYTES};
use deepnvme_stream::pack;
use deepnvme_stream::{CONVERSION_BYTES_MAX, Form};
use serde_json::value::RawValue;

/// A safetensors file with packed tensors, or its header alone with a matching file size.
pub(crate) fn container(file: &[u8]) {
    let Some((length, rest)) = file.split_first_chunk() else { return };
    let Ok(bytes) = Header::json_bytes(*length, u64::MAX) else { return };
    let Some(json) = rest.get(..bytes as usize) else { return };
    let mut file_bytes = file.len() as u64;
    if let Err(deepnvme_format::Error::Corrupt { offset, what }) = Header::parse(json, u64::MAX)
        && what.starts_with("the tensors end at byte")
    {
        file_bytes = offset;
    }
    let Ok(header) = Header::parse(json, file_bytes) else { return };
    let Ok(packed) = pack::tensors(&header, 3) else { return };
    for tensor in packed {
        let there = header.tensors.iter().find(|one| one.name == tensor.name).unwrap();
        assert_eq!(tensor.stored.source, 3);
        let Form::Parts { starts, part_bytes, bytes, .. } = &tensor.stored.form else { continue };
        assert!(*part_bytes > 0 && *part_bytes <= CONVERSION_BYTES_MAX);
        // A file never claims much more memory than it has bytes.
        assert!(*bytes as u64 <= there.bytes.saturating_mul(8) && starts.len() as u64 <= there.bytes + 1);
        assert!(starts.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(starts[0] >= LENGTH_BYTES + json.len() as u64 && *starts.last().unwrap() <= file_bytes);
    }
}

/// The `config.json` of a model whose weights are cast: only the dtype that it names changes.
pub(crate) fn config_json(text: &[u8]) {
    let Some(changed) = pack::retyped(text, "bfloat16") else { return };
    let parse = |text| serde_json::from_slice::<BTreeMap<String, Box<RawValue>>>(text).unwrap();
    let (before, after) = (parse(text), parse(&changed));
    assert!(before.keys().eq(after.keys()));
    for (key, value) in &after {
        let is_dtype = key == "dtype" || key == "torch_dtype";
        assert_eq!(value.get(), if is_dtype { "\"bfloat16\"" } else { before[key].get() });
    }
    assert_eq!(pack::retyped(&changed, "bfloat16"), Some(changed));
}
