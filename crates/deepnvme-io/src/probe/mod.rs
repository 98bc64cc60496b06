//! Probes the backends of this machine by running each one, and explains refusals with their remedy.
//!
//! [`Probe::run`] tries them, and [`Probe::choose`] decides. The explanation is a pure function of an error and a few
//! facts about the process (`facts`).
#![cfg_attr(simulated, allow(dead_code, unused_imports, reason = "a simulated machine is not probed"))]

mod facts;

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use deepnvme_mem::{Buffer, PAGE_BYTES};
use rustix::rand::{GetRandomFlags, getrandom};
use smallvec::smallvec;

use self::facts::{Explanation, Facts, explain};
use crate::backend::aio::AioBackend;
use crate::backend::threads::{THREADS_MAX, ThreadsBackend};
use crate::backend::uring::UringBackend;
use crate::backend::{Backend, BackendKind, BackendSetup};
use crate::config::BackendChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::fs::{self, OFlags};
use crate::op::{Errno, Op, OpKind, Submit, SubmitMode, Token};
use crate::start::start_thread;

/// Bytes of the file that each backend reads.
const SAMPLE_BYTES: usize = PAGE_BYTES as usize;
/// The file to read if the kernel has no files in memory.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// Bytes that `getrandom` returns without interruption by a signal.
const RANDOM_BYTES_AT_ONCE: usize = 256;

/// Whether a backend works on this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Availability {
    /// It was set up and read a file correctly.
    Works {
        /// Its features: flags, tables, limits.
        detail: String,
    },
    /// It is not usable.
    Missing {
        /// The kernel's error number, if any.
        errno: Option<i32>,
        /// The reason.
        reason: String,
        /// The remedy.
        remedy: String,
    },
}

impl Availability {
    /// Returns whether it works.
    #[must_use]
    pub fn works(&self) -> bool {
        matches!(self, Self::Works { .. })
    }
}

/// The availability of each backend on this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Probe {
    /// `io_uring`.
    pub uring: Availability,
    /// Linux native AIO.
    pub aio: Availability,
    /// `preadv`/`pwritev` on threads.
    pub threads: Availability,
}

impl Probe {
    /// Sets up each backend, reads a page of a file in memory with it, and closes it.
    #[must_use]
    #[cfg(not(simulated))]
    pub fn run() -> Self {
        let [uring, aio, threads] =
            [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads].map(|kind| match attempt(kind) {
                Ok(detail) => Availability::Works { detail },
                Err(error) => missing(kind, &error),
            });
        Self { uring, aio, threads }
    }

    /// A simulated machine only has the backend of its world.
    #[must_use]
    #[cfg(simulated)]
    pub fn run() -> Self {
        let missing = || Availability::Missing { errno: None, reason: "simulated".into(), remedy: String::new() };
        Self { uring: missing(), aio: missing(), threads: missing() }
    }

    /// Returns the availability of one backend, or `None` for those that only tests create.
    #[must_use]
    pub fn of(&self, kind: BackendKind) -> Option<&Availability> {
        match kind {
            BackendKind::Uring => Some(&self.uring),
            BackendKind::Aio => Some(&self.aio),
            BackendKind::Threads => Some(&self.threads),
            BackendKind::Simulated => None,
        }
    }

    /// Marks a backend as missing, since it could not be opened with the settings of an engine.
    ///
    /// # Errors
    /// The refusal if the process or the system has too many open files, which concerns every backend.
    pub(crate) fn reject(&mut self, kind: BackendKind, refusal: &Error) -> Result<()> {
        if let Some(Errno::MFILE | Errno::NFILE) = refusal.errno().map(Errno::from_raw_os_error) {
            return Err(refusal.clone());
        }
        let availability = match kind {
            BackendKind::Uring => &mut self.uring,
            BackendKind::Aio => &mut self.aio,
            BackendKind::Threads | BackendKind::Simulated => &mut self.threads,
        };
        *availability = missing(kind, refusal);
        Ok(())
    }

    /// Returns the backend for a choice, and the reason.
    ///
    /// # Errors
    /// `Unsupported`, with reason and remedy, if the requested backend does not work here.
    pub fn choose(&self, choice: BackendChoice) -> Result<(BackendKind, String)> {
        match choice {
            BackendChoice::Auto => self.first_that_works(),
            BackendChoice::Uring => explicit(BackendKind::Uring, &self.uring),
            BackendChoice::Aio => explicit(BackendKind::Aio, &self.aio),
            BackendChoice::Threads => explicit(BackendKind::Threads, &self.threads),
        }
    }

    fn first_that_works(&self) -> Result<(BackendKind, String)> {
        let candidates =
            [(BackendKind::Uring, &self.uring), (BackendKind::Aio, &self.aio), (BackendKind::Threads, &self.threads)];
        let mut refusals = Vec::new();
        for (kind, availability) in candidates {
            match availability {
                Availability::Works { detail } => {
                    let found = format!("{} works here ({detail})", kind.name());
                    let why = if refusals.is_empty() { found } else { format!("{found}; {}", refusals.join("; ")) };
                    return Ok((kind, why));
                }
                Availability::Missing { reason, remedy, .. } => {
                    refusals.push(format!("no {}: {reason} (remedy: {remedy})", kind.name()));
                }
            }
        }
        Err(Error::new(ErrorKind::Unsupported, "choose a backend", refusals.join("; ")))
    }
}

