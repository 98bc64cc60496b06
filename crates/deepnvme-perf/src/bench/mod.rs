//! Rounds of a workload on the engine, and on fio in turn if asked.
//!
//! `processes` runs the workload in several processes; `summary` turns samples into metrics, without I/O.

use std::path::Path;

use deepnvme_io::backend::BackendKind;
use deepnvme_io::gpu::GpuFacts;
use deepnvme_io::{DirectMode, DirectState, Engine, OpenOptions, display};
use serde::Serialize;

use crate::baseline::fio::{self, Fio};
use crate::error::{Error, Result};
use crate::measure::{Benchmark, Memory, Observer, Phase, Runner, Sample, Workload, gpu};
use crate::report::FolderReport;

pub mod processes;
pub mod summary;

pub use processes::Launcher;
pub use summary::{Ratio, Summary};

/// Maximum rounds, and maximum warm-up rounds.
pub const ROUNDS_MAX: u32 = 1000;
/// Maximum processes.
pub const PROCESSES_MAX: u32 = 64;

/// The workload, and the number of rounds.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The work of a round.
    pub workload: Workload,
    /// Rounds that count. Default of the command: 5.
    pub rounds: u32,
    /// Warm-up rounds, which do not count. Default of the command: 1.
    pub warm_up: u32,
    /// Processes that each run the workload, on their own files. Default of the command: 1.
    pub processes: u32,
    /// Whether fio runs as a baseline, in alternating rounds.
    pub against_fio: bool,
}

/// The outcome of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct BenchOutcome {
    /// The version of deepnvme.
    pub version: &'static str,
    /// The work of a round.
    pub workload: Workload,
    /// The number of processes.
    pub processes: u32,
    /// The backend of the engine.
    #[serde(flatten)]
    pub backend: ChosenBackend,
    /// The folders, as `report` describes them.
    pub folders: Vec<FolderSummary>,
    /// The GPU that holds the engine's memory, if one does.
    pub gpu: Option<GpuFacts>,
    /// The measurements: deepnvme first, then fio if asked.
    pub results: Vec<ToolResult>,
    /// deepnvme relative to fio, if fio ran.
    pub ratio: Option<Ratio>,
    /// Whether every byte of every round was compared.
    pub is_validated: bool,
    /// Notes on how to read the metrics.
    pub notes: Vec<String>,
}

/// The backend that the engine chose.
#[derive(Clone, Debug, Serialize)]
pub struct ChosenBackend {
    /// Its name.
    #[serde(rename = "backend")]
    pub name: String,
    /// Why the engine chose it.
    #[serde(rename = "backend_reason")]
    pub reason: String,
}

/// A folder in short.
#[derive(Clone, Debug, Serialize)]
pub struct FolderSummary {
    /// The path as given.
    #[serde(serialize_with = "display::serialize")]
    pub path: std::path::PathBuf,
    /// `ext4`, `xfs`.
    pub file_system: String,
    /// The disk, if known.
    pub device: Option<String>,
}

/// The measurements of one tool.
#[derive(Clone, Debug, Serialize)]
pub struct ToolResult {
    /// Its name in tables.
    pub name: String,
    /// The metrics.
    pub summary: Summary,
    /// The rounds.
    pub samples: Vec<Sample>,
}

/// Runs the benchmark. All its files are removed, even on failure.
///
/// # Errors
/// `Usage` for options that make no sense, `Failed`, an error of the engine, or `Interrupted`.
pub fn run(options: &BenchOptions, launcher: &Launcher, observer: &mut dyn Observer) -> Result<BenchOutcome> {
    check(options)?;
    let gpu = options.workload.place.gpu.map(gpu::find).transpose()?;
    let (backend, reason) = choose(&options.workload)?;
    let is_direct = is_direct(&options.workload);
    let mut notes = Vec::new();
    let mut engine = EngineBenchmark::prepare(options, launcher, observer)?;
    notes.extend(engine.note());
    let mut fio = if options.against_fio {
        let workload = for_fio(options, &mut notes);
        let fio = Fio::prepare(workload, backend, is_direct, observer)?;
        notes.extend(fio.notes());
        Some(fio)
    } else {
        None
    };
    let (samples, fio_samples) = rounds(options, &mut engine, fio.as_mut(), observer)?;
    notes.extend(engine.staged());
    let ratio = (!fio_samples.is_empty()).then(|| summary::ratio(&samples, &fio_samples));
    let mut results = vec![ToolResult { name: "deepnvme".into(), summary: summary::summarise(&samples), samples }];
    if !fio_samples.is_empty() {
        let name = fio::version().unwrap_or_else(|| "fio".into()) + if gpu.is_some() { " (host)" } else { "" };
        results.push(ToolResult { name, summary: summary::summarise(&fio_samples), samples: fio_samples });
    }
    Ok(BenchOutcome {
        version: env!("CARGO_PKG_VERSION"),
        processes: options.processes,
        backend: ChosenBackend { name: backend.name().into(), reason },
        folders: options.workload.folders.iter().map(|path| FolderSummary::of(path)).collect(),
        gpu,
        results,
        ratio,
        is_validated: options.workload.validate,
        notes,
        workload: options.workload.clone(),
    })
}

