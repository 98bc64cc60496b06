//! `ds_io`: read or write a tensor in each process, and print latencies and speeds.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use deepnvme_io::display;
use deepnvme_io::{Config, DirectMode, SubmitMode, WindowMode};

use deepnvme_perf::bench::Launcher;
use deepnvme_perf::bench::processes::BenchProcesses;
use deepnvme_perf::measure::{
    Benchmark, Direction, Memory, MemoryPlace, Observer, Phase, Runner, Sample, Workload, gpu,
};
use deepnvme_perf::units::parse_bytes;
use deepnvme_perf::{Error, Result};

use super::GIB;

/// The engines of DeepSpeed's tool.
pub const ENGINES: [&str; 4] = ["aio_handle", "aio_basic", "torch_io", "torch_fastio"];

/// The options, by DeepSpeed's names.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct DsIoOptions {
    /// Folder for all processes; this or --folder_to_device_mapping is required.
    #[arg(long)]
    pub folder: Option<PathBuf>,
    /// Folder and device for each process.
    #[arg(long = "folder_to_device_mapping", num_args = 1.., value_name = "FOLDER:DEVICE")]
    pub folder_to_device_mapping: Vec<String>,
    /// Bytes per process.
    #[arg(long = "io_size", value_parser = parse_bytes)]
    pub io_size: u64,
    /// Read instead of write.
    #[arg(long)]
    pub read: bool,
    /// Processes, with --folder.
    #[arg(long = "multi_process", default_value_t = 1)]
    pub multi_process: u32,
    /// Bytes of a request.
    #[arg(long = "block_size", value_parser = parse_bytes, default_value = "1M")]
    pub block_size: u64,
    /// Requests in flight.
    #[arg(long = "queue_depth", default_value_t = 32)]
    pub queue_depth: u32,
    /// Submit each request with its own system call.
    #[arg(long = "single_submit")]
    pub single_submit: bool,
    /// Submit the next requests when all requests in flight have completed [default: after each completion]
    #[arg(long = "sequential_requests")]
    pub sequential_requests: bool,
    /// Compare every byte.
    #[arg(long)]
    pub validate: bool,
    /// aio_handle or aio_basic; both select this engine.
    #[arg(long, default_value = "aio_handle")]
    pub engine: String,
    /// Rounds.
    #[arg(long, default_value_t = 3)]
    pub loops: u32,
    /// Workers [default: 1]
    #[arg(long = "io_parallel")]
    pub io_parallel: Option<u32>,
    /// Use GPU memory: the GPU of the process's number with --folder, else the device of the mapping.
    #[arg(long)]
    pub gpu: bool,
    /// With --gpu: use cuFile (GPUDirect Storage) instead of bounce buffers, or fail with the reason.
    #[arg(long = "use_gds")]
    pub use_gds: bool,
    /// Use memory that is not pinned; without effect with --gpu.
    #[arg(long = "slow_bounce_buffer")]
    pub slow_bounce_buffer: bool,
    /// Warm-up rounds.
    #[arg(long = "warmup_loops", default_value_t = 1)]
    pub warmup_loops: u32,
    /// Include the warm-up in the result.
    #[arg(long = "include_warmup_time")]
    pub include_warmup_time: bool,
}

/// The measured metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    direction: Direction,
    /// Seconds of the transfers: mean of the rounds.
    pub task_s: f64,
    /// Seconds from opening the files to the last byte: mean of the rounds.
    pub e2e_s: f64,
    /// Bytes of all processes.
    pub bytes: u64,
}

impl Metrics {
    pub(super) fn of(direction: Direction, samples: &[Sample]) -> Self {
        let mean = |field: fn(&Sample) -> f64| samples.iter().map(field).sum::<f64>() / samples.len().max(1) as f64;
        let bytes = samples.first().map_or(0, |sample| sample.bytes);
        Self { direction, task_s: mean(|sample| sample.transfer_s), e2e_s: mean(|sample| sample.wall_s), bytes }
    }

    /// Returns `GB/sec` as DeepSpeed counts it, including the time to open the files.
    #[must_use]
    pub fn e2e_speed(&self) -> f64 {
        self.bytes as f64 / GIB / self.e2e_s.max(1e-9)
    }

