//! `deepnvme tune`.

use std::path::{Path, PathBuf};

use deepnvme_io::display;
use deepnvme_io::op::Direction as IoDirection;
use deepnvme_perf::measure::{Direction, MemoryPlace};
use deepnvme_perf::tune::{self, Choice, FolderResult, TuneOptions, TuneOutcome, compare};
use deepnvme_perf::{Error, Result};
use deepnvme_settings::{FolderSettings, SettingsFile};

use super::gds;
use super::progress_bar::Bar;
use super::session::{CommandResult, Session};
use crate::arguments::TuneArguments;
use crate::deepspeed::tune::sweep_config;
use crate::show::{self, heatmap, picture};

/// The default file for settings, in the current folder.
const DEFAULT_OUTPUT: &str = "deepnvme.toml";

pub(super) fn run(options: &TuneArguments, session: &Session<'_>) -> Result<CommandResult> {
    gds::gds_mode(options.gds, options.gpu)?;
    options.plot.as_deref().map_or(Ok(()), picture::check)?;
    let request = request(options)?;
    if let Some(settings) = &options.compare {
        let file = SettingsFile::load(settings)?;
        let stored = |folder: &Path, direction: Direction| file.of(Some(folder), Some(io_direction(direction))).clone();
        let mut bar = Bar::new(session.interrupted);
        let comparison = compare::run(&request, settings, &stored, &mut bar)?;
        return CommandResult::new(&comparison, show::tune::draw_comparison(&comparison), options.json);
    }
    let output = options.output.clone().unwrap_or_else(|| DEFAULT_OUTPUT.into());
    check_replaceable(&output)?;
    picture::check_writable(&output)?;
    check_nameable(&request.folders)?;
    let outcome = {
        let mut bar = Bar::new(session.interrupted);
        tune::run(&request, &mut bar)?
    };
    write(&settings(&outcome)?.to_toml()?, &outcome, &output)?;
    if let Some(path) = &options.plot {
        heatmap::write(&outcome, path)?;
    }
    let result = CommandResult::new(&outcome, show::tune::draw(&outcome, Some(&output)), options.json)?;
    Ok(CommandResult { is_interrupted: outcome.is_interrupted, ..result })
}

/// Converts the arguments.
fn request(options: &TuneArguments) -> Result<TuneOptions> {
    let folders: Vec<PathBuf> = options.folders.iter().chain(&options.nvme_dir).cloned().collect();
    let directions = [(Direction::Read, options.no_read), (Direction::Write, options.no_write)];
    let mut request = TuneOptions {
        folders,
        budget: options.budget,
        io_bytes: options.size,
        directions: directions
            .into_iter()
            .filter_map(|(direction, is_skipped)| (!is_skipped).then_some(direction))
            .collect(),
        place: MemoryPlace { memory: options.memory.into(), gpu: options.gpu },
        gds: options.gds,
        durability: options.durability.into(),
        space: None,
    };
    if let Some(path) = &options.sweep_config {
        request.space = Some(sweep_config(path, tune::default_space(&request))?);
    }
    Ok(request)
}

/// Checks, before the search, that an existing file contains settings and may be replaced.
fn check_replaceable(path: &Path) -> Result<()> {
    if path.exists() && SettingsFile::load(path).is_err() {
        let text = "exists and does not contain deepnvme settings; choose another file with --output";
        return Err(Error::usage(format!("{} {text}", display::path(path))));
    }
    Ok(())
}

/// Checks, before the search, that settings can name the folders.
fn check_nameable(folders: &[PathBuf]) -> Result<()> {
    let is_bytes = |folder: &&PathBuf| folder.canonicalize().is_ok_and(|path| path.to_str().is_none());
    let Some(folder) = folders.iter().find(is_bytes) else { return Ok(()) };
    let text = "its path is not UTF-8, and a file of settings cannot name it; use a folder with another name";
    Err(Error::failed(format!("{}: {text}", display::path(folder))))
}

/// Replaces the file atomically: no engine reads half of it.
fn write(settings: &str, outcome: &TuneOutcome, path: &Path) -> Result<()> {
    let seconds = outcome.seconds;
    let head = format!(
        "# Found by deepnvme tune {} in {seconds:.0} s. Read by Engine.from_file() and DEEPNVME_CONFIG.\n\n",
        outcome.version
    );
    Ok(deepnvme_file::replace::replace_small(path, (head + settings).as_bytes())?)
}

/// Converts the outcome to settings: the last result, which is for all folders together, as the default, and an entry
/// for each folder.
///
/// # Errors
/// A folder has no absolute path.
fn settings(outcome: &TuneOutcome) -> Result<SettingsFile> {
    let engine = outcome.results.last().and_then(|result| result.both.clone()).unwrap_or_default();
    let alone = outcome.results.iter().filter(|result| result.folders.len() == 1);
    let entry = |result: &FolderResult| {
        let path = &result.folders[0];
        let path = path.canonicalize().map_err(|error| Error::at(path, "cannot resolve its path", &error))?;
        let of = |choice: &Option<Choice>| choice.as_ref().map(|choice| choice.config.clone());
        Ok(FolderSettings { path, engine: result.both.clone(), read: of(&result.read), write: of(&result.write) })
    };
    Ok(SettingsFile { engine, folders: alone.map(entry).collect::<Result<_>>()? })
}

fn io_direction(direction: Direction) -> IoDirection {
    match direction {
        Direction::Read => IoDirection::Read,
        Direction::Write => IoDirection::Write,
    }
}
