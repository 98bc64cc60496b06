//! Several threads gather, prefetch and keep rows of one table, and cancel or forget gathers at any point. Every gather
//! that succeeds has the rows of the file, all others fail for a reason, and no buffer is lost. One thread may close the
//! table: every gather that was started ends nevertheless.

use std::sync::Arc;
use std::time::Duration;

use deepnvme_file::{Target, VersionedFile};
use deepnvme_io::Engine;
use deepnvme_io::mem::RegionMut;
use deepnvme_rows::{BackgroundStore, Error, PendingGather, RowRange, RowStore, Table};
use deepnvme_simulation_runtime::thread;
use deepnvme_testkit::rng::Rng;

use super::context::Context;
use super::folders::make_folders;
use super::{first_file, payload};

/// Bytes of the file before the first row.
const HEAD_BYTES: u64 = 100;
/// Within this time, every gather ends.
const ENDS_WITHIN: Duration = Duration::from_secs(600);

struct Scenario {
    target: Target,
    row_bytes: usize,
    rows: Vec<u8>,
}

/// Runs the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let folders = make_folders(context, 1);
    let row_bytes = rng.within(1..3000) as usize;
    let mut rows = vec![0; row_bytes * rng.within(1..60) as usize];
    rng.fill(&mut rows);
    let scenario = Arc::new(Scenario { target: Target::from(&folders[0].join("rows.bin")), row_bytes, rows });
    let head = vec![7; HEAD_BYTES as usize];
    first_file::write(context, &scenario.target, [&head[..], &scenario.rows].concat());
    let gathering = Arc::clone(&scenario);
    let process = context.process(1, move |context| {
        let is_excused = context.world.state().setup.failing_per_mille > 0;
        if let (Err(error), false) = (use_table(context, &gathering), is_excused) {
            context.fail(format!("a table failed without an injected failure: {error}"));
        }
    });
    context.finish_running(vec![process], false);
}

fn use_table(context: &Context, scenario: &Scenario) -> Result<(), Error> {
    let engine = context.engine(1)?;
    let used = use_store(context, scenario, &engine);
    // Forgotten gathers end with the engine.
    engine.close();
    used
}

fn use_store(context: &Context, scenario: &Scenario, engine: &Arc<Engine>) -> Result<(), Error> {
    let mut rng = context.rng(2);
    let count = (scenario.rows.len() / scenario.row_bytes) as u64;
    let table = Table::new(vec![RowRange { file: 0, offset: HEAD_BYTES, rows: count }], scenario.row_bytes)?;
    // From one buffer and a few rows up.
    let memory = rng.within(12 << 10..200 << 10);
    let store =
        RowStore::new(Arc::clone(engine), vec![VersionedFile::open(scenario.target.clone())?], table, None, memory)?;
    if store.memory_bytes() > memory {
        context.fail(format!("a table takes {} bytes, of {memory}", store.memory_bytes()));
    }
    let store = BackgroundStore::new(store);
    let threads = rng.within(1..5);
    let may_close = rng.chance(300);
    let outcomes = thread::scope(|scope| {
        let mut running = Vec::new();
        for index in 0..threads {
            let rng = context.rng(100 + index);
            let user = User { context, scenario, store: &store, count, rng, may_close, started: Vec::new() };
            running.push(thread::Builder::new().spawn_scoped(scope, move || user.run()));
        }
        running.into_iter().map(|one| one.map(thread::ScopedJoinHandle::join)).collect::<Vec<_>>()
    });
    for outcome in outcomes {
        match outcome {
            Ok(Ok((started, result))) => {
                for gather in started {
                    if !gather.wait(Some(ENDS_WITHIN), &|| false)? {
                        context.fail("a gather does not end".into());
                    }
                }
                match result {
                    Err(Error::Closed) if may_close => {}
                    other => other?,
                }
            }
            _ => context.fail("a thread panicked".into()),
        }
    }
    if may_close {
        return Ok(());
    }
    // Had a buffer been lost, or a row been left in flight, this would wait forever.
    let all: Vec<u64> = (0..count).collect();
    let target = payload::allocate(scenario.rows.len());
    store.store().gather(&all, &target, None, &|| false)?;
    check(context, scenario, &all, &target);
    Ok(())
}

