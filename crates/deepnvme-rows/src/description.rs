//! The description of a packed table in the metadata of its file, as far as its bytes depend on it.

use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::Engine;
use serde::Deserialize;

use crate::blocks::BlockLayout;
use crate::error::{Error, Result};
use crate::hot_rows::{HotRowList, HotRows, NUMBER_BYTES};
use crate::pack::PACKED_VERSION;
use crate::table::{RowRange, Table};

/// A description.
#[derive(Debug, Deserialize)]
struct Description {
    version: u64,
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
        match &self.scales {
            Some(Scales { count, dtype }) => bytes.checked_add(count.checked_mul(dtype_bytes(dtype)?)?),
            None => Some(bytes),
        }
    }
}

/// Returns the bytes of an element, by torch's name of its type. `None` if there is none of that name.
fn dtype_bytes(name: &str) -> Option<u64> {
    Some(match name {
        "bool" | "uint8" | "int8" => 1,
        "float8_e4m3fn" | "float8_e5m2" | "float8_e4m3fnuz" | "float8_e5m2fnuz" | "float8_e8m0fnu" => 1,
        "uint16" | "int16" | "float16" | "bfloat16" => 2,
        "uint32" | "int32" | "float32" | "complex32" => 4,
        "uint64" | "int64" | "float64" | "complex64" => 8,
        "complex128" => 16,
        _ => return None,
    })
}

#[derive(Debug, Deserialize)]
struct Hot {
    rows: u64,
    crc32c: u32,
}

impl Table {
    /// Returns the packed table that a file describes. Its tensors are `rows` and `hot`, each as its offset and its
    /// bytes.
    ///
    /// # Errors
    /// `Invalid` if the text is no description of these tensors. As [`HotRows::read`].
    pub fn described(
        text: &str,
        rows: (u64, u64),
        hot: Option<(u64, u64)>,
        file: &VersionedFile,
        engine: &Arc<Engine>,
    ) -> Result<Self> {
        let damaged = |why: String| Error::Invalid(format!("the description of the packed table is damaged ({why})"));
        let described: Description = serde_json::from_str(text).map_err(|error| damaged(error.to_string()))?;
        let Description { version, rows: count, row_bytes, rows_per_block, block_bytes, row, hot: copies } = described;
        if version > u64::from(PACKED_VERSION) {
            let detail = format!("version {version} of packed tables needs a later deepnvme; this one reads");
            return Err(Error::Invalid(format!("{detail} {PACKED_VERSION}")));
        }
        if version == 0 || row.bytes() != Some(row_bytes as u64) {
            return Err(damaged(format!("rows of {row_bytes} bytes are not {:?} of {}", row.shape, row.dtype)));
        }
        let layout = BlockLayout { row_bytes, rows_per_block, block_bytes };
        let table = Self::packed(RowRange { file: 0, offset: rows.0, rows: count }, layout)?;
        let table = match (copies, hot) {
            (None, None) => table,
            (Some(Hot { rows, crc32c }), Some((offset, bytes)))
                if rows.checked_mul(NUMBER_BYTES as u64) == Some(bytes) =>
            {
                let list = HotRowList { offset, count: rows, checksum: crc32c };
                table.with_hot_rows(HotRows::read(engine, file, list, count)?)?
            }
            _ => return Err(damaged("its hot rows are not those of the file".into())),
        };
        if layout.blocks(table.places()) * block_bytes as u64 != rows.1 {
            return Err(damaged(format!("{} bytes are not its blocks", rows.1)));
        }
        Ok(table)
    }
}
