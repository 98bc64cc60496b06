//! A table on disk, with some of its rows in memory.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use deepnvme_file::VersionedFile;
use deepnvme_io::mem::{Buffer, RegionMut};
use deepnvme_io::{Engine, Error as IoError, ReadItem};

use crate::blocks::BlockLayout;
use crate::cache::{CachePlan, Claim, Kept, RowCache};
use crate::error::{Error, Result};
use crate::fetch::{BlockChecks, Fetch, Fetched, FetchedRows, Reading, check_unchanged, join};
use crate::hot_rows::HotRows;
use crate::pinned_pieces::PinnedPieces;
use crate::read_plan::{FileSizes, ReadPlan};
use crate::room::check_room;
use crate::scales::RowScales;
use crate::staging::Staging;
use crate::stats::{Counters, RowStats, count};
use crate::sync::Instant;
use crate::table::Table;

/// Largest size of a buffer for reads, unless a row needs more.
const BUFFER_BYTES_MAX: u64 = 1 << 20;
/// Most buffers of a table. Together they keep deep queues full.
const BUFFERS_MAX: u64 = 8;
/// Buffers take at most this fraction of the memory, unless that is too little for one.
const BUFFERS_FRACTION: u64 = 16;
/// Bytes that a call takes for each of its rows, at most.
const CALL_ROW_BYTES: u64 = 64;
const MEMORY_REMEDY: &str = "lower `memory`, or raise the limit of the process (`ulimit -v`)";
/// A prefetch reads this many rows at a time while gathers are made: a gather waits for those that the disk has begun. It
/// doubles the number while none is made.
const AHEAD_ROWS_MIN: usize = 16;
/// How often rows are read again that were evicted before they could be kept.
const KEEP_TRIES: usize = 10;
/// Buffers that are left to gathers for which a thread waits.
const BUFFERS_RESERVED: usize = 2;

/// Reads rows of a [`Table`] in any order. Threads may share it.
///
/// Rows that are used often stay in memory. The memory bounds all: cached rows with their index, and the buffers of
/// reads in flight.
#[derive(Debug)]
pub struct RowStore {
    pub(crate) engine: Arc<Engine>,
    pub(crate) files: Arc<[VersionedFile]>,
    sizes: FileSizes,
    pub(crate) table: Table,
    pub(crate) cache: RowCache<Fetch>,
    pub(crate) staging: Arc<Staging>,
    buffers: usize,
    pub(crate) pinned: PinnedPieces,
    pub(crate) scales: Option<RowScales>,
    is_closed: AtomicBool,
    pub(crate) counters: Arc<Counters>,
}

impl RowStore {
    /// Opens a table. `memory` bounds its memory, in bytes.
    ///
    /// # Errors
    /// `Memory` if it is too little for one row. `Invalid` if a range names a file that is not given, or ends beyond the
    /// end of its file. `Io` if memory cannot be allocated, or a file's size cannot be read.
    pub fn new(
        engine: Arc<Engine>,
        files: Vec<VersionedFile>,
        table: Table,
        scales: Option<RowScales>,
        memory: u64,
    ) -> Result<Self> {
        let bytes = files.iter().map(|file| file.file().len()).collect::<Result<Vec<_>, IoError>>()?;
        check_ranges(&table, &files, &bytes)?;
        let row_bytes = table.row_bytes();
        let alignment = table.alignment();
        let bytes_min = ReadPlan::bytes_min(row_bytes, alignment);
        let scale_bytes = scales.as_ref().map_or(0, RowScales::memory_bytes);
        let resident_bytes = scale_bytes + table.memory_bytes();
        if let Some(scales) = &scales {
            scales.check(&table)?;
        }
        let Some(memory) = memory.checked_sub(resident_bytes).filter(|rest| *rest >= bytes_min) else {
            return Err(Error::Memory { memory, row_bytes, bytes_min: bytes_min + resident_bytes });
        };
        let for_buffers = (memory / BUFFERS_FRACTION).max(bytes_min);
        let buffer_bytes =
            (for_buffers / BUFFERS_MAX / alignment * alignment).clamp(bytes_min, BUFFER_BYTES_MAX.max(bytes_min));
        let buffers = (for_buffers / buffer_bytes).clamp(1, BUFFERS_MAX);
        let plan = CachePlan::new(memory - buffers * buffer_bytes, table.rows(), row_bytes);
        let allocation = |error: std::io::Error| Error::Io(IoError::from_io("allocate", &error).because(MEMORY_REMEDY));
        // Its tables are small allocations, which abort the process if they fail.
        check_room(plan.bytes() * 2, MEMORY_REMEDY)?;
        Ok(Self {
            engine,
            files: files.into(),
            sizes: FileSizes { alignment, bytes },
            cache: RowCache::new(plan).map_err(allocation)?,
            staging: Arc::new(Staging::new(buffer_bytes as usize, buffers as usize, Buffer::zeroed)),
            buffers: buffers as usize,
            pinned: PinnedPieces::new(row_bytes),
            table,
            scales,
            is_closed: AtomicBool::new(false),
            counters: Arc::default(),
        })
    }

