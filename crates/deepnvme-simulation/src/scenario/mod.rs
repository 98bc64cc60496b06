//! What seeds are about: `kind` is which of the scenarios, `context` what all of them share, the others play one each. `folders`
//! and `users` are what several of them have on their machine, `content`, `payload` and `area` what is in files, `log` and `team`
//! who did what.

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

/// Plays it.
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
