//! fio with the same parameters.
//!
//! Each worker becomes a fio job with its own part of the file, and the same queue depth and block size. fio reuses a
//! few blocks of buffer, in huge pages if enough are reserved, like the engine's. Its timing excludes its start.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use deepnvme_io::backend::BackendKind;
use deepnvme_io::mem::PAGE_BYTES;
use deepnvme_io::{Durability, SubmitMode};

use super::fio_report::{FioReport, parse};
use crate::error::{Error, Result};
use crate::measure::{
    AccessOrder, Benchmark, Cache, Direction, Memory, Observer, Phase, ProgressUpdate, Sample, ScratchFiles, Workload,
};
use crate::measure::{check_free_space, drop_from_page_cache, load_into_page_cache};
use crate::system_files::SystemFiles;
use crate::units::{bytes_option, bytes_text};

/// Buffers up to this size may stay in a CPU cache.
const CACHE_BYTES: u64 = 32 << 20;
/// Time between two progress reports.
const UPDATE_INTERVAL: Duration = Duration::from_millis(50);

/// fio, with its own files.
pub struct Fio {
    workload: Workload,
    backend: BackendKind,
    is_direct: bool,
    has_huge_pages: bool,
    files: ScratchFiles,
}

/// Returns the version of the installed fio; `None` if there is none.
#[must_use]
pub fn version() -> Option<String> {
    let output = Command::new("fio").arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

impl Fio {
    /// Makes the files and fills them with fio. `backend` and `is_direct` are the choices of our engine.
    ///
    /// # Errors
    /// `Usage` if fio is not installed or does not support the workload, `Failed`, or `Interrupted`.
    pub fn prepare(
        workload: Workload,
        backend: BackendKind,
        is_direct: bool,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        if version().is_none() {
            let text = "--against fio: fio is not installed; apt install fio, dnf install fio, or remove the option";
            return Err(Error::usage(text));
        }
        if workload.stripe_bytes.is_some() {
            return Err(Error::usage("--against fio: fio has no stripe sets; remove --stripe-bytes or --against"));
        }
        check_free_space(&workload.folders, workload.file_bytes())?;
        let files = ScratchFiles::make(&workload.folders, None)?;
        files.allocate(workload.file_bytes())?;
        let has_huge_pages = workload.place.memory == Memory::Pinned && huge_bytes_free() >= buffer_bytes(&workload);
        let fio = Self { workload, backend, is_direct, has_huge_pages, files };
        let laid_out = fio.paths().into_iter().map(|path| fio.lay_out(&path, observer)).collect::<Result<Vec<_>>>();
        laid_out.map(|_| fio)
    }

    /// Returns each reason why the comparison is unfair, with its remedy.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        self.memory_note().into_iter().chain(remainder_note(&self.workload)).collect()
    }

    fn memory_note(&self) -> Option<String> {
        let workload = &self.workload;
        if !self.has_huge_pages && workload.place.memory == Memory::Pinned {
            let pages = buffer_bytes(workload).div_ceil(2 << 20);
            let text = "fio's buffers are scattered pages, deepnvme's are contiguous; for a fair comparison, as root:";
            return Some(format!("{text} echo {pages} > /proc/sys/vm/nr_hugepages"));
        }
        let config = &workload.config;
        let ring_bytes = u64::from(config.workers) * u64::from(config.queue_depth) * config.block_bytes;
        let is_cached =
            ring_bytes <= CACHE_BYTES && workload.buffer_bytes.is_none() && workload.order == AccessOrder::Sequential;
        // Twice as much: in the engine, queued blocks need memory as well.
        let (ring, option) = (bytes_text(ring_bytes), bytes_option(2 * ring_bytes));
        let text =
            "are reused by fio and may stay in a CPU cache; deepnvme fills a whole tensor. For a fair comparison:";
        is_cached.then(|| format!("{ring} of buffers {text} --buffer {option}"))
    }

    fn paths(&self) -> Vec<PathBuf> {
        self.files.paths().map(Path::to_path_buf).collect()
    }

    /// Fills a file with random bytes: some versions of fio lay out zeros for reads.
    fn lay_out(&self, path: &Path, observer: &mut dyn Observer) -> Result<()> {
        // The same blocks as later: fio skips a remainder of less than a block.
        let block_bytes = Jobs::of(&self.workload).block_bytes;
        let mut command = vec!["--rw=write".to_owned(), format!("--bs={block_bytes}"), "--end_fsync=1".to_owned()];
        command.push(format!("--size={}", self.workload.file_bytes()));
        command.extend(["--refill_buffers=1".to_owned(), "--name=lay-out".to_owned(), filename(path)]);
        self.execute(&command, Phase::LayingOut, observer).map(drop)
    }

    fn execute(&self, arguments: &[String], phase: Phase, observer: &mut dyn Observer) -> Result<FioReport> {
        let failed = |text: &str| Error::failed(format!("fio {}: {text}", arguments.join(" ")));
        let child = Command::new("fio")
            .arg("--output-format=json")
            .args(arguments)
            // Some versions write a state file into the working directory.
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(&error.to_string()))?;
        let mut child = KilledOnDrop(child);
        let output = drain(child.0.stdout.take())?;
        let errors = drain(child.0.stderr.take())?;
        let began = Instant::now();
        let status = loop {
            match child.0.try_wait().map_err(|error| failed(&error.to_string()))? {
                Some(status) => break status,
                None if observer.is_interrupted() => return Err(Error::Interrupted),
                None => std::thread::sleep(UPDATE_INTERVAL.min(Duration::from_millis(5).max(began.elapsed() / 20))),
            }
            let (bytes_total, seconds) = (self.workload.round_bytes(), began.elapsed().as_secs_f64());
            // fio reports bytes only at its end.
            observer.update(&ProgressUpdate { phase, label: "fio", bytes_done: 0, bytes_total, seconds });
        };
        let (output, errors) = (output.join().unwrap_or_default(), errors.join().unwrap_or_default());
        if !status.success() {
            return Err(failed(errors.lines().chain(output.lines()).next().unwrap_or("it failed without a message")));
        }
        parse(&output).map_err(|text| failed(&text))
    }
}

