//! The metadata of encoded tensors in a packed file's header. This module does no I/O. All of it is checked before use.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;

use deepnvme_codec::Float;
use deepnvme_codec::pack::HEADER_BYTES;
use deepnvme_codec::quant::{CodeType, Scheme};
use deepnvme_format::safetensors::PACKED_KEY;
use deepnvme_format::{DIMS_MAX, Dtype, Error, Result, safetensors};
use serde::{Deserialize, Serialize};

use super::encoding::{Encoding, SCALES, dtype, float};
use crate::layer_group::{CONVERSION_BYTES_MAX, Decoding};
use crate::stored_tensor::{Form, StoredTensor};

/// Padding after the last part of a tensor, at most up to the next page.
const PADDING_BYTES_MAX: u64 = 4095;
const VERSION: u32 = 1;

/// An encoded tensor of a packed file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements, decoded.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its parts and their encoding.
    pub stored: StoredTensor,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Container {
    version: u32,
    tensors: BTreeMap<String, TensorEntry>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorEntry {
    dtype: String,
    shape: Vec<u64>,
    form: String,
    /// Elements of a part.
    part: u64,
    /// Stored bytes of each part. For quantised parts they follow from the other fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lengths: Vec<u64>,
    /// Weights of a row that share a scale. Only for quantised forms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale: Option<String>,
}

/// The metadata of one tensor.
pub(super) struct TensorRecord<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a [u64],
    pub(super) encoding: Encoding,
    pub(super) lengths: &'a [u64],
}

/// The JSON text for these tensors. `header_bytes_max` relies on this: larger lengths never make the text shorter.
pub(super) fn text<'a>(tensors: impl Iterator<Item = TensorRecord<'a>>) -> String {
    let entry = |TensorRecord { name, shape, encoding, lengths }: TensorRecord<'a>| {
        let (of, form, part, group) = match encoding {
            Encoding::Keep | Encoding::Cast { .. } => return None,
            Encoding::Pack { float, part_elements } => (float, "lossless", part_elements, None),
            Encoding::Quantise { float, scheme, columns, part_rows } => {
                let form = if scheme.code == CodeType::Int8 { "int8" } else { "fp8" };
                (float, form, part_rows * columns, Some(scheme.group.map_or(columns, NonZeroUsize::get) as u64))
            }
        };
        let name_of = |float| dtype(float).safetensors_name().unwrap_or_default().to_owned();
        let entry = TensorEntry {
            dtype: name_of(of),
            shape: shape.to_vec(),
            form: form.to_owned(),
            part: part as u64,
            lengths: if group.is_none() { lengths.to_vec() } else { Vec::new() },
            group,
            scale: group.map(|_| name_of(SCALES)),
        };
        Some((name.to_owned(), entry))
    };
    let container = Container { version: VERSION, tensors: tensors.filter_map(entry).collect() };
    serde_json::to_string(&container).unwrap_or_default()
}

/// Parses the encoded tensors of a file. `source` is the index that the caller has for it.
///
/// # Errors
/// `Corrupt` if the header is inconsistent, `Unsupported` for another version.
pub fn tensors(header: &safetensors::Header, source: usize) -> Result<Vec<PackedTensor>> {
    let Some((_, text)) = header.metadata.iter().find(|(key, _)| key == PACKED_KEY) else { return Ok(Vec::new()) };
    let corrupt = |what: String| Error::Corrupt { offset: 0, what };
    let damaged =
        |error: serde_json::Error| corrupt(format!("what the header says of packed tensors is damaged: {error}"));
    let Version { version } = serde_json::from_str(text).map_err(damaged)?;
    if version != VERSION {
        return Err(Error::Unsupported(format!(
            "it was packed as version {version}; this one reads version {VERSION}: use a newer deepnvme, or pack the model again"
        )));
    }
    let container: Container = serde_json::from_str(text).map_err(damaged)?;
    let there: HashMap<&str, &safetensors::Tensor> =
        header.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut found = Vec::with_capacity(container.tensors.len());
    for (name, entry) in container.tensors {
        let bytes = there.get(name.as_str()).filter(|tensor| tensor.dtype == Dtype::U8);
        let stored = bytes.and_then(|tensor| parse_entry(&entry, tensor, source));
        let Some(stored) = stored else {
            return Err(corrupt(format!("the header contradicts itself about the packed tensor {name:?}")));
        };
        found.push(PackedTensor { name, dtype: dtype(stored.float), shape: entry.shape, stored });
    }
    Ok(found)
}

