//! What shells and `man` know about the command, made from what may be typed.

use clap::CommandFactory;
use clap_complete::Shell;
use deepnvme_perf::Result;

use super::session::{Session, closed};
use crate::arguments::Cli;

pub(super) fn completions(shell: Shell, session: &mut Session<'_>) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "deepnvme", &mut text);
    session.output.write_all(&text).map_err(closed)
}

pub(super) fn man(session: &mut Session<'_>) -> Result<()> {
    let mut text = Vec::new();
    // A manual page has one level: the commands follow one another in it.
    let mut command = Cli::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut text).map_err(closed)?;
    for part in command.get_subcommands().filter(|part| !part.is_hide_set() && part.get_name() != "help") {
        let page = clap_mangen::Man::new(part.clone());
        page.render_synopsis_section(&mut text).map_err(closed)?;
        page.render_description_section(&mut text).map_err(closed)?;
        page.render_options_section(&mut text).map_err(closed)?;
        page.render_extra_section(&mut text).map_err(closed)?;
    }
    session.output.write_all(&text).map_err(closed)
}