impl Benchmark for Fio {
    fn name(&self) -> &str {
        "fio"
    }

    fn round(&mut self, observer: &mut dyn Observer) -> Result<Sample> {
        for path in self.files.paths() {
            match self.workload.cache {
                Cache::Cold => drop_from_page_cache(path)?,
                Cache::Warm => load_into_page_cache(path)?,
            }
        }
        let mut arguments = arguments(&self.workload, self.backend, self.is_direct, &self.paths());
        if self.has_huge_pages {
            arguments.insert(0, "--iomem=mmaphuge".into());
        }
        let report = self.execute(&arguments, Phase::Measuring, observer)?;
        let sample = report.sample(self.workload.direction, self.is_direct);
        let expected = Jobs::of(&self.workload).bytes() * self.workload.file_count() as u64;
        let transferred = sample.bytes;
        if transferred * 100 < expected * 99 {
            return Err(Error::failed(format!("fio transferred {transferred} bytes instead of {expected}")));
        }
        Ok(sample)
    }
}

/// A process that is killed and reaped when an error ends the wait for it.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Both do nothing after `try_wait` has returned the status.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The jobs that transfer one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Jobs {
    count: u64,
    /// Bytes of the part of each job.
    job_bytes: u64,
    block_bytes: u64,
}

impl Jobs {
    /// Each of several jobs has whole blocks. One job has the whole file, if not every worker would have a block. Pure.
    fn of(workload: &Workload) -> Self {
        let (workers, file_bytes) = (u64::from(workload.config.workers), workload.file_bytes());
        // fio refuses blocks larger than the file, and direct I/O needs whole pages.
        let block_bytes = match workload.config.block_bytes.min(file_bytes) {
            bytes if bytes >= PAGE_BYTES => bytes / PAGE_BYTES * PAGE_BYTES,
            bytes => bytes.max(1),
        };
        match file_bytes / workers / block_bytes * block_bytes {
            job_bytes if workers > 1 && job_bytes > 0 => Self { count: workers, job_bytes, block_bytes },
            _ => Self { count: 1, job_bytes: file_bytes, block_bytes },
        }
    }

    /// Returns the bytes of the file that fio transfers: it skips a remainder of less than a block in each job.
    fn bytes(self) -> u64 {
        self.count * (self.job_bytes / self.block_bytes * self.block_bytes)
    }
}

