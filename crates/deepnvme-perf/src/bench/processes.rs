//! Processes that run the same workload at the same time, each with its own engine and files.
//!
//! A benchmark process is this program again. It reads the workload as one line of JSON from its standard input, then
//! one line for each round. It writes `Message`s to its standard output. At the end of its input it removes its files
//! and exits. It sees the end of its input between two rounds, so it outlives its parent by one round at most.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use deepnvme_io::display;

use crate::error::{Error, Result};
use crate::measure::{Benchmark, Observer, Phase, ProgressUpdate, Runner, Sample, Workload};

/// The hidden command that makes a process a benchmark process.
pub const PROCESS_COMMAND: &str = "bench-process";
/// Time between two progress reports.
const UPDATE_INTERVAL: Duration = Duration::from_millis(50);
/// Time for a process to remove its files and exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The command line that starts this program again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// The arguments before [`PROCESS_COMMAND`]: `-m deepnvme` if the program is Python.
    pub arguments: Vec<String>,
}

/// A message of a benchmark process: one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Message {
    /// The files are laid out.
    Ready,
    /// The bytes of the round transferred so far.
    Bytes(u64),
    /// The round has ended.
    Sample(Box<Sample>),
    /// The process has failed.
    Failed(String),
}

/// Several benchmark processes.
pub struct BenchProcesses {
    processes: Vec<BenchProcess>,
    messages: Receiver<(usize, Message)>,
    round_bytes: u64,
    phase: Phase,
}

struct BenchProcess {
    child: Child,
    // Dropped to end the process: it exits at the end of its input.
    stdin: Option<ChildStdin>,
}

impl BenchProcesses {
    /// Starts a process for each workload, and waits until all files are laid out.
    ///
    /// # Errors
    /// The program cannot be started again, or a process cannot prepare its files.
    pub fn launch(workloads: &[Workload], launcher: &Launcher, observer: &mut dyn Observer) -> Result<Self> {
        let (sender, messages) = channel();
        let round_bytes = workloads.iter().map(Workload::round_bytes).sum();
        let mut all = Self { processes: Vec::new(), messages, round_bytes, phase: Phase::LayingOut };
        for (index, workload) in workloads.iter().enumerate() {
            let failed = |error: &dyn std::fmt::Display| {
                Error::failed(format!(
                    "cannot start {} again as a benchmark process: {error}",
                    display::path(&launcher.program)
                ))
            };
            let mut child = Command::new(&launcher.program)
                .args(&launcher.arguments)
                .arg(PROCESS_COMMAND)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|error| failed(&error))?;
            let (mut stdin, stdout) = (child.stdin.take(), child.stdout.take());
            let sent = stdin.as_mut().map(|stdin| send(stdin, &ProcessWork::new(workload)));
            all.processes.push(BenchProcess { child, stdin });
            sent.unwrap_or(Ok(())).map_err(|error| failed(&error))?;
            let sender = sender.clone();
            let listen = move || {
                for line in
                    stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines()).map_while(|line| line.ok())
                {
                    let message = serde_json::from_str(&line).unwrap_or(Message::Failed(line));
                    if sender.send((index, message)).is_err() {
                        return;
                    }
                }
                let _ =
                    sender.send((index, Message::Failed("a benchmark process exited before its work was done".into())));
            };
            deepnvme_io::start_thread(|| std::thread::Builder::new().spawn(listen))?;
        }
        all.gather(observer)?;
        Ok(all)
    }

    /// Sets the phase that the next rounds report.
    pub(super) fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Waits until every process has sent `Ready` or a `Sample`.
    fn gather(&mut self, observer: &mut dyn Observer) -> Result<Vec<Sample>> {
        let began = Instant::now();
        let mut bytes = vec![0; self.processes.len()];
        let mut samples = Vec::new();
        let mut waiting = self.processes.len();
        while waiting > 0 {
            match self.messages.recv_timeout(UPDATE_INTERVAL) {
                Ok((index, Message::Bytes(transferred))) => bytes[index] = transferred,
                Ok((_, Message::Ready)) => waiting -= 1,
                Ok((_, Message::Sample(sample))) => {
                    samples.push(*sample);
                    waiting -= 1;
                }
                Ok((_, Message::Failed(text))) => return Err(Error::failed(text)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::failed("all benchmark processes have exited"));
                }
            }
            let (bytes_done, seconds) = (bytes.iter().sum(), began.elapsed().as_secs_f64());
            let bytes_total = self.round_bytes;
            observer.update(&ProgressUpdate { phase: self.phase, label: "deepnvme", bytes_done, bytes_total, seconds });
            if observer.is_interrupted() {
                return Err(Error::Interrupted);
            }
        }
        Ok(samples)
    }
}

impl Benchmark for BenchProcesses {
    fn name(&self) -> &'static str {
        "deepnvme"
    }

    fn round(&mut self, observer: &mut dyn Observer) -> Result<Sample> {
        let phase = self.phase.name();
        for stdin in self.processes.iter_mut().filter_map(|process| process.stdin.as_mut()) {
            send(stdin, &phase).map_err(|error| Error::failed(format!("a benchmark process has exited: {error}")))?;
        }
        Ok(Sample::combine(&self.gather(observer)?))
    }
}

