//! Packs a table: rows in blocks with checksums, each with its scales behind it, and then copies of hot rows.
//!
//! The file is a safetensors file with one tensor of bytes, `rows`, whose metadata describes the table. So other programs
//! can copy, list and check it. The tensor begins at a multiple of the block size. Behind it are the lists that an open
//! table keeps in memory: the numbers of hot rows, and checksums that are not in their blocks.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::SystemTime;

use deepnvme_file::{FileWriter, Target, VersionedFile};
use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Durability, Engine, Error as IoError, ErrorKind, Transfer};
use serde_json::json;

use crate::blocks::{BlockLayout, ChecksumPlace};
use crate::checksum_list::{checksum_of, list_bytes};
use crate::description::{
    CHECKSUM_TENSOR, HOT_TENSOR, PACKED_KEY, PACKED_TENSOR, PACKED_VERSION, PackedDescription, PackedTensors,
};
use crate::error::{Error, Result};
use crate::header_checksum;
use crate::hot_rows::HotRows;
use crate::store::RowStore;
use crate::table::Table;

/// Bytes of rows that are read at a time.
const PIECE_BYTES: usize = 4 << 20;
/// Memory for reading hot rows, unless their size needs more.
const HOT_MEMORY_BYTES: u64 = 4 << 20;

/// The tables to pack.
#[derive(Clone, Copy, Debug)]
pub struct PackSource<'a> {
    /// The files of both tables.
    pub files: &'a [VersionedFile],
    /// The rows.
    pub rows: &'a Table,
    /// The scales of each row, as bytes.
    pub scales: Option<&'a Table>,
    /// The rows to copy together, in the order in which the copies are stored.
    pub hot: &'a [u32],
    /// The description of a row, in JSON: its shape and its types.
    pub description: &'a str,
}

