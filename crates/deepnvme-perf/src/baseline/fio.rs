//! `fio` with the same parameters.
//!
//! A worker is a job of fio's with its own share of the file, the queue depth is the same, and so is the block size.
//! fio's buffers are a few blocks that it uses again and again, in huge pages where some are set aside, as ours are. Its
//! start lies outside of its timing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use deepnvme_io::backend::BackendKind;
use deepnvme_io::{Durability, SubmitMode};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::measure::{
    Cache, Contestant, Direction, Memory, Moment, Order, Phase, Sample, ScratchFiles, Watch, Workload,
};
use crate::measure::{check_room, make_cold, make_warm};
use crate::tree::Tree;
use crate::units::{bytes_option, bytes_text};

/// Buffers below that may stay in the cache of a processor.
const CACHE_BYTES: u64 = 32 << 20;
/// How often somebody who looks on is told, and asked whether to stop.
const LOOK: Duration = Duration::from_millis(50);

/// fio over files of its own.
pub struct Fio {
    workload: Workload,
    backend: BackendKind,
    is_direct: bool,
    has_huge_pages: bool,
    files: ScratchFiles,
}

/// The version of the fio that is installed; `None` where there is none.
#[must_use]
pub fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

impl Fio {
    /// Makes the files and lets fio lay them out. `backend` and `is_direct` are what our engine has chosen.
    ///
    /// # Errors
    /// When fio is not installed, or has no such job.
    pub fn prepare(workload: Workload, backend: BackendKind, is_direct: bool, watch: &mut dyn Watch) -> Result<Self> {
        if version().is_none() {
            let text = "--against fio: fio is not installed; apt install fio, dnf install fio, or leave the option out";
            return Err(Error::usage(text));
        }
        if workload.stripe_bytes.is_some() {
            return Err(Error::usage("--against fio: fio has no stripe sets; leave --stripe or --against out"));
        }
        check_room(&workload.folders, workload.file_bytes())?;
        let files = ScratchFiles::make(&workload.folders, None)?;
        files.allocate(workload.file_bytes())?;
        let has_huge_pages = workload.memory == Memory::Pinned && huge_bytes_free() >= buffer_bytes(&workload);
        let fio = Self { workload, backend, is_direct, has_huge_pages, files };
        let laid_out = fio.paths().into_iter().map(|path| fio.lay_out(&path, watch)).collect::<Result<Vec<_>>>();
        laid_out.map(|_| fio)
    }

    /// What makes the comparison unfair, and how to mend it.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        let workload = &self.workload;
        if !self.has_huge_pages && workload.memory == Memory::Pinned {
            let pages = buffer_bytes(workload).div_ceil(2 << 20);
            let text = "fio's buffers are scattered pages and those of deepnvme are not; for the same, as root:";
            return Some(format!("{text} echo {pages} > /proc/sys/vm/nr_hugepages"));
        }
        let ring =
            u64::from(workload.config.workers) * u64::from(workload.config.queue_depth) * workload.config.block_bytes;
        let is_cached = ring <= CACHE_BYTES && workload.buffer_bytes.is_none() && workload.order == Order::Sequential;
        // Twice as much: blocks that wait for their turn need memory here, too.
        let (ring_text, ring) = (bytes_text(ring), bytes_option(2 * ring));
        let text = "fio uses again and again, so that a processor's cache may hold them; deepnvme fills a tensor. For the same:";
        is_cached.then(|| format!("{ring_text} of buffers {text} --buffer {ring}"))
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.files.paths().map(Path::to_path_buf).collect()
    }

    /// Fills a file with random bytes; fio's own laying out writes zeros for reads on some versions.
    fn lay_out(&self, path: &Path, watch: &mut dyn Watch) -> Result<()> {
        let mut command = vec!["--rw=write".to_owned(), "--bs=1M".to_owned(), "--end_fsync=1".to_owned()];
        command.push(format!("--size={}", self.workload.file_bytes()));
        command.extend(["--refill_buffers=1".to_owned(), "--name=lay-out".to_owned(), filename(path)]);
        self.execute(&command, watch).map(drop)
    }

    fn execute(&self, arguments: &[String], watch: &mut dyn Watch) -> Result<Report> {
        let failed = |text: &str| Error::failed(format!("fio {}: {text}", arguments.join(" ")));
        let mut child = Command::new("fio")
            .arg("--output-format=json")
            .args(arguments)
            // Some versions write a file with their own state into the working directory.
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(&error.to_string()))?;
        let drained = drain(child.stdout.take()).and_then(|output| Ok((output, drain(child.stderr.take())?)));
        let (output, complaints) = drained.inspect_err(|_| {
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let began = Instant::now();
        let status = loop {
            match child.try_wait().map_err(|error| failed(&error.to_string()))? {
                Some(status) => break status,
                None if watch.is_interrupted() => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(Error::Interrupted);
                }
                None => std::thread::sleep(LOOK.min(Duration::from_millis(5).max(began.elapsed() / 20))),
            }
            let (bytes_total, seconds) = (self.workload.round_bytes(), began.elapsed().as_secs_f64());
            // fio tells only at its end what it has moved.
            watch.see(&Moment { phase: Phase::Measuring, contestant: "fio", bytes_done: 0, bytes_total, seconds });
        };
        let (output, complaints) = (output.join().unwrap_or_default(), complaints.join().unwrap_or_default());
        if !status.success() {
            return Err(failed(complaints.lines().chain(output.lines()).next().unwrap_or("it failed without a word")));
        }
        parse(&output).map_err(|text| failed(&text))
    }
}