/// One thread.
struct User<'a> {
    context: &'a Context,
    scenario: &'a Scenario,
    store: &'a BackgroundStore,
    count: u64,
    rng: Rng,
    may_close: bool,
    started: Vec<PendingGather>,
}

impl User<'_> {
    /// Returns the gathers that were started, whatever has become of them.
    fn run(mut self) -> (Vec<PendingGather>, Result<(), Error>) {
        let result = self.use_table();
        (self.started, result)
    }

    fn use_table(&mut self) -> Result<(), Error> {
        for _ in 0..self.rng.within(1..8) {
            let rows = self.pick();
            match self.rng.below(10) {
                0..3 => {
                    let target = self.target(&rows);
                    self.store.store().gather(&rows, &target, None, &|| false)?;
                    check(self.context, self.scenario, &rows, &target);
                }
                3..7 => self.start(rows)?,
                7 if self.may_close => self.store.close(),
                7..9 => self.store.start_prefetch(rows, None)?,
                _ => match self.store.store().keep(&rows, &|| false) {
                    // More rows than may be kept.
                    Ok(()) | Err(Error::Invalid(_)) => {}
                    Err(other) => return Err(other),
                },
            }
        }
        Ok(())
    }

    /// Picks rows, some of them repeatedly, and mostly the first ones.
    fn pick(&mut self) -> Vec<u64> {
        let most = if self.rng.chance(500) { self.count } else { self.count.min(4) };
        (0..self.rng.below(30)).map(|_| self.rng.below(most)).collect()
    }

    fn target(&self, rows: &[u64]) -> RegionMut {
        payload::allocate(rows.len() * self.scenario.row_bytes)
    }

    /// Gathers in the background, and then waits, cancels or forgets.
    fn start(&mut self, rows: Vec<u64>) -> Result<(), Error> {
        let target = self.target(&rows);
        let seen = target.region();
        let pending = self.store.start_gather(rows.clone(), target, None)?;
        self.started.push(pending.clone());
        (0..self.rng.below(20)).for_each(|_| thread::yield_now());
        if self.rng.chance(200) {
            // Begins with the gather, and gives it back.
            pending.wait(None, &|| true)?;
        }
        let is_cancelled = match self.rng.below(10) {
            0..2 => return Ok(()),
            2..4 => {
                pending.cancel();
                true
            }
            _ => false,
        };
        match wait(&pending)? {
            Ok(()) => {
                let mut bytes = vec![0; seen.len()];
                seen.copy_to_slice(0, &mut bytes);
                self.compare(&rows, &bytes);
                Ok(())
            }
            Err(Error::Interrupted) if is_cancelled => Ok(()),
            Err(other) => Err(other),
        }
    }

    fn compare(&self, rows: &[u64], bytes: &[u8]) {
        compare(self.context, self.scenario, rows, bytes);
    }
}

fn wait(pending: &PendingGather) -> Result<Result<(), Error>, Error> {
    while !pending.wait(None, &|| false)? {}
    Ok(pending.result().unwrap_or(Err(Error::Closed)))
}

fn check(context: &Context, scenario: &Scenario, rows: &[u64], target: &RegionMut) {
    let mut bytes = vec![0; target.len()];
    target.copy_to_slice(0, &mut bytes);
    compare(context, scenario, rows, &bytes);
}

fn compare(context: &Context, scenario: &Scenario, rows: &[u64], bytes: &[u8]) {
    for (row, bytes) in rows.iter().zip(bytes.chunks(scenario.row_bytes)) {
        if *bytes != scenario.rows[*row as usize * scenario.row_bytes..][..scenario.row_bytes] {
            context.fail(format!("a gather has other bytes than those of row {row}"));
        }
    }
}
