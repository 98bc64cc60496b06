//! Measuring a machine: a report, benchmarks, and a search for settings.
//!
//! [`report`] gathers facts about the system, its backends and its folders, and finds what costs speed. [`measure`]
//! runs a workload round by round. [`mod@bench`] summarises the rounds, next to a [`baseline`] if asked. [`tune`]
//! searches for the settings that suit a disk. The command line is `deepnvme-cli`.
//!
//! Gathering and judging are apart: findings, plans and summaries are pure functions. The report reads `/proc` and
//! `/sys` below a root folder, so that tests can describe other machines.
#![forbid(unsafe_code)]

pub mod baseline;
pub mod bench;
pub mod error;
pub mod measure;
pub mod report;
mod system_files;
pub mod tune;
pub mod units;

pub use error::{Error, Result};
