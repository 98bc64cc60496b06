//! `deepnvme ds_io` and `deepnvme ds_nvme_tune`: DeepSpeed's options become the values of `crate::deepspeed`.

use deepnvme_perf::Result;
use deepnvme_perf::measure::Direction;

use super::gds;
use super::progress_bar::Bar;
use super::session::{Session, closed, print};
use crate::arguments::{DsIoOptions, DsTuneOptions};
use crate::deepspeed::{io, tune};

pub(super) fn run_io(typed: DsIoOptions, session: &mut Session<'_>) -> Result<()> {
    let options = io::Options {
        folder: typed.folder,
        folder_to_device_mapping: typed.folder_to_device_mapping,
        io_size: typed.io_size,
        read: typed.read,
        multi_process: typed.multi_process,
        block_size: typed.block_size,
        queue_depth: typed.queue_depth,
        single_submit: typed.single_submit,
        sequential_requests: typed.sequential_requests,
        validate: typed.validate,
        engine: typed.engine,
        loops: typed.loops,
        io_parallel: typed.io_parallel,
        gpu: typed.gpu,
        use_gds: typed.use_gds,
        slow_bounce_buffer: typed.slow_bounce_buffer,
        warmup_loops: typed.warmup_loops,
        include_warmup_time: typed.include_warmup_time,
    };
    let figures = {
        let mut bar = Bar::new(session.interrupted);
        let output = &mut *session.output;
        let mut say = |text: &str| output.write_all(text.as_bytes()).map_err(closed);
        io::run(&options, &session.launcher, &mut bar, &mut say)?
    };
    print(session, &figures.text())
}

pub(super) fn run_tune(typed: DsTuneOptions, session: &mut Session<'_>) -> Result<()> {
    gds::refuse_gds(typed.gds)?;
    let directions = [(Direction::Read, typed.no_read), (Direction::Write, typed.no_write)];
    let options = tune::Options {
        nvme_dir: typed.nvme_dir,
        sweep_config: typed.sweep_config,
        io_size: typed.io_size,
        gpu: typed.gpu.then_some(0),
        directions: directions.into_iter().filter_map(|(one, is_left_out)| (!is_left_out).then_some(one)).collect(),
        log_dir: typed.log_dir.unwrap_or_else(|| tune::default_log_dir().to_path_buf()),
        loops: typed.loops,
        verbose: typed.verbose,
    };
    let end = {
        let mut bar = Bar::new(session.interrupted);
        let output = &mut *session.output;
        let mut say = |text: &str| output.write_all(text.as_bytes()).map_err(closed);
        tune::run(&options, &mut bar, &mut say)?
    };
    print(session, &end)
}