/// Writes a packed table, and returns its id. The file gets its name when it is complete and on the disk.
///
/// `progress` gets the number of rows so far. If it returns false, nothing is left, and the result is `Interrupted`.
///
/// # Errors
/// `Invalid` if the source is packed already, the tables have different numbers of rows, or the description is not that
/// of their rows. `Changed` if a file was
/// changed meanwhile. `Io` if reading or writing fails.
pub fn pack(
    engine: &Arc<Engine>,
    source: PackSource<'_>,
    target: &Target,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<u64> {
    let PackSource { files, rows, scales, hot, .. } = source;
    if rows.blocks().is_some() || scales.is_some_and(|scales| scales.blocks().is_some()) {
        return Err(Error::Invalid("the table is packed already".into()));
    }
    if let Some(scales) = scales.filter(|scales| scales.rows() != rows.rows()) {
        let detail = format!("there are {} rows, and scales for {}", rows.rows(), scales.rows());
        return Err(Error::Invalid(detail));
    }
    HotRows::new(rows.rows(), hot)?;
    let layout = BlockLayout::plan(rows.row_bytes() + scales.map_or(0, Table::row_bytes));
    let mut writer = FileWriter::create(Arc::clone(engine), target, Durability::Full)?;
    let id = new_id();
    writer.write(&header(source, &layout, id)?)?;
    let mut row_source = RecordSource::new(engine, files, rows, hot)?;
    let mut scale_source = scales.map(|scales| RecordSource::new(engine, files, scales, hot)).transpose()?;
    let mut block = vec![0; layout.block_bytes];
    let mut checksums = Vec::new();
    let places = rows.rows() + hot.len() as u64;
    for number in 0..layout.blocks(places) {
        let first = number * layout.rows_per_block as u64;
        let count = (places - first).min(layout.rows_per_block as u64) as usize;
        block.fill(0);
        for record in block.chunks_mut(layout.row_bytes).take(count) {
            let (row, scale) = record.split_at_mut(rows.row_bytes());
            row_source.next(row)?;
            if let Some(source) = &mut scale_source {
                source.next(scale)?;
            }
        }
        checksums.extend(layout.seal(id, number, &mut block));
        writer.write(&block)?;
        if !progress((first + count as u64).min(rows.rows())) {
            return Err(Error::Interrupted);
        }
    }
    writer.write(&hot_list(hot))?;
    if layout.checksums == ChecksumPlace::List {
        writer.write(&list_bytes(&checksums))?;
    }
    for file in files {
        if let Some(change) = file.change()? {
            return Err(Error::Changed { path: change.path, what: change.what });
        }
    }
    writer.commit()?;
    Ok(id)
}

/// Returns an id that no other table has. The standard library seeds its hash maps at random.
fn new_id() -> u64 {
    RandomState::new().hash_one(SystemTime::now())
}

/// The header of the file, up to the first block.
fn header(source: PackSource<'_>, layout: &BlockLayout, id: u64) -> Result<Vec<u8>> {
    let invalid = |why: String| Error::Invalid(format!("rows of this kind cannot be packed: {why}"));
    let row: serde_json::Value =
        serde_json::from_str(source.description).map_err(|error| invalid(error.to_string()))?;
    let rows = source.rows.rows();
    let hot = hot_list(source.hot);
    let places = rows + source.hot.len() as u64;
    let blocks = layout.blocks(places);
    let mut description = json!({
        "version": PACKED_VERSION,
        "rows": rows,
        "row_bytes": layout.row_bytes,
        "rows_per_block": layout.rows_per_block,
        "block_bytes": layout.block_bytes,
        "checksums": if layout.checksums == ChecksumPlace::List { "list" } else { "block" },
        "id": format!("{id:016x}"),
        "header_crc32c": header_checksum::PLACEHOLDER,
        "row": row,
    });
    let mut text = json!({});
    let mut end = 0;
    let mut place = |name: &str, dtype: &str, shape: &[u64], bytes: u64| {
        text[name] = json!({ "dtype": dtype, "shape": shape, "data_offsets": [end, end + bytes] });
        end += bytes;
        (end - bytes, bytes)
    };
    let block_bytes = layout.block_bytes as u64;
    let mut tensors = PackedTensors {
        rows: place(PACKED_TENSOR, "U8", &[blocks, block_bytes], blocks * block_bytes),
        ..PackedTensors::default()
    };
    if !hot.is_empty() {
        description["hot"] = json!({ "rows": source.hot.len(), "crc32c": checksum_of(&hot) });
        tensors.hot = Some(place(HOT_TENSOR, "U32", &[source.hot.len() as u64], hot.len() as u64));
    }
    if layout.checksums == ChecksumPlace::List {
        tensors.checksums = Some(place(CHECKSUM_TENSOR, "U32", &[blocks + 1], layout.list_bytes(places)));
    }
    let description = description.to_string();
    // Before a file is written that could then not be opened.
    PackedDescription::parse(&description, tensors).map_err(|error| match error {
        Error::Damaged(why) => invalid(why),
        other => other,
    })?;
    text["__metadata__"] = json!({ PACKED_KEY: description });
    let text = text.to_string().into_bytes();
    let padded = (text.len() + 8).next_multiple_of(layout.block_bytes) - 8;
    let mut header = [&(padded as u64).to_le_bytes()[..], &text].concat();
    header.resize(padded + 8, b' ');
    if header_checksum::set(&mut header) {
        return Ok(header);
    }
    Err(invalid("its description contains the key of its own checksum".into()))
}

/// Returns the list of hot rows, as it is in the file.
fn hot_list(hot: &[u32]) -> Vec<u8> {
    hot.iter().flat_map(|row| row.to_le_bytes()).collect()
}

/// Reads all rows of a table in order, and then the hot ones.
struct RecordSource<'a> {
    pieces: Pieces<'a>,
    rows_left: u64,
    /// Hot rows that were not read yet.
    hot: &'a [u32],
    hot_store: Option<RowStore>,
    /// Hot rows, and the bytes of them that were taken.
    batch: (Vec<u8>, usize),
}

