//! `deepnvme bench`.

use deepnvme_io::{Config, SubmitMode};
use deepnvme_perf::Result;
use deepnvme_perf::bench::{self, Options};
use deepnvme_perf::measure::{Order, Workload};

use super::gds;
use super::progress_bar::Bar;
use super::session::{Answer, Session};
use crate::arguments::BenchOptions;
use crate::show::{self, plot};

pub(super) fn answer(options: &BenchOptions, session: &Session<'_>) -> Result<Answer> {
    options.plot.as_deref().map_or(Ok(()), plot::check)?;
    let wanted = asked(options)?;
    let outcome = {
        let mut bar = Bar::new(session.interrupted);
        bench::run(&wanted, &session.launcher, &mut bar)?
    };
    if let Some(path) = &options.plot {
        plot::write(&outcome, path)?;
    }
    Answer::of(&outcome, show::bench::draw(&outcome), options.json)
}

/// What was typed, as a value.
fn asked(options: &BenchOptions) -> Result<Options> {
    let usual = Config::default();
    let config = Config {
        backend: options.backend.into(),
        workers: options.workers.unwrap_or(usual.workers),
        queue_depth: options.queue_depth.unwrap_or(usual.queue_depth),
        block_bytes: options.block_size.unwrap_or(usual.block_bytes),
        submit: if options.single_submit { SubmitMode::Single } else { SubmitMode::Batch },
        direct: options.direct.into(),
        gds: gds::gds_mode(options.gds, options.gpu)?,
        ..usual
    };
    let workload = Workload {
        direction: options.direction.into(),
        folders: options.folders.clone(),
        stripe_bytes: options.stripe,
        io_bytes: options.size,
        order: if options.random { Order::Random } else { Order::Sequential },
        memory: options.memory.into(),
        gpu: options.gpu,
        buffer_bytes: options.buffer,
        cache: options.cache.into(),
        durability: options.durable.into(),
        validate: options.validate,
        config,
    };
    Ok(Options {
        workload,
        rounds: options.loops,
        warm_up: options.warm_up,
        processes: options.processes,
        against_fio: options.against.is_some(),
    })
}