    /// Returns the four lines that `ds_nvme_tune` and scripts parse.
    #[must_use]
    pub fn text(&self) -> String {
        let name = if self.direction == Direction::Read { "Read" } else { "Write" };
        let speed = |seconds: f64| self.bytes as f64 / GIB / seconds.max(1e-9);
        let mut out = String::new();
        for (what, seconds) in [("Task", self.task_s), ("E2E", self.e2e_s)] {
            let _ = writeln!(out, "{what} {name} Latency = {seconds} sec");
            let _ = writeln!(out, "{what} {name} Speed = {} GB/sec", speed(seconds));
        }
        out
    }
}

impl DsIoOptions {
    /// Returns the errors, with DeepSpeed's messages where it has them.
    #[must_use]
    pub fn errors(&self) -> Vec<String> {
        let mut errors = Vec::new();
        let mut add = |is_wrong: bool, text: String| {
            if is_wrong {
                errors.push(text);
            }
        };
        let has_mapping = !self.folder_to_device_mapping.is_empty();
        let both = "--folder and --folder_to_device_mapping cannot be specified together.";
        add(self.folder.is_some() && has_mapping, both.into());
        let none = "At least one of --folder or --folder_to_device_mapping must be specified.";
        add(self.folder.is_none() && !has_mapping, none.into());
        if let Some(folder) = self.folder.as_ref().filter(|folder| !folder.is_dir()) {
            add(true, format!("Invalid folder in --folder: {} ", display::path(folder)));
        }
        for entry in &self.folder_to_device_mapping {
            match entry.rsplit_once(':') {
                None => add(
                    true,
                    format!("Missing delimiter (:) in folder_to_device_mapping {:?}", self.folder_to_device_mapping),
                ),
                Some((folder, _)) if !std::path::Path::new(folder).is_dir() => {
                    add(true, format!("Invalid folder in --folder_to_device_mapping: {folder}"));
                }
                Some(_) => {}
            }
        }
        let known = ENGINES.contains(&self.engine.as_str());
        add(!known, format!("Invalid engine {}. Valid options = {ENGINES:?}", self.engine));
        let torch = self.engine.starts_with("torch");
        add(torch, format!("--engine={} measures torch itself; run DeepSpeed's own ds_io for it", self.engine));
        add(self.use_gds && !self.gpu, "--gpu must be set to transfer with --use_gds".into());
        if self.gpu {
            let missing = self.processes().into_iter().find_map(|(_, device)| match device.parse() {
                Ok(index) => gpu::find(index).err().map(|error| error.to_string()),
                Err(_) => Some(format!("Invalid device in --folder_to_device_mapping: {device}")),
            });
            add(missing.is_some(), missing.unwrap_or_default());
        }
        errors
    }

    /// Returns the folder and the device of each process.
    #[must_use]
    pub fn processes(&self) -> Vec<(PathBuf, String)> {
        match &self.folder {
            Some(folder) => (0..self.multi_process).map(|number| (folder.clone(), number.to_string())).collect(),
            None => {
                let entries = self.folder_to_device_mapping.iter();
                let entries = entries.filter_map(|entry| entry.rsplit_once(':'));
                entries.map(|(folder, device)| (folder.into(), device.into())).collect()
            }
        }
    }

    /// Returns the options as Python shows them in DeepSpeed's tool. Its options that are missing here do not appear.
    fn namespace(&self) -> String {
        let truth = |value: bool| if value { "True" } else { "False" }.to_owned();
        let mapping: Vec<_> = self.folder_to_device_mapping.iter().map(|entry| quoted(entry)).collect();
        let fields = [
            ("folder", self.folder.as_ref().map_or("None".into(), |folder| quoted(&display::path(folder).to_string()))),
            ("folder_to_device_mapping", format!("[{}]", mapping.join(", "))),
            // DeepSpeed's tool keeps sizes as text.
            ("io_size", quoted(&self.io_size.to_string())),
            ("read", truth(self.read)),
            ("multi_process", self.multi_process.to_string()),
            ("block_size", quoted(&self.block_size.to_string())),
            ("queue_depth", self.queue_depth.to_string()),
            ("single_submit", truth(self.single_submit)),
            ("sequential_requests", truth(self.sequential_requests)),
            ("validate", truth(self.validate)),
            ("engine", quoted(&self.engine)),
            ("loops", self.loops.to_string()),
            ("io_parallel", self.io_parallel.map_or("None".into(), |workers| workers.to_string())),
            ("gpu", truth(self.gpu)),
            ("use_gds", truth(self.use_gds)),
            ("slow_bounce_buffer", truth(self.slow_bounce_buffer)),
            ("warmup_loops", self.warmup_loops.to_string()),
            ("include_warmup_time", truth(self.include_warmup_time)),
        ];
        let fields = fields.map(|(name, value)| format!("{name}={value}"));
        format!("Namespace({})", fields.join(", "))
    }

