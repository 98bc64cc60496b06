//! Writes a recording as a self-contained HTML page: a summary above the timeline. This module does no I/O.

use std::fmt::Write as _;

use deepnvme_io::trace::Recorded;

use super::formatting::{amount, counted, escape, number, time_text};
use super::summary::{TraceSummary, summarise};
use super::svg::svg;

/// Colours for light and dark mode. Those of reads, writes and copies are, or resemble, colours of Okabe and Ito, which
/// colour-blind readers can tell apart.
const STYLE: &str = "
:root{--paper:#fff;--ink:#1b1f27;--dim:#667085;--line:#e6e9ef;--card:#f6f7f9;--read:#0072b2;--write:#e69f00;--copy:#009e73;
--request:#98a2b3;--failed:#d92d20;--a:#8c6bb1;--b:#cc79a7;--c:#56b4e9}
@media(prefers-color-scheme:dark){:root{--paper:#12151b;--ink:#e8eaee;--dim:#98a2b3;--line:#262b35;--card:#1b2029;--read:#4aa8e0;
--write:#f0b429;--copy:#2fc79b;--request:#5d6779;--a:#a88bd0;--b:#dd94bd;--c:#7cc7f2}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1240px;padding:28px 24px 48px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
h1{font-size:22px;font-weight:650;letter-spacing:-.01em;margin:0 0 2px}.sub{color:var(--dim);margin:0 0 20px}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:0 0 22px}.card{background:var(--card);border-radius:10px;padding:12px 16px;min-width:150px;flex:1}
.card b{display:block;font-size:24px;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}.card span{color:var(--dim);font-size:13px}
.legend{display:flex;flex-wrap:wrap;gap:16px;color:var(--dim);font-size:13px;margin:0 0 6px}.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.note{color:var(--failed)}svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--dim)}
svg .name{fill:var(--ink);text-anchor:end;font-weight:550}svg .unit{text-anchor:end;font-size:11px}svg .tick{font-size:10.5px}svg .time{font-size:11px}
svg .inside{fill:#fff;font-size:11px}.grid{stroke:var(--line);stroke-width:1}.bar{rx:1px}.bar:hover{opacity:.65}
.read{fill:var(--read)}.write{fill:var(--write)}.copy{fill:var(--copy)}.request{fill:var(--request)}.sync,.failed{fill:var(--failed)}
.span-a{fill:var(--a)}.span-b{fill:var(--b)}.span-c{fill:var(--c)}.level{fill:var(--dim);opacity:.45}.area.read,.area.write{opacity:.3}
.area.copy,.area.request,.area.span-a,.area.span-b,.area.span-c{opacity:.55}
.edge{fill:none;stroke-width:1.6}.edge.read{stroke:var(--read)}.edge.write{stroke:var(--write)}.edge.copy{stroke:var(--copy)}
";

/// Formats a recording as an HTML page.
#[must_use]
pub fn html(recorded: &Recorded) -> String {
    let summary = summarise(recorded);
    let about = about(&summary);
    let mut cards = String::new();
    for (value, name) in cards_of(&summary) {
        // Writing to a string cannot fail.
        let _ = write!(cards, "<div class=\"card\"><b>{}</b><span>{}</span></div>", escape(&value), escape(&name));
    }
    let note = match summary.dropped {
        0 => String::new(),
        dropped => format!("<p class=\"note\">The recording was full: {dropped} later events are missing here.</p>"),
    };
    let svg = svg(recorded, &about).unwrap_or_else(|| "<p>The recording has no events.</p>\n".into());
    let legend = legend(&summary);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>deepnvme timeline</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>deepnvme timeline</h1>\n\
         <p class=\"sub\">{}</p>\n<div class=\"cards\">{cards}</div>\n{note}<div class=\"legend\">{legend}</div>\n{svg}</body></html>\n",
        escape(&about)
    )
}

/// Describes the recording in one line.
fn about(summary: &TraceSummary) -> String {
    let mut text = format!(
        "{} recorded: {}, {}",
        time_text(summary.seconds * 1e9, 0.0),
        counted(summary.requests, "request"),
        counted(summary.ops, "op")
    );
    let ways = [
        (summary.bytes_direct, "direct"),
        (summary.bytes_bounced, "bounced"),
        (summary.bytes_buffered, "buffered"),
        (summary.bytes_gds, "by cuFile"),
    ];
    for (bytes, data_path) in ways.iter().filter(|(bytes, _)| *bytes > 0) {
        let _ = write!(text, ", {} {data_path}", amount(*bytes));
    }
    if summary.copies > 0 {
        let _ = write!(text, ", {} to or from GPUs", counted(summary.copies, "copy"));
    }
    text
}

fn cards_of(summary: &TraceSummary) -> Vec<(String, String)> {
    let percent = |share: f64| format!("{:.0}%", share * 100.0);
    let mut cards = Vec::new();
    let moved = summary.bytes_read + summary.bytes_written;
    if summary.disk_busy_s > 0.0 {
        let speed = format!("{} GB/s", number(moved as f64 / 1e9 / summary.disk_busy_s));
        cards.push((speed, "while the disk was busy".to_owned()));
    }
    for (bytes, what) in [(summary.bytes_read, "read"), (summary.bytes_written, "written")] {
        if bytes > 0 {
            cards.push((amount(bytes), what.to_owned()));
        }
    }
    if summary.seconds > 0.0 && moved > 0 {
        cards.push((percent(summary.disk_busy_s / summary.seconds), "of the time the disk was busy".to_owned()));
    }
    if let Some(share) = summary.disk_overlap {
        cards.push((percent(share), "of copying overlapped with the disk".to_owned()));
    }
    for lane in &summary.lanes {
        let share = if summary.seconds > 0.0 { lane.busy_s / summary.seconds } else { 0.0 };
        let name = format!("{}, {} of it overlapped with the disk", lane.name, percent(lane.disk_overlap));
        cards.push((percent(share), name));
    }
    cards
}

fn legend(summary: &TraceSummary) -> String {
    let known = [
        ("read", "read", summary.bytes_read > 0),
        ("write", "write", summary.bytes_written > 0),
        ("copy", "copy to or from a GPU", summary.copies > 0),
        ("request", "request", summary.requests > 0),
    ];
    let shown = known.iter().filter(|(.., is_there)| *is_there);
    shown.map(|(colour, text, _)| format!("<span><i style=\"background:var(--{colour})\"></i>{text}</span>")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::recorded;

    #[test]
    fn the_page_is_self_contained_and_has_the_summary() {
        let html = html(&recorded());
        for word in ["http", "<script", "src=", "@import", "url("] {
            assert!(!html.contains(word), "{word}");
        }
        for words in [
            "83%</b><span>of copying overlapped with the disk",
            "80%</b><span>of the time the disk was busy",
            "40%</b><span>compute, 100% of it overlapped with the disk",
            "0.31 GB/s</b><span>while the disk was busy",
            "3 later events are missing",
        ] {
            assert!(html.contains(words), "{words}");
        }
    }

    #[test]
    fn an_empty_recording_gives_a_page() {
        let html = html(&Recorded { start_ns: 0, end_ns: 0, events: Vec::new(), dropped: 0 });
        assert!(html.contains("has no events") && !html.contains("NaN") && !html.contains("inf"));
    }
}
