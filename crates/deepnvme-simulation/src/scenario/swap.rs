//! Several processes swap in the same folders, and some die. Each finds its own items, and no files of dead processes
//! remain.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use deepnvme_io::fs;
use deepnvme_simulation_runtime::thread;
use deepnvme_swap::{Error, FileRange, Swapper, SwapperOptions};
use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;

use super::context::Context;
use super::folders::make_folders;
use super::payload;
use super::unproven::may_be_foreign;
use super::users::{self, TakenNames};

/// Memory of one swapper: less than all its items need.
const MEMORY_BYTES: usize = 48 << 10;
const KEYS: u64 = 6;
/// The largest item.
const ITEM_BYTES_MAX: u64 = 24 << 10;

struct Scenario {
    folders: Vec<PathBuf>,
    seed: u64,
    is_named: bool,
    has_checksums: bool,
}

/// Runs the scenario.
pub(super) fn run(context: &Context) {
    let mut rng = context.rng(1);
    let folders = make_folders(context, rng.within(1..3) as usize);
    let scenario =
        Arc::new(Scenario { folders, seed: rng.next_u64(), is_named: rng.chance(700), has_checksums: rng.chance(500) });
    for folder in &scenario.folders {
        for name in [".deepnvme-swap-1-0", ".deepnvme-swap-1-0011223344556677", ".deepnvme-swap-unnamed", "precious"] {
            if rng.chance(500) {
                users::create_user_file(context, &folder.join(name));
            }
        }
    }
    let processes = rng.within(1..4) as u32;
    let is_cut = context.draw_crash(&mut rng, processes, 3, 1..200, 1..150);
    context.world.bound_memory();
    let watched = Arc::clone(&scenario);
    context.check_crashes(400, 3, move || {
        let seen = Arc::clone(&watched);
        move |context: &Context, _| check_end(context, &seen)
    });
    let mut running: Vec<_> = (1..=processes).map(|id| swapper(context, &scenario, id)).collect();
    if rng.chance(600) {
        running.push(users::start_name_taker(context, scenario.folders.clone(), TakenNames::Private));
    }
    context.finish_running(running, is_cut);
    check_end(context, &scenario);
}

/// Checks that the next swapper removes all files of ended processes, and leaves none of its own.
fn check_end(context: &Context, scenario: &Arc<Scenario>) {
    let next = swapper(context, scenario, 500);
    context.join(vec![next]);
    if context.world.state().setup.has_locks {
        for folder in &scenario.folders {
            for path in users::own_files_in(context, folder) {
                if !may_be_foreign(context, &path) {
                    context.fail(format!("{} is left behind", path.display()));
                }
            }
        }
    }
    users::check_user_files(context);
}

fn swapper(context: &Context, scenario: &Arc<Scenario>, id: u32) -> thread::JoinHandle<()> {
    let scenario = Arc::clone(scenario);
    context.process(id, move |context| {
        let mut rng = context.rng(10 + u64::from(id));
        let outcome = use_swapper(context, &scenario, id, &mut rng);
        let is_excused = context.world.is_dead(id) || context.world.state().setup.failing_per_mille > 0;
        if let (Err(error), false) = (outcome, is_excused) {
            context.fail(format!("a swapper failed without an injected failure: {error}"));
        }
    })
}

/// One thread of a swapper. It alone uses its keys.
struct User<'a> {
    context: &'a Context,
    scenario: &'a Scenario,
    swapper: &'a Swapper,
    rng: Rng,
    first_version: u64,
    /// Its keys, and the version that each item has. Few, so that they change while they are flushed.
    items: Vec<(String, Option<u64>)>,
}

