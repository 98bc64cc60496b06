//! `deepnvme bench`.

use deepnvme_io::Config;
use deepnvme_perf::Result;
use deepnvme_perf::bench::{self, BenchOptions};
use deepnvme_perf::measure::{AccessOrder, MemoryPlace, Workload};

use super::gds;
use super::progress_bar::Bar;
use super::session::{CommandResult, Session};
use crate::arguments::BenchArguments;
use crate::show::{self, picture, plot};

pub(super) fn run(options: &BenchArguments, session: &Session<'_>) -> Result<CommandResult> {
    options.plot.as_deref().map_or(Ok(()), picture::check)?;
    let request = request(options)?;
    let outcome = {
        let mut bar = Bar::new(session.interrupted);
        bench::run(&request, &session.launcher, &mut bar)?
    };
    if let Some(path) = &options.plot {
        plot::write(&outcome, path)?;
    }
    CommandResult::new(&outcome, show::bench::draw(&outcome), options.json)
}

/// Converts the arguments.
fn request(options: &BenchArguments) -> Result<BenchOptions> {
    let default = Config::default();
    let config = Config {
        backend: options.backend.into(),
        workers: options.workers.unwrap_or(default.workers),
        queue_depth: options.queue_depth.unwrap_or(default.queue_depth),
        block_bytes: options.block_bytes.unwrap_or(default.block_bytes),
        submit: options.submit.into(),
        direct: options.direct.into(),
        gds: gds::gds_mode(options.gds, options.gpu)?,
        ..default
    };
    let workload = Workload {
        stripe_bytes: options.stripe_bytes,
        order: if options.random { AccessOrder::Random } else { AccessOrder::Sequential },
        place: MemoryPlace { memory: options.memory.into(), gpu: options.gpu },
        buffer_bytes: options.buffer,
        cache: options.cache.into(),
        durability: options.durability.into(),
        validate: options.validate,
        config,
        ..Workload::new(options.direction.into(), options.folders.clone(), options.size)
    };
    Ok(BenchOptions {
        workload,
        rounds: options.loops,
        warm_up: options.warm_up,
        processes: options.processes,
        against_fio: options.against.is_some(),
    })
}
