//! Shell completions and the manual page, generated from the arguments.

use clap::CommandFactory;
use clap_complete::Shell;
use deepnvme_perf::Result;

use super::session::{Session, output_error};
use crate::arguments::Cli;

pub(super) fn completions(shell: Shell, session: &mut Session<'_>) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "deepnvme", &mut text);
    session.stdout.write_all(&text).map_err(output_error)
}

pub(super) fn man(session: &mut Session<'_>) -> Result<()> {
    let mut text = Vec::new();
    let mut command = Cli::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut text).map_err(output_error)?;
    render_commands(&command, &mut text).map_err(output_error)?;
    session.stdout.write_all(&text).map_err(output_error)
}

/// Appends the commands of a command, and theirs. A manual page has one level, so they follow one another.
fn render_commands(command: &clap::Command, text: &mut Vec<u8>) -> std::io::Result<()> {
    for subcommand in command.get_subcommands().filter(|one| !one.is_hide_set() && one.get_name() != "help") {
        let page = clap_mangen::Man::new(subcommand.clone());
        page.render_synopsis_section(text)?;
        page.render_description_section(text)?;
        page.render_options_section(text)?;
        page.render_extra_section(text)?;
        render_commands(subcommand, text)?;
    }
    Ok(())
}
