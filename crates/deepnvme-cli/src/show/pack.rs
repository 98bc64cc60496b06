//! The estimate and the result of `pack` as text.

use std::fmt::Write;

use deepnvme_io::display;
use deepnvme_perf::units::{bytes_text, gb};
use deepnvme_stream::pack::{Estimate, LeftOut, PackOutcome};

/// Maximum lines about omitted files.
const OMITTED_SHOWN_MAX: usize = 20;

/// Formats two sizes in the unit of the second.
fn in_one_unit(from: u64, to: u64) -> (String, String) {
    let (from_text, to_text) = (bytes_text(from), bytes_text(to));
    let unit = |text: &str| text.rsplit(' ').next().unwrap_or_default().to_owned();
    let name = unit(&to_text);
    let unit_bytes = match name.as_str() {
        "KiB" => 1_u64 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return (from_text, to_text),
    };
    if unit(&from_text) == name {
        return (from_text, to_text);
    }
    (format!("{:.2} {name}", from as f64 / unit_bytes as f64), to_text)
}

/// Draws the estimate of the gain.
pub(crate) fn draw_estimate(estimate: &Estimate) -> String {
    let Estimate { encodings, bytes, packed_bytes, layers, file_ranges, threads, .. } = estimate;
    let fraction = |some: u64| some as f64 / (*bytes).max(1) as f64;
    let mut out = String::new();
    for (name, share) in encodings {
        let (from, to) = in_one_unit(share.bytes, share.packed_bytes);
        let ratio = share.packed_bytes as f64 / share.bytes.max(1) as f64;
        let (tensors, s) = (share.tensors, if share.tensors == 1 { "" } else { "s" });
        let _ = writeln!(out, "{name:<9} {tensors:>5} tensor{s}, {from} become about {to} ({ratio:.3})");
    }
    let (from, to) = in_one_unit(*bytes, *packed_bytes);
    let _ = writeln!(out, "total     {from} become about {to} ({:.3})", fraction(*packed_bytes));
    if *layers > 0 {
        let _ =
            writeln!(out, "layers    {layers}, each read from {file_ranges:.1} file ranges now, from 1 when packed");
    }
    let _ = writeln!(out, "disk      {:.2} GB/s", estimate.disk_gb_per_s);
    if let Some(speed) = estimate.decode_gb_per_s {
        let _ = writeln!(out, "decoding  {speed:.2} GB/s on {threads} threads");
    }
    let gain = estimate.packed_gb_per_s / estimate.now_gb_per_s.max(1e-9);
    let _ = writeln!(
        out,
        "expected  {:.2} GB/s of the model now, {:.2} GB/s packed: {gain:.2} times as fast, if the disk is the bottleneck",
        estimate.now_gb_per_s, estimate.packed_gb_per_s
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
pub(crate) fn draw_packed(packed: &PackOutcome, estimate: &Estimate, seconds: f64) -> String {
    let PackOutcome { file, bytes, tensors, encoded, copied, left_out } = packed;
    let ratio = *bytes as f64 / estimate.bytes.max(1) as f64;
    let (tensors, copied) = (counted(*tensors, "tensor"), counted(*copied, "other file"));
    let mut out = format!(
        "{}: {tensors}, {encoded} encoded, {} ({ratio:.3} of the original), {:.2} GB/s; {copied}\n",
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

/// Names a number of things: `1 tensor`, `2 tensors`.
fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sizes_of_a_line_have_one_unit() {
        let texts = |from, to| {
            let (from, to) = in_one_unit(from, to);
            [from, to]
        };
        assert_eq!(texts(26704 << 10, 22_775_000), ["26.08 MiB", "21.72 MiB"]);
        assert_eq!(texts(520 << 10, 520 << 10), ["520 KiB", "520 KiB"]);
        assert_eq!(texts(3000, 2001), ["3000 bytes", "2001 bytes"]);
    }
}
