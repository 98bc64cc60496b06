//! The outcome of `bench` as text.

use std::fmt::Write;

use deepnvme_io::display;
use deepnvme_io::{DirectMode, Durability, SubmitMode};
use deepnvme_perf::bench::{BenchOutcome, ToolResult};
use deepnvme_perf::measure::{AccessOrder, Cache, Direction, Memory};
use deepnvme_perf::units::{bytes_text, gb};

use super::memory_text;

/// Draws the outcome as lines of text.
#[must_use]
pub fn draw(outcome: &BenchOutcome) -> String {
    let mut out = format!("{}\n{}\n", workload_line(outcome), engine_line(outcome));
    for folder in &outcome.folders {
        let device = folder.device.as_ref().map_or_else(String::new, |device| format!(" on {device}"));
        let _ = writeln!(out, "{} ({}{device})", display::path(&folder.path), folder.file_system);
    }
    if let Some(gpu) = &outcome.gpu {
        let route = match outcome.workload.config.gds {
            DirectMode::Disabled => "through bounce buffers",
            DirectMode::Preferred | DirectMode::Required => "with cuFile",
        };
        let _ = writeln!(out, "cuda:{} ({}), {route}", gpu.index, gpu.name);
    }
    let head = ["", "GB/s", "min - max", "block p50", "p99", "CPU s/GB", "direct", "bounced", "buffered"];
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned)).chain(outcome.results.iter().map(row)).collect();
    out.push('\n');
    out.push_str(&table(&rows));
    if let Some(ratio) = &outcome.ratio {
        let rounds = outcome.results[0].samples.len();
        let rounds = if rounds == 1 { "1 round".into() } else { format!("median of {rounds} rounds") };
        let (median, min, max) = (ratio.median, ratio.min, ratio.max);
        let _ = writeln!(out, "\n{median:.2} times fio's speed: {rounds}, {min:.2} to {max:.2}");
    }
    if outcome.is_validated {
        out.push_str("\nevery byte of every round was compared\n");
    }
    for note in &outcome.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}

/// Describes the workload.
fn workload_line(outcome: &BenchOutcome) -> String {
    let workload = &outcome.workload;
    let verb = match workload.direction {
        Direction::Read => "read",
        Direction::Write => "write",
    };
    let mut text = format!("{verb} {}", bytes_text(workload.file_bytes()));
    match (workload.stripe_bytes, workload.folders.len()) {
        (Some(stripe), folders) => {
            let _ = write!(text, " striped over {folders} folders by {}", bytes_text(stripe));
        }
        (None, 1) => {}
        (None, folders) => {
            let _ = write!(text, " in each of {folders} folders");
        }
    }
    if outcome.processes > 1 {
        let _ = write!(text, " by each of {} processes", outcome.processes);
    }
    text.push_str(match workload.order {
        AccessOrder::Sequential => ", sequential",
        AccessOrder::Random => ", random blocks",
    });
    text.push_str(match (workload.direction, workload.cache) {
        (Direction::Read, Cache::Cold) => ", cold",
        (Direction::Read, Cache::Warm) => ", from the page cache",
        (Direction::Write, _) => ", over laid-out files",
    });
    let kind = match (workload.place.gpu, workload.place.memory) {
        (Some(index), _) => memory_text(index),
        (None, Memory::Pinned) => "pinned memory".into(),
        (None, Memory::Plain) => "pageable memory".into(),
    };
    match workload.buffer_bytes {
        None => text.push_str(&format!(", {kind}")),
        Some(bytes) => text.push_str(&format!(", {} of {kind}, reused", bytes_text(bytes))),
    }
    if workload.direction == Direction::Write {
        text.push_str(match workload.durability {
            Durability::None => ", not synced",
            Durability::Data => ", data synced",
            Durability::Full => ", data and folder synced",
        });
    }
    text
}

/// Describes the engine's settings.
fn engine_line(outcome: &BenchOutcome) -> String {
    let config = &outcome.workload.config;
    let plural = if config.workers == 1 { "" } else { "s" };
    let direct = match config.direct {
        DirectMode::Disabled => ", buffered",
        DirectMode::Preferred | DirectMode::Required => "",
    };
    let submit = match config.submit {
        SubmitMode::Batch => "",
        SubmitMode::Single => ", one submission each",
    };
    format!(
        "{}, {} worker{plural} x depth {}, blocks of {}{submit}{direct}",
        outcome.backend.name,
        config.workers,
        config.queue_depth,
        bytes_text(config.block_bytes)
    )
}

fn row(result: &ToolResult) -> [String; 9] {
    let summary = &result.summary;
    let amount = |bytes: u64| if bytes == 0 { "-".to_owned() } else { format!("{:.2} GB", gb(bytes)) };
    [
        result.name.clone(),
        format!("{:.2}", summary.speed.median),
        format!("{:.2} - {:.2}", summary.speed.min, summary.speed.max),
        summary.latency_us_p50.map_or_else(|| "-".into(), latency),
        summary.latency_us_p99.map_or_else(|| "-".into(), latency),
        format!("{:.3}", summary.cpu_s_per_gb),
        amount(summary.by_route.direct),
        amount(summary.by_route.bounced),
        amount(summary.by_route.buffered),
    ]
}

fn latency(us: u64) -> String {
    if us < 1000 { format!("{us} us") } else { format!("{:.1} ms", us as f64 / 1e3) }
}

/// Aligns the first column to the left and all others to the right.
fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let mut out = String::new();
    let widths: [usize; N] = std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    for row in rows {
        let mut line = format!("{:<width$}", row[0], width = widths[0]);
        for (cell, width) in row.iter().zip(widths).skip(1) {
            let _ = write!(line, "  {cell:>width$}");
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}