/// Returns the bytes that only deepnvme transfers, and the remedy; `None` if there are none. Pure.
fn remainder_note(workload: &Workload) -> Option<String> {
    let skipped = workload.file_bytes() - Jobs::of(workload).bytes();
    let whole = workload.config.block_bytes * u64::from(workload.config.workers);
    (skipped > 0).then(|| {
        let (skipped, whole) = (bytes_text(skipped), bytes_option(whole));
        format!(
            "fio skips the last {skipped} of a file; for the same bytes, use a --size that is a multiple of {whole}"
        )
    })
}

/// Returns the bytes of fio's buffers. Each job allocates a little more than its queue needs.
fn buffer_bytes(workload: &Workload) -> u64 {
    let config = &workload.config;
    let jobs = u64::from(config.workers) * workload.folders.len() as u64;
    jobs * (u64::from(config.queue_depth) * config.block_bytes + (4 << 20))
}

/// Returns the bytes of free reserved huge pages.
fn huge_bytes_free() -> u64 {
    let files = SystemFiles::of_this_machine();
    let first = |name| files.field("/proc/meminfo", name)?.split_whitespace().next()?.parse::<u64>().ok();
    first("HugePages_Free").unwrap_or(0) * (first("Hugepagesize").unwrap_or(0) << 10)
}

/// Reads a pipe to its end on its own thread, so that fio never blocks on a full pipe.
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

/// Makes the option for a file name. fio treats a colon as the end of a name.
fn filename(path: &Path) -> String {
    // fio does not find a folder whose name is not UTF-8.
    format!("--filename={}", path.display().to_string().replace(':', r"\:"))
}

/// Returns fio's options for a workload. Pure.
fn arguments(workload: &Workload, backend: BackendKind, is_direct: bool, paths: &[PathBuf]) -> Vec<String> {
    let config = &workload.config;
    let rw = match (workload.direction, workload.order) {
        (Direction::Read, AccessOrder::Sequential) => "read",
        (Direction::Read, AccessOrder::Random) => "randread",
        (Direction::Write, AccessOrder::Sequential) => "write",
        (Direction::Write, AccessOrder::Random) => "randwrite",
    };
    let Jobs { count, job_bytes, block_bytes } = Jobs::of(workload);
    let mut all = vec![
        format!("--rw={rw}"),
        format!("--bs={block_bytes}"),
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
    all.push(format!("--size={job_bytes}"));
    if count > 1 {
        all.extend([format!("--numjobs={count}"), format!("--offset_increment={job_bytes}")]);
    }
    for (index, path) in paths.iter().enumerate() {
        all.extend([format!("--name=file{index}"), filename(path)]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::workload::tests::small;

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
        let read = Workload { direction: Direction::Read, order: AccessOrder::Random, ..workload };
        let read = arguments(&read, BackendKind::Uring, false, &["/x".into()]).join(" ");
        assert!(read.contains("--rw=randread") && read.contains("--direct=0") && !read.contains("fsync"), "{read}");
    }
    #[test]
    fn fio_is_asked_for_whole_blocks_of_each_worker() {
        let jobs = |size, workers, block_bytes| {
            let base = small(Direction::Read, &[Path::new("/a")]);
            let config = deepnvme_io::Config { workers, block_bytes, ..base.config };
            let workload = Workload { io_bytes: size, config, ..base };
            let (jobs, note) = (Jobs::of(&workload), remainder_note(&workload));
            assert_eq!(note.is_some(), jobs.bytes() < size, "{size} {workers}: {note:?}");
            let text = arguments(&workload, BackendKind::Uring, true, &["/a/file".into()]).join(" ");
            assert!(text.contains(&format!("--size={} ", jobs.job_bytes)), "{text}");
            assert!(text.contains(&format!("--bs={} ", jobs.block_bytes)), "{text}");
            assert_eq!(text.contains("--numjobs"), jobs.count > 1, "{text}");
            (jobs.count, jobs.bytes())
        };
        assert_eq!(jobs(96 << 20, 2, 1 << 20), (2, 96 << 20));
        assert_eq!(jobs(100_000_000, 2, 1 << 20), (2, 94 << 20));
        assert_eq!(jobs(100_000_000, 4, 1 << 20), (4, 92 << 20));
        assert_eq!(jobs(100_000_000, 1, 1 << 20), (1, 95 << 20));
        assert_eq!(jobs(3 << 20, 4, 1 << 20), (1, 3 << 20), "a part would be less than a block");
        assert_eq!(jobs(10_000, 4, 1 << 20), (1, 8192), "fio refuses a block larger than the file");
    }
}
