//! A workload, done by an engine in this process.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepnvme_io::mem::{Region, RegionMut};
use deepnvme_io::shown;
use deepnvme_io::{
    Access, Config, Durability, Engine, GpuAccess, OpenOptions, Pending, ReadItem, TensorFile, Transfer, WriteExtent,
    WriteItem, WriteOptions,
};
use rustix::time::{ClockId, clock_gettime};

use super::contents::Contents;
use super::files::{ScratchFiles, check_room};
use super::plan::{BUFFER_BYTES_MAX, Piece, Plan};
use super::sample::{self, Latencies, Sample};
use super::watch::{Moment, Phase, Watch};
use super::workload::{Cache, Direction, Order, Workload};
use super::{Contestant, make_cold, make_warm};
use super::{gpu, memory};
use crate::error::{Error, Result};
use crate::units::bytes_text;

/// How often somebody who looks on is told.
const LOOK: Duration = Duration::from_millis(20);
/// Of the memory that is available, the part that a benchmark takes.
const MEMORY_SHARE: u64 = 3;

/// An engine, its files and its memory.
pub struct Runner {
    name: String,
    workload: Workload,
    engine: Engine,
    plan: Plan,
    memory: Vec<Option<RegionMut>>,
    /// Of the first engine: what was opened for the memory stays open when the engine changes.
    access: GpuAccess,
    contents: Contents,
    unlocked: Option<String>,
    rounds: u64,
    phase: Phase,
    // Last, so that the engine has let go of the files before they are removed.
    files: ScratchFiles,
}

impl Runner {
    /// Makes and fills the files, gets the memory, starts the engine.
    ///
    /// # Errors
    /// `Usage` for a workload that makes no sense; what the machine refused.
    pub fn prepare(workload: Workload, watch: &mut dyn Watch) -> Result<Self> {
        workload.check()?;
        let share = workload.file_bytes() * workload.file_count() as u64 / workload.folders.len() as u64;
        check_room(&workload.folders, share)?;
        let available = workload
            .gpu
            .map_or_else(|| Ok(available_bytes()), |index| Ok::<_, Error>(gpu::find(index)?.memory_bytes))?;
        let plan = Plan::of(&workload, BUFFER_BYTES_MAX.min(available / MEMORY_SHARE));
        if plan.buffer_bytes() > available {
            let (wanted, there) = (bytes_text(plan.buffer_bytes()), bytes_text(available));
            let text = format!("it takes {wanted} of memory to compare every byte, and {there} are available");
            return Err(Error::usage(format!("{text}; make --size smaller, or leave --validate out")));
        }
        let engine = Engine::new(workload.config.clone())?;
        let files = ScratchFiles::make(&workload.folders, workload.stripe_bytes)?;
        let access = engine.gpu_access();
        let allocated = memory::allocate(&workload, &access, plan.buffer_bytes() as usize)?;
        let mut runner = Self {
            name: "deepnvme".into(),
            memory: slots(allocated.region, &plan),
            access,
            unlocked: allocated.unlocked,
            contents: Contents::random(),
            rounds: 0,
            phase: Phase::LayingOut,
            workload,
            engine,
            plan,
            files,
        };
        runner.lay_out(watch)?;
        Ok(runner)
    }

    /// What moves the bytes.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Why memory that should be page-locked is not.
    #[must_use]
    pub fn unlocked(&self) -> Option<&str> {
        self.unlocked.as_deref()
    }

    /// Whether the rounds to come count; only what is shown depends on it.
    pub fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Goes on over the same files and memory with another engine, and in another direction. What is laid out stays. With a
    /// GPU the new engine does a round at once, so that no round that counts begins with making slots known to the driver.
    ///
    /// # Errors
    /// What the engine refused. `Usage` where the contents of the files would be needed afterwards.
    pub fn change(&mut self, direction: Direction, config: &Config, watch: &mut dyn Watch) -> Result<()> {
        if self.workload.validate || self.workload.order != Order::Sequential {
            return Err(Error::usage("only sequential work without validation can change its settings"));
        }
        self.workload.direction = direction;
        if self.workload.config != *config {
            self.engine = Engine::new(config.clone())?;
            self.workload.config = config.clone();
            if self.workload.gpu.is_some() {
                self.round(watch)?;
            }
        }
        Ok(())
    }

