//! Packs a table: rows in blocks with checksums, each with its scales behind it.
//!
//! The file is a safetensors file with one tensor of bytes, `rows`, whose metadata describes the table. So other programs
//! can copy, list and check it. The tensor begins at a multiple of the block size.

use std::sync::Arc;

use deepnvme_file::{FileWriter, Target, VersionedFile};
use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Durability, Engine, Error as IoError, ErrorKind, Transfer};
use serde_json::json;

use crate::blocks::BlockLayout;
use crate::error::{Error, Result};
use crate::table::Table;

/// The name of the tensor.
pub const PACKED_TENSOR: &str = "rows";
/// The key of the description in the metadata.
pub const PACKED_KEY: &str = "deepnvme.rows";
/// The version of the format.
pub const PACKED_VERSION: u32 = 1;
/// Bytes of rows that are read at a time.
const PIECE_BYTES: usize = 4 << 20;

/// The tables to pack.
#[derive(Clone, Copy, Debug)]
pub struct PackSource<'a> {
    /// The files of both tables.
    pub files: &'a [VersionedFile],
    /// The rows.
    pub rows: &'a Table,
    /// The scales of each row, as bytes.
    pub scales: Option<&'a Table>,
    /// The description of a row, in JSON: its shape and its types.
    pub description: &'a str,
}

/// Writes a packed table. The file gets its name when it is complete and on the disk.
///
/// `progress` gets the number of rows so far. If it returns false, nothing is left, and the result is `Interrupted`.
///
/// # Errors
/// `Invalid` if the source is packed already, or the tables have different numbers of rows. `Changed` if a file was
/// changed meanwhile. `Io` if reading or writing fails.
pub fn pack(
    engine: &Arc<Engine>,
    source: PackSource<'_>,
    target: &Target,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<BlockLayout> {
    let PackSource { files, rows, scales, .. } = source;
    if rows.blocks().is_some() || scales.is_some_and(|scales| scales.blocks().is_some()) {
        return Err(Error::Invalid("the table is packed already".into()));
    }
    if let Some(scales) = scales.filter(|scales| scales.rows() != rows.rows()) {
        let detail = format!("there are {} rows, and scales for {}", rows.rows(), scales.rows());
        return Err(Error::Invalid(detail));
    }
    let layout = BlockLayout::plan(rows.row_bytes() + scales.map_or(0, Table::row_bytes));
    let mut writer = FileWriter::create(Arc::clone(engine), target, Durability::Full)?;
    writer.write(&header(source, &layout)?)?;
    let mut row_pieces = Pieces::new(engine, files, rows)?;
    let mut scale_pieces = scales.map(|scales| Pieces::new(engine, files, scales)).transpose()?;
    let mut block = vec![0; layout.block_bytes];
    for number in 0..layout.blocks(rows.rows()) {
        let first = number * layout.rows_per_block as u64;
        let count = (rows.rows() - first).min(layout.rows_per_block as u64) as usize;
        block.fill(0);
        for record in block.chunks_mut(layout.row_bytes).take(count) {
            let (row, scale) = record.split_at_mut(rows.row_bytes());
            row_pieces.next(row)?;
            if let Some(pieces) = &mut scale_pieces {
                pieces.next(scale)?;
            }
        }
        layout.seal(number, &mut block);
        writer.write(&block)?;
        if !progress(first + count as u64) {
            return Err(Error::Interrupted);
        }
    }
    for file in files {
        if let Some(change) = file.change()? {
            return Err(Error::Changed { path: change.path, what: change.what });
        }
    }
    writer.commit()?;
    Ok(layout)
}

/// The header of the file, up to the first block.
fn header(source: PackSource<'_>, layout: &BlockLayout) -> Result<Vec<u8>> {
    let invalid = |error: serde_json::Error| Error::Invalid(format!("the description of rows is no JSON: {error}"));
    let row: serde_json::Value = serde_json::from_str(source.description).map_err(invalid)?;
    let rows = source.rows.rows();
    let blocks = layout.blocks(rows);
    let description = json!({
        "version": PACKED_VERSION,
        "rows": rows,
        "row_bytes": layout.row_bytes,
        "rows_per_block": layout.rows_per_block,
        "block_bytes": layout.block_bytes,
        "row": row,
    });
    let text = json!({
        "__metadata__": { PACKED_KEY: description.to_string() },
        PACKED_TENSOR: {
            "dtype": "U8",
            "shape": [blocks, layout.block_bytes],
            "data_offsets": [0, blocks * layout.block_bytes as u64],
        },
    });
    let mut header = text.to_string().into_bytes();
    header.resize((header.len() + 8).next_multiple_of(layout.block_bytes) - 8, b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header].concat())
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
