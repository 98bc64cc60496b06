//! The description of a packed table in the metadata of its file.

use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::Engine;
use serde::Deserialize;

use crate::blocks::BlockLayout;
use crate::error::{Error, Result};
use crate::hot_rows::{HotRowList, HotRows, NUMBER_BYTES};
use crate::table::{RowRange, Table};

/// The version of the format.
pub const PACKED_VERSION: u32 = 1;

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
    row: Row,
    hot: Option<Hot>,
}

#[derive(Debug, Deserialize)]
struct Row {
    shape: Vec<u64>,
    dtype: String,
    scales: Option<Scales>,
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
    /// The blocks.
    pub layout: BlockLayout,
    /// The number of hot rows, and the CRC-32C of their list.
    pub hot: Option<(u64, u32)>,
}

impl PackedDescription {
    /// Parses a description of tensors that have these bytes.
    ///
    /// # Errors
    /// `Damaged` if the text is no description of these tensors. `Unsupported` for a later version.
    pub fn parse(text: &str, rows_bytes: u64, hot_bytes: Option<u64>) -> Result<Self> {
        let Version { version } = serde_json::from_str(text).map_err(|error| Error::Damaged(error.to_string()))?;
        if version > u64::from(PACKED_VERSION) {
            return Err(Error::Unsupported(format!(
                "version {version} of packed tables needs a later deepnvme; this one reads {PACKED_VERSION}"
            )));
        }
        let described: Description = serde_json::from_str(text).map_err(|error| Error::Damaged(error.to_string()))?;
        let Description { rows, row_bytes, rows_per_block, block_bytes, row, hot } = described;
        if version == 0 || row.bytes() != Some(row_bytes as u64) {
            let detail = format!("rows of {row_bytes} bytes are not {:?} of {}", row.shape, row.dtype);
            return Err(Error::Damaged(detail));
        }
        let hot = match (hot, hot_bytes) {
            (None, None) => None,
            (Some(Hot { rows: count, crc32c }), Some(bytes))
                if count <= rows && count.checked_mul(NUMBER_BYTES as u64) == Some(bytes) =>
            {
                Some((count, crc32c))
            }
            _ => return Err(Error::Damaged("its hot rows are not those of the file".into())),
        };
        let layout = BlockLayout { row_bytes, rows_per_block, block_bytes };
        let copies = hot.map_or(0, |(count, _)| count);
        let blocks = rows.checked_add(copies).filter(|_| layout.is_valid()).map(|places| layout.blocks(places));
        if blocks.and_then(|blocks| blocks.checked_mul(block_bytes as u64)) != Some(rows_bytes) {
            return Err(Error::Damaged(format!("{rows_bytes} bytes are not its blocks")));
        }
        let scales = row.scales.map(|Scales { count, dtype }| (count, dtype));
        Ok(Self { rows, row_shape: row.shape, dtype: row.dtype, scales, layout, hot })
    }
}

impl Table {
    /// Returns the packed table that a file describes. Its tensors are `rows` and `hot`, each as its offset and its
    /// bytes.
    ///
    /// # Errors
    /// As [`PackedDescription::parse`] and [`HotRows::read`].
    pub fn described(
        text: &str,
        rows: (u64, u64),
        hot: Option<(u64, u64)>,
        file: &VersionedFile,
        engine: &Arc<Engine>,
    ) -> Result<Self> {
        let described = PackedDescription::parse(text, rows.1, hot.map(|(_, bytes)| bytes))?;
        let range = RowRange { file: 0, offset: rows.0, rows: described.rows };
        let table = Self::packed(range, described.layout)?;
        match (described.hot, hot) {
            (Some((count, checksum)), Some((offset, _))) => {
                let list = HotRowList { offset, count, checksum };
                table.with_hot_rows(HotRows::read(engine, file, list, described.rows)?)
            }
            _ => Ok(table),
        }
    }
}