    /// Fills the files with what belongs there, and waits until the disk has it.
    fn lay_out(&mut self, watch: &mut dyn Watch) -> Result<()> {
        self.fill_memory()?;
        let options = WriteOptions { durability: Durability::None, extent: WriteExtent::InPlace };
        let files = self.open(Access::ReadWrite)?;
        for file in &files {
            // The whole room first, so that no later write has to find any.
            file.set_len(self.workload.file_bytes())?;
        }
        self.run(&files, Direction::Write, options, watch)?;
        self.sync(&files, Durability::Data)
    }

    /// Puts into memory what belongs to the first request that each slot serves.
    fn fill_memory(&self) -> Result<()> {
        let mut is_filled = vec![false; self.memory.len()];
        for piece in &self.plan.pieces {
            if !std::mem::replace(&mut is_filled[piece.slot], true)
                && let Some(region) = &self.memory[piece.slot]
            {
                memory::fill(&self.access, region, self.contents.of_file(piece.file), piece.offset)?;
            }
        }
        Ok(())
    }

    fn clear_memory(&self) -> Result<()> {
        self.memory.iter().flatten().try_for_each(|region| memory::clear(&self.access, region))
    }

    fn open(&self, access: Access) -> Result<Vec<Arc<TensorFile>>> {
        let direct = self.workload.config.direct;
        let options = OpenOptions { access, create: false, direct };
        let targets = self.files.targets().iter();
        Ok(targets.map(|target| TensorFile::open(target, options)).collect::<deepnvme_io::Result<_>>()?)
    }

    /// All requests, as many at once as the plan says. What has been started is waited for, whatever happens.
    fn run(
        &mut self,
        files: &[Arc<TensorFile>],
        direction: Direction,
        options: WriteOptions,
        watch: &mut dyn Watch,
    ) -> Result<Vec<(f64, u64)>> {
        let mut flight = Flight {
            engine: &self.engine,
            files,
            direction,
            options,
            memory: &mut self.memory,
            in_air: VecDeque::new(),
            bytes_done: 0,
        };
        let began = Instant::now();
        let mut timeline = Vec::new();
        let mut look = |flight: &Flight<'_>, watch: &mut dyn Watch| {
            let (seconds, bytes_done) = (began.elapsed().as_secs_f64(), flight.bytes_arrived());
            timeline.push((seconds, bytes_done));
            let bytes_total = self.workload.round_bytes();
            watch.see(&Moment { phase: self.phase, contestant: &self.name, bytes_done, bytes_total, seconds });
            if watch.is_interrupted() { Err(Error::Interrupted) } else { Ok(()) }
        };
        let mut next_look = LOOK;
        let moved = (|| {
            for pieces in self.plan.requests() {
                while flight.pieces_in_air() + pieces.len() > self.plan.in_flight && !flight.in_air.is_empty() {
                    flight.land(&mut |flight| look(flight, watch))?;
                }
                flight.start(pieces)?;
                if began.elapsed() >= next_look {
                    look(&flight, watch)?;
                    next_look = began.elapsed() + LOOK;
                }
            }
            while !flight.in_air.is_empty() {
                flight.land(&mut |flight| look(flight, watch))?;
            }
            look(&flight, watch)
        })();
        flight.settle();
        moved.map(|()| timeline)
    }

    fn sync(&self, files: &[Arc<TensorFile>], durability: Durability) -> Result<()> {
        files.iter().try_for_each(|file| self.engine.sync(file, durability)).map_err(Error::from)
    }

    /// Brings memory and page cache into the state that the round begins with.
    fn settle(&mut self) -> Result<()> {
        self.rounds += 1;
        self.plan.shuffle(self.workload.order, self.rounds);
        match self.workload.direction {
            Direction::Write if self.workload.validate => {
                // Other contents than before, or a write that did nothing would pass.
                self.contents = self.contents.of_file(usize::MAX - 1);
                self.fill_memory()?;
            }
            Direction::Read if self.workload.validate => self.clear_memory()?,
            Direction::Read | Direction::Write => {}
        }
        for path in self.files.paths() {
            match self.workload.cache {
                Cache::Cold => make_cold(path)?,
                Cache::Warm => make_warm(path)?,
            }
        }
        Ok(())
    }

    /// Compares every byte: of a read what is in memory, of a write what is read back.
    fn validate(&mut self, watch: &mut dyn Watch) -> Result<()> {
        if self.workload.direction == Direction::Write {
            self.files.paths().try_for_each(make_cold)?;
            self.clear_memory()?;
            let files = self.open(Access::Read)?;
            self.run(&files, Direction::Read, WriteOptions::default(), watch)?;
        }
        for piece in &self.plan.pieces {
            let Some(region) = &self.memory[piece.slot] else { continue };
            let contents = self.contents.of_file(piece.file);
            if let Some(offset) = memory::first_difference(&self.access, region, contents, piece.offset)? {
                let path = self.files.targets()[piece.file].path();
                let text =
                    format!("{}: the byte at offset {offset} is not the one that was written", shown::path(&path));
                return Err(Error::failed(format!("{text}; do not trust this disk, its file system or this program")));
            }
        }
        Ok(())
    }
}

