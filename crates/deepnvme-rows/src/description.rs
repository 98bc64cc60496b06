//! The description of a packed table in the metadata of its file.

use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::{Engine, Error as IoError, ErrorKind};
use serde::Deserialize;

use crate::blocks::{BlockLayout, ChecksumPlace};
use crate::checksum_list::ChecksumList;
use crate::error::{Error, Result};
use crate::header_checksum;
use crate::hot_rows::{HotRowList, HotRows, NUMBER_BYTES};
use crate::table::{PackedTable, RowRange, Table};
use crate::whole_range::read_range;

/// The name of the tensor with the blocks.
pub const PACKED_TENSOR: &str = "rows";
/// The name of the tensor with the numbers of hot rows.
pub const HOT_TENSOR: &str = "hot_rows";
/// The name of the tensor with the list of checksums.
pub const CHECKSUM_TENSOR: &str = "checksums";
/// The key of the description in the metadata.
pub const PACKED_KEY: &str = "deepnvme.rows";
/// The version of the format.
pub const PACKED_VERSION: u32 = 1;
/// Hexadecimal digits of the id.
const ID_DIGITS: usize = 16;

/// Read first: all else depends on it.
#[derive(Debug, Deserialize)]
struct Version {
    version: u64,
}

#[derive(Debug, Deserialize)]
struct Description {
    rows: u64,
    row_bytes: usize,
    rows_per_block: usize,
    block_bytes: usize,
    checksums: DescribedPlace,
    id: String,
    header_crc32c: String,
    row: Row,
    hot: Option<Hot>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum DescribedPlace {
    Block,
    List,
}

#[derive(Debug, Deserialize)]
struct Row {
    shape: Vec<u64>,
    dtype: String,
    scales: Option<Scales>,
    first_rows: Option<Vec<u64>>,
}

#[derive(Debug, Deserialize)]
struct Scales {
    count: u64,
    dtype: String,
}

impl Row {
    /// Returns its bytes, with its scales. `None` if that is no row.
    fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1_u64, |all, size| all.checked_mul(*size))?;
        let bytes = elements.checked_mul(dtype_bytes(&self.dtype)?)?;
        let Some(Scales { count, dtype }) = &self.scales else { return Some(bytes) };
        // Each scale belongs to as many elements.
        if !can_have_scales(&self.dtype) || !is_of_scales(dtype) || elements.checked_rem(*count) != Some(0) {
            return None;
        }
        bytes.checked_add(count.checked_mul(dtype_bytes(dtype)?)?)
    }
}

/// Returns the bytes of an element, by torch's name of its type. `None` if there is none of that name.
fn dtype_bytes(name: &str) -> Option<u64> {
    Some(match name {
        "bool" | "uint8" | "int8" | "bits8" | "bits1x8" | "bits2x4" | "bits4x2" | "float4_e2m1fn_x2" => 1,
        "uint1" | "uint2" | "uint3" | "uint4" | "uint5" | "uint6" | "uint7" => 1,
        "int1" | "int2" | "int3" | "int4" | "int5" | "int6" | "int7" => 1,
        "float8_e4m3fn" | "float8_e5m2" | "float8_e4m3fnuz" | "float8_e5m2fnuz" | "float8_e8m0fnu" => 1,
        "uint16" | "int16" | "float16" | "bfloat16" | "bits16" => 2,
        "uint32" | "int32" | "float32" | "complex32" | "bcomplex32" => 4,
        "uint64" | "int64" | "float64" | "complex64" => 8,
        "complex128" => 16,
        _ => return None,
    })
}

/// Returns whether elements of this type can be multiplied by scales.
fn can_have_scales(dtype: &str) -> bool {
    is_float(dtype) || ["float8_e4m3fn", "float8_e5m2", "int8"].contains(&dtype)
}

/// Returns whether a scale can have this type.
fn is_of_scales(dtype: &str) -> bool {
    is_float(dtype) || dtype == "float8_e8m0fnu"
}

fn is_float(dtype: &str) -> bool {
    ["bfloat16", "float16", "float32"].contains(&dtype)
}

#[derive(Debug, Deserialize)]
struct Hot {
    rows: u64,
    crc32c: u32,
}

/// Where a tensor is in the file: its offset and its bytes.
pub type TensorPlace = (u64, u64);

/// Where the tensors of a packed table are.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PackedTensors {
    /// [`PACKED_TENSOR`]: the blocks.
    pub rows: TensorPlace,
    /// [`HOT_TENSOR`]: the numbers of hot rows.
    pub hot: Option<TensorPlace>,
    /// [`CHECKSUM_TENSOR`]: the list of checksums.
    pub checksums: Option<TensorPlace>,
}

impl PackedTensors {
    /// Finds the tensors by their names. `None` if there are no blocks.
    pub fn find(place_of: impl Fn(&str) -> Option<TensorPlace>) -> Option<Self> {
        Some(Self { rows: place_of(PACKED_TENSOR)?, hot: place_of(HOT_TENSOR), checksums: place_of(CHECKSUM_TENSOR) })
    }
}

