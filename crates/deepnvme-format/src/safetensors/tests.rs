//! Layouts and headers round-trip, and invalid ones are refused.

use proptest::prelude::*;

use super::*;
use crate::ALIGNMENT_LARGE;
use crate::checksums::chunk_count;

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::U8), Just(Dtype::I64), Just(Dtype::F8E4m3fn)]
}

proptest! {
    #[test]
    fn layouts_round_trip(
        specs in proptest::collection::btree_map("[a-z.\"\\\\ä]{1,8}", (dtypes(), proptest::collection::vec(0..9u64, 0..4)), 0..12),
        has_sums: bool,
    ) {
        let specs: Vec<_> =
            specs.into_iter().map(|(name, (dtype, shape))| TensorSpec { name, dtype, shape }).collect();
        let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
        let plan = SafetensorsPlan::new(specs, vec![("format".into(), "pt".into())], has_sums).unwrap();
        let chunks: Vec<_> =
            plan.tensors().iter().map(|tensor| vec![u64::MAX; chunk_count(tensor.bytes)]).collect();
        let bytes = plan.header(&chunks.iter().map(Vec::as_slice).collect::<Vec<_>>());
        prop_assert_eq!(bytes.len() as u64, plan.data_offset());
        prop_assert_eq!(plan.data_offset() % ALIGNMENT_LARGE, 0);
        let length = Header::json_bytes(bytes[..8].try_into().unwrap(), plan.file_bytes()).unwrap();
        let header = Header::parse(&bytes[8..8 + length as usize], plan.file_bytes()).unwrap();
        let key = |tensor: &Tensor| (tensor.offset, tensor.bytes, tensor.name.clone());
        let sorted = |tensors: &[Tensor]| { let mut all: Vec<_> = tensors.iter().map(key).collect(); all.sort(); all };
        prop_assert_eq!(sorted(&header.tensors), sorted(plan.tensors()));
        prop_assert_eq!(&header.metadata[0], &("format".to_owned(), "pt".to_owned()));
        prop_assert_eq!(header.metadata.len(), 1 + usize::from(has_sums));
        for (tensor, index) in plan.tensors().iter().zip(plan.order()) {
            prop_assert_eq!(tensor.offset % tensor.dtype.bytes(), 0);
            prop_assert_eq!(&tensor.name, &names[*index]);
        }
    }

    #[test]
    fn arbitrary_text_is_an_error_or_a_header(json in "[\\[\\]{}\":,a-z0-9_]{0,80}", file_bytes: u64) {
        let _ = Header::parse(json.as_bytes(), file_bytes);
        let _ = Index::parse(json.as_bytes());
    }
}

#[test]
fn invalid_headers_are_refused() {
    let entry = |begin: u64, end: u64| {
        format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end.saturating_sub(begin))
    };
    for (json, file_bytes, word) in [
        (format!(r#"{{"a":{}}}"#, entry(0, 4)), 0, "truncated"),
        (format!(r#"{{"a":{}}}"#, entry(1, 4)), 4, "begins there"),
        (format!(r#"{{"a":{},"b":{}}}"#, entry(0, 4), entry(2, 6)), 6, "begins there"),
        (format!(r#"{{"a":{},"a":{}}}"#, entry(0, 4), entry(4, 6)), 6, "twice"),
        (r#"{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}}"#.into(), 4, "does not fit"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#.into(), 4, "does not fit"),
        (r#"{"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#.into(), 0, "does not fit"),
        (
            // An empty tensor whose strides overflow.
            r#"{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#.into(),
            0,
            "does not fit",
        ),
        (format!(r#"{{"a":{{"dtype":"U8","shape":[{}2],"data_offsets":[0,1]}}}}"#, "1,".repeat(64)), 1, "does not fit"),
        (r#"{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,4]}}"#.into(), 4, "X9"),
        ("[1]".into(), 0, "damaged"),
    ] {
        let error = Header::parse(json.as_bytes(), file_bytes + LENGTH_BYTES + json.len() as u64).unwrap_err();
        assert!(error.to_string().contains(word), "{json}: {error}");
    }
    Header::json_bytes(u64::MAX.to_le_bytes(), 1000).unwrap_err();
    Header::json_bytes(993u64.to_le_bytes(), 1000).unwrap_err();
    assert_eq!(Header::json_bytes(992u64.to_le_bytes(), 1000), Ok(992));
}

#[test]
fn a_tensor_of_too_many_dimensions_is_not_damaged() {
    let parse = |dims: usize| {
        let json = format!(r#"{{"a":{{"dtype":"U8","shape":{:?},"data_offsets":[0,1]}}}}"#, vec![1; dims]);
        Header::parse(json.as_bytes(), 1 + LENGTH_BYTES + json.len() as u64)
    };
    assert_eq!(parse(crate::DIMS_MAX).unwrap().tensors[0].shape.len(), crate::DIMS_MAX);
    let Err(crate::Error::Unsupported(text)) = parse(crate::DIMS_MAX + 1) else { panic!() };
    assert!(text.contains("\"a\" has 65 dimensions, which are more than 64"), "{text}");
}

#[test]
fn an_index_names_files_in_its_folder() {
    let json = r#"{"metadata":{"total_size":5},"weight_map":{"b":"m-1.safetensors","a":"m-2.safetensors"}}"#;
    let weight_map = vec![("b".into(), "m-1.safetensors".into()), ("a".into(), "m-2.safetensors".into())];
    assert_eq!(Index::parse(json.as_bytes()), Ok(Index { weight_map }));
    for file in ["../x", "/etc/passwd", "", "..", "a/b"] {
        let json = format!(r#"{{"weight_map":{{"a":{file:?}}}}}"#);
        assert!(Index::parse(json.as_bytes()).is_err(), "{file}");
    }
}

#[test]
fn layouts_beyond_the_maximum_size_are_refused() {
    let spec = |name: &str, size| TensorSpec { name: name.into(), dtype: Dtype::U8, shape: vec![size] };
    SafetensorsPlan::new(vec![spec("a", 1 << 61)], Vec::new(), false).unwrap();
    // Its checksums would not fit into a header or into memory.
    let error = SafetensorsPlan::new(vec![spec("a", 1 << 61)], Vec::new(), true).unwrap_err();
    assert!(error.to_string().contains("the header has 35184372"), "{error}");
    for specs in [vec![spec("a", u64::MAX)], (0..9).map(|index| spec(&index.to_string(), 1 << 61)).collect()] {
        let error = SafetensorsPlan::new(specs, Vec::new(), false).unwrap_err();
        assert!(error.to_string().contains("exceeds the maximum size"), "{error}");
    }
}
