//! `deepnvme pack`, and how what comes of it is drawn.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use deepnvme_codec::Float;
use deepnvme_codec::quant::Code;
use deepnvme_io::shown;
use deepnvme_io::{Config, Engine};
use deepnvme_perf::Result;
use deepnvme_perf::measure::Phase;
use deepnvme_perf::units::{bytes_text, gb};
use deepnvme_stream::pack::{Forecast, LeftOut, Mode, Packed, Packer};
use serde::Serialize;

use super::checkpoint::shown;
use super::session::{Answer, Session};
use crate::arguments::{Dtype, PackOptions};
use crate::inspect::failed;

/// Lines about files that were left out.
const LEFT_OUT_SHOWN_MAX: usize = 20;

#[derive(Serialize)]
struct Report<'a> {
    forecast: &'a Forecast,
    packed: Option<&'a Packed>,
    seconds: f64,
}

pub(super) fn answer(options: &PackOptions, session: &mut Session<'_>) -> Result<Answer> {
    let began = Instant::now();
    let engine = Arc::new(Engine::new(Config::default())?);
    let asked = deepnvme_stream::pack::PackOptions { mode: mode(options), disks: options.disks.clone() };
    let packer = Packer::new(&engine, &options.source, &options.target, asked).map_err(failed)?;
    let forecast = packer.forecast().clone();
    let mut text = forecast_text(&forecast);
    let packed = if options.dry_run {
        None
    } else {
        // Beforehand, for whoever would rather stop it.
        let _ = session.talk.write_all(std::mem::take(&mut text).as_bytes());
        let packed = shown(session, Phase::Packing, "pack", |progress| packer.run(progress).map_err(failed))?;
        text = packed_text(&packed, &forecast, began.elapsed().as_secs_f64());
        Some(packed)
    };
    let seconds = began.elapsed().as_secs_f64();
    Answer::of(&Report { forecast: &forecast, packed: packed.as_ref(), seconds }, text, options.json)
}

/// What was typed, as a value.
fn mode(options: &PackOptions) -> Mode {
    match options.dtype {
        Dtype::Auto => Mode::Auto,
        Dtype::Lossless => Mode::Lossless,
        Dtype::Keep => Mode::Keep,
        Dtype::Bf16 => Mode::Cast(Float::Bf16),
        Dtype::Fp16 => Mode::Cast(Float::F16),
        Dtype::Fp32 => Mode::Cast(Float::F32),
        Dtype::Int8 => Mode::Quantised(Code::Int8, options.group as usize),
        Dtype::Fp8 => Mode::Quantised(Code::F8E4m3, options.group as usize),
    }
}

/// What it would gain.
fn forecast_text(forecast: &Forecast) -> String {
    let Forecast { forms, bytes, packed_bytes, layers, stretches, threads, .. } = forecast;
    let part = |some: u64| some as f64 / (*bytes).max(1) as f64;
    let mut out = String::new();
    for (name, share) in forms {
        let (from, to) = (bytes_text(share.bytes), bytes_text(share.packed_bytes));
        let ratio = share.packed_bytes as f64 / share.bytes.max(1) as f64;
        let _ = writeln!(out, "{name:<9} {:>5} tensors, {from} become about {to} ({ratio:.3})", share.tensors);
    }
    let _ = writeln!(
        out,
        "in all    {} become about {} ({:.3})",
        bytes_text(*bytes),
        bytes_text(*packed_bytes),
        part(*packed_bytes)
    );
    if *layers > 0 {
        let _ = writeln!(out, "layers    {layers}, each in {stretches:.1} stretches of files now, in 1 then");
    }
    let _ = writeln!(out, "disk      {:.2} GB/s", forecast.disk_gb_s);
    if let Some(speed) = forecast.decode_gb_s {
        let _ = writeln!(out, "decoding  {speed:.2} GB/s by {threads} processors at once");
    }
    let gain = forecast.packed_gb_s / forecast.now_gb_s.max(1e-9);
    let _ = writeln!(
        out,
        "expected  {:.2} GB/s of the model now, {:.2} GB/s packed: {gain:.2} times as fast, where the disk is the limit",
        forecast.now_gb_s, forecast.packed_gb_s
    );
    if let Some(compute) = forecast.compute_s_max {
        let _ = writeln!(
            out,
            "          (computing and decoding share the processors: it pays as long as computing takes less than {compute:.3} s for a pass)"
        );
    }
    out
}

/// What was written.
fn packed_text(packed: &Packed, forecast: &Forecast, seconds: f64) -> String {
    let Packed { file, bytes, tensors, encoded, copied, left_out } = packed;
    let ratio = *bytes as f64 / forecast.bytes.max(1) as f64;
    let mut out = format!(
        "{}: {tensors} tensors, {encoded} of them in another form, {} ({ratio:.3} of the old bytes), {:.2} GB/s; {copied} other files\n",
        shown::path(file),
        bytes_text(*bytes),
        gb(forecast.bytes) / seconds.max(1e-9)
    );
    for LeftOut { path, reason } in left_out.iter().take(LEFT_OUT_SHOWN_MAX) {
        let _ = writeln!(out, "left out: {} ({reason})", shown::path(path));
    }
    if let Some(more) = left_out.len().checked_sub(LEFT_OUT_SHOWN_MAX).filter(|more| *more > 0) {
        let _ = writeln!(out, "left out: {more} more, which --json lists");
    }
    out
}