/// What the description of a packed table says, checked as far as its text and the sizes of its tensors allow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedDescription {
    /// The number of rows, without copies.
    pub rows: u64,
    /// The shape of a row.
    pub row_shape: Vec<u64>,
    /// torch's name of the type of its elements.
    pub dtype: String,
    /// The number of the scales of a row, and torch's name of their type.
    pub scales: Option<(u64, String)>,
    /// The first row of each table that was packed, in order.
    pub first_rows: Vec<u64>,
    /// The id, which tells its blocks from those of other tables.
    pub id: u64,
    /// The blocks.
    pub layout: BlockLayout,
    /// The number of hot rows, and the CRC-32C of their list.
    pub hot: Option<(u64, u32)>,
    tensors: PackedTensors,
}

impl PackedDescription {
    /// Parses a description of these tensors.
    ///
    /// # Errors
    /// `Damaged` if the text is no description of these tensors. `Unsupported` for a later version.
    pub fn parse(text: &str, tensors: PackedTensors) -> Result<Self> {
        let Version { version } = serde_json::from_str(text).map_err(|error| Error::Damaged(error.to_string()))?;
        if version > u64::from(PACKED_VERSION) {
            return Err(Error::Unsupported(format!(
                "version {version} of packed tables needs a later deepnvme; this one reads {PACKED_VERSION}"
            )));
        }
        let described: Description = serde_json::from_str(text).map_err(|error| Error::Damaged(error.to_string()))?;
        let Description { rows, row_bytes, rows_per_block, block_bytes, row, hot, checksums, id, header_crc32c } =
            described;
        if version == 0 || row.bytes() != Some(row_bytes as u64) {
            let detail = format!("rows of {row_bytes} bytes are not {:?} of {}", row.shape, row.dtype);
            return Err(Error::Damaged(detail));
        }
        if !header_checksum::are_digits(header_crc32c.as_bytes()) {
            return Err(Error::Damaged("its own checksum is missing".into()));
        }
        // Digits alone: `from_str_radix` takes a sign as well.
        let is_id = id.len() == ID_DIGITS && id.bytes().all(|digit| digit.is_ascii_hexdigit());
        let id = u64::from_str_radix(&id, 16).ok().filter(|_| is_id);
        let id = id.ok_or_else(|| Error::Damaged("its id is no hexadecimal number".into()))?;
        let hot = match (hot, tensors.hot) {
            (None, None) => None,
            (Some(Hot { rows: count, crc32c }), Some((_, bytes)))
                if count <= rows && count.checked_mul(NUMBER_BYTES as u64) == Some(bytes) =>
            {
                Some((count, crc32c))
            }
            _ => return Err(Error::Damaged("its hot rows are not those of the file".into())),
        };
        let checksums = match checksums {
            DescribedPlace::Block => ChecksumPlace::Block,
            DescribedPlace::List => ChecksumPlace::List,
        };
        let layout = BlockLayout { row_bytes, rows_per_block, block_bytes, checksums };
        let places = rows.checked_add(hot.map_or(0, |(count, _)| count)).filter(|_| layout.is_valid());
        let bytes = places.and_then(|places| layout.blocks(places).checked_mul(block_bytes as u64));
        if bytes != Some(tensors.rows.1) {
            return Err(Error::Damaged(format!("{} bytes are not its blocks", tensors.rows.1)));
        }
        let listed = places.map_or(0, |places| layout.list_bytes(places));
        if listed != tensors.checksums.map_or(0, |(_, bytes)| bytes) || (listed == 0) != tensors.checksums.is_none() {
            return Err(Error::Damaged("its checksums are not those of the file".into()));
        }
        let first_rows = row.first_rows.unwrap_or_else(|| vec![0]);
        if first_rows.first() != Some(&0) || !first_rows.is_sorted() || first_rows.last() > Some(&rows) {
            return Err(Error::Damaged("its tables are not in order".into()));
        }
        let scales = row.scales.map(|Scales { count, dtype }| (count, dtype));
        Ok(Self { rows, row_shape: row.shape, dtype: row.dtype, scales, first_rows, id, layout, hot, tensors })
    }

    /// Reads what an open table keeps in memory, and compares the header of the file with its checksum.
    ///
    /// # Errors
    /// `Io` with [`ErrorKind::Corrupt`] if the header, the list of hot rows or that of checksums is damaged. `Io` if they
    /// cannot be read. `Invalid` if the file is no table in spite of that.
    pub fn open(&self, file: &VersionedFile, engine: &Arc<Engine>) -> Result<Table> {
        let PackedTensors { rows: (offset, _), hot, checksums } = self.tensors;
        let header = read_range(engine, file, 0, offset)?;
        if !header_checksum::is_sound(header.as_slice()) {
            let detail = "the header of the packed table is damaged (CRC-32C); restore the file from a copy, or pack the \
                          table again";
            let error = IoError::new(ErrorKind::Corrupt, "read", detail).at_offset(0);
            return Err(Error::Io(error.at_path(file.file().path())));
        }
        let hot_rows = match (self.hot, hot) {
            (Some((count, checksum)), Some((offset, _))) => {
                Some(HotRows::read(engine, file, HotRowList { offset, count, checksum }, self.rows)?)
            }
            _ => None,
        };
        let checksums = checksums.map(|place| ChecksumList::read(engine, file, place)).transpose()?;
        let range = RowRange { file: 0, offset, rows: self.rows };
        Table::packed(PackedTable { range, id: self.id, layout: self.layout, hot: hot_rows, checksums })
    }
}
