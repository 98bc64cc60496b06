//! Whoever looks on while something is measured: a progress bar, or nobody.

/// What is being done.
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
    /// Settings are tried; bytes stand for thousandths of the time.
    Tuning,
}

impl Phase {
    /// For a progress bar.
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

/// How far it is.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Moment<'a> {
    /// What is being done.
    pub phase: Phase,
    /// By whom.
    pub contestant: &'a str,
    /// Bytes that have arrived.
    pub bytes_done: u64,
    /// Bytes that are to arrive.
    pub bytes_total: u64,
    /// Since the phase began.
    pub seconds: f64,
}

/// Sees the bytes arrive, and may stop it.
pub trait Watch {
    /// Some bytes have arrived; called a few times a second.
    fn see(&mut self, moment: &Moment<'_>);

    /// Whether to stop now, and remove what was made.
    fn is_interrupted(&self) -> bool;
}

/// Nobody looks on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn see(&mut self, _: &Moment<'_>) {}

    fn is_interrupted(&self) -> bool {
        false
    }
}
