//! The scenarios of seeds. `kind` selects one, `context` contains their shared state, and each other module runs one.
//! `folders` and `users` set up the machine. `content`, `payload` and `area` define file contents. `log` and `team`
//! track actions.

mod area;
mod content;
mod context;
mod files;
mod folders;
mod history;
mod kind;
mod log;
mod packs;
mod payload;
mod ranks;
mod swap;
mod team;
mod transfers;
mod users;

use content::Content;
pub use context::{BATCH, Context, FIRST, GLIMPSE, Report, is_every_change_judged};
pub use kind::{Kind, draw};

/// Run a scenario.
pub fn play(kind: Kind, context: &Context) {
    match kind {
        Kind::Files => files::play(context, files::Shape::Single, Content::Bytes),
        Kind::Stripes => files::play(context, files::Shape::Striped, Content::Bytes),
        Kind::History => history::play(context),
        Kind::Swap => swap::play(context),
        Kind::Saves => files::play_saves(context),
        Kind::Shards => files::play_shards(context),
        Kind::Ranks => ranks::play(context),
        Kind::Packs => packs::play(context),
        Kind::Transfers => transfers::play(context),
        Kind::Boastful => files::play(context, files::Shape::Boastful, Content::Bytes),
        Kind::Script => {}
    }
}