    fn direction(&self) -> Direction {
        if self.read { Direction::Read } else { Direction::Write }
    }

    /// Returns the engine's settings.
    #[must_use]
    pub fn config(&self) -> Config {
        Config {
            block_bytes: self.block_size,
            queue_depth: self.queue_depth,
            workers: self.io_parallel.unwrap_or(1),
            submit: if self.single_submit { SubmitMode::Single } else { SubmitMode::Batch },
            window: if self.sequential_requests { WindowMode::Drain } else { WindowMode::Sliding },
            gds: if self.use_gds { DirectMode::Required } else { DirectMode::Disabled },
            ..Config::default()
        }
    }

    fn workload(&self, folder: PathBuf, device: &str) -> Workload {
        // With --gpu, `errors` has refused devices that are not numbers.
        let gpu = device.parse().ok().filter(|_| self.gpu);
        let memory = if self.slow_bounce_buffer && gpu.is_none() { Memory::Plain } else { Memory::Pinned };
        Workload {
            place: MemoryPlace { memory, gpu },
            validate: self.validate,
            config: self.config(),
            ..Workload::new(self.direction(), vec![folder], self.io_size)
        }
    }
}

/// Quotes text as Python does.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let escaped = text.replace('\\', "\\\\");
    let escaped = if quote == '\'' { escaped.replace('\'', "\\'") } else { escaped };
    format!("{quote}{escaped}{quote}")
}

