//! `deepnvme bench`.

use deepnvme_io::{BackendChoice, Config, DirectMode, Durability, SubmitMode};

use super::cli::{Backend, BenchOptions, Direct, Durable};
use super::progress::Bar;
use super::session::{Answer, Session};
use crate::bench::{self, Options, plot, text};
use crate::error::Result;
use crate::measure::{Order, Workload, gpu};

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
    Answer::of(&outcome, text::draw(&outcome), options.json)
}

/// What was typed, as a value.
fn asked(options: &BenchOptions) -> Result<Options> {
    let usual = Config::default();
    let config = Config {
        backend: match options.backend {
            Backend::Auto => BackendChoice::Auto,
            Backend::Uring => BackendChoice::Uring,
            Backend::Aio => BackendChoice::Aio,
            Backend::Threads => BackendChoice::Threads,
        },
        workers: options.workers.unwrap_or(usual.workers),
        queue_depth: options.queue_depth.unwrap_or(usual.queue_depth),
        block_bytes: options.block_size.unwrap_or(usual.block_bytes),
        submit: if options.single_submit { SubmitMode::Single } else { SubmitMode::Batch },
        direct: match options.direct {
            Direct::Required => DirectMode::Required,
            Direct::Preferred => DirectMode::Preferred,
            Direct::Disabled => DirectMode::Disabled,
        },
        gds: gpu::gds_mode(options.gds, options.gpu)?,
        ..usual
    };
    let workload = Workload {
        direction: options.direction,
        folders: options.folders.clone(),
        stripe_bytes: options.stripe,
        io_bytes: options.size,
        order: if options.random { Order::Random } else { Order::Sequential },
        memory: options.memory,
        gpu: options.gpu,
        buffer_bytes: options.buffer,
        cache: options.cache,
        durability: match options.durable {
            Durable::None => Durability::None,
            Durable::Data => Durability::Data,
            Durable::Full => Durability::Full,
        },
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
