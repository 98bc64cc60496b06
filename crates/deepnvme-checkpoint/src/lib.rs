//! Checkpoints: state dicts to and from torch archives and safetensors files, at the speed of the disk.
//!
//! Writing: `deepnvme_format` lays the file out; `write::spans` cuts it into pieces, purely; threads fill pooled slots with
//! what belongs there (`image`), hash it while it is in the cache, and have the engine write it directly (`writer`).
//! Headers that hold sums come last. The file is synced and gets its name at once, or nothing is left of it.
//!
//! Reading: `read::open` learns what a file holds; `read::arena` decides which stretches of it are mirrored in memory;
//! the engine fills those directly, and `read::verify` compares what came with the sums.
//!
//! A folder of them: `history` knows which checkpoints count, who may write, and what goes.
//!
//! Converting: `convert` plans the new file, whose records are read out of the old one when their turn comes.
//!
//! ```
//! use std::sync::Arc;
//!
//! use deepnvme_checkpoint::read::Reader;
//! use deepnvme_checkpoint::write::{Save, SaveOptions, Tensor};
//! use deepnvme_checkpoint::{Progress, convert};
//! use deepnvme_format::{Dtype, safetensors::TensorSpec};
//! use deepnvme_file::Target;
//! use deepnvme_io::{Config, Engine, mem::Region};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (path, archive) = (folder.path().join("model.safetensors"), folder.path().join("model.pt"));
//! let engine = Arc::new(Engine::new(Config::default())?);
//! let spec = TensorSpec { name: "weight".into(), dtype: Dtype::F32, shape: vec![2, 3] };
//! let weight = Tensor { spec, bytes: Region::from_vec((0..24).collect()).into() };
//! let save = Save::safetensors(&path, vec![weight], Vec::new(), SaveOptions::default())?;
//! save.run(Arc::clone(&engine), &Target::from(&path), Arc::new(Progress::default()))?;
//!
//! let mut reader = Reader::open(&engine, &Target::from(&path))?;
//! assert_eq!(reader.audit(&engine, &Progress::default())?, 24, "every byte is as it was saved");
//! let converted = convert(&engine, &path, &archive, SaveOptions::default(), &Arc::new(Progress::default()))?;
//! assert_eq!((converted.tensors, converted.left_out.len()), (1, 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod convert;
mod crew;
mod error;
pub mod history;
mod progress;
pub mod read;
mod stoppable;
mod stretch;
mod summed;
mod sync;
pub mod write;

pub use convert::{Conversion, convert};
pub use error::{Error, Result};
pub use progress::Progress;
pub use stoppable::until_stopped;
pub use summed::{Stretch, crc64_of};
