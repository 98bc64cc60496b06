//! `deepnvme tune`.

use std::path::{Path, PathBuf};

use deepnvme_io::Durability;
use deepnvme_io::shown;

use super::cli::{Durable, TuneOptions};
use super::progress::Bar;
use super::session::{Answer, Session};
use crate::bench::plot;
use crate::error::{Error, Result};
use crate::measure::{Direction, gpu};
use crate::tune::{self, Options, compare, heatmap, space, text};

pub(super) fn answer(options: &TuneOptions, session: &Session<'_>) -> Result<Answer> {
    gpu::gds_mode(options.gds, options.gpu)?;
    options.plot.as_deref().map_or(Ok(()), plot::check)?;
    let wanted = asked(options)?;
    if let Some(settings) = &options.compare {
        let mut bar = Bar::new(session.interrupted);
        let comparison = compare::run(&wanted, settings, &mut bar)?;
        return Answer::of(&comparison, compare::draw(&comparison), options.json);
    }
    let output = options.output.clone().unwrap_or_else(|| tune::default_output().to_path_buf());
    refuse_foreign(&output)?;
    let outcome = {
        let mut bar = Bar::new(session.interrupted);
        tune::run(&wanted, &mut bar)?
    };
    write(&outcome.settings()?.to_toml()?, &outcome, &output)?;
    if let Some(path) = &options.plot {
        heatmap::write(&outcome, path)?;
    }
    let answer = Answer::of(&outcome, text::draw(&outcome, Some(&output)), options.json)?;
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
        memory: options.memory,
        gpu: options.gpu,
        gds: options.gds,
        durability: match options.durable {
            Durable::None => Durability::None,
            Durable::Data => Durability::Data,
            Durable::Full => Durability::Full,
        },
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
    if path.exists() && deepnvme_io::SettingsFile::load(path).is_err() {
        let text = "is there and holds no settings of deepnvme; name another file with --output";
        return Err(Error::usage(format!("{} {text}", shown::path(path))));
    }
    Ok(())
}

/// Under its name at once, so that no engine ever reads half of it.
fn write(settings: &str, outcome: &tune::Outcome, path: &Path) -> Result<()> {
    let seconds = outcome.seconds;
    let head = format!(
        "# Found by deepnvme tune {} in {seconds:.0} s. Read by Engine.from_file() and DEEPNVME_CONFIG.\n\n",
        outcome.version
    );
    Ok(deepnvme_file::replace::replace_small(path, (head + settings).as_bytes())?)
}
