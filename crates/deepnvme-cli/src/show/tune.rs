//! The outcomes of `tune` as text.

use std::fmt::Write;

use deepnvme_io::display;
use deepnvme_io::{BackendChoice, Config, SubmitMode, WindowMode};
use deepnvme_perf::measure::Direction;
use deepnvme_perf::tune::compare::{Comparison, ROUNDS};
use deepnvme_perf::tune::{Choice, FolderResult, Trial, TuneOutcome};
use deepnvme_perf::units::bytes_text;

use super::aio_block::AioBlock;
use super::memory_text;

/// Rows of each table.
const ROWS: usize = 6;

/// Draws the outcome as lines of text; `written` is the file of settings.
#[must_use]
pub fn draw(outcome: &TuneOutcome, written: Option<&std::path::Path>) -> String {
    let mut out = String::new();
    for result in &outcome.results {
        draw_folders(result, outcome, &mut out);
    }
    let tried: usize =
        outcome.results.iter().flat_map(|result| [&result.read, &result.write]).flatten().map(|c| c.tried.len()).sum();
    let _ = writeln!(out, "{tried} settings tried of {} in {:.0} s", outcome.space_len, outcome.seconds);
    if outcome.is_interrupted {
        out.push_str("interrupted: the best so far\n");
    }
    if let Some(both) = outcome.results.last().and_then(|result| result.both.as_ref()) {
        let _ = write!(out, "\nfor DeepSpeed's configuration:\n{}", AioBlock::of(both).text());
    }
    if let Some(path) = written {
        let path = display::path(path);
        let _ = writeln!(
            out,
            "\nwritten to {path}: deepnvme.Engine.from_file({path:?}), or DEEPNVME_CONFIG={path}",
            path = path.to_string()
        );
    }
    out
}

fn draw_folders(result: &FolderResult, outcome: &TuneOutcome, out: &mut String) {
    let names: Vec<_> = result.folders.iter().map(|folder| display::path(folder).to_string()).collect();
    let memory = outcome.gpu.map_or_else(String::new, |index| format!(", {}", memory_text(index)));
    let _ = writeln!(out, "{}, {} in each trial{memory}", names.join(" + "), bytes_text(outcome.io_bytes));
    if let Some(gds) = &result.gds {
        let route = if gds.kind == "cufile" { "with cuFile" } else { "through bounce buffers" };
        let _ =
            writeln!(out, "{route}{}", gds.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}")));
    }
    for (name, choice) in [("read", &result.read), ("write", &result.write)] {
        let Some(choice) = choice else { continue };
        let _ = writeln!(out, "\n{name:<6}{:>8}  {:>6}  settings", "GB/s", "trials");
        for trial in choice.tried.iter().take(ROWS).chain(chosen_below(choice)) {
            let mark = if trial.config == choice.config { "*" } else { " " };
            let speed = deepnvme_perf::bench::summary::median(&trial.gb_per_s);
            let (trials, settings) = (trial.gb_per_s.len(), describe(&trial.config));
            let _ = writeln!(out, "{mark:<6}{speed:>8.2}  {trials:>6}  {settings}");
        }
        let gain = choice.gb_per_s / choice.gb_per_s_default.max(f64::MIN_POSITIVE);
        let _ =
            writeln!(out, "{}; {gain:.2} times the default's {:.2} GB/s", choice.confidence, choice.gb_per_s_default);
    }
    if let Some(both) = &result.both {
        let _ = writeln!(out, "\nboth  {}\n", describe(both));
    }
}

/// Returns the chosen row if it is not among the first.
fn chosen_below(choice: &Choice) -> impl Iterator<Item = &Trial> {
    choice.tried.iter().skip(ROWS).filter(|trial| trial.config == choice.config)
}

/// Describes settings in a line.
#[must_use]
pub fn describe(config: &Config) -> String {
    let backend = match config.backend {
        BackendChoice::Auto => "auto",
        BackendChoice::Uring => "io_uring",
        BackendChoice::Aio => "aio",
        BackendChoice::Threads => "threads",
    };
    let (workers, depth, block) = (config.workers, config.queue_depth, bytes_text(config.block_bytes));
    let plural = if workers == 1 { "" } else { "s" };
    let mut text = format!("{backend}, {workers} worker{plural} x depth {depth}, blocks of {block}");
    if config.submit == SubmitMode::Single {
        text.push_str(", single submissions");
    }
    if config.window == WindowMode::Drain {
        text.push_str(", drained");
    }
    if !config.register_pool {
        text.push_str(", pool not registered");
    }
    text
}

/// Draws a comparison as lines of text.
#[must_use]
pub fn draw_comparison(comparison: &Comparison) -> String {
    let mut out =
        format!("{} against the defaults, {ROUNDS} alternating rounds\n", display::path(&comparison.settings));
    for line in &comparison.comparisons {
        let direction = match line.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let (stored, default, ratio) = (line.stored.speed.median, line.default.speed.median, &line.ratio);
        let _ = writeln!(
            out,
            "\n{} {direction}: {stored:.2} GB/s, default {default:.2}; {:.2} times as fast by the median of \
             the rounds ({:.2} to {:.2})\n  {}",
            display::path(&line.folder),
            ratio.median,
            ratio.min,
            ratio.max,
            describe(&line.config)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_only_unusual_settings() {
        let default = Config { workers: 1, queue_depth: 8, block_bytes: 1 << 20, ..Config::default() };
        assert_eq!(describe(&default), "auto, 1 worker x depth 8, blocks of 1 MiB");
        let unusual = Config {
            backend: BackendChoice::Aio,
            workers: 2,
            submit: SubmitMode::Single,
            window: WindowMode::Drain,
            register_pool: false,
            ..default
        };
        let text = "aio, 2 workers x depth 8, blocks of 1 MiB, single submissions, drained, pool not registered";
        assert_eq!(describe(&unusual), text);
    }
}