fn check(options: &BenchOptions) -> Result<()> {
    options.workload.check()?;
    for (name, value, max) in
        [("--loops", options.rounds, ROUNDS_MAX), ("--processes", options.processes, PROCESSES_MAX)]
    {
        if !(1..=max).contains(&value) {
            return Err(Error::usage(format!("{name} is {value}; it must be between 1 and {max}")));
        }
    }
    if options.warm_up > ROUNDS_MAX {
        return Err(Error::usage(format!("--warm-up is {}; it must be at most {ROUNDS_MAX}", options.warm_up)));
    }
    Ok(())
}

/// Returns the backend that an engine with these settings uses here, and why.
fn choose(workload: &Workload) -> Result<(BackendKind, String)> {
    let engine = Engine::new(workload.config.clone())?;
    Ok((engine.backend_kind(), engine.backend_reason().to_owned()))
}

/// Returns whether transfers in the first folder bypass the page cache.
fn is_direct(workload: &Workload) -> bool {
    if workload.config.direct == DirectMode::Disabled {
        return false;
    }
    let Ok(files) = crate::measure::ScratchFiles::make(&workload.folders[..1], None) else { return true };
    let options = OpenOptions { access: deepnvme_io::Access::ReadWrite, create: false, direct: DirectMode::Preferred };
    let opened = files.targets().iter().map(|target| deepnvme_file::open(target, options));
    let states: Vec<_> = opened.flatten().map(|file| file.direct()).collect();
    states.iter().all(|state| matches!(state, DirectState::Direct { .. }))
}

/// Returns the same workload for one fio process: each process of ours is one more file of fio's.
fn for_fio(options: &BenchOptions, notes: &mut Vec<String>) -> Workload {
    let mut workload = options.workload.clone();
    if options.processes > 1 {
        let folders = std::mem::take(&mut workload.folders);
        workload.folders = (0..options.processes).flat_map(|_| folders.iter().cloned()).collect();
    }
    if workload.place.memory == Memory::Plain {
        notes.push(
            "fio used aligned memory, and deepnvme unaligned memory: deepnvme made copies that fio did not".into(),
        );
    }
    if let Some(index) = workload.place.gpu.take() {
        let text = "fio supports host memory only; deepnvme also copied its bytes to or from";
        notes.push(format!("{text} cuda:{index}, and the ratio includes that"));
    }
    workload
}

/// Runs the engine and the baseline in turn; they take turns at going first.
fn rounds(
    options: &BenchOptions,
    engine: &mut EngineBenchmark,
    mut fio: Option<&mut Fio>,
    observer: &mut dyn Observer,
) -> Result<(Vec<Sample>, Vec<Sample>)> {
    let (mut samples, mut fio_samples) = (Vec::new(), Vec::new());
    for round in 0..options.warm_up + options.rounds {
        let counts = round >= options.warm_up;
        engine.set_phase(if counts { Phase::Measuring } else { Phase::WarmUp });
        for turn in 0..2 {
            let is_engine = (turn + round) % 2 == 0;
            let sample = match (is_engine, fio.as_deref_mut()) {
                (true, _) => engine.benchmark().round(observer)?,
                (false, Some(fio)) => fio.round(observer)?,
                (false, None) => continue,
            };
            if counts {
                (if is_engine { &mut samples } else { &mut fio_samples }).push(sample);
            }
        }
    }
    Ok((samples, fio_samples))
}

/// The engine's side of a benchmark: in this process, or in several.
enum EngineBenchmark {
    InProcess(Box<Runner>),
    Processes(processes::BenchProcesses),
}

impl EngineBenchmark {
    fn prepare(options: &BenchOptions, launcher: &Launcher, observer: &mut dyn Observer) -> Result<Self> {
        if options.processes == 1 {
            return Ok(Self::InProcess(Box::new(Runner::prepare(options.workload.clone(), observer)?)));
        }
        let workloads = vec![options.workload.clone(); options.processes as usize];
        Ok(Self::Processes(processes::BenchProcesses::launch(&workloads, launcher, observer)?))
    }

    fn set_phase(&mut self, phase: Phase) {
        match self {
            Self::InProcess(runner) => runner.set_phase(phase),
            Self::Processes(processes) => processes.set_phase(phase),
        }
    }

    fn benchmark(&mut self) -> &mut dyn Benchmark {
        match self {
            Self::InProcess(runner) => &mut **runner,
            Self::Processes(processes) => processes,
        }
    }

    fn note(&self) -> Option<String> {
        let Self::InProcess(runner) = self else { return None };
        runner.not_pinned_reason().map(|reason| format!("the memory is not pinned: {reason}"))
    }

    /// Returns why the driver staged copies from and to a GPU; known after the first copy.
    fn staged(&self) -> Option<String> {
        let Self::InProcess(runner) = self else { return None };
        let reason = runner.engine().stats().staged_reason?;
        Some(format!("the driver staged the copies from and to the GPU: {reason}"))
    }
}

impl FolderSummary {
    fn of(path: &Path) -> Self {
        let folder = FolderReport::of_this_machine(path);
        Self {
            path: path.to_path_buf(),
            file_system: folder.mount.file_system,
            device: folder.device.map(|device| device.name),
        }
    }
}