impl<'a> RecordSource<'a> {
    fn new(engine: &'a Arc<Engine>, files: &'a [VersionedFile], table: &'a Table, hot: &'a [u32]) -> Result<Self> {
        let open = || {
            let of_open = |file: &VersionedFile| VersionedFile::of_open(Arc::clone(file.file()));
            let files = files.iter().map(of_open).collect::<Result<Vec<_>, IoError>>()?;
            let memory = HOT_MEMORY_BYTES.max(table.row_bytes() as u64 * 4);
            RowStore::new(Arc::clone(engine), files, table.clone(), None, memory)
        };
        let hot_store = if hot.is_empty() { None } else { Some(open()?) };
        let pieces = Pieces::new(engine, files, table)?;
        Ok(Self { pieces, rows_left: table.rows(), hot, hot_store, batch: (Vec::new(), 0) })
    }

    /// Copies the next row.
    fn next(&mut self, row: &mut [u8]) -> Result<()> {
        if self.rows_left > 0 {
            self.rows_left -= 1;
            return self.pieces.next(row);
        }
        if self.batch.1 == self.batch.0.len()
            && let Some(store) = &self.hot_store
        {
            let count = (PIECE_BYTES / row.len()).clamp(1, self.hot.len());
            let (numbers, rest) = self.hot.split_at(count);
            let numbers: Vec<u64> = numbers.iter().map(|row| u64::from(*row)).collect();
            let memory = RegionMut::from_vec(vec![0; count * row.len()]);
            store.gather(&numbers, &memory, None, &|| false)?;
            self.batch.0.resize(memory.len(), 0);
            memory.copy_to_slice(0, &mut self.batch.0);
            self.batch.1 = 0;
            self.hot = rest;
        }
        row.copy_from_slice(&self.batch.0[self.batch.1..][..row.len()]);
        self.batch.1 += row.len();
        Ok(())
    }
}

/// Reads the rows of a table in order, one piece ahead.
struct Pieces<'a> {
    engine: &'a Arc<Engine>,
    files: &'a [VersionedFile],
    table: &'a Table,
    /// The range to read next, and its first row that was not requested.
    next: (usize, u64),
    ahead: Option<Transfer<RegionMut>>,
    /// The current piece, and the bytes of it that were taken.
    current: Option<(Buffer, usize)>,
}

impl<'a> Pieces<'a> {
    fn new(engine: &'a Arc<Engine>, files: &'a [VersionedFile], table: &'a Table) -> Result<Self> {
        let mut pieces = Self { engine, files, table, next: (0, 0), ahead: None, current: None };
        pieces.request()?;
        Ok(pieces)
    }

    /// Starts to read the next piece, if there is one.
    fn request(&mut self) -> Result<()> {
        let (mut index, mut first) = self.next;
        let row_bytes = self.table.row_bytes();
        while let Some(range) = self.table.ranges().get(index) {
            let rows = (range.rows - first).min((PIECE_BYTES / row_bytes).max(1) as u64);
            if rows == 0 {
                (index, first) = (index + 1, 0);
                continue;
            }
            let allocation = |error: std::io::Error| Error::Io(IoError::from_io("allocate", &error));
            let memory = Buffer::zeroed(rows as usize * row_bytes).map_err(allocation)?.into_region();
            let file = self.files.get(range.file).ok_or_else(|| Error::Invalid("a range is in no file".into()))?;
            self.ahead = Some(self.engine.read(file.file(), range.offset + first * row_bytes as u64, memory)?);
            self.next = (index, first + rows);
            break;
        }
        Ok(())
    }

    /// Copies the next row.
    fn next(&mut self, row: &mut [u8]) -> Result<()> {
        let lost = |detail| Error::Io(IoError::new(ErrorKind::Io, "read", detail));
        if self.current.as_ref().is_none_or(|(piece, taken)| *taken == piece.len()) {
            let (memory, result) = self.ahead.take().ok_or_else(|| lost("the table ends early"))?.wait();
            result?;
            let piece = memory.and_then(|memory| memory.into_buffer().ok());
            let piece = piece.ok_or_else(|| lost("the engine did not return a buffer; report this as a bug"))?;
            self.current = Some((piece, 0));
            self.request()?;
        }
        if let Some((piece, taken)) = &mut self.current {
            row.copy_from_slice(&piece.as_slice()[*taken..*taken + row.len()]);
            *taken += row.len();
        }
        Ok(())
    }
}
