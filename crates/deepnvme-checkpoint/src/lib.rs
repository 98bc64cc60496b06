//! Checkpoints: save and load state dicts as torch archives and safetensors files, at disk speed.
//!
//! Writing: `deepnvme_format` lays out the file, and `write::spans` cuts it into pieces. Threads copy each piece into a
//! pooled slot (`file_layout`) and hash it while it is in the CPU cache, and the engine writes it with direct I/O
//! (`write_pipeline`). The index and the headers of large records are written last, since they contain checksums. The
//! file is synced as the options require and then gets its name, or nothing is left of it.
//!
//! Reading: `read::open` parses the metadata of a file, and `read::load_buffer` decides which byte ranges to mirror in
//! memory. The engine reads them directly, and `read::verify` compares the data with the checksums.
//!
//! `history` manages a folder of checkpoints: which of them are current, the writer's lock, and retention.
//!
//! `convert` plans the new file and reads each record from the old file when it is due.
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
//! let weight = Tensor { spec, data: Region::from_vec((0..24).collect()).into() };
//! let save = Save::safetensors(&path, vec![weight], Vec::new(), SaveOptions::default())?;
//! save.run(Arc::clone(&engine), &Target::from(&path), Arc::new(Progress::default()))?;
//!
//! let mut reader = Reader::open(&engine, &Target::from(&path))?;
//! assert_eq!(reader.verify_all(&engine, &Progress::default())?, 24, "every byte is as it was saved");
//! let converted = convert(&engine, &path, &archive, SaveOptions::default(), &Arc::new(Progress::default()))?;
//! assert_eq!((converted.tensors, converted.left_out.len()), (1, 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod convert;
mod error;
pub mod history;
mod progress;
pub mod read;
mod stoppable;
mod summed;
mod sync;
mod work_queue;
pub mod write;

pub use convert::{Conversion, convert};
pub use error::{DamagedPart, Error, Result};
pub use progress::Progress;
pub use stoppable::until_stopped;
pub use summed::{NamedRange, crc64_of};
