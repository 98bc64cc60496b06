//! `deepnvme inspect` and `deepnvme verify`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use deepnvme_checkpoint::Progress;

use super::cli::{InspectOptions, VerifyOptions};
use super::progress::Bar;
use super::{Answer, Session};
use crate::checkpoint::{Verdict, inspect, text, verify};
use crate::error::Result;
use crate::measure::{Moment, Phase, Watch};

/// How often somebody who looks on is told.
const LOOK: Duration = Duration::from_millis(50);

pub(super) fn inspection(options: &InspectOptions) -> Result<Answer> {
    let files = inspect(&options.path)?;
    let depth = if options.all { usize::MAX } else { options.depth };
    Answer::of(&files, text::inspection(&files, depth), options.json)
}

pub(super) fn verification(options: &VerifyOptions, session: &Session<'_>) -> Result<Answer> {
    let (progress, is_over, began) = (Progress::default(), AtomicBool::new(false), Instant::now());
    let mut bar = Bar::new(session.interrupted);
    let found = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let found: Result<Vec<_>> = options.paths.iter().map(|path| verify(path, &progress)).collect();
            is_over.store(true, Ordering::Relaxed);
            found
        });
        while !is_over.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK.min(began.elapsed() / 4 + Duration::from_millis(1)));
            let (bytes_done, bytes_total) = progress.bytes();
            let seconds = began.elapsed().as_secs_f64();
            bar.see(&Moment { phase: Phase::Validating, contestant: "verify", bytes_done, bytes_total, seconds });
            if bar.is_interrupted() {
                progress.stop();
            }
        }
        worker.join().unwrap_or(Err(crate::error::Error::failed("the thread that compared has panicked")))
    });
    drop(bar);
    let files: Vec<_> = found?.into_iter().flatten().collect();
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