    /// Returns the least memory of a packed table with this layout, this many rows, and copies of this many hot rows,
    /// in bytes.
    #[must_use]
    pub fn packed_bytes_min(layout: &BlockLayout, rows: u64, hot_rows: u64) -> u64 {
        let hot_bytes = if hot_rows == 0 { 0 } else { HotRows::bytes_of(hot_rows) };
        let list_bytes = layout.list_bytes(rows.saturating_add(hot_rows));
        let buffer_bytes = ReadPlan::bytes_min(layout.row_bytes, layout.block_bytes as u64);
        buffer_bytes.saturating_add(hot_bytes).saturating_add(list_bytes)
    }

    /// Returns the table.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the bytes that this uses at most.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let buffers = (self.buffers * self.staging.buffer_bytes()) as u64;
        let resident = self.scales.as_ref().map_or(0, RowScales::memory_bytes);
        self.cache.plan().bytes() + buffers + resident + self.table.memory_bytes()
    }

    /// Returns how many rows fit into the cache.
    #[must_use]
    pub fn cached_rows_max(&self) -> u64 {
        (self.cache.plan().shards * self.cache.plan().slots) as u64
    }

    /// Returns the counters so far.
    #[must_use]
    pub fn stats(&self) -> RowStats {
        self.counters.values()
    }

    /// Returns the counters, which can outlive this.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Refuses further calls. Those that have begun go on.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Refuses calls of a process other than the one that opened this, where nothing is read.
    pub(crate) fn check_process(&self) -> Result<()> {
        Ok(self.engine.check_process()?)
    }

    /// Refuses calls of a closed store, and those of another process.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.is_closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// Returns the places of these rows. Refuses calls that cannot succeed.
    pub(crate) fn places<'a>(&self, rows: Cow<'a, [u64]>) -> Result<Cow<'a, [u64]>> {
        self.check_call(&rows)?;
        Ok(match self.table.hot() {
            None => rows,
            Some(hot) => {
                let mut rows = rows.into_owned();
                rows.iter_mut().for_each(|row| *row = hot.place(*row));
                rows.into()
            }
        })
    }

    fn check_call(&self, rows: &[u64]) -> Result<()> {
        self.check_open()?;
        // The misses of a gather, and the rows of its reads.
        check_room(rows.len() as u64 * CALL_ROW_BYTES, "gather fewer rows at a time")?;
        let count = self.table.rows();
        match rows.iter().position(|row| *row >= count) {
            Some(position) => Err(Error::NoSuchRow { id: rows[position].into(), position, rows: count }),
            None if u32::try_from(rows.len()).is_err() => {
                Err(Error::Invalid(format!("{} rows in one gather are too many; gather them in parts", rows.len())))
            }
            None => Ok(()),
        }
    }

    /// Reads rows into the cache with low priority, so that a later gather finds them. Rows beyond the room for
    /// prefetches, and those whose turn comes after `deadline`, are left out. Returns when the others are there.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub fn prefetch(&self, rows: &[u64], deadline: Option<Instant>, should_stop: &dyn Fn() -> bool) -> Result<()> {
        let rows = self.places(rows.into())?;
        self.prefetch_places(&rows, deadline, should_stop)
    }

    /// Prefetches rows by their places.
    pub(crate) fn prefetch_places(
        &self,
        rows: &[u64],
        deadline: Option<Instant>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        self.check_open()?;
        let mut wanted: Vec<u64> = rows.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|row| !self.cache.contains(*row));
        self.leave_out(&mut wanted, self.prefetched_rows_max());
        let left_out = self.read_to_cache(&wanted, deadline, false, &mut |_| {}, should_stop)?;
        count(&self.counters.rows_not_prefetched, left_out);
        count(&self.counters.rows_prefetched, wanted.len() - left_out);
        Ok(())
    }

    /// Returns how many rows prefetches may have in flight. More would evict each other.
    pub(crate) fn prefetched_rows_max(&self) -> u64 {
        self.cached_rows_max() / 2
    }

    /// Leaves out the rows of a prefetch for which there is no room.
    pub(crate) fn leave_out(&self, rows: &mut Vec<u64>, room: u64) {
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        count(&self.counters.rows_not_prefetched, rows.len().saturating_sub(room));
        rows.truncate(room);
    }

    /// Reads rows that are not in memory, and never evicts any of these rows as long as the table is open.
    ///
    /// # Errors
    /// `Invalid` if these and those kept before are more than half of the rows that memory has room for. As
    /// [`gather`](Self::gather) otherwise; some of the rows are kept then.
    pub fn keep(&self, rows: &[u64], should_stop: &dyn Fn() -> bool) -> Result<()> {
        let mut rest = self.places(rows.into())?.into_owned();
        rest.sort_unstable();
        rest.dedup();
        for _ in 0..KEEP_TRIES {
            let room = (self.cached_rows_max() / 2).saturating_sub(self.cache.kept());
            let others = rest.iter().filter(|row| !self.cache.is_kept(**row)).count() as u64;
            if others > room {
                let rows = self.table.rows();
                let remedy = if self.cached_rows_max() < rows && self.cache.kept() + others <= rows / 2 {
                    "use more memory"
                } else {
                    "at most half of the table can be kept"
                };
                let more = if others == 1 { "row" } else { "rows" };
                let detail = format!("{others} more {more} cannot be kept: memory has room for {room}; {remedy}");
                return Err(Error::Invalid(detail));
            }
            rest.retain(|row| !self.cache.keep(*row));
            let mut keep_all = |rows: &[u64]| rows.iter().for_each(|row| _ = self.cache.keep(*row));
            self.read_to_cache(&rest, None, true, &mut keep_all, should_stop)?;
            rest.retain(|row| !self.cache.is_kept(*row));
            if rest.is_empty() {
                return Ok(());
            }
        }
        let verb = if rest.len() == 1 { "row was" } else { "rows were" };
        Err(Error::Invalid(format!("{} {verb} evicted before they could be kept; use more memory", rest.len())))
    }

    /// Reads rows, in ascending order, into the cache, and calls `read` with each batch. Returns how many were left out
    /// because of the deadline.
    fn read_to_cache(
        &self,
        rows: &[u64],
        deadline: Option<Instant>,
        is_urgent: bool,
        read: &mut dyn FnMut(&[u64]),
        should_stop: &dyn Fn() -> bool,
    ) -> Result<usize> {
        let mut rest = rows;
        let mut rows_max = if is_urgent { rows.len() } else { AHEAD_ROWS_MIN };
        while !rest.is_empty() {
            if self.is_closed.load(Ordering::Acquire) {
                return Err(Error::Closed);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(rest.len());
            }
            let reserved = BUFFERS_RESERVED.min(self.buffers - 1);
            let Some(buffer) = self.take_buffer(reserved)? else {
                if should_stop() {
                    return Err(Error::Interrupted);
                }
                self.staging.wait(reserved);
                continue;
            };
            let gathered = self.counters.rows.load(Ordering::Relaxed);
            let next = &rest[..rest.len().min(rows_max)];
            let batch = self.start(next.iter().copied(), buffer, is_urgent, &mut |_, _| {}, &mut |_, _| {})?;
            if let Some(fetch) = batch.fetch {
                let completed = self.complete(&fetch, Kept::UntilUsed, should_stop);
                if matches!(completed, Err(Error::Interrupted)) {
                    self.abandon(&fetch);
                }
                completed?;
            }
            read(&rest[..batch.taken]);
            rest = &rest[batch.taken..];
            let is_alone = self.counters.rows.load(Ordering::Relaxed) == gathered;
            rows_max = if is_urgent || is_alone { rows_max.saturating_mul(2) } else { AHEAD_ROWS_MIN };
        }
        Ok(0)
    }

    /// Checks that a file is the one that was opened.
    pub(crate) fn check_unchanged(&self, file: usize) -> Result<()> {
        check_unchanged(&self.files, &[file])
    }

    /// Returns how many buffers only gathers take that a thread runs.
    pub(crate) fn buffers_reserved(&self) -> usize {
        BUFFERS_RESERVED.min(self.buffers)
    }

    pub(crate) fn take_buffer(&self, rest: usize) -> Result<Option<Buffer>> {
        self.staging.try_take(rest).map_err(|error| Error::Io(IoError::from_io("allocate", &error)))
    }

    /// Starts to read the first of these rows, as many as the buffer takes. Rows may be repeated. `found` gets those that
    /// are cached by now, by index, and `shared` those that another fetch reads.
    pub(crate) fn start(
        &self,
        rows: impl Iterator<Item = u64>,
        buffer: Buffer,
        is_urgent: bool,
        found: &mut dyn FnMut(usize, &[u8]),
        shared: &mut dyn FnMut(usize, Arc<Fetch>),
    ) -> Result<Batch> {
        let fetch = Fetch::new();
        let mut plan = ReadPlan::new(&self.table, &self.sizes, buffer.len());
        let mut claimed = FetchedRows::default();
        let mut taken = 0;
        for (index, row) in rows.enumerate() {
            if claimed.rows.last() != Some(&row) {
                if !plan.fits(row) {
                    break;
                }
                match self.cache.claim(row, &fetch, |bytes| found(index, bytes)) {
                    Claim::Cached => {}
                    Claim::InFlight(other) => shared(index, other),
                    Claim::Claimed => {
                        claimed.places.push(plan.add(row));
                        claimed.rows.push(row);
                    }
                }
            }
            taken = index + 1;
        }
        if claimed.rows.is_empty() {
            self.staging.put_back(Some(buffer));
            return Ok(Batch { fetch: None, taken });
        }
        let count_of_rows = claimed.rows.len();
        count(&self.counters.rows_read, count_of_rows);
        count(&self.counters.reads, plan.runs().len());
        count(&self.counters.rows_joined, count_of_rows - plan.runs().len().min(count_of_rows));
        count(&self.counters.bytes_read, plan.runs().iter().map(|run| run.len()).sum());
        let (items, rest) = self.items(&plan, buffer);
        match self.engine.try_read_batch(items, is_urgent) {
            Ok(transfer) => {
                let (files, staging) = (Arc::clone(&self.files), Arc::clone(&self.staging));
                let rows = Arc::new(claimed);
                let checks = self.table.checker().map(|checker| BlockChecks {
                    checker,
                    start: self.table.ranges()[0].offset,
                    rows: self.table.rows(),
                    runs: plan.runs().to_vec(),
                });
                fetch.start(Reading { transfer, files, used_files: plan.files(), checks, rest, rows, staging });
                Ok(Batch { fetch: Some(fetch), taken })
            }
            Err(refused) => {
                let error = Error::Io(refused.error);
                self.staging.put_back(refused.memory.and_then(|parts| join(parts, rest)));
                fetch.fail(error.clone());
                claimed.rows.iter().for_each(|row| self.cache.end_fetch(*row, &fetch, None, Kept::WhileUsed));
                Err(error)
            }
        }
    }

    /// The reads of a plan, and the parts of the buffer between them.
    fn items(&self, plan: &ReadPlan<'_>, buffer: Buffer) -> (Vec<ReadItem>, Vec<RegionMut>) {
        let (mut memory, mut at) = (buffer.into_region(), 0);
        let (mut items, mut rest) = (Vec::with_capacity(plan.runs().len()), Vec::new());
        for run in plan.runs() {
            if run.start > at {
                let (gap, after) = memory.split_at(run.start - at);
                rest.push(gap);
                memory = after;
            }
            let (target, after) = memory.split_at(run.len());
            memory = after;
            at = run.start + run.len();
            let file = Arc::clone(self.files[run.file].file());
            items.push(ReadItem { file, offset: run.range.start, target });
        }
        rest.push(memory);
        (items, rest)
    }

    /// Waits for a fetch, and caches its rows if no other thread has done so.
    pub(crate) fn complete(
        &self,
        fetch: &Arc<Fetch>,
        kept: Kept,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<Arc<Fetched>> {
        fetch.wait(self.table.row_bytes(), should_stop, |result, rows| {
            for (index, row) in rows.iter().enumerate() {
                let bytes = result.as_ref().ok().map(|fetched| fetched.bytes(index));
                self.cache.end_fetch(*row, fetch, bytes, kept);
            }
        })
    }

    /// Ends a fetch that its caller no longer wants. The operations that have begun end soon.
    pub(crate) fn abandon(&self, fetch: &Arc<Fetch>) {
        fetch.cancel();
        drop(self.complete(fetch, Kept::WhileUsed, &|| false));
    }
}

/// Rows whose reads were started.
pub(crate) struct Batch {
    /// `None` if none was needed.
    pub(crate) fetch: Option<Arc<Fetch>>,
    /// How many of the rows are taken care of.
    pub(crate) taken: usize,
}

/// Checks that each range lies in its file.
fn check_ranges(table: &Table, files: &[VersionedFile], bytes: &[u64]) -> Result<()> {
    for range in table.ranges() {
        let Some(file) = files.get(range.file) else {
            return Err(Error::Invalid(format!(
                "rows are in file {}, and {} files are given",
                range.file,
                files.len()
            )));
        };
        let end = table.end_of(range);
        if end > bytes[range.file] {
            let error = IoError::end_of_file("open", bytes[range.file], range.offset, end - range.offset);
            return Err(error.at_path(file.file().path()).into());
        }
    }
    Ok(())
}
