//! Runs a workload round by round on an engine in this process.

use std::sync::Arc;
use std::time::Instant;

use deepnvme_io::display;
use deepnvme_io::mem::RegionMut;
use deepnvme_io::{Access, Config, Durability, Engine, GpuAccess, OpenOptions, TensorFile, WriteMode, WriteOptions};
use rustix::time::{ClockId, clock_gettime};

use super::contents::Contents;
use super::engine_run::EngineRun;
use super::files::{ScratchFiles, check_free_space};
use super::observer::{Observer, Phase, ProgressUpdate};
use super::plan::{BUFFER_BYTES_MAX, RequestPlan};
use super::sample::{self, Latencies, RouteBytes, Sample};
use super::workload::{AccessOrder, Cache, Direction, Workload};
use super::{Benchmark, drop_from_page_cache, load_into_page_cache};
use super::{gpu, memory};
use crate::error::{Error, Result};
use crate::units::bytes_text;

/// A sequential run uses at most a third of the available memory, unless it names its buffer or compares every byte.
const MEMORY_DIVISOR: u64 = 3;

/// A workload that is ready to run: its engine, files and memory.
pub struct Runner {
    name: String,
    workload: Workload,
    engine: Engine,
    plan: RequestPlan,
    memory: Vec<Option<RegionMut>>,
    /// Taken from the first engine: it keeps the GPU memory open when the engine changes.
    access: GpuAccess,
    contents: Contents,
    not_pinned_reason: Option<String>,
    rounds: u64,
    phase: Phase,
    // Last: the engine closes the files before they are removed.
    files: ScratchFiles,
}

impl Runner {
    /// Makes and fills the files, allocates the memory, and starts the engine.
    ///
    /// # Errors
    /// `Usage` for a workload that makes no sense. `Failed` if files or memory cannot be made, or an error of the
    /// engine. `Interrupted` if the observer stops the work.
    pub fn prepare(workload: Workload, observer: &mut dyn Observer) -> Result<Self> {
        workload.check()?;
        let share = workload.file_bytes() * workload.file_count() as u64 / workload.folders.len() as u64;
        check_free_space(&workload.folders, share)?;
        let available = workload
            .place
            .gpu
            .map_or_else(|| Ok(memory::available_bytes()), |index| Ok::<_, Error>(gpu::find(index)?.memory_bytes))?;
        let plan = RequestPlan::of(&workload, BUFFER_BYTES_MAX.min(available / MEMORY_DIVISOR));
        if plan.buffer_bytes() > available {
            let (wanted, there) = (bytes_text(plan.buffer_bytes()), bytes_text(available));
            let text = format!("--validate needs {wanted} of memory to compare every byte, and {there} are available");
            return Err(Error::usage(format!("{text}; make --size smaller, or remove --validate")));
        }
        let engine = Engine::new(workload.config.clone())?;
        let files = ScratchFiles::make(&workload.folders, workload.stripe_bytes)?;
        let access = engine.gpu_access();
        let allocated = memory::allocate(&workload, &access, plan.buffer_bytes() as usize)?;
        let mut runner = Self {
            name: "deepnvme".into(),
            memory: memory::split_slots(allocated.region, &plan),
            access,
            not_pinned_reason: allocated.not_pinned_reason,
            contents: Contents::random(),
            rounds: 0,
            phase: Phase::LayingOut,
            workload,
            engine,
            plan,
            files,
        };
        runner.lay_out(observer)?;
        Ok(runner)
    }

    /// Returns the engine that runs the workload.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns why the memory is not pinned although the workload asks for it.
    #[must_use]
    pub fn not_pinned_reason(&self) -> Option<&str> {
        self.not_pinned_reason.as_deref()
    }

    /// Sets the phase that the next rounds report.
    pub fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Changes the direction and the engine's settings, over the same files and memory. With a GPU, a new engine does
    /// one round at once: it registers its slots with the driver, and no counted round should include that.
    ///
    /// # Errors
    /// An error of the engine. `Usage` if the workload is random, since its requests were planned for one block size,
    /// or if it validates, which no search for settings does.
    pub fn reconfigure(&mut self, direction: Direction, config: &Config, observer: &mut dyn Observer) -> Result<()> {
        if self.workload.validate || self.workload.order != AccessOrder::Sequential {
            return Err(Error::usage("only sequential workloads without validation can change their settings"));
        }
        self.workload.direction = direction;
        if self.workload.config != *config {
            self.engine = Engine::new(config.clone())?;
            self.workload.config = config.clone();
            if self.workload.place.gpu.is_some() {
                self.round(observer)?;
            }
        }
        Ok(())
    }

    /// Fills the files with their contents, and waits until the disk has them.
    fn lay_out(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.fill_memory()?;
        let options = WriteOptions { durability: Durability::None, mode: WriteMode::InPlace };
        let files = self.open(Access::ReadWrite)?;
        for file in &files {
            // Allocate the whole file first, so that no later write has to.
            file.allocate_len(self.workload.file_bytes())?;
        }
        self.run(&files, Direction::Write, options, observer)?;
        self.sync(&files, Durability::Data)
    }

