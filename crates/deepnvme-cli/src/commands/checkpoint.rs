//! `deepnvme inspect`, `deepnvme verify` and `deepnvme convert`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use deepnvme_checkpoint::Progress;
use deepnvme_perf::measure::{Observer, Phase, ProgressUpdate};
use deepnvme_perf::{Error, Result};
use serde::Serialize;

use super::progress_bar::Bar;
use super::session::{CommandResult, Session, VERSION};
use crate::arguments::{ConvertArguments, InspectArguments, VerifyArguments};
use crate::inspect::{Conversion, Inspection, Verification, convert, inspect, verify_all};
use crate::show::checkpoint as text;

/// The result of `inspect` as JSON.
#[derive(Serialize)]
struct Inspected {
    version: &'static str,
    files: Vec<Inspection>,
}

/// The result of `verify` as JSON.
#[derive(Serialize)]
struct Verified {
    version: &'static str,
    is_sound: bool,
    files: Vec<Verification>,
}

/// The result of `convert` as JSON.
#[derive(Serialize)]
struct Converted {
    version: &'static str,
    #[serde(flatten)]
    converted: Conversion,
}

/// Time between two progress reports.
const UPDATE_INTERVAL: Duration = Duration::from_millis(50);

pub(super) fn run_inspect(options: &InspectArguments, session: &Session<'_>) -> Result<CommandResult> {
    let files = with_progress(session, Phase::Validating, "inspect", |progress| inspect(&options.path, progress))?;
    let depth = if options.all { usize::MAX } else { options.depth };
    let text = text::draw_inspections(&files, depth);
    CommandResult::new(&Inspected { version: VERSION, files }, text, options.json)
}

pub(super) fn run_verify(options: &VerifyArguments, session: &Session<'_>) -> Result<CommandResult> {
    let files = with_progress(session, Phase::Validating, "verify", |progress| verify_all(&options.paths, progress))?;
    let text = text::draw_verifications(&files);
    let failure = text::draw_failure(&files);
    let verified = Verified { version: VERSION, is_sound: failure.is_none(), files };
    Ok(CommandResult { failure, ..CommandResult::new(&verified, text, options.json)? })
}

pub(super) fn run_convert(options: &ConvertArguments, session: &Session<'_>) -> Result<CommandResult> {
    let converted = with_progress(session, Phase::Converting, "convert", |progress| {
        convert(&options.source, &options.target, progress)
    })?;
    let text = text::draw_conversion(&converted);
    CommandResult::new(&Converted { version: VERSION, converted }, text, options.json)
}

/// Runs `work` on a thread and shows its progress. An interruption stops it.
pub(super) fn with_progress<T: Send>(
    session: &Session<'_>,
    phase: Phase,
    label: &'static str,
    work: impl FnOnce(&Arc<Progress>) -> Result<T> + Send,
) -> Result<T> {
    let (progress, has_ended, began) = (Arc::new(Progress::default()), AtomicBool::new(false), Instant::now());
    let mut bar = Bar::new(session.interrupted);
    std::thread::scope(|scope| {
        let run = || {
            let done = work(&progress);
            has_ended.store(true, Ordering::Relaxed);
            done
        };
        let builder = std::thread::Builder::new().name("deepnvme-work".into());
        let worker = deepnvme_io::start_thread(|| builder.spawn_scoped(scope, run))?;
        while !has_ended.load(Ordering::Relaxed) && !worker.is_finished() {
            std::thread::sleep(UPDATE_INTERVAL.min(began.elapsed() / 4 + Duration::from_millis(1)));
            let (bytes_done, bytes_total) = progress.bytes();
            let seconds = began.elapsed().as_secs_f64();
            bar.update(&ProgressUpdate { phase, label, bytes_done, bytes_total, seconds });
            if bar.is_interrupted() {
                progress.stop();
            }
        }
        worker.join().unwrap_or_else(|_| Err(Error::failed("the command's thread panicked")))
    })
}
