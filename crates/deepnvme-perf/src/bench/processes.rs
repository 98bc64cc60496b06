//! Several processes that do the same workload at the same time, each with an engine and files of its own.
//!
//! A worker is this program again. It is told the workload in a line of JSON on its standard input and then, line by
//! line, to do a round; on its standard output it answers with [`Answer`]s. When its input ends it removes its files
//! and goes, so that it never outlives whoever started it.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use deepnvme_io::shown;

use crate::error::{Error, Result};
use crate::measure::{Contestant, Moment, Phase, Runner, Sample, Watch, Workload};

/// The hidden command that makes a process a worker.
pub const WORKER_COMMAND: &str = "bench-worker";
/// How often somebody who looks on is told.
const LOOK: Duration = Duration::from_millis(50);
/// How long a worker may take to remove its files when it is told to go.
const LEAVE: Duration = Duration::from_secs(10);

/// How to start this program again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// What comes before [`WORKER_COMMAND`]: `-m deepnvme` where the program is Python.
    pub arguments: Vec<String>,
}

/// What a worker says, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    /// The files are laid out.
    Ready,
    /// So many bytes of the round have arrived.
    Bytes(u64),
    /// The round is over.
    Sample(Box<Sample>),
    /// It cannot go on.
    Failed(String),
}

/// The workers.
pub struct Crew {
    members: Vec<Member>,
    answers: Receiver<(usize, Answer)>,
    round_bytes: u64,
    phase: Phase,
}

struct Member {
    child: Child,
    // Dropped first when it is to go: the end of its input tells it so.
    orders: Option<ChildStdin>,
}

impl Crew {
    /// Starts a worker for each workload, and waits until their files are laid out.
    ///
    /// # Errors
    /// When the program cannot be started again, or a worker cannot prepare.
    pub fn launch(workloads: &[Workload], launcher: &Launcher, watch: &mut dyn Watch) -> Result<Self> {
        let (sender, answers) = channel();
        let round_bytes = workloads.iter().map(Workload::round_bytes).sum();
        let mut crew = Self { members: Vec::new(), answers, round_bytes, phase: Phase::LayingOut };
        for (index, workload) in workloads.iter().enumerate() {
            let failed = |error: &dyn std::fmt::Display| {
                Error::failed(format!("cannot start {} again as a worker: {error}", shown::path(&launcher.program)))
            };
            let mut child = Command::new(&launcher.program)
                .args(&launcher.arguments)
                .arg(WORKER_COMMAND)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|error| failed(&error))?;
            let (mut orders, output) = (child.stdin.take(), child.stdout.take());
            let told = orders.as_mut().map(|orders| send(orders, workload));
            crew.members.push(Member { child, orders });
            told.unwrap_or(Ok(())).map_err(|error| failed(&error))?;
            let sender = sender.clone();
            let listen = move || {
                for line in
                    output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(|line| line.ok())
                {
                    let answer = serde_json::from_str(&line).unwrap_or(Answer::Failed(line));
                    if sender.send((index, answer)).is_err() {
                        return;
                    }
                }
                let _ = sender.send((index, Answer::Failed("a worker process ended before its work was done".into())));
            };
            deepnvme_io::start_thread(|| std::thread::Builder::new().spawn(listen))?;
        }
        crew.gather(watch)?;
        Ok(crew)
    }

    /// Whether the rounds to come count; only what is shown depends on it.
    pub(super) fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Waits for the last answer of every worker.
    fn gather(&mut self, watch: &mut dyn Watch) -> Result<Vec<Sample>> {
        let began = Instant::now();
        let mut bytes = vec![0; self.members.len()];
        let mut samples = Vec::new();
        let mut waiting = self.members.len();
        while waiting > 0 {
            match self.answers.recv_timeout(LOOK) {
                Ok((index, Answer::Bytes(arrived))) => bytes[index] = arrived,
                Ok((_, Answer::Ready)) => waiting -= 1,
                Ok((_, Answer::Sample(sample))) => {
                    samples.push(*sample);
                    waiting -= 1;
                }
                Ok((_, Answer::Failed(text))) => return Err(Error::failed(text)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Error::failed("the worker processes have gone")),
            }
            let (bytes_done, seconds) = (bytes.iter().sum(), began.elapsed().as_secs_f64());
            let bytes_total = self.round_bytes;
            watch.see(&Moment { phase: self.phase, contestant: "deepnvme", bytes_done, bytes_total, seconds });
            if watch.is_interrupted() {
                return Err(Error::Interrupted);
            }
        }
        Ok(samples)
    }
}

