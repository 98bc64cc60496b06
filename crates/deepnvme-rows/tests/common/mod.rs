//! Tables of random bytes in files, stores of their rows, and gathers into memory.
#![allow(dead_code, reason = "every test uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_file::VersionedFile;
use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::Buffer;
use deepnvme_io::{BackendFactory, Config, Engine};
use deepnvme_rows::{Conversion, Error, RowRange, RowStore, Table};
use deepnvme_testkit::faults::{FaultPlan, Faults};
use tempfile::TempDir;

fn config() -> Config {
    Config { workers: 1, ..Config::default() }
}

pub(crate) fn engine() -> Arc<Engine> {
    Arc::new(Engine::new(config()).unwrap())
}

pub(crate) fn faulty_engine(plan: FaultPlan) -> Arc<Engine> {
    let faults = Faults::new(plan);
    let factory: BackendFactory =
        Arc::new(move |setup| Ok(Box::new(faults.wrap(deepnvme_io::backend::open(BackendKind::Threads, setup)?))));
    Arc::new(Engine::with_backends(config(), factory).unwrap())
}

/// A folder on a file system with direct I/O.
pub(crate) fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A table in files, and its bytes.
pub(crate) struct Model {
    pub(crate) bytes: Vec<u8>,
    pub(crate) row_bytes: usize,
    pub(crate) ranges: Vec<RowRange>,
    pub(crate) paths: Vec<PathBuf>,
    _folder: TempDir,
}

impl Model {
    /// Ranges of these numbers of rows, each in a file of its own behind some other bytes.
    pub(crate) fn new(row_bytes: usize, counts: &[u64], seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut model = Self { bytes: Vec::new(), row_bytes, ranges: Vec::new(), paths: Vec::new(), _folder: folder() };
        for (file, rows) in counts.iter().enumerate() {
            let mut head = vec![0; random.usize(0..9000)];
            random.fill(&mut head);
            let mut bytes = vec![0; *rows as usize * row_bytes];
            random.fill(&mut bytes);
            let path = model._folder.path().join(format!("{file}.bin"));
            fs::write(&path, [&head[..], &bytes[..]].concat()).unwrap();
            model.ranges.push(RowRange { file, offset: head.len() as u64, rows: *rows });
            model.paths.push(path);
            model.bytes.extend(bytes);
        }
        model
    }

    pub(crate) fn rows(&self) -> u64 {
        (self.bytes.len() / self.row_bytes) as u64
    }

    pub(crate) fn open(&self, engine: &Arc<Engine>, memory: u64) -> Result<RowStore, Error> {
        let files = self.paths.iter().map(|path| VersionedFile::open(path).unwrap()).collect();
        RowStore::new(Arc::clone(engine), files, Table::new(self.ranges.clone(), self.row_bytes)?, None, memory)
    }

    pub(crate) fn expected(&self, rows: &[u64]) -> Vec<u8> {
        rows_of(&self.bytes, self.row_bytes, rows)
    }
}

/// Rows of a table that is in memory.
pub(crate) fn rows_of(table: &[u8], row_bytes: usize, rows: &[u64]) -> Vec<u8> {
    let row = |row: &u64| &table[*row as usize * row_bytes..][..row_bytes];
    rows.iter().map(row).collect::<Vec<_>>().concat()
}

pub(crate) fn gather(store: &RowStore, rows: &[u64]) -> Result<Vec<u8>, Error> {
    gather_as(store, rows, None, rows.len() * store.table().row_bytes())
}

pub(crate) fn gather_as(
    store: &RowStore,
    rows: &[u64],
    conversion: Option<Conversion>,
    bytes: usize,
) -> Result<Vec<u8>, Error> {
    let target = Buffer::zeroed(bytes).unwrap().into_region();
    store.gather(rows, &target, conversion, &|| false)?;
    Ok(target.into_buffer().expect("the store keeps no memory of its caller").as_slice().to_vec())
}
