//! The estimate and the result of `pack` as text.

use std::fmt::Write;

use deepnvme_io::display;
use deepnvme_perf::units::{bytes_text, gb};
use deepnvme_stream::pack::{Estimate, LeftOut, Packed};

/// Maximum lines about omitted files.
const OMITTED_SHOWN_MAX: usize = 20;

/// Draws the estimate of the gain.
pub(crate) fn draw_estimate(estimate: &Estimate) -> String {
    let Estimate { forms, bytes, packed_bytes, layers, file_ranges, threads, .. } = estimate;
    let fraction = |some: u64| some as f64 / (*bytes).max(1) as f64;
    let mut out = String::new();
    for (name, share) in forms {
        let (from, to) = (bytes_text(share.bytes), bytes_text(share.packed_bytes));
        let ratio = share.packed_bytes as f64 / share.bytes.max(1) as f64;
        let _ = writeln!(out, "{name:<9} {:>5} tensors, {from} become about {to} ({ratio:.3})", share.tensors);
    }
    let _ = writeln!(
        out,
        "total     {} become about {} ({:.3})",
        bytes_text(*bytes),
        bytes_text(*packed_bytes),
        fraction(*packed_bytes)
    );
    if *layers > 0 {
        let _ =
            writeln!(out, "layers    {layers}, each read from {file_ranges:.1} file ranges now, from 1 when packed");
    }
    let _ = writeln!(out, "disk      {:.2} GB/s", estimate.disk_gb_s);
    if let Some(speed) = estimate.decode_gb_s {
        let _ = writeln!(out, "decoding  {speed:.2} GB/s on {threads} threads");
    }
    let gain = estimate.packed_gb_s / estimate.now_gb_s.max(1e-9);
    let _ = writeln!(
        out,
        "expected  {:.2} GB/s of the model now, {:.2} GB/s packed: {gain:.2} times as fast, if the disk is the bottleneck",
        estimate.now_gb_s, estimate.packed_gb_s
    );
    if let Some(compute) = estimate.compute_s_max {
        let _ = writeln!(
            out,
            "          (computation and decoding share the CPUs: packing pays if a pass computes for less than {compute:.3} s)"
        );
    }
    out
}

/// Draws the result of packing.
pub(crate) fn draw_packed(packed: &Packed, estimate: &Estimate, seconds: f64) -> String {
    let Packed { file, bytes, tensors, encoded, copied, left_out } = packed;
    let ratio = *bytes as f64 / estimate.bytes.max(1) as f64;
    let mut out = format!(
        "{}: {tensors} tensors, {encoded} of them encoded, {} ({ratio:.3} of the original), {:.2} GB/s; {copied} other files\n",
        display::path(file),
        bytes_text(*bytes),
        gb(estimate.bytes) / seconds.max(1e-9)
    );
    for LeftOut { path, reason } in left_out.iter().take(OMITTED_SHOWN_MAX) {
        let _ = writeln!(out, "omitted: {} ({reason})", display::path(path));
    }
    if let Some(more) = left_out.len().checked_sub(OMITTED_SHOWN_MAX).filter(|more| *more > 0) {
        let _ = writeln!(out, "omitted: {more} more; --json lists all");
    }
    out
}
