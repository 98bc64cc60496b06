//! `deepnvme bench`: a workload in rounds, alone or beside fio, and what came of it.
//!
//! `processes` spreads it over processes, `summary` (pure) makes figures of the samples.

use std::path::Path;

use deepnvme_io::backend::BackendKind;
use deepnvme_io::probe::GpuFacts;
use deepnvme_io::{DirectMode, DirectState, Engine, OpenOptions, TensorFile, shown};
use serde::Serialize;

use crate::baseline::fio::{self, Fio};
use crate::error::{Error, Result};
use crate::measure::{Contestant, Memory, Phase, Runner, Sample, Watch, Workload, gpu};
use crate::report::Folder;

pub mod processes;
pub mod summary;

pub use processes::Launcher;
pub use summary::{Ratio, Summary};

/// Most rounds, and most warm-up rounds.
pub const ROUNDS_MAX: u32 = 1000;
/// Most processes.
pub const PROCESSES_MAX: u32 = 64;

/// What to measure, and how often.
#[derive(Clone, Debug)]
pub struct Options {
    /// What is done in a round.
    pub workload: Workload,
    /// Rounds that count. Default of the command: 5.
    pub rounds: u32,
    /// Rounds before them that do not. Default of the command: 1.
    pub warm_up: u32,
    /// Processes that each do the workload, on files of their own. Default of the command: 1.
    pub processes: u32,
    /// Whether fio takes part, in alternating rounds.
    pub against_fio: bool,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Of deepnvme.
    pub version: &'static str,
    /// What was done.
    pub workload: Workload,
    /// How many processes did it.
    pub processes: u32,
    /// What moved the bytes.
    pub backend: String,
    /// Why that.
    pub backend_reason: String,
    /// The folders, as `report` sees them.
    pub folders: Vec<Place>,
    /// The GPU that has deepnvme's memory, where one has.
    pub gpu: Option<GpuFacts>,
    /// Everybody who took part: deepnvme first.
    pub contestants: Vec<Line>,
    /// deepnvme against fio, where that took part.
    pub ratio: Option<Ratio>,
    /// Whether every byte of every round was compared.
    pub is_validated: bool,
    /// What else is to be known about the figures.
    pub notes: Vec<String>,
}

/// A folder in short.
#[derive(Clone, Debug, Serialize)]
pub struct Place {
    /// As it was given.
    #[serde(serialize_with = "shown::serialize")]
    pub path: std::path::PathBuf,
    /// `ext4`, `xfs`.
    pub file_system: String,
    /// The disk, where there is one.
    pub device: Option<String>,
}

/// One who took part.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// As the table calls it.
    pub name: String,
    /// The figures.
    pub summary: Summary,
    /// What they were made of.
    pub samples: Vec<Sample>,
}

/// Measures. What was made is removed, however it ends.
///
/// # Errors
/// `Usage` for what makes no sense, `Interrupted`, or what the machine refused.
pub fn run(options: &Options, launcher: &Launcher, watch: &mut dyn Watch) -> Result<Outcome> {
    check(options)?;
    let gpu = options.workload.gpu.map(gpu::find).transpose()?;
    let (backend, backend_reason) = choose(&options.workload)?;
    let is_direct = is_direct(&options.workload);
    let mut notes = Vec::new();
    let mut ours = Ours::prepare(options, launcher, watch)?;
    notes.extend(ours.note());
    let mut fio = if options.against_fio {
        let workload = for_fio(options, &mut notes);
        let fio = Fio::prepare(workload, backend, is_direct, watch)?;
        notes.extend(fio.note());
        Some(fio)
    } else {
        None
    };
    let (mine, theirs) = rounds(options, &mut ours, fio.as_mut(), watch)?;
    notes.extend(ours.staged());
    let ratio = (!theirs.is_empty()).then(|| summary::ratio(&mine, &theirs));
    let mut contestants = vec![Line { name: "deepnvme".into(), summary: summary::of(&mine), samples: mine }];
    if !theirs.is_empty() {
        let name = fio::version().unwrap_or_else(|| "fio".into()) + if gpu.is_some() { " (host)" } else { "" };
        contestants.push(Line { name, summary: summary::of(&theirs), samples: theirs });
    }
    Ok(Outcome {
        version: env!("CARGO_PKG_VERSION"),
        processes: options.processes,
        backend: backend.name().into(),
        backend_reason,
        folders: options.workload.folders.iter().map(|path| Place::of(path)).collect(),
        gpu,
        contestants,
        ratio,
        is_validated: options.workload.validate,
        notes,
        workload: options.workload.clone(),
    })
}

