//! `deepnvme report`.

use std::path::PathBuf;

use deepnvme_perf::Result;
use deepnvme_perf::report::Report;

use super::session::{CommandResult, Session};
use crate::arguments::ReportArguments;
use crate::show::report as text;

pub(super) fn run(options: &ReportArguments, session: &Session<'_>) -> Result<CommandResult> {
    let folders = if options.folders.is_empty() { vec![PathBuf::from(".")] } else { options.folders.clone() };
    let report = Report::gather(&folders, &session.python);
    CommandResult::new(&report, text::draw(&report), options.json)
}