impl Contestant for Fio {
    fn name(&self) -> &str {
        "fio"
    }

    fn round(&mut self, watch: &mut dyn Watch) -> Result<Sample> {
        for path in self.files.paths() {
            match self.workload.cache {
                Cache::Cold => make_cold(path)?,
                Cache::Warm => make_warm(path)?,
            }
        }
        let mut arguments = arguments(&self.workload, self.backend, self.is_direct, &self.paths());
        if self.has_huge_pages {
            arguments.insert(0, "--iomem=mmaphuge".into());
        }
        let report = self.execute(&arguments, watch)?;
        let sample = report.sample(self.workload.direction, self.is_direct);
        let (moved, asked) = (sample.bytes, self.workload.round_bytes());
        if moved * 100 < asked * 99 {
            return Err(Error::failed(format!("fio moved {moved} bytes instead of {asked}")));
        }
        Ok(sample)
    }
}

/// What fio's jobs take for their buffers, each a little more than it asks for.
fn buffer_bytes(workload: &Workload) -> u64 {
    let config = &workload.config;
    let jobs = u64::from(config.workers) * workload.folders.len() as u64;
    jobs * (u64::from(config.queue_depth) * config.block_bytes + (4 << 20))
}

/// Huge pages that are set aside and not in use.
fn huge_bytes_free() -> u64 {
    let tree = Tree::of_this_machine();
    let first = |name| tree.field("/proc/meminfo", name)?.split_whitespace().next()?.parse::<u64>().ok();
    first("HugePages_Free").unwrap_or(0) * (first("Hugepagesize").unwrap_or(0) << 10)
}

/// Reads a pipe to its end on a thread of its own, so that fio never waits for us.
fn drain(pipe: Option<impl std::io::Read + Send + 'static>) -> Result<std::thread::JoinHandle<String>> {
    let read = move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).into_owned()
    };
    Ok(deepnvme_io::start_thread(|| std::thread::Builder::new().spawn(read))?)
}

/// fio takes a colon for the end of a name.
fn filename(path: &Path) -> String {
    // fio is given names of ours below a folder; one that is no UTF-8 it does not find.
    format!("--filename={}", path.display().to_string().replace(':', r"\:"))
}

/// fio's options for a workload: pure.
fn arguments(workload: &Workload, backend: BackendKind, is_direct: bool, paths: &[PathBuf]) -> Vec<String> {
    let config = &workload.config;
    let rw = match (workload.direction, workload.order) {
        (Direction::Read, Order::Sequential) => "read",
        (Direction::Read, Order::Random) => "randread",
        (Direction::Write, Order::Sequential) => "write",
        (Direction::Write, Order::Random) => "randwrite",
    };
    let workers = u64::from(config.workers);
    // Each job has whole blocks; what is left over at the end of the file is left out.
    let share = workload.file_bytes() / workers / config.block_bytes * config.block_bytes;
    let mut all = vec![
        format!("--rw={rw}"),
        format!("--bs={}", config.block_bytes),
        format!("--direct={}", u8::from(is_direct)),
        "--group_reporting=1".into(),
        "--norandommap=0".into(),
        "--overwrite=1".into(),
        "--invalidate=0".into(),
        "--thread=1".into(),
    ];
    match backend {
        BackendKind::Uring => {
            all.extend(["--ioengine=io_uring".into(), "--fixedbufs=1".into(), "--registerfiles=1".into()]);
            all.push(format!("--iodepth={}", config.queue_depth));
        }
        BackendKind::Aio => all.extend(["--ioengine=libaio".into(), format!("--iodepth={}", config.queue_depth)]),
        BackendKind::Threads | BackendKind::Simulated => all.push("--ioengine=psync".into()),
    }
    if config.submit == SubmitMode::Single {
        all.push("--iodepth_batch_submit=1".into());
    }
    match workload.durability {
        _ if workload.direction == Direction::Read => {}
        Durability::None => {}
        Durability::Data | Durability::Full => all.push("--end_fsync=1".into()),
    }
    if workers > 1 && share > 0 {
        all.extend([format!("--numjobs={workers}"), format!("--size={share}"), format!("--offset_increment={share}")]);
    } else {
        all.push(format!("--size={}", workload.file_bytes()));
    }
    for (index, path) in paths.iter().enumerate() {
        all.extend([format!("--name=file{index}"), filename(path)]);
    }
    all
}

#[derive(Deserialize)]
struct Report {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Side,
    write: Side,
    usr_cpu: f64,
    sys_cpu: f64,
    job_runtime: u64,
}

#[derive(Deserialize)]
struct Side {
    io_bytes: u64,
    runtime: u64,
    #[serde(default)]
    clat_ns: Option<Clat>,
}

