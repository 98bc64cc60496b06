//! ZIP directories and the records of an archive.

use deepnvme_format::archive::{
    ArchivePlan, Directory, End, LOCAL_BYTES, LocalHeader, PICKLE, Record, RecordSpec, find_end,
};
use deepnvme_format::checksums::SIDECAR;

/// Parses a file by itself, and as the end of a much larger one.
pub(crate) fn archive(file: &[u8]) {
    let far = 1 << 62;
    if let Ok(end) = find_end(file, far) {
        assert!(end.directory_offset + end.directory_bytes <= far + file.len() as u64);
    }
    let Ok(end) = find_end(file, 0) else { return };
    let whole = end.directory_offset as usize..(end.directory_offset + end.directory_bytes) as usize;
    assert!(whole.end <= file.len(), "{end:?}");
    let Ok(directory) = Directory::parse(&file[whole], end, file.len() as u64) else { return };
    check(&directory, end);
    for record in directory.records() {
        read(file, record, &directory);
    }
    write_again(&directory);
}

/// Every record lies before the directory, and none inside another.
fn check(directory: &Directory, end: End) {
    let records = directory.records();
    assert_eq!(records.len() as u64, end.records);
    let mut order: Vec<&Record> = records.iter().collect();
    order.sort_by_key(|record| record.header_offset);
    let mut limit = 0;
    for record in order {
        assert!(record.header_offset >= limit, "{record:?}");
        assert!(record.data_offset >= record.header_offset + LOCAL_BYTES + record.name.len() as u64, "{record:?}");
        limit = record.data_offset + record.bytes;
        assert!(limit <= end.directory_offset, "{record:?}");
    }
    for record in records {
        let below = record.name.strip_prefix(directory.root()).and_then(|name| name.strip_prefix('/'));
        if let Some(name) = below {
            assert_eq!(directory.find(name), Some(record));
        }
    }
}

/// Parses a record's header, and its contents if they have a parser.
fn read(file: &[u8], record: &Record, directory: &Directory) {
    let Ok(Some(header)) = LocalHeader::parse(&file[record.header_offset as usize..], record.header_offset) else {
        return;
    };
    assert!(header.header_bytes >= LOCAL_BYTES + header.name.len() as u64);
    let begin = (record.header_offset + header.header_bytes) as usize;
    let Some(bytes) = file.get(begin..begin + record.bytes as usize) else { return };
    if directory.find(PICKLE) == Some(record) {
        super::pickle(bytes);
    } else if directory.find(SIDECAR) == Some(record) {
        super::sums(bytes);
    }
}

/// A layout of the same records has the same names and sizes.
fn write_again(directory: &Directory) {
    let prefix = format!("{}/", directory.root());
    let mut specs = Vec::new();
    for record in directory.records() {
        let Some(name) = record.name.strip_prefix(&prefix) else { return };
        specs.push(RecordSpec { name, bytes: record.bytes });
    }
    let Ok(plan) = ArchivePlan::new(directory.root(), &specs) else { return };
    let crc32: Vec<u32> = directory.records().iter().map(|record| record.crc32).collect();
    let index = plan.index(&crc32);
    let end = find_end(&index, plan.index_offset()).unwrap();
    assert_eq!(end.directory_offset, plan.index_offset());
    let again = Directory::parse(&index[..end.directory_bytes as usize], end, plan.file_bytes()).unwrap();
    check(&again, end);
    let known = |record: &Record| (record.name.clone(), record.bytes, record.crc32);
    let known_of = |directory: &Directory| directory.records().iter().map(known).collect::<Vec<_>>();
    assert_eq!(known_of(&again), known_of(directory));
    for (index, (record, sum)) in again.records().iter().zip(crc32).enumerate() {
        let header = LocalHeader::parse(&plan.header(index, sum), record.header_offset).unwrap().unwrap();
        assert_eq!(header.name, record.name.as_bytes());
        assert_eq!(record.header_offset + header.header_bytes, plan.records()[index].data_offset);
    }
}
