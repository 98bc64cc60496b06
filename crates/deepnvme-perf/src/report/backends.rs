//! The backends of the engine: which work here, and which is chosen.

use deepnvme_io::backend::BackendKind;
use deepnvme_io::probe::{Availability, Probe};
use serde::Serialize;

/// A backend of the engine.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct BackendReport {
    /// `"io_uring"`, `"aio"` or `"threads"`.
    pub name: &'static str,
    /// Whether it could be set up and read a file.
    pub works: bool,
    /// Whether `backend="auto"` chooses it.
    pub is_chosen: bool,
    /// How it was set up, or why it does not work.
    pub detail: String,
    /// The kernel's error number, if any.
    pub errno: Option<i32>,
    /// The remedy.
    pub remedy: Option<String>,
}

/// Lists all backends, in order of preference.
pub(super) fn of(probe: &Probe) -> Vec<BackendReport> {
    let mut is_taken = false;
    let kinds = [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads];
    let mut line = |kind: BackendKind| {
        let availability = probe.of(kind)?;
        let works = availability.works();
        let is_chosen = works && !is_taken;
        is_taken |= works;
        let (detail, errno, remedy) = match availability.clone() {
            Availability::Works { detail } => (detail, None, None),
            Availability::Missing { errno, reason, remedy } => (reason, errno, Some(remedy)),
        };
        Some(BackendReport { name: kind.name(), works, is_chosen, detail, errno, remedy })
    };
    kinds.into_iter().filter_map(&mut line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_back_end_that_works_is_chosen_and_no_other() {
        let works = || Availability::Works { detail: "fine".into() };
        let missing =
            || Availability::Missing { errno: Some(1), reason: "forbidden".into(), remedy: "allow it".into() };
        for (uring, aio, chosen) in
            [(works(), works(), "io_uring"), (missing(), works(), "aio"), (missing(), missing(), "threads")]
        {
            let found = of(&Probe { uring, aio, threads: works() });
            let names: Vec<_> = found.iter().filter(|backend| backend.is_chosen).map(|backend| backend.name).collect();
            assert_eq!(names, [chosen]);
            assert!(found.iter().all(|backend| backend.works == backend.remedy.is_none()));
        }
    }
}
