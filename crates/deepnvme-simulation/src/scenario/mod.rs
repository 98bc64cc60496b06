//! The scenarios of seeds. `kind` selects one, `context` contains their shared state, and each other module runs one.
//! `folders` and `users` set up the machine. `content`, `payload` and `area` define file contents. `save_log` and
//! `process_group` track actions.

mod area;
mod content;
mod context;
mod files;
mod folders;
mod history;
mod kind;
mod packs;
mod payload;
mod process_group;
mod ranks;
mod save_log;
mod swap;
mod transfers;
mod users;

use content::Content;
pub use context::{CRASH_CHECKS_PER_RUN, CRASHED_WORLD, Context, MAIN_WORLD, Report, checks_every_change};
pub use kind::{Kind, draw};

/// Run a scenario.
pub fn run(kind: Kind, context: &Context) {
    match kind {
        Kind::Files => files::run(context, files::FileLayout::Single, Content::Bytes),
        Kind::Stripes => files::run(context, files::FileLayout::Striped, Content::Bytes),
        Kind::History => history::run(context),
        Kind::Swap => swap::run(context),
        Kind::Saves => files::run_saves(context),
        Kind::Shards => files::run_shards(context),
        Kind::Ranks => ranks::run(context),
        Kind::Packs => packs::run(context),
        Kind::Transfers => transfers::run(context),
        Kind::Overclaiming => files::run(context, files::FileLayout::Overclaiming, Content::Bytes),
        Kind::Script => {}
    }
}
