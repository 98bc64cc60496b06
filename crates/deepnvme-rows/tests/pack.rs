//! Packed tables have the rows of their source, and no changed byte of one is taken for a row.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepnvme_codec::{Float, Float8};
use deepnvme_file::{Target, VersionedFile};
use deepnvme_io::Engine;
use deepnvme_rows::{
    BlockLayout, ChecksumPlace, Conversion, Element, Error, PackSource, PackedDescription, PackedTable, PackedTensors,
    RowRange, RowScales, RowStore, ScaleType, Table, pack,
};
use deepnvme_testkit::faults::FaultPlan;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{engine, faulty_engine, folder, gather, gather_as, rows_of};

struct World {
    folder: TempDir,
    engine: Arc<Engine>,
    files: Vec<VersionedFile>,
    rows: Table,
    scales: Table,
    bytes: Vec<u8>,
    scale_bytes: Vec<u8>,
}

const SCALES: usize = 4;

fn world(row_bytes: usize, counts: &[u64]) -> World {
    let folder = folder();
    let mut random = fastrand::Rng::with_seed(row_bytes as u64);
    let path = folder.path().join("source");
    let rows = counts.iter().sum::<u64>() as usize;
    let (mut bytes, mut scale_bytes) = (vec![0; rows * row_bytes], vec![0; rows * SCALES]);
    random.fill(&mut bytes);
    scale_bytes.fill_with(|| random.u8(100..140));
    fs::write(&path, [&[9; 100][..], &bytes, &scale_bytes].concat()).unwrap();
    let mut ranges = Vec::new();
    let mut offset = 100;
    for rows in counts {
        ranges.push(RowRange { file: 0, offset, rows: *rows });
        offset += rows * row_bytes as u64;
    }
    let scales = Table::new(vec![RowRange { file: 0, offset, rows: rows as u64 }], SCALES).unwrap();
    World {
        engine: engine(),
        files: vec![VersionedFile::open(path).unwrap()],
        rows: Table::new(ranges, row_bytes).unwrap(),
        scales,
        bytes,
        scale_bytes,
        folder,
    }
}

impl World {
    fn target(&self) -> PathBuf {
        self.folder.path().join("packed.safetensors")
    }

    fn pack(&self, has_scales: bool) -> Result<BlockLayout, Error> {
        self.pack_hot(has_scales, &[])
    }

    fn pack_hot(&self, has_scales: bool, hot: &[u32]) -> Result<BlockLayout, Error> {
        let scales = has_scales.then_some(&self.scales);
        let description = description(self.rows.row_bytes(), has_scales);
        let source = PackSource { files: &self.files, rows: &self.rows, scales, hot, description: &description };
        pack(&self.engine, source, &Target::from(&self.target()), &mut |_| true)?;
        Ok(BlockLayout::plan(self.rows.row_bytes() + if has_scales { SCALES } else { 0 }))
    }

    /// Packs the rows without their scales. Returns the layout, the bytes of the file, and the offset of its first block.
    fn packed_file(&self) -> (BlockLayout, Vec<u8>, usize) {
        let layout = self.pack(false).unwrap();
        (layout, fs::read(self.target()).unwrap(), data_offset(&self.target()) as usize)
    }

    /// Opens the packed table, as its header describes it.
    fn open(&self, scales: Option<RowScales>) -> RowStore {
        self.try_open(scales).unwrap()
    }

    fn try_open(&self, scales: Option<RowScales>) -> Result<RowStore, Error> {
        let (header, description) = header_of(&self.target());
        let start = data_offset(&self.target());
        let place_of = |name: &str| {
            let number = |index: usize| header[name]["data_offsets"][index].as_u64();
            Some((start + number(0)?, number(1)? - number(0)?))
        };
        let tensors = PackedTensors::find(place_of).unwrap();
        let file = VersionedFile::open(self.target()).unwrap();
        let table = PackedDescription::parse(&description.to_string(), tensors)?.open(&file, &self.engine)?;
        assert_eq!(table.rows(), self.rows.rows());
        RowStore::new(Arc::clone(&self.engine), vec![file], table, scales, 16 << 20)
    }
}

/// Describes rows of bytes.
fn description(row_bytes: usize, has_scales: bool) -> String {
    let scales = has_scales.then(|| json!({ "count": SCALES, "dtype": "float8_e8m0fnu" }));
    json!({ "shape": [row_bytes], "dtype": "int8", "scales": scales }).to_string()
}