/// Runs it; `print` gets the lines before the metrics.
///
/// # Errors
/// `Usage` with DeepSpeed's list of errors, `Failed`, an error of the engine, or `Interrupted`.
pub fn run(
    options: &DsIoOptions,
    launcher: &Launcher,
    observer: &mut dyn Observer,
    print: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Metrics> {
    print("Testing DeepNVMe python frontend\n")?;
    print(&format!("args = {}\n", options.namespace()))?;
    let errors = options.errors();
    if !errors.is_empty() {
        let numbered = errors.iter().enumerate();
        let list: String = numbered.map(|(index, error)| format!("\n{}: {error}", index + 1)).collect();
        return Err(Error::usage(format!("Found {} validation error(s){list}", errors.len())));
    }
    print("Successful validation of command line arguments\n")?;
    let processes = options.processes();
    print(&format!("Configuring {} process to folder mapping\n", processes.len()))?;
    for (index, (folder, _)) in processes.iter().enumerate() {
        print(&format!("[{index}]: process {index} <----> {}\n", display::path(folder)))?;
    }
    let workloads: Vec<_> = processes.into_iter().map(|(folder, device)| options.workload(folder, &device)).collect();
    workloads.iter().try_for_each(Workload::check)?;
    let samples = match workloads.as_slice() {
        [one] => {
            let mut runner = Runner::prepare(one.clone(), observer)?;
            runner.set_phase(Phase::Measuring);
            rounds(options, &mut runner, observer)?
        }
        several => rounds(options, &mut BenchProcesses::launch(several, launcher, observer)?, observer)?,
    };
    Ok(Metrics::of(options.direction(), &samples))
}

fn rounds(options: &DsIoOptions, benchmark: &mut dyn Benchmark, observer: &mut dyn Observer) -> Result<Vec<Sample>> {
    let skipped = if options.include_warmup_time { 0 } else { options.warmup_loops };
    let all: Vec<_> =
        (0..options.warmup_loops + options.loops.max(1)).map(|_| benchmark.round(observer)).collect::<Result<_>>()?;
    Ok(all.into_iter().skip(skipped as usize).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use deepnvme_perf::measure::NoObserver;

    pub(crate) fn small(folder: &std::path::Path) -> DsIoOptions {
        DsIoOptions {
            folder: Some(folder.into()),
            folder_to_device_mapping: vec![],
            io_size: 1 << 20,
            read: true,
            multi_process: 1,
            block_size: 64 << 10,
            queue_depth: 8,
            single_submit: false,
            sequential_requests: true,
            validate: true,
            engine: "aio_handle".into(),
            loops: 2,
            io_parallel: None,
            gpu: false,
            use_gds: false,
            slow_bounce_buffer: false,
            warmup_loops: 1,
            include_warmup_time: false,
        }
    }

    #[test]
    fn lines_are_those_of_deepspeed() {
        let folder = tempfile::tempdir().unwrap();
        for read in [true, false] {
            let launcher = Launcher { program: "/bin/false".into(), arguments: vec![] };
            let mut printed = String::new();
            let mut print = |text: &str| {
                printed.push_str(text);
                Ok(())
            };
            let options = DsIoOptions { read, ..small(folder.path()) };
            let metrics = run(&options, &launcher, &mut NoObserver, &mut print).unwrap();
            let name = if read { "Read" } else { "Write" };
            let lines = metrics.text();
            let starts = ["Task _ Latency = ", "Task _ Speed = ", "E2E _ Latency = ", "E2E _ Speed = "];
            for (line, start) in lines.lines().zip(starts) {
                assert!(line.starts_with(&start.replace('_', name)), "{line}");
            }
            let python =
                format!("args = Namespace(folder='{}', folder_to_device_mapping=[], ", folder.path().display());
            assert!(printed.contains(&python), "{printed}");
            let read = if read { "True" } else { "False" };
            let rest = format!(
                "io_size='1048576', read={read}, multi_process=1, block_size='65536', queue_depth=8, \
                 single_submit=False, sequential_requests=True, validate=True, engine='aio_handle', loops=2, \
                 io_parallel=None, gpu=False, use_gds=False, slow_bounce_buffer=False, warmup_loops=1, \
                 include_warmup_time=False)\n"
            );
            assert!(printed.contains(&rest), "{printed}");
            assert!(printed.contains("process 0 <----> ") && printed.contains("Successful validation"), "{printed}");
            assert!(metrics.e2e_speed() > 0.0 && metrics.task_s <= metrics.e2e_s && metrics.bytes == 1 << 20);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn text_is_quoted_as_python_quotes_it() {
        assert_eq!(["a", "it's", "a\\b", "'\""].map(quoted), ["'a'", "\"it's\"", "'a\\\\b'", "'\\'\"'"]);
    }

    #[test]
    fn errors_have_deepspeeds_messages() {
        let folder = tempfile::tempdir().unwrap();
        let good = small(folder.path());
        assert_eq!(good.errors(), Vec::<String>::new());
        let mapping = vec![format!("{}:0", folder.path().display())];
        let cases = [
            (DsIoOptions { folder_to_device_mapping: mapping.clone(), ..good.clone() }, "cannot be specified together"),
            (DsIoOptions { folder: None, ..good.clone() }, "At least one of --folder"),
            (DsIoOptions { folder: Some("/no/such".into()), ..good.clone() }, "Invalid folder in --folder: /no/such "),
            (
                DsIoOptions { folder: None, folder_to_device_mapping: vec!["x".into()], ..good.clone() },
                "Missing delimiter (:)",
            ),
            (DsIoOptions { engine: "x".into(), ..good.clone() }, "Invalid engine x. Valid options = "),
            (DsIoOptions { use_gds: true, ..good.clone() }, "--gpu must be set"),
        ];
        for (options, text) in cases {
            assert!(options.errors().iter().any(|error| error.contains(text)), "{text}: {:?}", options.errors());
        }
        let mapped = DsIoOptions { folder: None, folder_to_device_mapping: mapping, ..good };
        assert_eq!((mapped.errors(), mapped.processes()), (vec![], vec![(folder.path().to_path_buf(), "0".into())]));
    }
}
