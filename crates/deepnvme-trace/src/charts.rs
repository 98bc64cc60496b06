//! The charts above the lanes: speed, and bytes in flight. This module does no I/O.

use std::fmt::Write as _;

use deepnvme_io::op::Direction;
use deepnvme_io::trace::{EventKind, Recorded};

use super::formatting::{amount, nice_step, number};
use super::intervals::{distribute, downsample, levels};
use super::lanes::interval;
use super::svg::{GAP, LABEL_WIDTH, LEVEL_HEIGHT, POINTS_MAX, RIGHT_MARGIN, Svg, WIDTH};

const SPEED_HEIGHT: f64 = 150.0;
/// Bins of equal duration. The speed of each follows from the bytes that move in it.
const SPEED_BINS: usize = 150;

impl Svg {
    /// Draws the GB/s of reads, writes and copies.
    pub(crate) fn speed(&mut self, recorded: &Recorded) {
        let bin_s = (self.range.1 - self.range.0) as f64 / SPEED_BINS as f64 / 1e9;
        let mut lines = Vec::new();
        for (class, direction) in [("read", Some(Direction::Read)), ("write", Some(Direction::Write)), ("copy", None)] {
            let amounts = recorded.events.iter().filter_map(|event| match &event.kind {
                EventKind::Op { direction: of, bytes, .. } if direction == Some(*of) => Some((interval(event), *bytes)),
                EventKind::Copy { bytes, .. } if direction.is_none() => Some((interval(event), *bytes)),
                _ => None,
            });
            let speeds: Vec<f64> =
                distribute(self.range, SPEED_BINS, amounts).iter().map(|bytes| bytes / 1e9 / bin_s).collect();
            if speeds.iter().any(|speed| *speed > 0.0) {
                lines.push((class, speeds));
            }
        }
        let highest = lines.iter().flat_map(|(_, speeds)| speeds).copied().fold(0.0, f64::max);
        if highest == 0.0 {
            return;
        }
        self.label("speed", Some("GB/s"), SPEED_HEIGHT);
        let (top, bottom) = (self.y, self.y + SPEED_HEIGHT);
        let step = nice_step(highest / 4.0);
        let ceiling = (highest / step).ceil() * step;
        let y = |speed: f64| bottom - speed / ceiling * (bottom - top);
        let width = (WIDTH - LABEL_WIDTH - RIGHT_MARGIN) / SPEED_BINS as f64;
        for (class, speeds) in lines {
            let outline = outline(speeds.iter().map(|speed| y(*speed)), bottom, width);
            if class != "copy" {
                self.add(&format!("<path class=\"area {class}\" d=\"{outline}\"/>"));
            }
            self.add(&format!("<path class=\"edge {class}\" d=\"{outline}\"/>"));
        }
        let mut tick = 0.0;
        while tick <= ceiling * 1.001 {
            let (at, right) = (y(tick), WIDTH - RIGHT_MARGIN);
            self.add(&format!(
                "<line class=\"grid\" x1=\"{LABEL_WIDTH}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"
            ));
            let text = number(tick);
            self.add(&format!("<text class=\"tick\" x=\"{}\" y=\"{:.1}\">{text}</text>", LABEL_WIDTH + 4.0, at - 3.0));
            tick += step;
        }
        self.y = bottom + GAP;
    }

    /// Draws the bytes of ops in flight over time.
    pub(crate) fn level(&mut self, name: &str, recorded: &Recorded) {
        let ops = recorded.events.iter().filter_map(|event| match &event.kind {
            EventKind::Op { bytes, .. } => Some((interval(event), *bytes)),
            _ => None,
        });
        let levels = downsample(levels(ops), POINTS_MAX);
        let highest = levels.iter().map(|(_, level)| *level).max().unwrap_or(0);
        if highest > 0 {
            let below = format!("to {}", amount(highest));
            self.label(name, Some(&below), LEVEL_HEIGHT);
            self.steps(&levels, highest, "level", LEVEL_HEIGHT);
            self.y += LEVEL_HEIGHT + GAP;
        }
    }

    pub(crate) fn steps(&mut self, levels: &[(u64, u64)], highest: u64, class: &str, height: f64) {
        let bottom = self.y + height;
        let mut area =
            format!("M{:.1},{bottom:.1} ", levels.first().map_or(LABEL_WIDTH, |(moment, _)| self.x(*moment)));
        let mut before = bottom;
        for (moment, level) in levels {
            let (x, y) = (self.x(*moment), bottom - *level as f64 / highest.max(1) as f64 * height);
            let _ = write!(area, "L{x:.1},{before:.1} L{x:.1},{y:.1} ");
            before = y;
        }
        self.add(&format!("<path class=\"area {class}\" d=\"{area}Z\"/>"));
    }
}

/// The outline of equally wide bars; empty ones have none.
fn outline(tops: impl Iterator<Item = f64>, bottom: f64, width: f64) -> String {
    let (mut path, mut before) = (String::new(), bottom);
    for (index, top) in tops.chain([bottom]).enumerate() {
        let left = LABEL_WIDTH + index as f64 * width;
        if before >= bottom && top < bottom {
            // Writing to a string cannot fail.
            let _ = write!(path, "M{left:.1},{bottom:.1} ");
        }
        if before < bottom || top < bottom {
            let _ = write!(path, "L{left:.1},{before:.1} L{left:.1},{top:.1} ");
        }
        before = top;
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outlines_omit_empty_bars() {
        let path = outline([9.0, 2.0, 9.0, 9.0, 4.0].into_iter(), 9.0, 10.0);
        let x = |index: f64| LABEL_WIDTH + index * 10.0;
        let piece = |from: f64, top: f64| {
            let (left, right) = (x(from), x(from + 1.0));
            format!("M{left:.1},9.0 L{left:.1},9.0 L{left:.1},{top:.1} L{right:.1},{top:.1} L{right:.1},9.0 ")
        };
        assert_eq!(path, piece(1.0, 2.0) + &piece(4.0, 4.0));
    }
}
