//! Files of pictures: SVG, or a page that contains it.

use std::path::Path;

use deepnvme_io::display;
use deepnvme_perf::{Error, Result};

pub(super) type Drawn<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Checks the extension of the file name, and that the file can be written.
///
/// # Errors
/// `Usage` for another extension, or as [`check_writable`].
pub fn check(path: &Path) -> Result<()> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("svg" | "html") => check_writable(path),
        _ => Err(Error::usage(format!("--plot {}: the name must end in .svg or .html", display::path(path)))),
    }
}

/// Checks, before the work, that a small file can be written at its end.
///
/// # Errors
/// The error of the file's folder.
pub fn check_writable(path: &Path) -> Result<()> {
    // This makes and removes a private file in the same folder. The file itself stays as it is.
    let made = deepnvme_file::Temporary::new(path);
    Ok(made.map(drop).map_err(|error| error.at_path(path))?)
}

/// Draws a picture and writes it as `.svg`, or as a self-contained `.html` page. `kind` names it in errors.
pub(super) fn write(path: &Path, title: &str, kind: &str, draw: impl FnOnce() -> Drawn<String>) -> Result<()> {
    check(path)?;
    let picture = draw().map_err(|error| Error::failed(format!("cannot draw the {kind}: {error}")))?;
    let is_page = path.extension().is_some_and(|ending| ending == "html");
    let text = if is_page { page(title, &picture) } else { picture };
    Ok(deepnvme_file::replace::replace_small(path, text.as_bytes())?)
}

fn page(title: &str, picture: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
         <style>body{{margin:2em auto;max-width:60em;font-family:sans-serif}}svg{{width:100%;height:auto}}</style></head>\n\
         <body>\n{picture}\n</body></html>\n"
    )
}
