//! The outcome of `bench` as a picture: a histogram of latencies, and bandwidth over time.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use deepnvme_perf::Result;
use deepnvme_perf::bench::BenchOutcome;
use deepnvme_perf::bench::summary::all_latencies;
use deepnvme_perf::measure::Sample;
use deepnvme_perf::measure::sample::Latencies;

use super::picture::{self, Drawn};

const WIDTH: u32 = 960;
const HEIGHT: u32 = 760;
/// One hue per tool, safe for colour blindness (Okabe and Ito).
const COLOURS: [RGBColor; 2] = [RGBColor(0, 114, 178), RGBColor(230, 159, 0)];
/// Points of a line in the bandwidth panel.
const SPANS: f64 = 12.0;
/// Bars of the latency panel per factor of ten.
const BARS_PER_DECADE: f64 = 10.0;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes the picture as `.svg`, or as a self-contained `.html` page.
///
/// # Errors
/// `Usage` for another extension; an I/O error.
pub fn write(outcome: &BenchOutcome, path: &Path) -> Result<()> {
    picture::write(path, "deepnvme bench", "plot", || svg(outcome))
}

fn svg(outcome: &BenchOutcome) -> Drawn<String> {
    let mut picture = String::new();
    {
        let root = SVGBackend::with_string(&mut picture, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE)?;
        let heading = super::bench::draw(outcome).lines().take(2).collect::<Vec<_>>().join("; ");
        let root = root.titled(&heading, ("sans-serif", 15))?;
        let (upper, lower) = root.split_vertically(HEIGHT as i32 / 2);
        draw_latencies(outcome, &upper)?;
        draw_bandwidth(outcome, &lower)?;
        root.present()?;
    }
    Ok(picture)
}

/// Draws the histogram of latencies over a logarithmic axis.
fn draw_latencies(outcome: &BenchOutcome, area: &Area<'_>) -> Drawn<()> {
    let histograms: Vec<_> = outcome.results.iter().map(|line| bars(&all_latencies(&line.samples))).collect();
    let bar_indices = || histograms.iter().flatten().map(|(index, _)| *index);
    let (Some(first), Some(last)) = (bar_indices().min(), bar_indices().max()) else {
        area.titled("no block latencies available", ("sans-serif", 14))?;
        return Ok(());
    };
    let highest = histograms.iter().flatten().map(|(_, share)| *share).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption("latency of blocks", ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d((us_of(first)..us_of(last + 1)).log_scale(), 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(6)
        .x_label_formatter(&|us| time_text(*us))
        .y_label_formatter(&|share| format!("{share:.0}%"))
        .y_desc("share of the blocks")
        .draw()?;
    for ((bars, colour), line) in histograms.iter().zip(COLOURS).zip(&outcome.results) {
        let boxes = bars.iter().map(|(index, share)| {
            Rectangle::new([(us_of(*index), 0.0), (us_of(index + 1), *share)], colour.mix(0.55).filled())
        });
        chart
            .draw_series(boxes)?
            .label(&line.name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.mix(0.55).filled()));
    }
    chart.configure_series_labels().border_style(BLACK.mix(0.3)).background_style(WHITE).draw()?;
    Ok(())
}

/// Draws a line per round over the seconds of the round.
fn draw_bandwidth(outcome: &BenchOutcome, area: &Area<'_>) -> Drawn<()> {
    let lines: Vec<(usize, Vec<(f64, f64)>)> = outcome
        .results
        .iter()
        .enumerate()
        .flat_map(|(index, line)| line.samples.iter().map(move |sample| (index, speeds(sample))))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let points = || lines.iter().flat_map(|(_, points)| points);
    let longest = points().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    let highest = points().map(|(_, speed)| *speed).fold(0.0, f64::max);
    if longest == 0.0 {
        area.titled("the rounds were too short to sample", ("sans-serif", 14))?;
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .caption("bandwidth over time, a line per round", ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..longest, 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("seconds since the round began")
        .y_desc("GB/s")
        .draw()?;
    for (index, points) in lines {
        chart.draw_series(LineSeries::new(points, COLOURS[index % COLOURS.len()].mix(0.7).stroke_width(2)))?;
    }
    Ok(())
}

/// Counts blocks in bars of equal width on a logarithmic axis. Returns each bar's index and its percentage.
fn bars(latencies: &Latencies) -> Vec<(i32, f64)> {
    let total: u64 = latencies.values().sum();
    let mut bars = std::collections::BTreeMap::<i32, u64>::new();
    for (us, count) in latencies {
        *bars.entry(((*us).max(1) as f64).log10().mul_add(BARS_PER_DECADE, 1e-9).floor() as i32).or_default() += count;
    }
    bars.into_iter().map(|(index, count)| (index, count as f64 * 100.0 / total as f64)).collect()
}

/// Returns the start of a bar in microseconds.
fn us_of(index: i32) -> f64 {
    10_f64.powf(f64::from(index) / BARS_PER_DECADE)
}

/// Formats a latency: `250 us`, `12 ms`.
fn time_text(us: f64) -> String {
    if us < 1000.0 { format!("{us:.0} us") } else { format!("{:.0} ms", us / 1000.0) }
}

/// Returns the end of each twelfth of the round in seconds, and its GB/s. Disks complete requests in bursts, which
/// would dominate shorter spans.
fn speeds(sample: &Sample) -> Vec<(f64, f64)> {
    let Some((end, _)) = sample.timeline.last() else { return Vec::new() };
    let span = end / SPANS;
    let (mut from, mut before) = (0.0, 0);
    let mut points = Vec::new();
    for (at, bytes) in &sample.timeline {
        // The remainder at the end is too short for a point of its own.
        if at - from >= span * 0.99 && at > &from {
            points.push((*at, bytes.saturating_sub(before) as f64 / (at - from) / 1e9));
            (from, before) = (*at, *bytes);
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_count_all_blocks_and_start_at_powers_of_ten() {
        let bars = bars(&[(1, 1), (10, 1), (11, 1), (100, 1)].into());
        assert_eq!(bars, [(0, 25.0), (10, 50.0), (20, 25.0)]);
        assert!((us_of(20) - 100.0).abs() < 1e-9);
    }

    #[test]
    fn speed_is_bytes_between_two_points_over_their_time() {
        let timeline = vec![(0.5, 1_000_000_000), (0.5, 1_000_000_000), (1.0, 3_000_000_000), (1.01, 3_000_000_000)];
        let speeds = speeds(&Sample { timeline, ..Sample::default() });
        assert_eq!(speeds, [(0.5, 2.0), (1.0, 4.0)], "the remainder is no point");
        assert_eq!([250.0, 12_000.0].map(time_text), ["250 us", "12 ms"]);
    }
}
