//! The properties of any accepted description of a packed table, and of any accepted list of hot rows.
#![allow(dead_code, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use std::cell::OnceCell;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use deepnvme_file::VersionedFile;
use deepnvme_io::{Config, Engine};
use deepnvme_rows::{
    ChecksumPlace, Error, HotRowList, HotRows, PackedDescription, PackedTable, PackedTensors, RowRange, Table,
    TensorPlace,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A description. Its tensors have the bytes that it states, or else none.
pub(crate) fn packed_rows(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let tensors = stated_tensors(text);
    let Ok(described) = PackedDescription::parse(text, tensors) else { return };
    let PackedDescription { rows, row_shape, dtype, scales, first_rows, layout, hot, .. } = &described;
    assert!(layout.is_valid() && row_shape.iter().all(|size| *size > 0));
    assert!(first_rows.is_sorted() && first_rows[0] == 0 && first_rows.iter().all(|first| first <= rows));
    let copies = hot.map_or(0, |(count, _)| count);
    assert!(copies <= *rows && tensors.hot.map(|(_, bytes)| bytes) == hot.map(|(count, _)| count * 4));
    let block_bytes = layout.block_bytes as u64;
    let blocks = layout.blocks(rows + copies);
    assert_eq!(blocks * block_bytes, tensors.rows.1);
    let is_listed = layout.checksums == ChecksumPlace::List;
    assert_eq!(tensors.checksums.map(|(_, bytes)| bytes), is_listed.then_some((blocks + 1) * 4));
    // Other sizes are refused.
    let (start, bytes) = tensors.rows;
    let swapped = |place: Option<TensorPlace>| place.map_or(Some((0, 0)), |_| None);
    for other in [
        PackedTensors { rows: (start, bytes + 1), ..tensors },
        PackedTensors { hot: swapped(tensors.hot), ..tensors },
        PackedTensors { checksums: swapped(tensors.checksums), ..tensors },
    ] {
        assert!(PackedDescription::parse(text, other).is_err());
    }
    let scales = scales.as_ref().map(|(count, dtype)| json!({ "count": count, "dtype": dtype }));
    let hot = hot.map(|(count, crc32c)| json!({ "rows": count, "crc32c": crc32c }));
    let again = json!({
        "version": 1, "rows": rows, "row_bytes": layout.row_bytes, "rows_per_block": layout.rows_per_block,
        "block_bytes": block_bytes, "checksums": if is_listed { "list" } else { "block" },
        "header_crc32c": "0123abcd", "id": format!("{:016x}", described.id), "hot": hot,
        "row": { "shape": row_shape, "dtype": dtype, "scales": scales, "first_rows": first_rows },
    });
    assert_eq!(PackedDescription::parse(&again.to_string(), tensors).unwrap(), described);
    let range = RowRange { file: 0, offset: block_bytes, rows: *rows };
    let Ok(table) = Table::packed(PackedTable { range, id: 1, layout: *layout, hot: None, checksums: None }) else {
        return;
    };
    assert_eq!((table.rows(), table.row_bytes()), (*rows, layout.row_bytes));
    let ends: Vec<u64> = [0, rows / 2, rows.saturating_sub(1)]
        .into_iter()
        .filter(|row| row < rows)
        .map(|row| table.locate(row).1 + layout.row_bytes as u64)
        .collect();
    assert!(ends.is_sorted() && ends.iter().all(|end| *end <= block_bytes + tensors.rows.1));
}

/// Returns the bytes that the tensors of a description should have, as far as it is one.
fn stated_tensors(text: &str) -> PackedTensors {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return PackedTensors::default() };
    let number = |place: &str| value.pointer(place).and_then(Value::as_u64);
    let hot = number("/hot/rows");
    let blocks = || {
        let places = number("/rows")?.checked_add(hot.unwrap_or(0))?;
        Some(places.div_ceil(number("/rows_per_block").filter(|rows| *rows > 0)?))
    };
    let bytes = || blocks()?.checked_mul(number("/block_bytes")?);
    let is_listed = value.pointer("/checksums").and_then(Value::as_str) == Some("list");
    let list_bytes = blocks().unwrap_or(0).saturating_add(1).saturating_mul(4);
    PackedTensors {
        rows: (0, bytes().filter(|bytes| *bytes < u64::MAX).unwrap_or(0)),
        hot: hot.map(|rows| (0, rows.saturating_mul(4))),
        checksums: is_listed.then_some((0, list_bytes)),
    }
}

thread_local! {
    static PLACE: OnceCell<(TempDir, Arc<Engine>)> = const { OnceCell::new() };
}

/// A number of rows in four bytes, and a list of some of them in a file.
pub(crate) fn hot_rows(bytes: &[u8]) {
    let Some((rows, list)) = bytes.split_first_chunk() else { return };
    PLACE.with(|place| {
        let (folder, engine) = place.get_or_init(|| {
            let config = Config { workers: 1, ..Config::default() };
            (folder(), Arc::new(Engine::new(config).unwrap()))
        });
        check_list(u64::from(u32::from_le_bytes(*rows)), list, &folder.path().join("list"), engine);
    });
}

/// Creates a folder in memory. `TMPDIR` names another place, whose owner removes what is left.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if std::env::var_os("TMPDIR").is_none() && memory.is_dir() {
        return tempfile::tempdir_in(memory).unwrap();
    }
    tempfile::tempdir().unwrap()
}

fn check_list(rows: u64, list: &[u8], path: &Path, engine: &Arc<Engine>) {
    fs::write(path, list).unwrap();
    let file = VersionedFile::open(path).unwrap();
    let count = (list.len() / 4) as u64;
    let sum = checksum(CrcAlgorithm::Crc32Iscsi, &list[..count as usize * 4]) as u32;
    let described = HotRowList { offset: 0, count, checksum: sum };
    let numbers: Vec<u32> = list.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let different: HashSet<u32> = numbers.iter().copied().collect();
    let is_list = different.len() == numbers.len() && numbers.iter().all(|number| u64::from(*number) < rows);
    let found = HotRows::read(engine, &file, described, rows);
    assert_eq!(found.is_ok(), is_list, "{found:?}");
    if let Ok(found) = found {
        assert_eq!(found.len(), count);
        assert_eq!(found, HotRows::new(rows, &numbers).unwrap());
    }
    let wrong = HotRowList { checksum: !sum, ..described };
    assert!(HotRows::read(engine, &file, wrong, rows).is_err());
    // Beyond the end of the file.
    for list in
        [HotRowList { count: count + 1, ..described }, HotRowList { offset: 4, count: count.max(1), ..described }]
    {
        assert!(matches!(HotRows::read(engine, &file, list, rows), Err(Error::Io(_))));
    }
}