fn data_offset(path: &Path) -> u64 {
    let head: [u8; 8] = fs::read(path).unwrap()[..8].try_into().unwrap();
    8 + u64::from_le_bytes(head)
}

/// Returns the header of a packed file, and the description of the rows in it.
fn header_of(path: &Path) -> (Value, Value) {
    let header: Value = serde_json::from_slice(&fs::read(path).unwrap()[8..data_offset(path) as usize]).unwrap();
    let description = serde_json::from_str(header["__metadata__"]["deepnvme.rows"].as_str().unwrap()).unwrap();
    (header, description)
}

#[test]
fn packed_rows_are_those_of_the_source() {
    for row_bytes in [1, 160, 1400, 2048, 3000, 4092, 4093, 4096, 8192, 17_920, 5 << 20] {
        let counts: &[u64] = if row_bytes > 1 << 20 { &[1, 2] } else { &[700, 0, 1, 299] };
        let world = world(row_bytes, counts);
        let layout = world.pack(false).unwrap();
        let store = world.open(None);
        assert_eq!(store.verify(&|_| {}, &|| false).unwrap(), layout.blocks(world.rows.rows()));
        let all: Vec<u64> = (0..world.rows.rows()).rev().collect();
        for rows in all.chunks(300) {
            assert!(gather(&store, rows).unwrap() == rows_of(&world.bytes, row_bytes, rows), "{row_bytes}");
        }
    }
}

#[test]
fn scales_lie_behind_their_rows() {
    let world = world(64, &[500]);
    let layout = world.pack(true).unwrap();
    assert_eq!(layout.row_bytes, 64 + SCALES);
    let store = world.open(Some(RowScales::behind_rows(ScaleType::E8m0fnu, SCALES, 64)));
    let conversion = Conversion { from: Element::Int8, to: Float::F32, scale: None };
    let rows = [499, 0, 250, 250];
    let made = gather_as(&store, &rows, Some(conversion), rows.len() * 256).unwrap();
    let mut expected = Vec::new();
    for row in rows {
        for column in 0..64 {
            let element = f32::from(world.bytes[row as usize * 64 + column] as i8);
            let scale = world.scale_bytes[row as usize * SCALES + column / 16];
            expected.extend((element * Float8::E8m0fnu.values()[usize::from(scale)]).to_le_bytes());
        }
    }
    assert!(made == expected);
    assert!(gather(&store, &rows).is_err(), "rows with scales are converted");
}

#[test]
fn the_file_is_safetensors() {
    let world = world(160, &[1000]);
    let (layout, file, start) = world.packed_file();
    assert_eq!(start % layout.block_bytes, 0);
    let (header, found) = header_of(&world.target());
    assert_eq!(header["rows"]["shape"], json!([40, 4096]));
    assert_eq!(header["rows"]["data_offsets"], json!([0, file.len() - start]));
    let expected = json!({
        "version": 1, "rows": 1000, "row_bytes": 160, "rows_per_block": 25, "block_bytes": 4096,
        "checksums": "block", "header_crc32c": found["header_crc32c"], "id": found["id"],
        "row": { "shape": [160], "dtype": "int8", "scales": null },
    });
    assert_eq!(found, expected);
    let listed = self::world(4096, &[7]);
    let (_, file, start) = listed.packed_file();
    let (header, found) = header_of(&listed.target());
    assert_eq!((&header["checksums"]["shape"], &found["checksums"]), (&json!([8]), &json!("list")));
    assert_eq!(header["checksums"]["data_offsets"], json!([7 * 4096, 7 * 4096 + 32]));
    assert_eq!(file.len(), start + 7 * 4096 + 32);
}

