//! A progress bar on standard error, if that is a terminal.

use deepnvme_perf::measure::{Observer, Phase, ProgressUpdate};
use indicatif::{ProgressBar, ProgressStyle};

/// The progress bar of one command; cleared when it is dropped.
pub(super) struct Bar<'a> {
    bar: ProgressBar,
    shown: Option<(Phase, String)>,
    interrupted: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Bar<'a> {
    pub(super) fn new(interrupted: &'a (dyn Fn() -> bool + Sync)) -> Self {
        // indicatif draws nothing if standard error is not a terminal.
        let bar = ProgressBar::new(0);
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:24} {wide_bar} {bytes:>11} of {total_bytes:<11} {msg:>10}")
        {
            bar.set_style(style);
        }
        Self { bar, shown: None, interrupted }
    }
}

impl Observer for Bar<'_> {
    fn update(&mut self, update: &ProgressUpdate<'_>) {
        let current = (update.phase, update.label.to_owned());
        if self.shown.as_ref() != Some(&current) {
            self.bar.set_prefix(format!("{}: {}", update.label, update.phase.name()));
            self.shown = Some(current);
        }
        self.bar.set_length(update.bytes_total);
        self.bar.set_position(update.bytes_done);
        let speed = update.bytes_done as f64 / update.seconds.max(1e-9) / 1e9;
        self.bar.set_message(if update.bytes_done == 0 { String::new() } else { format!("{speed:.2} GB/s") });
    }

    fn is_interrupted(&self) -> bool {
        (self.interrupted)()
    }
}

impl Drop for Bar<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