/// The field that every version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// The parts of a tensor; `None` if the metadata is inconsistent.
fn parse_entry(entry: &TensorEntry, tensor: &safetensors::Tensor, source: usize) -> Option<StoredTensor> {
    let float = float(Dtype::from_safetensors(&entry.dtype)?)?;
    if entry.shape.len() > DIMS_MAX || entry.part == 0 {
        return None;
    }
    let elements = entry.shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size))?;
    let bytes = usize::try_from(elements.checked_mul(float.bytes() as u64)?).ok()?;
    let part_bytes = usize::try_from(entry.part.checked_mul(float.bytes() as u64)?).ok()?;
    // Every encoding takes at least a byte per element, so a file cannot claim much more memory than it has bytes.
    if elements == 0 || elements > tensor.bytes || part_bytes > CONVERSION_BYTES_MAX {
        return None;
    }
    let parts = usize::try_from(elements.div_ceil(entry.part)).ok()?;
    let (lengths, decoding) = match entry.form.as_str() {
        "lossless" if entry.group.is_none() && entry.scale.is_none() => (entry.lengths.clone(), Decoding::Unpack),
        "int8" => parse_quantised(entry, CodeType::Int8, float, elements)?,
        "fp8" => parse_quantised(entry, CodeType::F8E4m3, float, elements)?,
        _ => return None,
    };
    if lengths.len() != parts {
        return None;
    }
    let mut starts = Vec::with_capacity(parts + 1);
    starts.push(tensor.offset);
    for (index, length) in lengths.iter().enumerate() {
        let elements = entry.part.min(elements - index as u64 * entry.part);
        let least = match decoding {
            // Only the exponents are compressed.
            Decoding::Unpack => HEADER_BYTES as u64 + elements * (float.bytes() as u64 - 1),
            _ => elements,
        };
        if *length < least || *length > CONVERSION_BYTES_MAX as u64 {
            return None;
        }
        starts.push(starts[index].checked_add(*length)?);
    }
    let end = tensor.offset + tensor.bytes;
    let padding = end.checked_sub(*starts.last()?)?;
    let encoded = StoredTensor { source, float, form: Form::Parts { starts, part_bytes, bytes, decoding } };
    (padding <= PADDING_BYTES_MAX && encoded.check().is_ok()).then_some(encoded)
}

