//! Examines checkpoints: lists their contents, verifies their checksums, and converts them to another format.

mod contents;
mod convert;
mod files;
mod names;
mod packed_rows;
mod verify;
mod verify_history;

pub use contents::{Inspection, PickledValue, Tensor, inspect};
pub use convert::{Conversion, convert};
pub(crate) use files::failed;
pub use verify::{Coverage, Verdict, Verification, verify, verify_all};
