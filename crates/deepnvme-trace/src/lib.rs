//! Writes the recording of an engine to a file: `.json` for Perfetto, or `.html` as a self-contained page.
//!
//! `intervals` is arithmetic, `lanes` groups events, `summary` adds them up. `chrome` and `html` format the file, the
//! latter with `svg`, `charts` and `formatting`. All of these are pure; only [`write()`] and [`check()`] touch files.
#![forbid(unsafe_code)]

use std::path::Path;

use deepnvme_file::replace::replace_small;
use deepnvme_file::{Replacement, Target};
use deepnvme_io::trace::Recorded;
use deepnvme_io::{Error, ErrorKind, Result};

mod charts;
mod chrome;
mod formatting;
mod html;
mod intervals;
mod lanes;
#[cfg(test)]
mod sample;
mod summary;
mod svg;

pub use chrome::chrome;
pub use html::html;
pub use summary::{LaneSummary, TraceSummary, summarise};

/// Writes a recording to a file, which appears complete or not at all. The suffix chooses the format: `.json` for
/// Perfetto and `chrome://tracing`, `.html` for a page.
///
/// # Errors
/// `InvalidInput` for another suffix, or the error of the file system.
pub fn write(recorded: &Recorded, path: &Path) -> Result<()> {
    let text = match Form::of(path)? {
        Form::Chrome => chrome(recorded),
        Form::Html => html(recorded),
    };
    replace_small(path, text.as_bytes())
}

/// Checks that [`write()`] will be able to write there. Call it before a recording begins.
///
/// # Errors
/// As [`write()`].
pub fn check(path: &Path) -> Result<()> {
    Form::of(path)?;
    // Creates a private file, which is deleted.
    Replacement::new(&Target::from(path)).map(drop)
}

enum Form {
    Chrome,
    Html,
}

impl Form {
    fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("json") => Ok(Self::Chrome),
            Some("html") => Ok(Self::Html),
            _ => Err(Error::new(
                ErrorKind::InvalidInput,
                "trace to",
                "the name of a trace must end in .json (for Perfetto) or .html",
            )
            .at_path(path)),
        }
    }
}
