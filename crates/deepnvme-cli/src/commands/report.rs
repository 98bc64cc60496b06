//! `deepnvme report`.

use std::path::PathBuf;

use deepnvme_perf::Result;
use deepnvme_perf::report::Report;

use super::session::{Answer, Session};
use crate::arguments::ReportOptions;
use crate::show::report as text;

pub(super) fn answer(options: &ReportOptions, session: &Session<'_>) -> Result<Answer> {
    let folders = if options.folders.is_empty() { vec![PathBuf::from(".")] } else { options.folders.clone() };
    let report = Report::gather(&folders, &session.python);
    Answer::of(&report, text::draw(&report), options.json)
}