    /// Fills each slot with the contents of its first piece.
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
        Ok(targets.map(|target| deepnvme_file::open(target, options)).collect::<deepnvme_io::Result<_>>()?)
    }

    /// Runs all requests, and returns the seconds and bytes of each progress report.
    fn run(
        &mut self,
        files: &[Arc<TensorFile>],
        direction: Direction,
        options: WriteOptions,
        observer: &mut dyn Observer,
    ) -> Result<Vec<(f64, u64)>> {
        let began = Instant::now();
        let mut timeline = Vec::new();
        let (phase, bytes_total) = (self.phase, self.workload.round_bytes());
        let mut report = |seconds: f64, bytes_done: u64| {
            timeline.push((seconds, bytes_done));
            observer.update(&ProgressUpdate { phase, label: &self.name, bytes_done, bytes_total, seconds });
            if observer.is_interrupted() { Err(Error::Interrupted) } else { Ok(()) }
        };
        let run = EngineRun::new(&self.engine, files, direction, options, &mut self.memory);
        run.run(&self.plan, began, &mut report)?;
        Ok(timeline)
    }

    fn sync(&self, files: &[Arc<TensorFile>], durability: Durability) -> Result<()> {
        files.iter().try_for_each(|file| self.engine.sync(file, durability)).map_err(Error::from)
    }

    /// Brings memory and page cache into the state in which a round begins.
    fn prepare_round(&mut self) -> Result<()> {
        self.rounds += 1;
        self.plan.shuffle(self.workload.order, self.rounds);
        match self.workload.direction {
            Direction::Write if self.workload.validate => {
                // New contents: with the old ones, a write that did nothing would pass.
                self.contents = self.contents.next_round();
                self.fill_memory()?;
            }
            Direction::Read if self.workload.validate => self.clear_memory()?,
            Direction::Read | Direction::Write => {}
        }
        for path in self.files.paths() {
            match self.workload.cache {
                Cache::Cold => drop_from_page_cache(path)?,
                Cache::Warm => load_into_page_cache(path)?,
            }
        }
        Ok(())
    }

    /// Compares every byte: of a read, in memory; of a write, after reading the files back.
    fn validate(&mut self, observer: &mut dyn Observer) -> Result<()> {
        if self.workload.direction == Direction::Write {
            self.files.paths().try_for_each(drop_from_page_cache)?;
            self.clear_memory()?;
            let files = self.open(Access::Read)?;
            self.run(&files, Direction::Read, WriteOptions::default(), observer)?;
        }
        for piece in &self.plan.pieces {
            let Some(region) = &self.memory[piece.slot] else { continue };
            let contents = self.contents.of_file(piece.file);
            if let Some(offset) = memory::first_difference(&self.access, region, contents, piece.offset)? {
                let path = self.files.targets()[piece.file].path();
                let text = format!(
                    "{}: the byte at offset {offset} differs from the one that was written",
                    display::path(&path)
                );
                return Err(Error::failed(format!("{text}; do not trust this disk, its file system or this program")));
            }
        }
        Ok(())
    }
}

impl Benchmark for Runner {
    fn name(&self) -> &str {
        &self.name
    }

    fn round(&mut self, observer: &mut dyn Observer) -> Result<Sample> {
        self.prepare_round()?;
        let direction = self.workload.direction;
        let (stats, latencies) = (self.engine.stats(), self.engine.latencies_us());
        let (began, cpu) = (Instant::now(), cpu_s());
        let files = self.open(if direction == Direction::Read { Access::Read } else { Access::Write })?;
        // A file written in one request is synced by that request, as `deepnvme.write` does.
        let is_one_request_per_file = self.plan.pieces.len() == files.len();
        let durability = self.workload.durability;
        let options = WriteOptions {
            durability: if is_one_request_per_file { durability } else { Durability::None },
            mode: WriteMode::InPlace,
        };
        let opened = began.elapsed();
        let timeline = self.run(&files, direction, options, observer)?;
        let transfer_s = (began.elapsed() - opened).as_secs_f64();
        if direction == Direction::Write && !is_one_request_per_file && durability != Durability::None {
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
            by_route: RouteBytes {
                // cuFile transfers to GPU memory without a bounce buffer.
                direct: now.bytes_direct - stats.bytes_direct + now.bytes_gds - stats.bytes_gds,
                bounced: now.bytes_bounced - stats.bytes_bounced,
                buffered: now.bytes_buffered - stats.bytes_buffered,
            },
            latencies_us: sample::added_since(&latencies.into_iter().collect(), &latencies_us),
            timeline,
        };
        if self.workload.validate {
            let phase = std::mem::replace(&mut self.phase, Phase::Validating);
            self.validate(observer)?;
            self.phase = phase;
        }
        Ok(sample)
    }
}

/// Returns the CPU time of this process, all threads.
fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