#[derive(Deserialize)]
struct Clat {
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, u64>,
    #[serde(default, rename = "N")]
    count: u64,
}

/// fio's JSON. Warnings may come before it on the same stream.
fn parse(text: &str) -> std::result::Result<Report, String> {
    let start = text.find('{').ok_or("it printed no JSON")?;
    let mut documents = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Report>();
    let report = documents.next().ok_or("it printed no JSON")?.map_err(|error| format!("not understood: {error}"))?;
    match report.jobs.iter().find(|job| job.error != 0) {
        Some(job) => Err(std::io::Error::from_raw_os_error(job.error).to_string()),
        None => Ok(report),
    }
}

impl Report {
    fn sample(&self, direction: Direction, is_direct: bool) -> Sample {
        let side = |job: &'_ Job| match direction {
            Direction::Read => (job.read.io_bytes, job.read.runtime, percentiles(&job.read)),
            Direction::Write => (job.write.io_bytes, job.write.runtime, percentiles(&job.write)),
        };
        let mut sample = Sample::default();
        for job in &self.jobs {
            let (bytes, runtime_ms, latencies) = side(job);
            sample.bytes += bytes;
            // Whole milliseconds are what fio tells; a job that took less counts as one.
            sample.wall_s = sample.wall_s.max(runtime_ms.max(1) as f64 / 1e3);
            sample.cpu_s += (job.usr_cpu + job.sys_cpu) / 100.0 * job.job_runtime as f64 / 1e3;
            for (us, count) in latencies {
                *sample.latencies_us.entry(us).or_default() += count;
            }
        }
        sample.transfer_s = sample.wall_s;
        *(if is_direct { &mut sample.bytes_direct } else { &mut sample.bytes_buffered }) = sample.bytes;
        sample
    }
}

/// The blocks between two of fio's percentiles, counted at the upper one.
fn percentiles(side: &Side) -> Vec<(u64, u64)> {
    let Some(clat) = &side.clat_ns else { return Vec::new() };
    let mut known: Vec<_> =
        clat.percentile.iter().filter_map(|(part, ns)| Some((part.parse::<f64>().ok()?, *ns))).collect();
    known.sort_by(|left, right| left.0.total_cmp(&right.0));
    let mut counted = 0;
    let steps = known.into_iter().map(|(part, ns)| {
        let upto = (clat.count as f64 * part / 100.0).round() as u64;
        let count = upto.saturating_sub(counted);
        counted = counted.max(upto);
        (ns / 1000, count)
    });
    steps.filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::sample::quantile;
    use crate::measure::workload::tests::small;

    const JSON: &str = r#"fio: a warning
{"fio version": "fio-3.33", "jobs": [
 {"error": 0, "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": 1000,
  "read": {"io_bytes": 4000000000, "runtime": 500, "clat_ns": {"N": 100, "percentile": {"50.000000": 2000000, "99.000000": 9000000, "99.900000": 12000000}}},
  "write": {"io_bytes": 0, "runtime": 0}}]}
trailing words"#;

    #[test]
    fn the_report_becomes_a_sample() {
        let sample = parse(JSON).unwrap_or_else(|text| panic!("{text}")).sample(Direction::Read, true);
        assert_eq!((sample.bytes, sample.wall_s, sample.bytes_direct), (4_000_000_000, 0.5, 4_000_000_000));
        assert!((sample.gb_per_s() - 8.0).abs() < 1e-9 && (sample.cpu_s - 0.2).abs() < 1e-9);
        assert_eq!([0.5, 0.99].map(|part| quantile(&sample.latencies_us, part)), [Some(2000), Some(9000)]);
        let failed = JSON.replace(r#""error": 0"#, r#""error": 28"#);
        assert!(parse(&failed).err().is_some_and(|text| text.contains("space")));
        assert!(parse("fio: command not understood").is_err());
    }

    #[test]
    fn parameters_are_the_same() {
        let base = small(Direction::Write, &[Path::new("/a:b")]);
        let mut config = base.config.clone();
        (config.workers, config.queue_depth) = (2, 7);
        let workload = Workload { durability: Durability::Full, config, ..base };
        let text = |backend| arguments(&workload, backend, true, &["/a:b/file".into()]).join(" ");
        let uring = text(BackendKind::Uring);
        for part in [
            "--rw=write",
            "--bs=65536",
            "--iodepth=7",
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--end_fsync=1",
            "--numjobs=2",
            "--size=1572864",
            "--offset_increment=1572864",
            r"--filename=/a\:b/file",
            "--direct=1",
        ] {
            assert!(uring.contains(part), "{part}: {uring}");
        }
        assert!(text(BackendKind::Aio).contains("--ioengine=libaio") && text(BackendKind::Threads).contains("psync"));
        let read = Workload { direction: Direction::Read, order: Order::Random, ..workload };
        let read = arguments(&read, BackendKind::Uring, false, &["/x".into()]).join(" ");
        assert!(read.contains("--rw=randread") && read.contains("--direct=0") && !read.contains("fsync"), "{read}");
    }
}