fn check(options: &Options) -> Result<()> {
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

/// What an engine of that configuration would use here.
fn choose(workload: &Workload) -> Result<(BackendKind, String)> {
    let engine = Engine::new(workload.config.clone())?;
    Ok((engine.backend_kind(), engine.backend_reason().to_owned()))
}

/// Whether transfers in the first folder bypass the page cache.
fn is_direct(workload: &Workload) -> bool {
    if workload.config.direct == DirectMode::Disabled {
        return false;
    }
    let Ok(files) = crate::measure::ScratchFiles::make(&workload.folders[..1], None) else { return true };
    let options = OpenOptions { access: deepnvme_io::Access::ReadWrite, create: false, direct: DirectMode::Preferred };
    let opened = files.targets().iter().map(|target| TensorFile::open(target, options));
    let states: Vec<_> = opened.flatten().map(|file| file.direct()).collect();
    states.iter().all(|state| matches!(state, DirectState::Direct { .. }))
}

/// The same work for one fio: several processes of ours are several files of fio's.
fn for_fio(options: &Options, notes: &mut Vec<String>) -> Workload {
    let mut workload = options.workload.clone();
    if options.processes > 1 {
        let folders = std::mem::take(&mut workload.folders);
        workload.folders = (0..options.processes).flat_map(|_| folders.iter().cloned()).collect();
    }
    if workload.memory == Memory::Plain {
        notes.push(
            "fio reads and writes aligned memory; that of deepnvme was not, so that it copied what fio did not".into(),
        );
    }
    if let Some(index) = workload.gpu.take() {
        let text = "fio knows host memory only; deepnvme's bytes went on to or came from";
        notes.push(format!("{text} cuda:{index}, which is in the ratio"));
    }
    workload
}

/// We and the rival in turn; who begins changes from round to round.
fn rounds(
    options: &Options,
    ours: &mut Ours,
    mut fio: Option<&mut Fio>,
    watch: &mut dyn Watch,
) -> Result<(Vec<Sample>, Vec<Sample>)> {
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..options.warm_up + options.rounds {
        let counts = round >= options.warm_up;
        ours.set_phase(if counts { Phase::Measuring } else { Phase::WarmUp });
        for turn in 0..2 {
            let is_mine = (turn + round) % 2 == 0;
            let sample = match (is_mine, fio.as_deref_mut()) {
                (true, _) => ours.contestant().round(watch)?,
                (false, Some(fio)) => fio.round(watch)?,
                (false, None) => continue,
            };
            if counts {
                (if is_mine { &mut mine } else { &mut theirs }).push(sample);
            }
        }
    }
    Ok((mine, theirs))
}

/// Our side: in this process, or in several.
enum Ours {
    Here(Box<Runner>),
    Crew(processes::Crew),
}

impl Ours {
    fn prepare(options: &Options, launcher: &Launcher, watch: &mut dyn Watch) -> Result<Self> {
        if options.processes == 1 {
            return Ok(Self::Here(Box::new(Runner::prepare(options.workload.clone(), watch)?)));
        }
        let workloads = vec![options.workload.clone(); options.processes as usize];
        Ok(Self::Crew(processes::Crew::launch(&workloads, launcher, watch)?))
    }

    fn set_phase(&mut self, phase: Phase) {
        match self {
            Self::Here(runner) => runner.set_phase(phase),
            Self::Crew(crew) => crew.set_phase(phase),
        }
    }

    fn contestant(&mut self) -> &mut dyn Contestant {
        match self {
            Self::Here(runner) => &mut **runner,
            Self::Crew(crew) => crew,
        }
    }

    fn note(&self) -> Option<String> {
        let Self::Here(runner) = self else { return None };
        runner.unlocked().map(|reason| format!("the memory is not page-locked: {reason}"))
    }

    /// Why copies from and to a GPU took a longer way than they should; known when there have been some.
    fn staged(&self) -> Option<String> {
        let Self::Here(runner) = self else { return None };
        let reason = runner.engine().stats().staged_reason?;
        Some(format!("the driver staged the copies from and to the GPU: {reason}"))
    }
}

impl Place {
    fn of(path: &Path) -> Self {
        let folder = Folder::of_this_machine(path);
        Self {
            path: path.to_path_buf(),
            file_system: folder.file_system,
            device: folder.device.map(|device| device.name),
        }
    }
}
