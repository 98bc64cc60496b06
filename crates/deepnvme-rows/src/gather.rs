//! Gathers into memory of the host or of a GPU.

use deepnvme_io::mem::{Device, RegionMut};

use crate::error::Result;
use crate::gpu_gather::GpuGather;
use crate::host_gather::Gather;
use crate::row_writer::Conversion;
use crate::store::RowStore;

impl RowStore {
    /// Copies rows into `target`, one behind the other, in the order of `rows`. Repeated rows are read once.
    ///
    /// `should_stop` is asked from time to time while this waits; on true, it returns `Interrupted`.
    ///
    /// # Errors
    /// `NoSuchRow` for the first number that is no row. `Invalid` if the memory has another size. `Changed` if a file
    /// was replaced or written to. `Io` if a read fails. `Closed` after [`close`](Self::close), and in a forked child.
    /// After an error, the target's bytes are undefined.
    pub fn gather(
        &self,
        rows: &[u64],
        target: &RegionMut,
        conversion: Option<Conversion>,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let rows = self.places(rows.into())?;
        let mut begun = self.begin(&rows, target, conversion)?;
        let finished = self.finish(&mut begun, &rows, target, should_stop);
        begun.abandon(self);
        finished
    }

    /// Begins a gather of rows by their places: its first reads are in flight.
    pub(crate) fn begin(
        &self,
        rows: &[u64],
        target: &RegionMut,
        conversion: Option<Conversion>,
    ) -> Result<BegunGather> {
        match target.device() {
            Device::Host => self.begin_on_host(rows, target, conversion).map(BegunGather::Host),
            Device::Cuda { .. } => Ok(BegunGather::Gpu(Box::new(GpuGather::begin(self, rows, target, conversion)?))),
        }
    }

    /// Ends a gather that [`begin`](Self::begin) began with these rows and this target. After `Interrupted`, it can be
    /// called again.
    pub(crate) fn finish(
        &self,
        begun: &mut BegunGather,
        rows: &[u64],
        target: &RegionMut,
        should_stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        match begun {
            BegunGather::Host(gather) => self.finish_on_host(gather, rows.len(), target, should_stop),
            BegunGather::Gpu(gather) => gather.run(self, rows, target, should_stop),
        }
    }
}

/// A gather that has begun.
#[derive(Debug)]
pub(crate) enum BegunGather {
    Host(Gather),
    Gpu(Box<GpuGather>),
}

impl BegunGather {
    /// Ends the reads of a gather that is not finished.
    pub(crate) fn abandon(&mut self, store: &RowStore) {
        match self {
            Self::Host(gather) => gather.abandon(store),
            Self::Gpu(gather) => gather.abandon(store),
        }
    }
}
