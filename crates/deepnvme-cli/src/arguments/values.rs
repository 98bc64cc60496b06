//! Values that several options take.

use clap::ValueEnum;
use deepnvme_io::{BackendChoice, DirectMode, Durability};
use deepnvme_perf::measure;

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl From<Direction> for measure::Direction {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Read => Self::Read,
            Direction::Write => Self::Write,
        }
    }
}

/// What kind of memory the bytes come from or go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Memory {
    /// Page-locked and aligned, as of `deepnvme.pinned_empty`.
    Pinned,
    /// As of `torch.empty`: aligned to 64 bytes, in ordinary pages.
    Plain,
}

impl From<Memory> for measure::Memory {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::Pinned => Self::Pinned,
            Memory::Plain => Self::Plain,
        }
    }
}

/// Whether the page cache has the file before a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Cache {
    /// It has nothing of it.
    Cold,
    /// It has all of it.
    Warm,
}

impl From<Cache> for measure::Cache {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::Cold => Self::Cold,
            Cache::Warm => Self::Warm,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Backend {
    /// The first that works
    Auto,
    /// io_uring
    #[value(name = "io_uring", alias = "uring")]
    Uring,
    /// Linux native AIO
    #[value(alias = "libaio")]
    Aio,
    /// preadv and pwritev on threads
    Threads,
}

impl From<Backend> for BackendChoice {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Auto => Self::Auto,
            Backend::Uring => Self::Uring,
            Backend::Aio => Self::Aio,
            Backend::Threads => Self::Threads,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Direct {
    /// Past the page cache, or fail
    Required,
    /// Past the page cache where the file system can
    Preferred,
    /// Through the page cache
    Disabled,
}

impl From<Direct> for DirectMode {
    fn from(direct: Direct) -> Self {
        match direct {
            Direct::Required => Self::Required,
            Direct::Preferred => Self::Preferred,
            Direct::Disabled => Self::Disabled,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Durable {
    /// Do not wait for the disk's word
    None,
    /// Wait until the bytes are on the disk
    Data,
    /// Wait until the bytes and the file's name are on the disk
    Full,
}

impl From<Durable> for Durability {
    fn from(durable: Durable) -> Self {
        match durable {
            Durable::None => Self::None,
            Durable::Data => Self::Data,
            Durable::Full => Self::Full,
        }
    }
}
