//! The progress of a measurement, for an observer such as a progress bar. The observer may stop the work.

/// A phase of the work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Files are made and filled.
    LayingOut,
    /// A round that does not count.
    WarmUp,
    /// A round that counts.
    Measuring,
    /// Contents are compared.
    Validating,
    /// A checkpoint is written in another format.
    Converting,
    /// A model's weights are written in another layout.
    Packing,
    /// Settings are tried; bytes stand for thousandths of the budget.
    Tuning,
}

impl Phase {
    /// Its name, for a progress bar.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LayingOut => "laying out",
            Self::WarmUp => "warming up",
            Self::Measuring => "measuring",
            Self::Validating => "validating",
            Self::Converting => "converting",
            Self::Packing => "packing",
            Self::Tuning => "tuning",
        }
    }
}

/// The progress at one moment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProgressUpdate<'a> {
    /// The current phase.
    pub phase: Phase,
    /// The tool or command at work, for the progress bar.
    pub label: &'a str,
    /// Bytes transferred so far.
    pub bytes_done: u64,
    /// Bytes of the whole round or phase.
    pub bytes_total: u64,
    /// Seconds since the round or phase began.
    pub seconds: f64,
}

/// Receives progress, and may stop the work.
pub trait Observer {
    /// Receives the progress; called at most about 50 times a second.
    fn update(&mut self, update: &ProgressUpdate<'_>);

    /// Returns whether to stop now and remove all files.
    fn is_interrupted(&self) -> bool;
}

/// Ignores all progress and never stops the work.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn update(&mut self, _: &ProgressUpdate<'_>) {}

    fn is_interrupted(&self) -> bool {
        false
    }
}
