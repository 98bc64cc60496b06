//! `deepnvme pack`.

use std::sync::Arc;
use std::time::Instant;

use deepnvme_codec::Float;
use deepnvme_codec::quant::CodeType;
use deepnvme_io::{Config, Engine};
use deepnvme_perf::Result;
use deepnvme_perf::measure::Phase;
use deepnvme_stream::pack::{EncodingMode, Estimate, PackOutcome, Packer};
use serde::Serialize;

use super::checkpoint::with_progress;
use super::session::{CommandResult, Session, VERSION};
use crate::arguments::{PackArguments, PackedForm};
use crate::inspect::failed;
use crate::show;

/// The result as JSON.
#[derive(Serialize)]
struct PackReport<'a> {
    version: &'static str,
    estimate: &'a Estimate,
    packed: Option<&'a PackOutcome>,
    seconds: f64,
}

pub(super) fn run(options: &PackArguments, session: &mut Session<'_>) -> Result<CommandResult> {
    let began = Instant::now();
    let engine = Arc::new(Engine::new(Config::default())?);
    let request = deepnvme_stream::pack::PackOptions { mode: mode(options), disks: options.disks.clone() };
    let packer = Packer::new(&engine, &options.source, &options.target, request).map_err(failed)?;
    let estimate = packer.estimate().clone();
    let mut text = show::pack::draw_estimate(&estimate);
    let packed = if options.dry_run {
        None
    } else {
        // Before the work, so that the user can still stop it.
        let _ = session.stderr.write_all(std::mem::take(&mut text).as_bytes());
        let packed = with_progress(session, Phase::Packing, "pack", |progress| packer.run(progress).map_err(failed))?;
        text = show::pack::draw_packed(&packed, &estimate, began.elapsed().as_secs_f64());
        Some(packed)
    };
    let seconds = began.elapsed().as_secs_f64();
    let report = PackReport { version: VERSION, estimate: &estimate, packed: packed.as_ref(), seconds };
    CommandResult::new(&report, text, options.json)
}

/// Converts the arguments.
fn mode(options: &PackArguments) -> EncodingMode {
    match options.dtype {
        PackedForm::Auto => EncodingMode::Auto,
        PackedForm::Lossless => EncodingMode::Lossless,
        PackedForm::Keep => EncodingMode::Keep,
        PackedForm::Bf16 => EncodingMode::Cast(Float::Bf16),
        PackedForm::Fp16 => EncodingMode::Cast(Float::F16),
        PackedForm::Fp32 => EncodingMode::Cast(Float::F32),
        PackedForm::Int8 => EncodingMode::Quantised(CodeType::Int8, options.group as usize),
        PackedForm::Fp8 => EncodingMode::Quantised(CodeType::F8E4m3, options.group as usize),
    }
}
