//! The folder of a `Checkpointer`: which checkpoints are current, which process may write, and retention.
//!
//! ```text
//! commit      publishes a checkpoint, renames its files, removes retired ones
//! read        reads the manifest for its own process, and finishes the renames of a killed writer
//! claim       takes the lock, and cleans up after killed writers
//! state       this process's knowledge of the manifest, and its replacement
//!
//! manifest    manifest.json: current and retired checkpoints    (pure)
//! names       names of checkpoints                              (pure)
//! retention   transitions of the manifest                       (pure)
//! members     files that a list or an index names               (pure)
//! files       renames files; removes retired ones if they verify
//! listed      current checkpoints, for readers that rename nothing
//! lock        one writer at a time
//! private     cleanup after killed writers; unnamed folders
//! ```
//!
//! Replacing the manifest is the one moment of change. It lists a new checkpoint while its files still have private
//! names. The writer renames them afterwards. If it dies, the next process that opens the folder does. A checkpoint
//! that retention drops moves to the retired list in the same write. Its files are removed after that, each only if it
//! matches the manifest's record. No file is removed because of its name alone.
//!
//! A replacement that reports an error may still have happened, and may not survive a power cut. So the manifest is
//! read again and synced before anything relies on it, and no name is used twice.

mod claim;
mod commit;
mod files;
mod listed;
mod lock;
mod manifest;
mod members;
mod names;
mod private;
mod read;
mod retention;
mod state;
#[cfg(test)]
mod tests;

pub use claim::Claim;
pub use commit::{Settled, private_name};
pub use files::HEAD_BYTES;
pub use listed::{Listed, find_file, is_as_listed, listed};
pub use lock::{Holder, LOCK};
pub use manifest::{MANIFEST, MANIFEST_BYTES_MAX, Manifest, ManifestEntry, Part};
pub use members::{parts as listed_parts, shards as listed_shards};
pub use names::{PARTS_LIST, SHARDS_LIST, SHARDS_RECORD, is_checkpoint};
pub use private::PrivateFolder;
pub use state::{History, MissingCheckpoint};