fn missing(kind: BackendKind, error: &Error) -> Availability {
    let Explanation { reason, remedy } = explain(kind, error, &Facts::gather());
    Availability::Missing { errno: error.errno(), reason, remedy }
}

fn explicit(kind: BackendKind, availability: &Availability) -> Result<(BackendKind, String)> {
    match availability {
        Availability::Works { detail } => Ok((kind, format!("{} was asked for ({detail})", kind.name()))),
        Availability::Missing { reason, remedy, .. } => {
            let detail = format!("{} was asked for, but {reason}; {remedy}", kind.name());
            Err(Error::new(ErrorKind::Unsupported, "choose a backend", detail))
        }
    }
}

/// Sets up a backend and reads with it. Returns its features.
fn attempt(kind: BackendKind) -> Result<String> {
    let setup = BackendSetup { queue_depth: 2, submit: SubmitMode::Batch, worker_index: 0 };
    match kind {
        BackendKind::Uring => {
            let mut backend = UringBackend::open(&setup)?;
            read_sample(&mut backend)?;
            Ok(backend.describe())
        }
        BackendKind::Aio => {
            attempt_aio(setup)?;
            Ok(facts::aio_use())
        }
        BackendKind::Threads | BackendKind::Simulated => {
            read_sample(&mut ThreadsBackend::open(&setup)?)?;
            Ok(format!("up to {THREADS_MAX} threads per worker"))
        }
    }
}

/// Tries native AIO on a separate thread, which destroys the queue after it has reported. The kernel takes tens of
/// milliseconds to destroy a queue, and the start of an engine need not wait for that.
fn attempt_aio(setup: BackendSetup) -> Result<()> {
    let (answer, answered) = std::sync::mpsc::channel();
    let run = move || {
        let mut backend = match AioBackend::open(&setup) {
            Ok(backend) => backend,
            Err(error) => return drop(answer.send(Err(error))),
        };
        drop(answer.send(read_sample(&mut backend)));
    };
    start_thread(|| std::thread::Builder::new().name("dnvme-probe".into()).spawn(run))?;
    answered.recv().unwrap_or_else(|_| Err(wrong("its thread ended without an answer")))
}

fn read_sample(backend: &mut dyn Backend) -> Result<()> {
    let (file, content) = sample()?;
    let target = Buffer::zeroed(SAMPLE_BYTES).map_err(|error| os_error("mmap", &error))?.into_region();
    let iovecs = smallvec![target.region()];
    let op = Op { token: Token(0), kind: OpKind::Read, file: Arc::new(file), offset: 0, iovecs, cufile: None };
    let Submit::Queued = backend.submit(op) else {
        return Err(wrong("it refused an op although nothing was in flight"));
    };
    let mut completions = Vec::new();
    backend.reap(1, &mut completions)?;
    let Some(completion) = completions.pop() else {
        return Err(wrong("it answered without a completion"));
    };
    let bytes = completion.result.map_err(|errno| Error::os("read", errno))?;
    let mut found = vec![0; SAMPLE_BYTES];
    target.region().copy_to_slice(0, &mut found);
    if bytes == SAMPLE_BYTES && found == content { Ok(()) } else { Err(wrong("it read other bytes than the file has")) }
}

/// Returns a file and its content: a file in memory with random content, so that the result depends on no folder.
/// Without such files, returns this program, which every process can read.
fn sample() -> Result<(OwnedFd, Vec<u8>)> {
    in_memory().or_else(|refusal| this_program().map_err(|_| refusal))
}

fn this_program() -> Result<(OwnedFd, Vec<u8>)> {
    let failed = |errno| Error::os("open", errno).at_path(THIS_PROGRAM);
    let file = fs::open(Path::new(THIS_PROGRAM), OFlags::RDONLY, 0).map_err(failed)?;
    let mut content = vec![0; SAMPLE_BYTES];
    match fs::read_at(file.as_fd(), &mut content, 0) {
        Ok(SAMPLE_BYTES) => Ok((file, content)),
        Ok(_) => Err(wrong("the program is shorter than the sample")),
        Err(errno) => Err(failed(errno)),
    }
}

fn in_memory() -> Result<(OwnedFd, Vec<u8>)> {
    let mut content = vec![0; SAMPLE_BYTES];
    for chunk in content.chunks_mut(RANDOM_BYTES_AT_ONCE) {
        getrandom(chunk, GetRandomFlags::empty()).map_err(|errno| Error::os("getrandom", errno))?;
    }
    let file = fs::open_in_memory("deepnvme-probe").map_err(|errno| Error::os("memfd_create", errno))?;
    fs::write_all(file.as_fd(), &content).map_err(|errno| Error::os("write", errno))?;
    Ok((file, content))
}

fn os_error(operation: &'static str, error: &std::io::Error) -> Error {
    let errno = rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::IO);
    Error::os(operation, errno)
}

fn wrong(what: &'static str) -> Error {
    Error::new(ErrorKind::Io, "probe", what)
}
