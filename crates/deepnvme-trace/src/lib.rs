//! What an engine recorded, as a file: for Perfetto (`.json`), or as a page that needs nothing else (`.html`).
//!
//! `spans` is the arithmetic, `lanes` puts events into lines, `figures` adds up; `chrome` makes text of that, and so does `page`,
//! with a `picture` and its `curves`, and `words`. All of them are pure; only [`write()`] here touches a file.
#![forbid(unsafe_code)]

use std::path::Path;

use deepnvme_io::stream::{Replacement, replace_small};
use deepnvme_io::trace::Recorded;
use deepnvme_io::{Error, Result, Target};

mod charts;
mod chrome;
mod formatting;
mod html;
mod lanes;
#[cfg(test)]
mod sample;
mod spans;
mod summary;
mod svg;

pub use chrome::chrome;
pub use html::page;
pub use summary::{Figures, LaneFigures, figures};

/// Writes the recording to a file of that name, which appears as a whole or not at all: `.json` for Perfetto and
/// `chrome://tracing`, `.html` for a page.
///
/// # Errors
/// `InvalidInput` for another ending; what the folder refused.
pub fn write(recorded: &Recorded, path: &Path) -> Result<()> {
    let text = match Form::of(path)? {
        Form::Chrome => chrome(recorded),
        Form::Page => page(recorded),
    };
    replace_small(path, text.as_bytes())
}

/// Whether a recording could be written there: to be asked before it begins, so that nothing is recorded in vain.
///
/// # Errors
/// As [`write()`].
pub fn check(path: &Path) -> Result<()> {
    Form::of(path)?;
    // A private file is made there, and removed.
    Replacement::new(&Target::from(path)).map(drop)
}

enum Form {
    Chrome,
    Page,
}

impl Form {
    fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("json") => Ok(Self::Chrome),
            Some("html") => Ok(Self::Page),
            _ => Err(Error::invalid("the name of a trace must end in .json (for Perfetto) or .html").at_path(path)),
        }
    }
}
