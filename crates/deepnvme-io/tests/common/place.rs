//! The storage of a program's file: one file, or stripes over several.

use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_io::{
    Access, DirectMode, Durability, Engine, OpenOptions, StripeLayout, TensorFile, WriteMode, WriteOptions,
};
use deepnvme_testkit::data::{bytes_of, region_at, region_holding, temp_dir};
use tempfile::TempDir;

/// A kind of storage.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// One file.
    File,
    /// Several files, striped.
    Stripes { parts: usize, stripe_bytes: u64 },
}

/// A file of this kind.
pub(crate) struct Placed {
    parts: Vec<PathBuf>,
    layout: StripeLayout,
    _dir: TempDir,
}

impl Place {
    /// Creates a file with this content.
    pub(crate) fn make(self, engine: &Engine, content: &[u8]) -> Placed {
        let dir = temp_dir();
        let layout = match self {
            Self::File => StripeLayout::SINGLE,
            Self::Stripes { parts, stripe_bytes } => StripeLayout { parts: parts as u64, stripe_bytes },
        };
        let parts = (0..layout.parts).map(|index| dir.path().join(format!("part{index}.bin"))).collect();
        let placed = Placed { parts, layout, _dir: dir };
        match &placed.parts[..] {
            [path] => std::fs::write(path, content).expect("a file in the test folder"),
            _ => {
                let options = WriteOptions { mode: WriteMode::WholeFile, durability: Durability::None };
                let file = placed.open(DirectMode::Preferred);
                let source = region_holding(0, content).region();
                engine.write(&file, 0, source, options).expect("accepted").wait().1.expect("written");
            }
        }
        placed
    }
}

impl Placed {
    /// Opens it for both directions.
    pub(crate) fn open(&self, direct: DirectMode) -> Arc<TensorFile> {
        let options = OpenOptions { access: Access::ReadWrite, create: true, direct };
        TensorFile::open_parts(&self.parts[0], &self.parts, self.layout, options).expect("the test file")
    }

    /// Returns its content.
    pub(crate) fn bytes(&self, engine: &Engine) -> Vec<u8> {
        if let [path] = &self.parts[..] {
            return std::fs::read(path).expect("the test file");
        }
        let file = self.open(DirectMode::Disabled);
        let len = file.len().expect("a length") as usize;
        let (returned, result) = engine.read(&file, 0, region_at(0, len)).expect("accepted").wait();
        result.expect("the whole set is readable");
        bytes_of(&returned.expect("memory is returned").region())
    }
}
