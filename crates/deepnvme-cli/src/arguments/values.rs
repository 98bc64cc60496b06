//! Values that options share.

use clap::ValueEnum;
use deepnvme_io::{BackendChoice, DirectMode, SubmitMode};
use deepnvme_perf::measure;

/// The direction of the transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Direction {
    /// From disk to memory
    Read,
    /// From memory to disk
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

/// The kind of host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Memory {
    /// Pinned and aligned, like deepnvme.pinned_empty
    Pinned,
    /// Ordinary pages, aligned to 64 bytes, like torch.empty
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

/// The state of the page cache before a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Cache {
    /// No page of the file is cached
    Cold,
    /// The whole file is cached
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
    /// Bypass the page cache, except for the ragged edges of writes, or fail
    Required,
    /// Bypass the page cache if the file system supports it, except for reads of cached bytes
    Preferred,
    /// Use the page cache
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

/// How ops reach the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Submit {
    /// Several per system call
    Batch,
    /// One per system call
    Single,
}

impl From<Submit> for SubmitMode {
    fn from(submit: Submit) -> Self {
        match submit {
            Submit::Batch => Self::Batch,
            Submit::Single => Self::Single,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Durability {
    /// Do not sync
    None,
    /// Sync the data
    Data,
    /// Sync the data and the folder
    Full,
}

impl From<Durability> for deepnvme_io::Durability {
    fn from(durability: Durability) -> Self {
        match durability {
            Durability::None => Self::None,
            Durability::Data => Self::Data,
            Durability::Full => Self::Full,
        }
    }
}
