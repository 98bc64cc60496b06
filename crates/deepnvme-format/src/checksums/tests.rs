//! Checksums are the same for any split, and sidecars round-trip.

use proptest::prelude::*;

use super::*;

#[test]
fn checksums_match_the_standards() {
    let sums = checksums_of(b"123456789");
    assert_eq!((sums.crc32, sums.crc64), (0xCBF4_3926, 0xAE8B_1486_0A79_9888));
    assert_eq!(checksums_of(b""), PartChecksums::EMPTY);
}

proptest! {
    #[test]
    fn any_split_gives_the_same_checksum(bytes in proptest::collection::vec(any::<u8>(), 0..5000), at in 0.0..1.0f64) {
        let at = (bytes.len() as f64 * at) as usize;
        let (left, right) = bytes.split_at(at);
        prop_assert_eq!(checksums_of(left).then(checksums_of(right)), checksums_of(&bytes));
    }

    #[test]
    fn a_sidecar_round_trips_with_constant_length(
        records in proptest::collection::vec((".*", proptest::collection::vec(any::<u64>(), 0..4)), 0..5)
    ) {
        let mut seen = std::collections::BTreeSet::new();
        let records: Vec<_> = records.into_iter().filter(|(name, _)| seen.insert(name.clone()))
            .map(|(name, chunks)| SidecarRecord { name, chunks }).collect();
        let frame = Frame { file_bytes: u64::MAX, index_offset: 7, index_bytes: 4096 };
        let text = encode(records.iter().map(|record| (record.name.as_str(), record.chunks.as_slice())), frame);
        let index = Some(IndexChecksum { frame, index_crc64: 0 });
        prop_assert_eq!(&decode(text.as_bytes()).unwrap(), &Sidecar { records: records.clone(), index });
        let bare = encode(records.iter().map(|record| (record.name.as_str(), &[][..])), Frame::default()).len() as u64;
        let chunks: u64 = records.iter().map(|record| text_bytes(record.chunks.len() as u64 * CHUNK_BYTES)).sum();
        prop_assert_eq!(bare + chunks, text.len() as u64);
    }
}

#[test]
fn parts_combine_to_chunks() {
    let bytes: Vec<u8> = (0..2 * CHUNK_BYTES + 77).map(|index| (index * 7 % 251) as u8).collect();
    let chunk = CHUNK_BYTES as usize;
    let cuts = [0, 100, chunk, chunk + 5, 2 * chunk, bytes.len()];
    let mut parts: Vec<_> = cuts.windows(2).map(|cut| (cut[0] as u64, checksums_of(&bytes[cut[0]..cut[1]]))).collect();
    parts.reverse();
    let sums = RecordChecksums::from_parts(parts.clone()).unwrap();
    let chunks: Vec<_> = bytes.chunks(chunk).map(|chunk| checksums_of(chunk).crc64).collect();
    assert_eq!(sums, RecordChecksums { crc32: checksums_of(&bytes).crc32, chunks });
    parts.remove(1);
    RecordChecksums::from_parts(parts).unwrap_err();
    RecordChecksums::from_parts(vec![(0, checksums_of(&bytes))]).unwrap_err();
    assert_eq!(RecordChecksums::from_parts(Vec::new()).unwrap(), RecordChecksums::default());
}

#[test]
fn a_foreign_sidecar_is_refused() {
    for text in ["", "[]", r#"{"version":1}"#] {
        assert!(matches!(decode(text.as_bytes()), Err(Error::Corrupt { .. })), "{text}");
    }
    let later = r#"{"version":3,"algorithm":"x","cell_bytes":1,"records":{}}"#;
    assert!(decode(later.as_bytes()).unwrap_err().to_string().contains("upgrade"));
    for digits in ["0", "000000000000000g", "\u{e9}00000000000000"] {
        let text = format!(
            r#"{{"version":1,"algorithm":"{ALGORITHM}","cell_bytes":{CHUNK_BYTES},"records":{{"a":"{digits}"}}}}"#
        );
        assert!(decode(text.as_bytes()).is_err(), "{digits}");
    }
}

#[test]
fn every_changed_byte_of_a_sidecar_is_reported() {
    let mut text = encode([("w", &[1, u64::MAX][..]), ("", &[][..])].into_iter(), Frame::default()).into_bytes();
    write_index_checksum(&mut text, INDEX_DIGITS, &[INDEX_DIGITS]);
    let sound = decode(&text).unwrap();
    assert_eq!(sound.index.unwrap().index_crc64, covered_sum(&text, &[INDEX_DIGITS]));
    for at in 0..text.len() {
        for value in 0..=u8::MAX {
            let mut damaged = text.clone();
            damaged[at] = value;
            if value == text[at] {
                continue;
            }
            // The digits of the index's checksum are compared with the index.
            let is_index = INDEX_DIGITS.contains(&at);
            match decode(&damaged) {
                Ok(other) => assert!(is_index && other.index != sound.index, "byte {at} as {value}"),
                Err(error) => assert!(matches!(error, Error::Corrupt { .. } | Error::Unsupported(_)), "{error}"),
            }
        }
    }
}

#[test]
fn version_one_is_read() {
    let text = format!(
        r#"{{"version":1,"algorithm":"{ALGORITHM}","cell_bytes":{CHUNK_BYTES},"records":{{"a":"00000000000000ff"}}}}"#
    );
    let records = vec![SidecarRecord { name: "a".into(), chunks: vec![255] }];
    assert_eq!(decode(text.as_bytes()).unwrap(), Sidecar { records, index: None });
}
