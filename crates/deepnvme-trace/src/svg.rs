//! Draws the timeline as an SVG: charts above a line for each lane. This module does no I/O.

use std::fmt::Write as _;

use deepnvme_io::display;
use deepnvme_io::op::Direction;
use deepnvme_io::trace::{EventKind, Recorded, TraceEvent};

use super::formatting::{counted, escape, nice_step, time_text};
use super::intervals::{Interval, downsample, levels};
use super::lanes::{Lane, LaneKind, failed, interval, lanes, title};

pub(crate) const WIDTH: f64 = 1180.0;
/// Width of the lane names, left of the time axis.
pub(crate) const LABEL_WIDTH: f64 = 132.0;
pub(crate) const RIGHT_MARGIN: f64 = 14.0;
const TOP: f64 = 18.0;
pub(crate) const LEVEL_HEIGHT: f64 = 44.0;
const ROW_HEIGHT: f64 = 8.0;
/// Height of rows whose bars have readable names.
const NAMED_ROW_HEIGHT: f64 = 20.0;
pub(crate) const GAP: f64 = 14.0;
/// A lane with more rows or bars than these is drawn as the number of events in progress.
const ROWS_MAX: usize = 10;
const BARS_MAX: usize = 1500;
/// Points of a drawn level: more than the drawing has columns.
pub(crate) const POINTS_MAX: usize = 1600;
/// Mean width of a letter in the names of bars.
const LETTER_WIDTH: f64 = 6.2;

/// A drawing that grows downwards.
pub(crate) struct Svg {
    body: String,
    pub(crate) y: f64,
    /// The time that the width stands for.
    pub(crate) range: Interval,
}

/// Draws a recording; `None` if it has no events. `about` is the description for screen readers.
pub(crate) fn svg(recorded: &Recorded, about: &str) -> Option<String> {
    let first = recorded.events.iter().map(|event| event.start_ns).min()?;
    let last = recorded.events.iter().map(|event| event.end_ns).max()?;
    let mut svg = Svg { body: String::new(), y: TOP, range: (first, last.max(first + 1)) };
    svg.speed(recorded);
    svg.level("in flight", recorded);
    for (place, lane) in lanes(recorded).iter().enumerate() {
        svg.lane(lane, place);
    }
    Some(svg.finish(about))
}

impl Svg {
    pub(crate) fn add(&mut self, text: &str) {
        self.body.push_str(text);
        self.body.push('\n');
    }

    pub(crate) fn x(&self, moment: u64) -> f64 {
        let share = moment.saturating_sub(self.range.0) as f64 / (self.range.1 - self.range.0) as f64;
        LABEL_WIDTH + share.min(1.0) * (WIDTH - LABEL_WIDTH - RIGHT_MARGIN)
    }

    pub(crate) fn label(&mut self, name: &str, below: Option<&str>, height: f64) {
        let (x, middle) = (LABEL_WIDTH - 12.0, self.y + height / 2.0);
        let y = if below.is_some() { middle - 3.0 } else { middle + 4.0 };
        self.add(&format!("<text class=\"name\" x=\"{x}\" y=\"{y:.1}\">{}</text>", escape(name)));
        if let Some(below) = below {
            self.add(&format!("<text class=\"unit\" x=\"{x}\" y=\"{:.1}\">{}</text>", middle + 12.0, escape(below)));
        }
    }