impl Drop for BenchProcesses {
    fn drop(&mut self) {
        for process in &mut self.processes {
            drop(process.stdin.take());
            // A process in the middle of a round stops it.
            if let Some(pid) = rustix::process::Pid::from_raw(process.child.id() as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
        let began = Instant::now();
        for process in &mut self.processes {
            while matches!(process.child.try_wait(), Ok(None)) && began.elapsed() < EXIT_TIMEOUT {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// The first line of a benchmark process's input.
#[derive(Serialize, Deserialize)]
struct ProcessWork {
    workload: Workload,
    /// The workload's folders to the byte: its own JSON escapes what is not UTF-8, for readers.
    folders: Vec<OsString>,
}

impl ProcessWork {
    fn new(workload: &Workload) -> Self {
        let folders = workload.folders.iter().map(|folder| folder.clone().into()).collect();
        Self { workload: workload.clone(), folders }
    }

    fn into_workload(self) -> Workload {
        Workload { folders: self.folders.into_iter().map(PathBuf::from).collect(), ..self.workload }
    }
}

/// Runs a benchmark process: one round for each line of its input after the workload.
///
/// # Errors
/// The failure that ended the work. The parent gets it as a message as well.
pub fn serve(input: &mut dyn BufRead, output: &mut (dyn Write + Send), interrupted: &dyn Fn() -> bool) -> Result<()> {
    let mut first = String::new();
    let outcome: Result<()> = (|| {
        input.read_line(&mut first).map_err(|_| Error::OutputClosed)?;
        let work: ProcessWork = serde_json::from_str(&first)
            .map_err(|error| Error::usage(format!("{PROCESS_COMMAND} is for deepnvme bench --processes: {error}")))?;
        let mut reporter = Reporter { output, interrupted, last_report: Instant::now() };
        let mut runner = Runner::prepare(work.into_workload(), &mut reporter)?;
        reporter.send(&Message::Ready);
        runner.set_phase(Phase::Measuring);
        for line in input.lines() {
            let _ = line.map_err(|_| Error::OutputClosed)?;
            let sample = runner.round(&mut reporter)?;
            reporter.send(&Message::Sample(Box::new(sample)));
        }
        Ok(())
    })();
    if let Err(error) = &outcome {
        let _ = send(output, &Message::Failed(error.to_string()));
    }
    outcome
}

/// Sends the progress of a process to its parent.
struct Reporter<'a> {
    output: &'a mut (dyn Write + Send),
    interrupted: &'a dyn Fn() -> bool,
    last_report: Instant,
}

impl Reporter<'_> {
    fn send(&mut self, message: &Message) {
        // If the parent has exited, the input ends as well.
        let _ = send(self.output, message);
    }
}

impl Observer for Reporter<'_> {
    fn update(&mut self, update: &ProgressUpdate<'_>) {
        if self.last_report.elapsed() >= UPDATE_INTERVAL {
            self.last_report = Instant::now();
            self.send(&Message::Bytes(update.bytes_done));
        }
    }

    fn is_interrupted(&self) -> bool {
        (self.interrupted)()
    }
}

/// Writes one line of JSON.
fn send(output: &mut (impl Write + ?Sized), value: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use crate::measure::Direction;
    use crate::measure::workload::tests::small;

    #[test]
    fn a_process_runs_its_rounds_and_leaves_no_files() {
        let place = tempfile::tempdir().unwrap();
        // JSON has no text for this name.
        let folder = place.path().join(OsString::from_vec(b"bytes \xff".to_vec()));
        std::fs::create_dir(&folder).unwrap();
        let workload = small(Direction::Write, &[&folder]);
        let mut input =
            serde_json::to_string(&ProcessWork::new(&workload)).unwrap() + "\n\"measuring\"\n\"measuring\"\n";
        let mut output = Vec::new();
        serve(&mut input.as_bytes(), &mut output, &|| false).unwrap();
        let text = String::from_utf8(output).unwrap();
        let messages: Vec<Message> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let samples =
            messages.iter().filter(|message| matches!(message, Message::Sample(sample) if sample.bytes == 3 << 20));
        assert_eq!(samples.count(), 2, "{text}");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        input = "no workload\n".into();
        let mut output = Vec::new();
        assert_eq!(serve(&mut input.as_bytes(), &mut output, &|| false).unwrap_err().exit_status(), 2);
        assert!(String::from_utf8(output).unwrap().contains("failed"));
    }

    #[test]
    fn an_error_names_a_missing_program() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = Launcher { program: "/no/such/program".into(), arguments: vec![] };
        let workload = small(Direction::Read, &[folder.path()]);
        let error =
            BenchProcesses::launch(&[workload.clone(), workload.clone()], &launcher, &mut crate::measure::NoObserver)
                .err()
                .unwrap();
        assert!(error.to_string().contains("/no/such/program"), "{error}");
        let silent = Launcher { program: "/bin/true".into(), arguments: vec![] };
        let error = BenchProcesses::launch(&[workload.clone(), workload], &silent, &mut crate::measure::NoObserver)
            .err()
            .unwrap();
        assert!(error.to_string().contains("benchmark process"), "{error}");
    }
}