impl Contestant for Crew {
    fn name(&self) -> &'static str {
        "deepnvme"
    }

    fn round(&mut self, watch: &mut dyn Watch) -> Result<Sample> {
        let order = self.phase.name();
        for orders in self.members.iter_mut().filter_map(|member| member.orders.as_mut()) {
            send(orders, &order).map_err(|error| Error::failed(format!("a worker process has gone: {error}")))?;
        }
        Ok(Sample::together(&self.gather(watch)?))
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for member in &mut self.members {
            drop(member.orders.take());
            // It may be in the middle of a round, which it then gives up.
            if let Some(pid) = rustix::process::Pid::from_raw(member.child.id() as i32) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
        let began = Instant::now();
        for member in &mut self.members {
            while matches!(member.child.try_wait(), Ok(None)) && began.elapsed() < LEAVE {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}

/// The worker's side: does as it is told until its input ends.
///
/// # Errors
/// None that matters: what goes wrong is said in an answer, since whoever started it reads those.
pub fn serve(input: &mut dyn BufRead, output: &mut (dyn Write + Send), interrupted: &dyn Fn() -> bool) -> Result<()> {
    let mut first = String::new();
    let outcome: Result<()> = (|| {
        input.read_line(&mut first).map_err(|_| Error::Closed)?;
        let workload: Workload = serde_json::from_str(&first)
            .map_err(|error| Error::usage(format!("{WORKER_COMMAND} is for deepnvme bench --processes: {error}")))?;
        let mut watch = Teller { output, interrupted, told: Instant::now() };
        let mut runner = Runner::prepare(workload, &mut watch)?;
        watch.tell(&Answer::Ready);
        runner.set_phase(Phase::Measuring);
        for order in input.lines() {
            let _ = order.map_err(|_| Error::Closed)?;
            let sample = runner.round(&mut watch)?;
            watch.tell(&Answer::Sample(Box::new(sample)));
        }
        Ok(())
    })();
    if let Err(error) = &outcome {
        let _ = send(output, &Answer::Failed(error.to_string()));
    }
    outcome
}

struct Teller<'a> {
    output: &'a mut (dyn Write + Send),
    interrupted: &'a dyn Fn() -> bool,
    told: Instant,
}

impl Teller<'_> {
    fn tell(&mut self, answer: &Answer) {
        // Whoever would read it has gone, and so the input will end.
        let _ = send(self.output, answer);
    }
}

impl Watch for Teller<'_> {
    fn see(&mut self, moment: &Moment<'_>) {
        if self.told.elapsed() >= LOOK {
            self.told = Instant::now();
            self.tell(&Answer::Bytes(moment.bytes_done));
        }
    }

    fn is_interrupted(&self) -> bool {
        (self.interrupted)()
    }
}

/// One line of JSON.
fn send(output: &mut (impl Write + ?Sized), value: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Direction;
    use crate::measure::workload::tests::small;

    #[test]
    fn a_worker_does_as_it_is_told_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let workload = small(Direction::Write, &[folder.path()]);
        let mut input = serde_json::to_string(&workload).unwrap() + "\n\"measuring\"\n\"measuring\"\n";
        let mut output = Vec::new();
        serve(&mut input.as_bytes(), &mut output, &|| false).unwrap();
        let text = String::from_utf8(output).unwrap();
        let answers: Vec<Answer> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let samples =
            answers.iter().filter(|answer| matches!(answer, Answer::Sample(sample) if sample.bytes == 3 << 20));
        assert_eq!(samples.count(), 2, "{text}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        input = "no workload\n".into();
        let mut output = Vec::new();
        assert_eq!(serve(&mut input.as_bytes(), &mut output, &|| false).unwrap_err().exit_status(), 2);
        assert!(String::from_utf8(output).unwrap().contains("failed"));
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let launcher = Launcher { program: "/no/such/program".into(), arguments: vec![] };
        let workload = small(Direction::Read, &[folder.path()]);
        let error = Crew::launch(&[workload.clone(), workload.clone()], &launcher, &mut crate::measure::Unwatched)
            .err()
            .unwrap();
        assert!(error.to_string().contains("/no/such/program"), "{error}");
        let mute = Launcher { program: "/bin/true".into(), arguments: vec![] };
        let error = Crew::launch(&[workload.clone(), workload], &mute, &mut crate::measure::Unwatched).err().unwrap();
        assert!(error.to_string().contains("worker"), "{error}");
    }
}