    /// Draws the number of a lane's events in progress, for each kind of event.
    fn density(&mut self, lane: &Lane<'_>, below: &str, place: usize) {
        let mut kinds: Vec<(&'static str, Vec<(Interval, u64)>)> = Vec::new();
        for event in &lane.events {
            let class = class(event, place);
            match kinds.iter_mut().find(|(known, _)| *known == class) {
                Some((_, intervals)) => intervals.push((interval(event), 1)),
                None => kinds.push((class, vec![(interval(event), 1)])),
            }
        }
        let kinds: Vec<_> =
            kinds.into_iter().map(|(class, intervals)| (class, downsample(levels(intervals), POINTS_MAX))).collect();
        let highest = kinds.iter().flat_map(|(_, levels)| levels).map(|(_, level)| *level).max().unwrap_or(0);
        self.label(&lane.name, Some(&format!("{below}, to {highest}")), LEVEL_HEIGHT);
        for (class, levels) in kinds {
            self.steps(&levels, highest, class, LEVEL_HEIGHT);
        }
        self.y += LEVEL_HEIGHT + GAP;
    }

    fn lane(&mut self, lane: &Lane<'_>, place: usize) {
        let below = counted(lane.events.len() as u64, noun(lane));
        let is_named = lane.kind == LaneKind::User;
        if lane.row_count() > ROWS_MAX || lane.events.len() > BARS_MAX {
            return self.density(lane, &below, place);
        }
        let row_height = if is_named { NAMED_ROW_HEIGHT } else { ROW_HEIGHT };
        let height = (row_height * lane.row_count() as f64).max(26.0);
        self.label(&lane.name, Some(&below), height);
        for (event, row) in lane.events.iter().zip(&lane.rows) {
            let (left, right) = (self.x(event.start_ns), self.x(event.end_ns));
            let (width, top) = ((right - left - 0.4).max(0.8), self.y + row_height * *row as f64);
            let class = if failed(&event.kind) { "failed" } else { class(event, place) };
            let tooltip = escape(&tooltip(event));
            let tall = row_height - 1.5;
            self.add(&format!(
                "<rect class=\"bar {class}\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{tall}\"><title>{tooltip}</title></rect>"
            ));
            let name = title(&event.kind);
            if is_named && name.chars().count() as f64 * LETTER_WIDTH + 6.0 < width {
                let (x, y) = (left + 4.0, top + row_height - 6.5);
                self.add(&format!("<text class=\"inside\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(&name)));
            }
        }
        self.y += height + GAP;
    }

    /// Adds the time axis.
    fn finish(self, about: &str) -> String {
        let bottom = self.y;
        let mut axis = String::new();
        let whole = (self.range.1 - self.range.0) as f64;
        let step = nice_step(whole / 8.0);
        let mut moment = 0.0;
        while moment <= whole {
            let x = self.x(self.range.0 + moment as u64);
            let _ = write!(axis, "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\"/>");
            let anchor = if x > WIDTH - 60.0 { "end" } else { "middle" };
            let text = time_text(moment, step);
            let _ = writeln!(
                axis,
                "<text class=\"time\" text-anchor=\"{anchor}\" x=\"{x:.1}\" y=\"{:.1}\">{text}</text>",
                bottom + 16.0
            );
            moment += step;
        }
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" aria-label=\"{}\">\n{axis}{}</svg>\n",
            bottom + 26.0,
            escape(about),
            self.body
        )
    }
}

fn noun(lane: &Lane<'_>) -> &'static str {
    match lane.kind {
        LaneKind::Requests => "request",
        LaneKind::Disk => "op",
        LaneKind::Copies => "copy",
        LaneKind::User => "span",
    }
}

/// The colour of a bar. User lanes cycle through three.
fn class(event: &TraceEvent, place: usize) -> &'static str {
    match &event.kind {
        EventKind::Request { .. } => "request",
        EventKind::Op { direction: Direction::Read, .. } => "read",
        EventKind::Op { .. } => "write",
        EventKind::Sync { .. } => "sync",
        EventKind::Copy { .. } => "copy",
        EventKind::Span { .. } => ["span-a", "span-b", "span-c"][place % 3],
    }
}

/// The tooltip of a bar.
fn tooltip(event: &TraceEvent) -> String {
    let took = time_text((event.end_ns - event.start_ns) as f64, 0.0);
    let name = title(&event.kind);
    let suffix = if failed(&event.kind) { ", failed" } else { "" };
    match &event.kind {
        EventKind::Request { file: Some(file), files, .. } => {
            let more = if *files > 1 { format!(" and {} more", files - 1) } else { String::new() };
            format!("{name}, {took}{suffix}\n{}{more}", display::path(file))
        }
        EventKind::Op { file, offset, data_path, .. } => {
            format!("{name} at {offset}, {}, {took}{suffix}\n{}", data_path.name(), display::path(file))
        }
        EventKind::Sync { file, .. } => format!("{name}, {took}{suffix}\n{}", display::path(file)),
        _ => format!("{name}, {took}{suffix}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::recorded;

    #[test]
    fn every_bar_is_drawn_and_names_are_escaped() {
        let recorded = recorded();
        let svg = svg(&recorded, "a \"test\"").unwrap_or_default();
        assert_eq!(svg.matches("<rect").count(), recorded.events.len());
        assert_eq!(svg.matches("class=\"bar failed\"").count(), 2);
        assert!(svg.contains("layer &lt;1&gt;") && svg.contains("&lt;model&gt; &amp; co"));
        assert!(!svg.contains("<model>") && !svg.contains("NaN") && !svg.contains("inf"));
        assert!(svg.contains("aria-label=\"a &quot;test&quot;\""));
    }

    #[test]
    fn many_bars_become_a_level() {
        let mut many = recorded();
        let (first, step) = (many.events[0].clone(), 10_000);
        many.events = (0..BARS_MAX as u64 + 1)
            .map(|at| TraceEvent {
                start_ns: first.start_ns + at * step,
                end_ns: first.start_ns + (at + 3) * step,
                ..first.clone()
            })
            .collect();
        let svg = svg(&many, "").unwrap_or_default();
        assert_eq!(svg.matches("<rect").count(), 0);
        assert!(svg.contains("1501 ops, to 3"), "three overlap");
    }

    #[test]
    fn an_empty_recording_has_no_drawing() {
        let mut recorded = recorded();
        recorded.events.truncate(1);
        recorded.events[0].end_ns = recorded.events[0].start_ns;
        assert!(svg(&recorded, "").is_some_and(|svg| !svg.contains("NaN")));
        recorded.events.clear();
        assert_eq!(svg(&recorded, ""), None);
    }
}
