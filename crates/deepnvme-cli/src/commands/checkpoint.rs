//! `deepnvme inspect`, `deepnvme verify` and `deepnvme convert`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use deepnvme_checkpoint::Progress;
use deepnvme_perf::measure::{Moment, Phase, Watch};
use deepnvme_perf::{Error, Result};

use super::progress_bar::Bar;
use super::session::{Answer, Session};
use crate::arguments::{ConvertOptions, InspectOptions, VerifyOptions};
use crate::inspect::{Verdict, convert, inspect, verify};
use crate::show::checkpoint as text;

/// How often somebody who looks on is told.
const LOOK: Duration = Duration::from_millis(50);

pub(super) fn inspection(options: &InspectOptions, session: &Session<'_>) -> Result<Answer> {
    let files = shown(session, Phase::Validating, "inspect", |progress| inspect(&options.path, progress))?;
    let depth = if options.all { usize::MAX } else { options.depth };
    Answer::of(&files, text::inspection(&files, depth), options.json)
}

pub(super) fn verification(options: &VerifyOptions, session: &Session<'_>) -> Result<Answer> {
    let files = shown(session, Phase::Validating, "verify", |progress| {
        options.paths.iter().map(|path| verify(path, progress)).collect::<Result<Vec<_>>>()
    })?;
    let files: Vec<_> = files.into_iter().flatten().collect();
    let mut answer = Answer::of(&files, text::verification(&files), options.json)?;
    answer.bad_news = [Verdict::Damaged, Verdict::Unverifiable].into_iter().find_map(|verdict| {
        let count = files.iter().filter(|file| file.verdict == verdict).count();
        (count > 0).then(|| match verdict {
            Verdict::Damaged => format!("damaged: {count} of {}", files.len()),
            _ => format!("nothing to verify with: {count} of {}", files.len()),
        })
    });
    Ok(answer)
}

pub(super) fn conversion(options: &ConvertOptions, session: &Session<'_>) -> Result<Answer> {
    let converted =
        shown(session, Phase::Converting, "convert", |progress| convert(&options.source, &options.target, progress))?;
    Answer::of(&converted, text::conversion(&converted), options.json)
}

/// Does work on a thread, and shows how far it is; an interruption ends it.
pub(super) fn shown<T: Send>(
    session: &Session<'_>,
    phase: Phase,
    contestant: &'static str,
    work: impl FnOnce(&Arc<Progress>) -> Result<T> + Send,
) -> Result<T> {
    let (progress, is_over, began) = (Arc::new(Progress::default()), AtomicBool::new(false), Instant::now());
    let mut bar = Bar::new(session.interrupted);
    std::thread::scope(|scope| {
        let run = || {
            let done = work(&progress);
            is_over.store(true, Ordering::Relaxed);
            done
        };
        let builder = std::thread::Builder::new().name("deepnvme-work".into());
        let worker = deepnvme_io::start_thread(|| builder.spawn_scoped(scope, run))?;
        while !is_over.load(Ordering::Relaxed) && !worker.is_finished() {
            std::thread::sleep(LOOK.min(began.elapsed() / 4 + Duration::from_millis(1)));
            let (bytes_done, bytes_total) = progress.bytes();
            let seconds = began.elapsed().as_secs_f64();
            bar.see(&Moment { phase, contestant, bytes_done, bytes_total, seconds });
            if bar.is_interrupted() {
                progress.stop();
            }
        }
        worker.join().unwrap_or_else(|_| Err(Error::failed("the thread that did the work has panicked")))
    })
}
