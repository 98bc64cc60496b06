//! What works on a machine, and how fast.
//!
//! [`report`] gathers facts about the system, its back ends and the folders that data is to live in, and says which of
//! them cost speed and what to do about it. [`measure`] does a workload round by round, [`bench`] sums the rounds up,
//! beside a [`baseline`] if asked; [`tune`] searches for the settings that suit a disk. The command line over it is `deepnvme-cli`.
//!
//! Gathering and judging are apart: findings, plans and summaries are pure functions, and every reader of `/proc` and
//! `/sys` takes the root of the tree, so that tests bring machines of their own.
#![forbid(unsafe_code)]

pub mod baseline;
pub mod bench;
pub mod error;
pub mod measure;
pub mod report;
mod tree;
pub mod tune;
pub mod units;

pub use error::{Error, Result};