#[test]
fn every_flipped_byte_of_a_block_is_noticed() {
    let world = world(160, &[60]);
    let (layout, sound, start) = world.packed_file();
    let mut random = fastrand::Rng::with_seed(1);
    for at in (start..sound.len()).step_by(7) {
        let mut damaged = sound.clone();
        damaged[at] ^= 1 << random.u8(0..8);
        fs::write(world.target(), damaged).unwrap();
        let store = world.open(None);
        let block = (at - start) / layout.block_bytes;
        for number in 0..3 {
            let row = (number * 25) as u64;
            match gather(&store, &[row]) {
                // A neighbouring block may come with the same read.
                Ok(bytes) => assert!(number != block && bytes == world.bytes[row as usize * 160..][..160]),
                Err(Error::Checksum { offset, rows, .. }) => {
                    assert_eq!((offset as usize, rows.start as usize), (start + block * 4096, block * 25));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Header, blocks, hot rows and checksums: no byte of the file can change unnoticed.
#[test]
fn every_flipped_byte_of_the_file_is_noticed() {
    for row_bytes in [160, 4096] {
        let world = world(row_bytes, &[9]);
        let layout = world.pack_hot(false, &[3, 8, 1]).unwrap();
        let sound = fs::read(world.target()).unwrap();
        let sampled = (0..sound.len()).filter(|at| *at < 700 || at % 97 == 0 || sound.len() - at < 80);
        let mut random = fastrand::Rng::with_seed(row_bytes as u64);
        for at in sampled {
            let mut damaged = sound.clone();
            damaged[at] ^= 1 << random.u8(0..8);
            fs::write(world.target(), &damaged).unwrap();
            // A header that is no JSON any more, or another length of it, is noticed before this crate is asked.
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                world.try_open(None).and_then(|store| store.verify(&|_| {}, &|| false))
            }));
            assert!(!matches!(found, Ok(Ok(_))), "byte {at} of {layout:?}");
        }
        fs::write(world.target(), &sound).unwrap();
        assert_eq!(world.open(None).verify(&|_| {}, &|| false).unwrap(), layout.blocks(12));
    }
}

#[test]
fn a_gather_reads_no_more_pages_than_its_rows_need() {
    for (row_bytes, pages) in [(1024, 1), (2048, 1), (3000, 1), (4096, 1), (8192, 2), (17_920, 5)] {
        let world = world(row_bytes, &[100]);
        world.pack(false).unwrap();
        let store = world.open(None);
        gather(&store, &[57]).unwrap();
        assert_eq!(store.stats().bytes_read, pages * 4096, "{row_bytes}");
    }
}

#[test]
fn checksums_in_memory_count() {
    let world = world(4096, &[3000]);
    let layout = world.pack(false).unwrap();
    let least = RowStore::packed_bytes_min(&layout, 3000, 0);
    assert_eq!(least, RowStore::packed_bytes_min(&layout, 0, 0) + 3000 * 4);
    let table = world.open(None).table().clone();
    let open = |memory| {
        let files = vec![VersionedFile::open(world.target()).unwrap()];
        RowStore::new(Arc::clone(&world.engine), files, table.clone(), None, memory)
    };
    let refused = open(least - 1).unwrap_err();
    assert!(matches!(refused, Error::Memory { bytes_min, .. } if bytes_min == least), "{refused}");
    let store = open(least).unwrap();
    assert!(store.memory_bytes() <= least);
    assert!(gather(&store, &[2999]).unwrap() == rows_of(&world.bytes, 4096, &[2999]));
}

#[test]
fn a_whole_table_is_verified() {
    let world = world(160, &[30_000]);
    world.pack(false).unwrap();
    let store = world.open(None);
    assert_eq!(store.verify(&|_| {}, &|| false).unwrap(), 1200);
    assert!(matches!(store.verify(&|_| {}, &|| true), Err(Error::Interrupted)));
    assert_eq!(store.verify(&|_| {}, &|| false).unwrap(), 1200, "all buffers came back");
    let mut bytes = fs::read(world.target()).unwrap();
    let place = bytes.len() - 3 * 4096 + 77;
    bytes[place] ^= 4;
    fs::write(world.target(), bytes).unwrap();
    assert!(matches!(store.verify(&|_| {}, &|| false), Err(Error::Changed { .. })));
    let damaged = world.open(None).verify(&|_| {}, &|| false);
    assert!(matches!(damaged, Err(Error::Checksum { ref rows, .. }) if rows.start == 1197 * 25), "{damaged:?}");
    let files = vec![VersionedFile::open(world.folder.path().join("source")).unwrap()];
    let in_place = RowStore::new(Arc::clone(&world.engine), files, world.rows.clone(), None, 1 << 20).unwrap();
    assert!(matches!(in_place.verify(&|_| {}, &|| false), Err(Error::Invalid(_))));
}

#[test]
fn a_block_of_another_table_is_noticed() {
    for row_bytes in [160, 4096] {
        let world = world(row_bytes, &[60]);
        let (layout, old, start) = world.packed_file();
        let (_, mut new, _) = world.packed_file();
        assert_ne!(old, new, "the ids differ");
        let place = start + layout.block_bytes..start + 2 * layout.block_bytes;
        new[place.clone()].copy_from_slice(&old[place]);
        fs::write(world.target(), &new).unwrap();
        let row = layout.rows_per_block as u64;
        if layout.checksums == ChecksumPlace::Block {
            assert!(matches!(gather(&world.open(None), &[row]), Err(Error::Checksum { .. })));
        } else {
            // The same rows: the block has no checksum in it.
            assert!(gather(&world.open(None), &[row]).unwrap() == rows_of(&world.bytes, row_bytes, &[row]));
        }
        let end = start + layout.blocks(60) as usize * layout.block_bytes;
        if end < new.len() {
            new[end..].copy_from_slice(&old[end..]);
            fs::write(world.target(), &new).unwrap();
            assert!(world.open(None).verify(&|_| {}, &|| false).is_err(), "checksums of another table");
        }
    }
}

#[test]
fn swapped_blocks_are_noticed() {
    let world = world(160, &[60]);
    let (_, mut bytes, start) = world.packed_file();
    let (first, second) = bytes[start..].split_at_mut(4096);
    first.swap_with_slice(&mut second[..4096]);
    fs::write(world.target(), bytes).unwrap();
    let store = world.open(None);
    assert!(matches!(gather(&store, &[0]), Err(Error::Checksum { .. })));
}

#[test]
fn an_unfinished_file_never_has_its_name() {
    let world = world(160, &[5000]);
    fs::write(world.target(), b"before").unwrap();
    let description = description(160, false);
    let source =
        PackSource { files: &world.files, rows: &world.rows, scales: None, hot: &[], description: &description };
    let stopped = pack(&world.engine, source, &Target::from(&world.target()), &mut |rows| rows < 2000);
    assert!(matches!(stopped, Err(Error::Interrupted)));
    for seed in 0..20 {
        let engine = faulty_engine(FaultPlan { seed, eio: 100, enospc: 100, ..FaultPlan::default() });
        if pack(&engine, source, &Target::from(&world.target()), &mut |_| true).is_ok() {
            fs::write(world.target(), b"before").unwrap();
        }
    }
    assert_eq!(fs::read(world.target()).unwrap(), b"before");
    assert_eq!(fs::read_dir(world.folder.path()).unwrap().count(), 2);
}

#[test]
fn rows_that_could_not_be_described_are_refused_before_a_file_is_replaced() {
    let world = world(160, &[10]);
    fs::write(world.target(), b"before").unwrap();
    let descriptions = [
        "{}",
        "[",
        r#"{"shape": [160], "dtype": "qint8"}"#,
        r#"{"shape": [80], "dtype": "uint8"}"#,
        r#"{"shape": [80], "dtype": "uint8", "scales": {"count": 80, "dtype": "uint8"}}"#,
    ];
    for description in descriptions {
        let source = PackSource { files: &world.files, rows: &world.rows, scales: None, hot: &[], description };
        let packed = pack(&world.engine, source, &Target::from(&world.target()), &mut |_| true);
        assert!(matches!(packed, Err(Error::Invalid(_))), "{description}: {packed:?}");
    }
    assert_eq!(fs::read(world.target()).unwrap(), b"before");
}

#[test]
fn a_source_that_changes_meanwhile_is_refused() {
    let world = world(160, &[5000]);
    let description = description(160, false);
    let source =
        PackSource { files: &world.files, rows: &world.rows, scales: None, hot: &[], description: &description };
    let path = world.folder.path().join("source");
    let mut change = |rows: u64| {
        if rows < 100 {
            let mut bytes = fs::read(&path).unwrap();
            bytes[0] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
        true
    };
    let packed = pack(&world.engine, source, &Target::from(&world.target()), &mut change);
    assert!(matches!(packed, Err(Error::Changed { .. })), "{packed:?}");
    assert!(!world.target().exists());
}

#[test]
fn copies_of_hot_rows_are_read_together() {
    for row_bytes in [1, 160, 1400, 4096, 5000] {
        let world = world(row_bytes, &[700, 0, 1, 299]);
        let hot: Vec<u32> = (0..60).map(|index| index * 617 % 1000).collect();
        let layout = world.pack_hot(false, &hot).unwrap();
        let store = world.open(None);
        assert_eq!(store.table().rows(), 1000);
        let wanted: Vec<u64> = hot.iter().map(|row| u64::from(*row)).collect();
        let all: Vec<u64> = wanted.iter().copied().chain((0..1000).rev()).collect();
        for rows in [&wanted[..], &all[..]] {
            assert!(gather(&store, rows).unwrap() == rows_of(&world.bytes, row_bytes, rows), "{row_bytes}");
            if rows.len() == wanted.len() {
                // The first copy may lie in a block with the last rows.
                let blocks = layout.blocks(60) + 1;
                assert!(store.stats().bytes_read <= blocks * layout.block_bytes as u64, "{row_bytes}");
            }
        }
        assert!(matches!(gather(&store, &[1000]), Err(Error::NoSuchRow { .. })), "a place is no row");
        assert!(matches!(store.prefetch(&[1059], None, &|| false), Err(Error::NoSuchRow { .. })));
        store.keep(&wanted[..3], &|| false).unwrap();
        assert_eq!(store.verify(&|_| {}, &|| false).unwrap(), layout.blocks(1060));
    }
}

#[test]
fn copies_of_hot_rows_have_their_scales() {
    let world = world(64, &[500]);
    world.pack_hot(true, &[499, 7]).unwrap();
    let store = world.open(Some(RowScales::behind_rows(ScaleType::E8m0fnu, SCALES, 64)));
    let conversion = Conversion { from: Element::Int8, to: Float::F32, scale: None };
    let rows = [7, 499, 8];
    let made = gather_as(&store, &rows, Some(conversion), rows.len() * 256).unwrap();
    assert!(world.pack(true).is_ok());
    let plain = world.open(Some(RowScales::behind_rows(ScaleType::E8m0fnu, SCALES, 64)));
    assert!(made == gather_as(&plain, &rows, Some(conversion), rows.len() * 256).unwrap());
}

#[test]
fn a_damaged_list_of_hot_rows_is_noticed() {
    let world = world(160, &[500]);
    world.pack_hot(false, &[3, 499, 20]).unwrap();
    let sound = fs::read(world.target()).unwrap();
    for at in sound.len() - 12..sound.len() {
        let mut damaged = sound.clone();
        damaged[at] ^= 1;
        fs::write(world.target(), damaged).unwrap();
        let error = world.try_open(None).unwrap_err().to_string();
        assert!(error.contains("list of hot rows is damaged"), "{error}");
    }
    for bad in [&[500][..], &[1, 1]] {
        assert!(matches!(world.pack_hot(false, bad), Err(Error::Invalid(_))));
    }
    fs::write(world.target(), &sound).unwrap();
    let mut damaged = sound;
    let copy = damaged.len() - 12 - 4096 + 30;
    damaged[copy] ^= 1;
    fs::write(world.target(), damaged).unwrap();
    let found = world.open(None).verify(&|_| {}, &|| false);
    assert!(matches!(found, Err(Error::Checksum { .. })), "{found:?}");
}

#[test]
fn impossible_blocks_are_refused() {
    let checksums = ChecksumPlace::Block;
    let good = BlockLayout { row_bytes: 160, rows_per_block: 25, block_bytes: 4096, checksums };
    let range = RowRange { file: 0, offset: 4096, rows: 100 };
    let packed = |range, layout| Table::packed(PackedTable { range, id: 7, layout, hot: None, checksums: None });
    assert!(packed(range, good).is_ok());
    for bad in [
        BlockLayout { row_bytes: 0, ..good },
        BlockLayout { rows_per_block: 0, ..good },
        BlockLayout { rows_per_block: 26, ..good },
        BlockLayout { block_bytes: 4000, ..good },
        BlockLayout { block_bytes: 0, ..good },
        BlockLayout { rows_per_block: usize::MAX, row_bytes: 2, ..good },
        BlockLayout { checksums: ChecksumPlace::List, ..good },
    ] {
        assert!(packed(range, bad).is_err(), "{bad:?}");
    }
    assert!(packed(RowRange { offset: 100, ..range }, good).is_err());
    assert!(packed(RowRange { rows: u64::MAX, ..range }, good).is_err());
}
