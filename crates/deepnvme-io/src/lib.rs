//! The deepnvme engine.
#![deny(unsafe_code)]

pub mod backend;
pub mod config;
pub mod error;
pub mod op;

pub use config::{BackendChoice, Config, DirectMode, SubmitMode};
pub use error::{Error, ErrorKind, Result};
