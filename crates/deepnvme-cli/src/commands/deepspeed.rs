//! `deepnvme ds_io` and `deepnvme ds_nvme_tune`.

use deepnvme_perf::Result;
use deepnvme_perf::measure::Direction;

use super::gds;
use super::progress_bar::Bar;
use super::session::{Session, output_error, print};
use crate::arguments::{DsIoArguments, DsTuneArguments};
use crate::deepspeed::{io, tune};

pub(super) fn run_io(arguments: DsIoArguments, session: &mut Session<'_>) -> Result<()> {
    let DsIoArguments { options, .. } = arguments;
    let launcher = session.launcher.clone();
    let metrics = with_progress(session, |bar, print| io::run(&options, &launcher, bar, print))?;
    print(session, &metrics.text())
}

pub(super) fn run_tune(arguments: DsTuneArguments, session: &mut Session<'_>) -> Result<()> {
    gds::refuse_gds(arguments.gds)?;
    let directions = [(Direction::Read, arguments.no_read), (Direction::Write, arguments.no_write)];
    let options = tune::DsTuneOptions {
        nvme_dir: arguments.nvme_dir,
        sweep_config: arguments.sweep_config,
        io_size: arguments.io_size,
        gpu: arguments.gpu.then_some(0),
        directions: directions.into_iter().filter_map(|(one, is_skipped)| (!is_skipped).then_some(one)).collect(),
        log_dir: arguments.log_dir.unwrap_or_else(|| tune::default_log_dir().to_path_buf()),
        loops: arguments.loops,
        verbose: arguments.verbose,
    };
    let summary = with_progress(session, |bar, print| tune::run(&options, bar, print))?;
    print(session, &summary)
}

/// Runs a command with a progress bar and with a function that writes to standard output.
fn with_progress<T>(
    session: &mut Session<'_>,
    command: impl FnOnce(&mut Bar<'_>, &mut dyn FnMut(&str) -> Result<()>) -> Result<T>,
) -> Result<T> {
    let output = &mut *session.stdout;
    command(&mut Bar::new(session.interrupted), &mut |text| output.write_all(text.as_bytes()).map_err(output_error))
}