impl Contestant for Runner {
    fn name(&self) -> &str {
        &self.name
    }

    fn round(&mut self, watch: &mut dyn Watch) -> Result<Sample> {
        self.settle()?;
        let direction = self.workload.direction;
        let (stats, latencies) = (self.engine.stats(), self.engine.latencies_us());
        let (began, cpu) = (Instant::now(), cpu_s());
        let files = self.open(if direction == Direction::Read { Access::Read } else { Access::Write })?;
        // Of a single request the sync is a part, as users have it.
        let is_one = self.plan.pieces.len() == files.len();
        let durability = self.workload.durability;
        let options = WriteOptions {
            durability: if is_one { durability } else { Durability::None },
            extent: WriteExtent::InPlace,
        };
        let opened = began.elapsed();
        let timeline = self.run(&files, direction, options, watch)?;
        let transfer_s = (began.elapsed() - opened).as_secs_f64();
        if direction == Direction::Write && !is_one && durability != Durability::None {
            self.sync(&files, durability)?;
        }
        let (wall_s, cpu_s) = (began.elapsed().as_secs_f64(), cpu_s() - cpu);
        let now = self.engine.stats();
        let latencies_us: Latencies = self.engine.latencies_us().into_iter().collect();
        let sample = Sample {
            bytes: self.workload.round_bytes(),
            wall_s,
            transfer_s,
            cpu_s,
            // cuFile's memory is the GPU's own.
            bytes_direct: now.bytes_direct - stats.bytes_direct + now.bytes_gds - stats.bytes_gds,
            bytes_bounced: now.bytes_bounced - stats.bytes_bounced,
            bytes_buffered: now.bytes_buffered - stats.bytes_buffered,
            latencies_us: sample::since(&latencies.into_iter().collect(), &latencies_us),
            timeline,
        };
        if self.workload.validate {
            let phase = std::mem::replace(&mut self.phase, Phase::Validating);
            self.validate(watch)?;
            self.phase = phase;
        }
        Ok(sample)
    }
}

/// The requests that have been started, the oldest first.
struct Flight<'a> {
    engine: &'a Engine,
    files: &'a [Arc<TensorFile>],
    direction: Direction,
    options: WriteOptions,
    memory: &'a mut [Option<RegionMut>],
    in_air: VecDeque<Airborne>,
    bytes_done: u64,
}

/// A request, and the slots whose memory it has.
enum Airborne {
    Read(Vec<usize>, Pending<Vec<RegionMut>>),
    Write(usize, Pending<Vec<Region>>),
}

impl Airborne {
    fn pieces(&self) -> usize {
        match self {
            Self::Read(slots, _) => slots.len(),
            Self::Write(pieces, _) => *pieces,
        }
    }