impl User<'_> {
    fn run(mut self) -> Result<(), Error> {
        for turn in 0..self.rng.within(2..16) {
            let at = self.rng.below(self.items.len() as u64) as usize;
            let (key, version) = self.items[at].clone();
            let now = match self.rng.below(1000) {
                0..150 => self.abandon_create(&key)?,
                150..200 if version.is_some() => {
                    self.swapper.delete(&key)?;
                    None
                }
                200..300 => {
                    self.swapper
                        .flush(version.map(|_| [key.as_str()]).as_ref().map(<[_; 1]>::as_slice), &mut || false)?;
                    version
                }
                300..400 if version.is_some() => {
                    self.copy_through_file(&key, version)?;
                    version
                }
                400..650 if version.is_some() => self.check(&key, version)?,
                _ => self.put(&key, self.first_version + turn)?,
            };
            self.items[at].1 = now;
        }
        Ok(())
    }

    /// Creates an item and drops it without a commit, as a failed block does. No item may remain.
    fn abandon_create(&mut self, key: &str) -> Result<Option<u64>, Error> {
        let mut garbage = vec![0; self.rng.within(1..9000) as usize];
        self.rng.fill(&mut garbage);
        let created = self.swapper.create(key, garbage.len(), &mut || false)?;
        created.target().copy_from_slice(0, &garbage);
        drop(created);
        match self.swapper.borrow(key, false, &mut || false) {
            Err(Error::NotFound { .. }) => {}
            Err(other) => return Err(other),
            Ok(_) => self.context.fail(format!("{key} is an item, though its creation was abandoned")),
        }
        Ok(None)
    }

    /// Copies an item to an unnamed file, and from there to another key, as a saved and a restored state do.
    fn copy_through_file(&mut self, key: &str, version: Option<u64>) -> Result<(), Error> {
        let file = match fs::open_unnamed(&self.scenario.folders[0]) {
            Ok(file) => file,
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(errno) => return Err(deepnvme_io::Error::os("open", errno).into()),
        };
        let bytes = self.swapper.borrow(key, false, &mut || false)?.region().len();
        // Blocks can be shared at some offsets only.
        let offset = if self.rng.chance(500) { 4096 } else { self.rng.below(9000) };
        self.swapper.export(key, file.as_fd(), offset, &mut || false)?;
        let at = self.rng.below(self.items.len() as u64) as usize;
        let range = FileRange { file: file.as_fd(), offset, bytes };
        self.swapper.import(&self.items[at].0, "", &range, &mut || false)?;
        self.items[at].1 = version;
        self.check(&self.items[at].0, version)?;
        self.check(key, version)?;
        Ok(())
    }

    fn put(&self, key: &str, version: u64) -> Result<Option<u64>, Error> {
        let content = payload::region_with(&payload::content(self.scenario.seed, version));
        self.swapper.put(key, &content.region())?;
        Ok(Some(version))
    }

    fn check(&self, key: &str, version: Option<u64>) -> Result<Option<u64>, Error> {
        let borrowed = self.swapper.borrow(key, false, &mut || false)?;
        let region = borrowed.region();
        let mut bytes = vec![0; region.len()];
        region.copy_to_slice(0, &mut bytes);
        if payload::recognise(self.scenario.seed, &bytes) != version {
            self.context.fail(format!("a swapper returns {} bytes that nobody put there", bytes.len()));
        }
        Ok(version)
    }
}

/// Flushes all items and announces some, repeatedly, while users run.
fn flush_often(swapper: &Swapper, mut rng: Rng) -> Result<(), Error> {
    for _ in 0..rng.below(16) {
        (0..rng.below(30)).for_each(|_| thread::yield_now());
        swapper.flush(None, &mut || false)?;
        match swapper.prefetch([rng.below(KEYS).to_string().as_str()]) {
            Ok(()) | Err(Error::NotFound { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

fn use_swapper(context: &Context, scenario: &Scenario, id: u32, rng: &mut Rng) -> Result<(), Error> {
    let (threads, keys) = (rng.within(1..3), rng.within(2..KEYS + 1));
    // Includes the memory of an item that a thread stores or has borrowed.
    let _allowance = context.world.allow_memory(MEMORY_BYTES as u64 + threads * ITEM_BYTES_MAX);
    let engine = context.engine(u64::from(id))?;
    let options = SwapperOptions {
        folders: scenario.folders.clone(),
        is_named: scenario.is_named,
        has_checksums: scenario.has_checksums,
        stripe_bytes: 4096,
        ..SwapperOptions::new(scenario.folders[0].clone(), MEMORY_BYTES)
    };
    let swapper = &Swapper::new(engine, &options)?;
    let outcomes = thread::scope(|scope| {
        let mut running = Vec::new();
        for index in 0..threads {
            let keys = (0..keys).filter(|key| key % threads == index);
            let user = User {
                context,
                scenario,
                swapper,
                rng: context.rng(1000 * u64::from(id) + index),
                first_version: 1000 * u64::from(id) + 100 * index,
                items: keys.map(|key| (key.to_string(), None)).collect(),
            };
            running.push(thread::Builder::new().spawn_scoped(scope, move || user.run()));
        }
        let rng = context.rng(1000 * u64::from(id) + 999);
        running.push(thread::Builder::new().spawn_scoped(scope, move || flush_often(swapper, rng)));
        let joined = running.into_iter().map(|one| one.map(thread::ScopedJoinHandle::join));
        joined.collect::<Vec<_>>()
    });
    let resident = swapper.stats().resident_bytes_peak;
    if resident > MEMORY_BYTES as u64 {
        context.fail(format!("{resident} bytes are in memory, of {MEMORY_BYTES}"));
    }
    for outcome in outcomes {
        match outcome {
            Ok(Ok(result)) => result?,
            _ => context.fail("a thread panicked".into()),
        }
    }
    Ok(())
}
