//! The scenarios of seeds. `kind` selects one, `context` contains their shared state, and each other module runs one.
//! `folders`, `first_file` and `users` set up the machine, and `unproven` tells which files may stay behind. `content`, `payload` and
//! `area` define file contents. `save_log` records saves, and `process_group` passes messages between ranks.

mod area;
mod content;
mod context;
mod files;
mod first_file;
mod folders;
mod history;
mod kind;
mod packing;
mod payload;
mod process_group;
mod ranks;
mod rows;
mod save_log;
mod swap;
mod transfers;
mod unproven;
mod users;

use content::Content;
pub use context::{CRASH_CHECKS_PER_RUN, CRASHED_WORLD, Context, MAIN_WORLD, RunReport, checks_every_change};
pub use kind::{ScenarioKind, draw};

/// Runs a scenario.
pub fn run(kind: ScenarioKind, context: &Context) {
    match kind {
        ScenarioKind::Files => files::run(context, files::FileLayout::Single, Content::Bytes),
        ScenarioKind::Stripes => files::run(context, files::FileLayout::Striped, Content::Bytes),
        ScenarioKind::History => history::run(context),
        ScenarioKind::Swap => swap::run(context),
        ScenarioKind::Saves => files::run_saves(context),
        ScenarioKind::Shards => files::run_shards(context),
        ScenarioKind::Ranks => ranks::run(context),
        ScenarioKind::Packing => packing::run(context),
        ScenarioKind::Transfers => transfers::run(context),
        ScenarioKind::Conversions => files::run_conversions(context),
        ScenarioKind::Rows => rows::run(context),
        ScenarioKind::Overclaiming => files::run(context, files::FileLayout::Overclaiming, Content::Bytes),
        ScenarioKind::Script => {}
    }
}