    fn wait_timeout(&self, timeout: Duration) -> bool {
        match self {
            Self::Read(_, pending) => pending.wait_timeout(timeout),
            Self::Write(_, pending) => pending.wait_timeout(timeout),
        }
    }

    fn bytes_done(&self) -> u64 {
        match self {
            Self::Read(_, pending) => pending.progress().bytes_done,
            Self::Write(_, pending) => pending.progress().bytes_done,
        }
    }

    fn cancel(&self) {
        match self {
            Self::Read(_, pending) => pending.cancel(),
            Self::Write(_, pending) => pending.cancel(),
        };
    }
}

impl Flight<'_> {
    fn bytes_arrived(&self) -> u64 {
        self.bytes_done + self.in_air.iter().map(Airborne::bytes_done).sum::<u64>()
    }

    fn pieces_in_air(&self) -> usize {
        self.in_air.iter().map(Airborne::pieces).sum()
    }

    /// Makes these pieces one request.
    fn start(&mut self, pieces: &[Piece]) -> Result<()> {
        let airborne = match self.direction {
            Direction::Read => {
                let items = pieces.iter().map(|piece| {
                    let (file, target) = (Arc::clone(&self.files[piece.file]), self.memory[piece.slot].take()?);
                    Some(ReadItem { file, offset: piece.offset, target })
                });
                let Some(items) = items.collect::<Option<Vec<_>>>() else { return Err(astray()) };
                let slots = pieces.iter().map(|piece| piece.slot).collect();
                Airborne::Read(slots, self.engine.read_batch(items)?)
            }
            Direction::Write => {
                let items = pieces.iter().map(|piece| {
                    let (file, source) =
                        (Arc::clone(&self.files[piece.file]), self.memory[piece.slot].as_ref()?.region());
                    Some(WriteItem { file, offset: piece.offset, source })
                });
                let Some(items) = items.collect::<Option<Vec<_>>>() else { return Err(astray()) };
                Airborne::Write(pieces.len(), self.engine.write_batch(items, self.options)?)
            }
        };
        self.in_air.push_back(airborne);
        Ok(())
    }

    /// Waits for the oldest, looking up now and then.
    fn land(&mut self, look: &mut dyn FnMut(&Self) -> Result<()>) -> Result<()> {
        while self.in_air.front().is_some_and(|oldest| !oldest.wait_timeout(LOOK)) {
            look(self)?;
        }
        self.take_oldest().map(|transfer| self.bytes_done += transfer.map_or(0, |transfer| transfer.bytes))
    }

    fn take_oldest(&mut self) -> Result<Option<Transfer>> {
        match self.in_air.pop_front() {
            None => Ok(None),
            Some(Airborne::Read(slots, pending)) => {
                let (regions, outcome) = pending.wait();
                for (slot, region) in slots.into_iter().zip(regions.into_iter().flatten()) {
                    self.memory[slot] = Some(region);
                }
                Ok(Some(outcome?))
            }
            Some(Airborne::Write(_, pending)) => Ok(Some(pending.wait().1?)),
        }
    }

    /// Gives up what has not been started, and takes back all memory. After a good round there is nothing to do.
    fn settle(mut self) {
        self.in_air.iter().for_each(Airborne::cancel);
        while !self.in_air.is_empty() {
            // It has failed already, with the first error.
            let _ = self.take_oldest();
        }
    }
}

/// After a request that failed without giving its memory back nothing can go on.
fn astray() -> Error {
    Error::failed("memory of an earlier request has not come home")
}

/// The plan's slots, out of one piece of memory.
fn slots(region: RegionMut, plan: &Plan) -> Vec<Option<RegionMut>> {
    let mut rest = region;
    let mut slots = Vec::with_capacity(plan.slots.len());
    for bytes in &plan.slots {
        let (slot, after) = rest.split_at(*bytes as usize);
        slots.push(Some(slot));
        rest = after;
    }
    slots
}

/// Processor time of this process, all threads.
fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What programs can have without swapping.
fn available_bytes() -> u64 {
    let field = crate::tree::Tree::of_this_machine().field("/proc/meminfo", "MemAvailable");
    let kib = field.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX / 2, |kib| kib << 10)
}
