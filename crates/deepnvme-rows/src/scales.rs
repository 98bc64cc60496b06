//! Scales of quantised rows: all in memory, or each behind its row.

use std::sync::Arc;

use deepnvme_codec::{Float, Float8, cast};
use deepnvme_file::VersionedFile;
use deepnvme_io::mem::Buffer;
use deepnvme_io::{Engine, Error as IoError, ErrorKind};

use crate::error::{Error, Result};
use crate::staging::POLL_INTERVAL;
use crate::table::Table;

/// The type of a scale.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ScaleType {
    /// A float of 16 or 32 bits.
    Float(Float),
    /// A power of two in one byte.
    E8m0fnu,
}

impl ScaleType {
    fn bytes(self) -> usize {
        match self {
            Self::Float(float) => float.bytes(),
            Self::E8m0fnu => 1,
        }
    }
}

/// The scales of each row: one for each group of columns.
#[derive(Debug)]
pub struct RowScales {
    kind: ScaleType,
    groups: usize,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Those of all rows.
    Memory(Buffer),
    /// Behind the elements of the row, which have this many bytes.
    BehindRow(usize),
}

impl RowScales {
    /// Reads all scales of a table. Each row of `table` has those of one row. Those of a large table take a while: ends
    /// once `should_stop` says so.
    ///
    /// # Errors
    /// `Io` if they cannot be read. `Invalid` if a row ends within a scale. `Interrupted`.
    pub fn read(
        engine: &Arc<Engine>,
        files: &[VersionedFile],
        table: &Table,
        kind: ScaleType,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<Self> {
        if !table.row_bytes().is_multiple_of(kind.bytes()) {
            let detail = format!("{} bytes for each row are no scales of {} bytes", table.row_bytes(), kind.bytes());
            return Err(Error::Invalid(detail));
        }
        let bytes = table.rows().checked_mul(table.row_bytes() as u64).and_then(|bytes| usize::try_from(bytes).ok());
        let too_large = || Error::Invalid("the scales are larger than any memory".into());
        let memory = Buffer::zeroed(bytes.ok_or_else(too_large)?);
        let mut rest = memory.map_err(|error| Error::Io(IoError::from_io("allocate", &error)))?.into_region();
        let whole = rest.region();
        let mut items = Vec::with_capacity(table.ranges().len());
        for range in table.ranges() {
            let file = files.get(range.file).ok_or_else(|| Error::Invalid("the scales are in no file".into()))?;
            let (target, after) = rest.split_at((range.rows * table.row_bytes() as u64) as usize);
            items.push(deepnvme_io::ReadItem { file: Arc::clone(file.file()), offset: range.offset, target });
            rest = after;
        }
        let transfer = engine.read_batch(items)?;
        while !transfer.wait_timeout(POLL_INTERVAL) {
            transfer.check_process()?;
            if should_stop() {
                transfer.cancel();
                return Err(Error::Interrupted);
            }
        }
        let (parts, result) = transfer.wait();
        result?;
        drop(whole);
        let joined = parts.and_then(|parts| crate::fetch::join(parts, vec![rest]));
        let lost = || IoError::new(ErrorKind::Io, "read", "the engine did not return the memory; report this as a bug");
        Ok(Self { kind, groups: table.row_bytes() / kind.bytes(), place: Place::Memory(joined.ok_or_else(lost)?) })
    }

    /// Describes the scales of a packed table, whose rows have this many bytes without them.
    #[must_use]
    pub fn behind_rows(kind: ScaleType, groups: usize, row_bytes: usize) -> Self {
        Self { kind, groups, place: Place::BehindRow(row_bytes) }
    }

    /// Returns the scales of a row.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Returns the bytes of the scales that are in memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        match &self.place {
            Place::Memory(memory) => memory.len() as u64,
            Place::BehindRow(_) => 0,
        }
    }

    /// Checks that a table of these rows can have these scales.
    pub(crate) fn check(&self, table: &Table) -> Result<()> {
        let bytes = self.groups * self.kind.bytes();
        let fits = match &self.place {
            Place::Memory(memory) => table.rows().checked_mul(bytes as u64) == Some(memory.len() as u64),
            Place::BehindRow(row_bytes) => row_bytes.checked_add(bytes) == Some(table.row_bytes()),
        };
        let rows = table.rows();
        let detail = || format!("{} scales for each row do not fit a table of {rows} rows", self.groups);
        if fits && self.groups > 0 { Ok(()) } else { Err(Error::Invalid(detail())) }
    }

    /// Returns the bytes of the elements of a row, of which `row_bytes` are on disk.
    pub(crate) fn element_bytes(&self, row_bytes: usize) -> usize {
        match &self.place {
            Place::Memory(_) => row_bytes,
            Place::BehindRow(bytes) => *bytes,
        }
    }

    /// Copies the scales of a row, of which `record` is on disk.
    pub(crate) fn copy(&self, row: u64, record: &[u8], factors: &mut [f32]) {
        let row_bytes = self.groups * self.kind.bytes();
        let bytes = match &self.place {
            Place::Memory(memory) => &memory.as_slice()[row as usize * row_bytes..][..row_bytes],
            Place::BehindRow(start) => &record[*start..],
        };
        match self.kind {
            ScaleType::E8m0fnu => {
                for (factor, code) in factors.iter_mut().zip(bytes) {
                    *factor = Float8::E8m0fnu.values()[usize::from(*code)];
                }
            }
            ScaleType::Float(float) => {
                for (factor, scale) in factors.iter_mut().zip(bytes.chunks(float.bytes())) {
                    let mut wide = [0; 4];
                    let done = cast::convert(float, Float::F32, scale, &mut wide);
                    debug_assert!(done.is_ok(), "{done:?}");
                    *factor = f32::from_le_bytes(wide);
                }
            }
        }
    }
}
