//! A progress bar on standard error, where that is a terminal.

use deepnvme_perf::measure::{Moment, Phase, Watch};
use indicatif::{ProgressBar, ProgressStyle};

/// The bar of one command; gone when it is dropped.
pub(super) struct Bar<'a> {
    bar: ProgressBar,
    shown: Option<(Phase, String)>,
    interrupted: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Bar<'a> {
    pub(super) fn new(interrupted: &'a (dyn Fn() -> bool + Sync)) -> Self {
        // It draws nothing where standard error is no terminal.
        let bar = ProgressBar::new(0);
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:24} {wide_bar} {bytes:>11} of {total_bytes:<11} {msg:>10}")
        {
            bar.set_style(style);
        }
        Self { bar, shown: None, interrupted }
    }
}

impl Watch for Bar<'_> {
    fn see(&mut self, moment: &Moment<'_>) {
        let now = (moment.phase, moment.contestant.to_owned());
        if self.shown.as_ref() != Some(&now) {
            self.bar.set_prefix(format!("{}: {}", moment.contestant, moment.phase.name()));
            self.shown = Some(now);
        }
        self.bar.set_length(moment.bytes_total);
        self.bar.set_position(moment.bytes_done);
        let speed = moment.bytes_done as f64 / moment.seconds.max(1e-9) / 1e9;
        self.bar.set_message(if moment.bytes_done == 0 { String::new() } else { format!("{speed:.2} GB/s") });
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
