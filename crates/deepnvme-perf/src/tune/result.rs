//! The result of a search, as a value.

use std::path::PathBuf;

use deepnvme_io::{Config, display};
use serde::Serialize;

use super::search::{Candidate, SearchResult};
use super::space::SearchSpace;

/// The outcome of `tune`.
#[derive(Clone, Debug, Serialize)]
pub struct TuneOutcome {
    /// The version of deepnvme.
    pub version: &'static str,
    /// The settings to choose from. If folders had different ones, those of the last folder.
    pub space: SearchSpace,
    /// The number of settings.
    pub space_len: usize,
    /// Bytes of a trial.
    pub io_bytes: u64,
    /// The GPU that held the memory, if one did.
    pub gpu: Option<u32>,
    /// The duration in seconds.
    pub seconds: f64,
    /// One result for each folder, and one for all of several folders together.
    pub results: Vec<FolderResult>,
    /// Whether it was interrupted.
    pub is_interrupted: bool,
}

/// The searches in one folder, or in several together.
#[derive(Clone, Debug, Serialize)]
pub struct FolderResult {
    /// The folders.
    #[serde(serialize_with = "display::serialize_all")]
    pub folders: Vec<PathBuf>,
    /// The route to the GPU, if cuFile was requested.
    pub gds: Option<GpuRoute>,
    /// The best settings for reading.
    pub read: Option<Choice>,
    /// The best settings for writing.
    pub write: Option<Choice>,
    /// The best settings for an engine that does both.
    pub both: Option<Config>,
}

/// The route between a folder and a GPU.
#[derive(Clone, Debug, Serialize)]
pub struct GpuRoute {
    /// `cufile`, or `bounce`: through bounce buffers in host memory.
    pub kind: &'static str,
    /// The reason why cuFile is not used.
    pub reason: Option<String>,
}

/// The settings that one search chose.
#[derive(Clone, Debug, Serialize)]
pub struct Choice {
    /// The settings.
    pub config: Config,
    /// Median of their trials, 10^9 bytes per second.
    pub gb_per_s: f64,
    /// Median of the default settings' trials.
    pub gb_per_s_default: f64,
    /// How certain the choice is, in a sentence.
    pub confidence: String,
    /// All settings that were tried, the best first.
    pub tried: Vec<Trial>,
}

/// Settings, and the speeds of their trials.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// The settings.
    pub config: Config,
    /// The speed of each trial, 10^9 bytes per second.
    pub gb_per_s: Vec<f64>,
}

impl Choice {
    /// Summarises a search that started with the settings `start`.
    pub(super) fn of(found: &SearchResult, start: &Config) -> Self {
        let default = found.tried.iter().find(|candidate| candidate.config == *start).map_or(0.0, Candidate::median);
        Self {
            config: found.best().config.clone(),
            gb_per_s: found.best().median(),
            gb_per_s_default: default,
            confidence: found.confidence(),
            tried: found
                .tried
                .iter()
                .map(|candidate| Trial { config: candidate.config.clone(), gb_per_s: candidate.gb_per_s.clone() })
                .collect(),
        }
    }
}
