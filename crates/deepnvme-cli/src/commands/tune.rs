//! `deepnvme tune`.

use std::path::{Path, PathBuf};

use deepnvme_io::shown;
use deepnvme_io::split::Direction as IoDirection;
use deepnvme_perf::measure::Direction;
use deepnvme_perf::tune::{self, Choice, Options, Outcome, Place, compare, space};
use deepnvme_perf::{Error, Result};
use deepnvme_settings::{FolderSettings, SettingsFile};

use super::gds;
use super::progress_bar::Bar;
use super::session::{Answer, Session};
use crate::arguments::TuneOptions;
use crate::show::{self, heatmap, plot};

/// Where a file of settings goes by default: into the current folder.
const DEFAULT_OUTPUT: &str = "deepnvme.toml";

pub(super) fn answer(options: &TuneOptions, session: &Session<'_>) -> Result<Answer> {
    gds::gds_mode(options.gds, options.gpu)?;
    options.plot.as_deref().map_or(Ok(()), plot::check)?;
    let wanted = asked(options)?;
    if let Some(settings) = &options.compare {
        let file = SettingsFile::load(settings)?;
        let stored = |folder: &Path, direction: Direction| file.of(Some(folder), Some(io_direction(direction))).clone();
        let mut bar = Bar::new(session.interrupted);
        let comparison = compare::run(&wanted, settings, &stored, &mut bar)?;
        return Answer::of(&comparison, show::tune::draw_comparison(&comparison), options.json);
    }
    let output = options.output.clone().unwrap_or_else(|| DEFAULT_OUTPUT.into());
    refuse_foreign(&output)?;
    let outcome = {
        let mut bar = Bar::new(session.interrupted);
        tune::run(&wanted, &mut bar)?
    };
    write(&settings(&outcome)?.to_toml()?, &outcome, &output)?;
    if let Some(path) = &options.plot {
        heatmap::write(&outcome, path)?;
    }
    let answer = Answer::of(&outcome, show::tune::draw(&outcome, Some(&output)), options.json)?;
    Ok(Answer { is_cut_short: outcome.is_interrupted, ..answer })
}

fn asked(options: &TuneOptions) -> Result<Options> {
    let folders: Vec<PathBuf> = options.folders.iter().chain(&options.nvme_dir).cloned().collect();
    let directions = [(Direction::Read, options.no_read), (Direction::Write, options.no_write)];
    let mut wanted = Options {
        folders,
        budget: options.budget,
        io_bytes: options.size,
        directions: directions
            .into_iter()
            .filter_map(|(direction, is_left_out)| (!is_left_out).then_some(direction))
            .collect(),
        memory: options.memory.into(),
        gpu: options.gpu,
        gds: options.gds,
        durability: options.durable.into(),
        space: None,
    };
    if let Some(path) = &options.sweep_config {
        let text = std::fs::read_to_string(path).map_err(|error| Error::at(path, "read the sweep config", &error))?;
        wanted.space = Some(space::from_deepspeed(&text, tune::usual_space(&wanted))?);
    }
    Ok(wanted)
}

/// A file that is there and holds something else is not overwritten, and that is said before a minute has gone.
fn refuse_foreign(path: &Path) -> Result<()> {
    if path.exists() && SettingsFile::load(path).is_err() {
        let text = "is there and holds no settings of deepnvme; name another file with --output";
        return Err(Error::usage(format!("{} {text}", shown::path(path))));
    }
    Ok(())
}

/// Under its name at once, so that no engine ever reads half of it.
fn write(settings: &str, outcome: &Outcome, path: &Path) -> Result<()> {
    let seconds = outcome.seconds;
    let head = format!(
        "# Found by deepnvme tune {} in {seconds:.0} s. Read by Engine.from_file() and DEEPNVME_CONFIG.\n\n",
        outcome.version
    );
    Ok(deepnvme_io::stream::replace_small(path, (head + settings).as_bytes())?)
}

/// As `deepnvme.toml`: the last place, which is all folders together where there are several, for every folder,
/// and an entry for each.
///
/// # Errors
/// When a folder has no absolute path.
fn settings(outcome: &Outcome) -> Result<SettingsFile> {
    let engine = outcome.places.last().and_then(|place| place.both.clone()).unwrap_or_default();
    let alone = outcome.places.iter().filter(|place| place.folders.len() == 1);
    let entry = |place: &Place| {
        let path = &place.folders[0];
        let path = path.canonicalize().map_err(|error| Error::at(path, "find its place", &error))?;
        let of = |choice: &Option<Choice>| choice.as_ref().map(|choice| choice.config.clone());
        Ok(FolderSettings { path, engine: place.both.clone(), read: of(&place.read), write: of(&place.write) })
    };
    Ok(SettingsFile { engine, folders: alone.map(entry).collect::<Result<_>>()? })
}

fn io_direction(direction: Direction) -> IoDirection {
    match direction {
        Direction::Read => IoDirection::Read,
        Direction::Write => IoDirection::Write,
    }
}