fn parse_quantised(entry: &TensorEntry, code: CodeType, to: Float, elements: u64) -> Option<(Vec<u64>, Decoding)> {
    let columns = *entry.shape.last()?;
    let group = NonZeroUsize::new(usize::try_from(entry.group?).ok()?)?;
    let scale = float(Dtype::from_safetensors(entry.scale.as_ref()?)?)?;
    if !entry.lengths.is_empty() || !entry.part.is_multiple_of(columns) {
        return None;
    }
    let scheme = Scheme { code, group: Some(group), scale };
    let (columns, part_rows) = (usize::try_from(columns).ok()?, usize::try_from(entry.part / columns).ok()?);
    let length = |elements: u64| {
        let scales = scheme.scales(elements as usize / columns, columns)?.checked_mul(scale.bytes())?;
        elements.checked_add(scales as u64)
    };
    let whole = usize::try_from(elements / entry.part).ok()?;
    let mut lengths = vec![length(entry.part)?; whole];
    if !elements.is_multiple_of(entry.part) {
        lengths.push(length(elements % entry.part)?);
    }
    Some((lengths, Decoding::Dequantise { scheme, columns, part_rows, to }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(text: &str, bytes: u64) -> safetensors::Header {
        let tensor =
            safetensors::Tensor { name: "w".into(), dtype: Dtype::U8, shape: vec![bytes], offset: 4096, bytes };
        safetensors::Header { metadata: vec![(PACKED_KEY.into(), text.into())], tensors: vec![tensor] }
    }

    fn header_text(entry: &str) -> String {
        format!(r#"{{"version":1,"tensors":{{"w":{{"dtype":"BF16",{entry}}}}}}}"#)
    }

    #[test]
    fn metadata_survives_a_round_trip() {
        let shape = [10, 100];
        let pack = Encoding::Pack { float: Float::F32, part_elements: 400 };
        let lengths = [1300, 1400, 1000];
        let one = |encoding| std::iter::once(TensorRecord { name: "w", shape: &shape, encoding, lengths: &lengths });
        let found = tensors(&header(&text(one(pack)), 3700), 7).unwrap();
        assert_eq!((found[0].dtype, found[0].shape.as_slice(), found[0].stored.source), (Dtype::F32, &shape[..], 7));
        let Form::Parts { starts, part_bytes, bytes, decoding } = &found[0].stored.form else { panic!("it has parts") };
        assert_eq!((starts.as_slice(), *part_bytes, *bytes), (&[4096, 5396, 6796, 7796][..], 1600, 4000));
        assert_eq!(*decoding, Decoding::Unpack);

        let scheme = Scheme { code: CodeType::F8E4m3, group: NonZeroUsize::new(64), scale: SCALES };
        let quantise = Encoding::Quantise { float: Float::F16, scheme, columns: 100, part_rows: 4 };
        let found = tensors(&header(&text(one(quantise)), 1000 + 40 + 5), 0).unwrap();
        let Form::Parts { starts, decoding, .. } = &found[0].stored.form else { panic!("it has parts") };
        assert_eq!(starts.as_slice(), [4096, 4096 + 416, 4096 + 832, 4096 + 1040]);
        assert_eq!(Some(*decoding), quantise.decoding());
    }

    #[test]
    fn inconsistent_metadata_is_refused() {
        let good = r#""shape":[1000],"form":"lossless","part":600,"lengths":[700,500]"#;
        assert!(tensors(&header(&header_text(good), 1200), 0).is_ok());
        assert!(tensors(&header(&header_text(good), 1199), 0).is_err(), "the parts are longer than the tensor");
        assert!(tensors(&header(&header_text(good), 1200 + 4096), 0).is_err(), "more than padding is left");
        for entry in [
            r#""shape":[],"form":"lossless","part":600,"lengths":[700,500]"#,
            r#""shape":[0],"form":"lossless","part":600,"lengths":[]"#,
            r#""shape":[1000,1000000],"form":"lossless","part":600,"lengths":[700,500]"#,
            r#""shape":[18446744073709551615,3],"form":"lossless","part":600,"lengths":[700,500]"#,
            r#""shape":[1000],"form":"lossless","part":0,"lengths":[700,500]"#,
            r#""shape":[1000],"form":"lossless","part":600,"lengths":[700,400,100]"#,
            r#""shape":[1000],"form":"lossless","part":600,"lengths":[1190,10]"#,
            r#""shape":[1000],"form":"lossless","part":600,"lengths":[18446744073709551615,500]"#,
            r#""shape":[1000],"form":"lossless","part":99999999,"lengths":[1200]"#,
            r#""shape":[1000],"form":"zip","part":600,"lengths":[700,500]"#,
            r#""shape":[1000],"form":"lossless","part":600,"lengths":[700,500],"group":3"#,
            r#""shape":[10,100],"form":"int8","part":600,"lengths":[]"#,
            r#""shape":[10,100],"form":"int8","part":650,"group":50,"scale":"BF16""#,
            r#""shape":[10,100],"form":"int8","part":600,"group":0,"scale":"BF16""#,
            r#""shape":[10,100],"form":"int8","part":600,"group":1,"scale":"U8""#,
            r#""shape":[10,100],"form":"int8","part":600,"group":1,"scale":"BF16""#,
            r#""shape":[1000],"form":"lossless","part":600,"lengths":[700,500],"more":1"#,
        ] {
            let found = tensors(&header(&header_text(entry), 1200), 0);
            assert!(matches!(found, Err(Error::Corrupt { .. })), "{entry}: {found:?}");
        }
        for text in ["", "[]", "{}", r#"{"version":1}"#, r#"{"version":1,"tensors":{"v":{}}}"#] {
            assert!(matches!(tensors(&header(text, 1200), 0), Err(Error::Corrupt { .. })), "{text}");
        }
        let later = tensors(&header(r#"{"version":2,"layers":[]}"#, 1200), 0);
        assert!(matches!(later, Err(Error::Unsupported(_))));
        let mut typed = header(&header_text(good), 1200);
        typed.tensors[0].dtype = Dtype::Bool;
        assert!(tensors(&typed, 0).is_err(), "packed bytes are bytes");
    }
}
