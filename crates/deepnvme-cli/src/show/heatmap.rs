//! The trials of `tune` as a heat map: bandwidth over block size and queue depth, a panel per number of workers.

use std::collections::BTreeMap;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;

use deepnvme_io::display;
use deepnvme_perf::Result;
use deepnvme_perf::bench::summary::median;
use deepnvme_perf::measure::Direction;
use deepnvme_perf::tune::{FolderResult, Trial, TuneOutcome};
use deepnvme_perf::units::bytes_option;

use super::picture::{self, Drawn};

const PANEL_WIDTH: u32 = 300;
const PANEL_HEIGHT: u32 = 280;
const MARGIN: i32 = 56;

/// GB/s by block size and queue depth.
type Cells = BTreeMap<(u64, u32), f64>;

/// Writes the map as `.svg`, or as a self-contained `.html` page.
///
/// # Errors
/// `Usage` for another extension; an I/O error.
pub fn write(outcome: &TuneOutcome, path: &Path) -> Result<()> {
    picture::write(path, "deepnvme tune", "heat map", || svg(outcome))
}

/// One row of panels: a folder and a direction.
struct Row {
    title: String,
    panels: BTreeMap<u32, Cells>,
}

fn rows(outcome: &TuneOutcome) -> Vec<Row> {
    let of = |result: &FolderResult, direction| {
        let choice = if direction == Direction::Read { &result.read } else { &result.write };
        let name = if direction == Direction::Read { "read" } else { "write" };
        let folders: Vec<_> = result.folders.iter().map(|folder| display::path(folder).to_string()).collect();
        choice
            .as_ref()
            .map(|choice| Row { title: format!("{name}, {}", folders.join(" + ")), panels: panels(&choice.tried) })
    };
    let results = outcome.results.iter();
    results.flat_map(|result| [of(result, Direction::Read), of(result, Direction::Write)]).flatten().collect()
}

/// Returns the best speed of each cell: several trials may share one.
fn panels(tried: &[Trial]) -> BTreeMap<u32, Cells> {
    let mut panels = BTreeMap::<u32, Cells>::new();
    for trial in tried {
        let config = &trial.config;
        let cell =
            panels.entry(config.workers).or_default().entry((config.block_bytes, config.queue_depth)).or_default();
        *cell = cell.max(median(&trial.gb_per_s));
    }
    panels
}

fn svg(outcome: &TuneOutcome) -> Drawn<String> {
    let rows = rows(outcome);
    let columns = rows.iter().map(|row| row.panels.len()).max().unwrap_or(1).max(1);
    let size = (PANEL_WIDTH * columns as u32, (PANEL_HEIGHT + 30) * rows.len().max(1) as u32);
    let mut picture = String::new();
    {
        let root = SVGBackend::with_string(&mut picture, size).into_drawing_area();
        root.fill(&WHITE)?;
        for (row, area) in rows.iter().zip(root.split_evenly((rows.len().max(1), 1))) {
            let area = area.titled(&row.title, ("sans-serif", 16))?;
            let all = row.panels.values().flat_map(BTreeMap::values);
            let range = all.fold((f64::INFINITY, 0.0_f64), |(low, high), speed| (low.min(*speed), high.max(*speed)));
            // The same axes for all panels, so that they can be compared.
            let keys = || row.panels.values().flat_map(BTreeMap::keys);
            let axes = (sorted(keys().map(|(block, _)| *block)), sorted(keys().map(|(_, depth)| *depth)));
            for ((workers, cells), panel) in row.panels.iter().zip(area.split_evenly((1, columns))) {
                draw_panel(*workers, cells, &axes, range, &panel)?;
            }
        }
        root.present()?;
    }
    Ok(picture)
}

fn draw_panel(
    workers: u32,
    cells: &Cells,
    (blocks, depths): &(Vec<u64>, Vec<u32>),
    range: (f64, f64),
    area: &DrawingArea<SVGBackend<'_>, Shift>,
) -> Drawn<()> {
    let (width, height) = area.dim_in_pixel();
    let (step_x, step_y) = (
        (width as i32 - MARGIN - 8) / blocks.len().max(1) as i32,
        (height as i32 - MARGIN - 8) / depths.len().max(1) as i32,
    );
    let plural = if workers == 1 { "" } else { "s" };
    let style = |size: i32| ("sans-serif", size).into_font();
    area.draw(&Text::new(format!("{workers} worker{plural}"), (MARGIN, 2), style(14)))?;
    for (row, depth) in depths.iter().rev().enumerate() {
        let y = 22 + row as i32 * step_y;
        area.draw(&Text::new(format!("depth {depth}"), (2, y + step_y / 2 - 6), style(11)))?;
        for (column, block) in blocks.iter().enumerate() {
            let x = MARGIN + column as i32 * step_x;
            let Some(speed) = cells.get(&(*block, *depth)) else { continue };
            area.draw(&Rectangle::new([(x, y), (x + step_x - 2, y + step_y - 2)], colour(*speed, range).filled()))?;
            let dark = shade(*speed, range) > 0.55;
            let ink = if dark { WHITE } else { BLACK };
            area.draw(&Text::new(format!("{speed:.1}"), (x + 4, y + step_y / 2 - 6), style(11).color(&ink)))?;
        }
    }
    for (column, block) in blocks.iter().enumerate() {
        let at = (MARGIN + column as i32 * step_x + 4, 22 + depths.len() as i32 * step_y + 4);
        area.draw(&Text::new(bytes_option(*block), at, style(11)))?;
    }
    Ok(())
}

fn sorted<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

/// Returns the position of a speed between the slowest and the fastest, 0 to 1.
fn shade(speed: f64, (low, high): (f64, f64)) -> f64 {
    if high > low { (speed - low) / (high - low) } else { 1.0 }
}

/// Returns a colour from pale to dark blue: lightness is safe for colour blindness and print.
fn colour(speed: f64, range: (f64, f64)) -> RGBColor {
    let shade = shade(speed, range);
    let channel = |from: f64, to: f64| (from + (to - from) * shade) as u8;
    RGBColor(channel(235.0, 8.0), channel(243.0, 64.0), channel(251.0, 129.0))
}

#[cfg(test)]
mod tests {
    use deepnvme_io::{Config, SubmitMode};

    use super::*;

    #[test]
    fn a_cell_shows_its_best_trial() {
        let trial = |workers, submit, speeds: &[f64]| Trial {
            config: Config { workers, queue_depth: 8, block_bytes: 1 << 20, submit, ..Config::default() },
            gb_per_s: speeds.to_vec(),
        };
        let tried = [
            trial(1, SubmitMode::Batch, &[3.0, 4.0, 9.0]),
            trial(1, SubmitMode::Single, &[2.0]),
            trial(2, SubmitMode::Batch, &[5.0]),
        ];
        let panels = panels(&tried);
        assert_eq!(panels[&1][&(1 << 20, 8)].to_bits(), 4.0_f64.to_bits());
        assert_eq!(panels.len(), 2);
        assert!((shade(5.0, (4.0, 6.0)) - 0.5).abs() < 1e-9 && (shade(5.0, (5.0, 5.0)) - 1.0).abs() < 1e-9);
    }
}
