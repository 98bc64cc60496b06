//! Gathers into host memory: rows in memory are copied, and the others are read.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::mem::RegionMut;

use crate::cache::Kept;
use crate::error::{Error, Result};
use crate::fetch::{Fetch, Fetched};
use crate::row_writer::{Conversion, RowWriter};
use crate::stats::count;
use crate::store::RowStore;

impl RowStore {
    /// Copies cached rows, and starts to read others as far as buffers are free.
    pub(crate) fn begin_on_host(
        &self,
        rows: &[u64],
        target: &RegionMut,
        conversion: Option<Conversion>,
    ) -> Result<Gather> {
        self.check_open()?;
        let mut writer = RowWriter::new(target, rows.len(), self.table.row_bytes(), conversion, self.scales.as_ref())?;
        count(&self.counters.rows, rows.len());
        let mut misses = Vec::new();
        let put = &mut |position: u32, bytes: &[u8]| writer.put(position as usize, rows[position as usize], bytes);
        self.cache.copy(rows, put, &mut |position| {
            misses.push(Miss { row: rows[position as usize], position });
        });
        count(&self.counters.hits, rows.len() - misses.len());
        misses.sort_unstable();
        let mut gather = Gather::new(misses, conversion);
        match gather.start_some(self, &mut writer) {
            Ok(()) => Ok(gather),
            Err(error) => {
                gather.abandon(self);
                Err(error)
            }
        }
    }

    /// Ends a gather that [`begin_on_host`](Self::begin_on_host) began with this many rows and this target. After
    /// `Interrupted`, it can be called again.
    pub(crate) fn finish_on_host(
        &self,
        gather: &mut Gather,
        rows: usize,
        target: &RegionMut,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut writer = gather.writer(self, rows, target)?;
        while !gather.step(self, &mut writer, should_stop)? {}
        Ok(())
    }
}

/// A row that was not in memory, and the position of the caller that wants it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Miss {
    pub(crate) row: u64,
    pub(crate) position: u32,
}

/// A gather into host memory that has begun.
#[derive(Debug)]
pub(crate) struct Gather {
    pub(crate) conversion: Option<Conversion>,
    /// Ascending.
    misses: Vec<Miss>,
    /// The first miss that nothing was started for.
    next: usize,
    /// Its own fetches, with the misses that each may serve.
    own: VecDeque<(Arc<Fetch>, Range<usize>)>,
    /// Misses that fetches of others serve.
    shared: Vec<(Arc<Fetch>, Miss)>,
    /// Misses to try again: others were reading them when this gather began, or have failed to.
    failed: Vec<Miss>,
}

impl Gather {
    /// Begins a gather of these misses, in ascending order.
    pub(crate) fn new(misses: Vec<Miss>, conversion: Option<Conversion>) -> Self {
        Self { conversion, misses, next: 0, own: VecDeque::new(), shared: Vec::new(), failed: Vec::new() }
    }

    /// Writes rows to the target of this gather.
    pub(crate) fn writer<'a>(&self, store: &'a RowStore, rows: usize, target: &'a RegionMut) -> Result<RowWriter<'a>> {
        RowWriter::new(target, rows, store.table.row_bytes(), self.conversion, store.scales.as_ref())
    }

    /// Starts all reads that there are buffers for, waits for one read, and writes its rows to their positions. Returns
    /// true once all rows are there.
    pub(crate) fn step(
        &mut self,
        store: &RowStore,
        writer: &mut RowWriter<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<bool> {
        if !self.is_finished() && should_stop() {
            return Err(Error::Interrupted);
        }
        self.start_all(store, writer, 0)?;
        // Its own fetches end before it waits for others: no two gathers wait for each other.
        if let Some((fetch, served)) = self.own.front() {
            let fetched = store.complete(fetch, Kept::WhileUsed, should_stop)?;
            serve(&self.misses[served.clone()], &fetched, writer);
            self.own.pop_front();
        } else if let Some((fetch, miss)) = self.shared.pop() {
            let served = self.serve_shared(store, (&fetch, miss), writer, should_stop);
            if served.is_err() {
                self.shared.push((fetch, miss));
            }
            served?;
        } else if self.next < self.misses.len() {
            if should_stop() {
                return Err(Error::Interrupted);
            }
            store.staging.wait(0);
        } else if self.failed.is_empty() {
            return Ok(true);
        } else {
            self.failed.sort_unstable();
            (self.misses, self.next) = (std::mem::take(&mut self.failed), 0);
        }
        Ok(false)
    }

    /// Returns whether the reads of all its misses have started, those apart that it must try again.
    pub(crate) fn has_started_all(&self) -> bool {
        self.next == self.misses.len()
    }

    fn is_finished(&self) -> bool {
        let is_started = self.next == self.misses.len() && self.failed.is_empty();
        is_started && self.own.is_empty() && self.shared.is_empty()
    }

    /// Starts fetches of a gather whose turn has not come. It keeps their buffers until then. So some buffers are
    /// left to gathers that run, and it keeps no fetch of others.
    pub(crate) fn start_some(&mut self, store: &RowStore, writer: &mut RowWriter<'_>) -> Result<()> {
        self.start_all(store, writer, store.buffers_reserved())?;
        self.failed.extend(self.shared.drain(..).map(|(_, miss)| miss));
        Ok(())
    }

    /// Starts as many fetches as there are free buffers, and leaves `rest` of these.
    fn start_all(&mut self, store: &RowStore, writer: &mut RowWriter<'_>, rest: usize) -> Result<()> {
        while self.next < self.misses.len()
            && let Some(buffer) = store.take_buffer(rest)?
        {
            let misses = &self.misses[self.next..];
            let shared = &mut self.shared;
            let batch = store.start(
                misses.iter().map(|miss| miss.row),
                buffer,
                true,
                &mut |index, bytes| writer.put(misses[index].position as usize, misses[index].row, bytes),
                &mut |index, fetch| {
                    fetch.prioritise();
                    shared.push((fetch, misses[index]));
                },
            )?;
            if let Some(fetch) = batch.fetch {
                self.own.push_back((fetch, self.next..self.next + batch.taken));
            }
            self.next += batch.taken;
        }
        Ok(())
    }

    fn serve_shared(
        &mut self,
        store: &RowStore,
        (fetch, miss): (&Arc<Fetch>, Miss),
        writer: &mut RowWriter<'_>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        match store.complete(fetch, Kept::WhileUsed, should_stop) {
            Ok(fetched) => match fetched.get(miss.row) {
                Some(bytes) => writer.put(miss.position as usize, miss.row, bytes),
                None => self.failed.push(miss),
            },
            Err(Error::Interrupted) if should_stop() => return Err(Error::Interrupted),
            // The other caller gets this error. This one tries for itself.
            Err(_) => self.failed.push(miss),
        }
        count(&store.counters.rows_shared, 1);
        Ok(())
    }

    /// Ends the fetches of a gather that is not finished.
    pub(crate) fn abandon(&mut self, store: &RowStore) {
        self.own.iter().for_each(|(fetch, _)| fetch.cancel());
        self.own.drain(..).for_each(|(fetch, _)| store.abandon(&fetch));
    }
}

/// Writes the rows of a fetch to their positions.
fn serve(misses: &[Miss], fetched: &Fetched, writer: &mut RowWriter<'_>) {
    let mut index = 0;
    for miss in misses {
        while fetched.rows.rows.get(index).is_some_and(|row| *row < miss.row) {
            index += 1;
        }
        if fetched.rows.rows.get(index) == Some(&miss.row) {
            writer.put(miss.position as usize, miss.row, fetched.bytes(index));
        }
    }
}
