//! Commands that need models, and so Python: what may be typed stands here with the rest, what it does in the package.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use clap::{Args, Parser, ValueEnum};
use serde::{Serialize, Serializer};

use deepnvme_io::shown;

use super::Session;
use super::cli::{Cli, Command};
use super::pack::Dtype;
use crate::error::{Error, Result};

/// What a model computes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Computed {
    /// What its config says, else its files
    Auto,
    /// Half the memory of float32, and slow on processors without bf16 products
    Bfloat16,
    /// As bfloat16
    Float16,
    /// Twice the memory for each weight; the quickest where the processor has no bf16 products
    Float32,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(after_help = "Examples:
  deepnvme generate --model ./llama-70b --prompt 'Once upon a time' --memory 16GB
  deepnvme generate --model ./llama-70b --prompt-file prompts.txt --memory 16GB --batch 16 --json > answers.jsonl

The weights stay on disk and pass through that much memory. Each byte that is read serves the whole batch: the larger the
batch, the more tokens a second.")]
pub(super) struct GenerateOptions {
    /// A folder with config.json, a tokenizer and weights, as Hugging Face lays it out
    #[arg(long)]
    #[serde(serialize_with = "exact")]
    pub(super) model: PathBuf,
    /// A prompt; may be given several times
    #[arg(long, required_unless_present = "prompt_file")]
    pub(super) prompt: Vec<String>,
    /// A file with a prompt on each line
    #[arg(long, conflicts_with = "prompt")]
    #[serde(serialize_with = "exact_if_any")]
    pub(super) prompt_file: Option<PathBuf>,
    /// Memory for weights; activations and the KV cache come on top
    #[arg(long)]
    pub(super) memory: String,
    /// Prompts at a time [default: as many as half of the free memory has room for]
    #[arg(long)]
    pub(super) batch: Option<usize>,
    /// New tokens for each prompt
    #[arg(long, default_value_t = 128)]
    pub(super) max_new_tokens: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    pub(super) temperature: f64,
    /// Of the random numbers
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// Where it computes: cpu, cuda, cuda:1
    #[arg(long, default_value = "cpu")]
    pub(super) device: String,
    /// What weights are cast to when they come, and so what is computed in
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) dtype: Computed,
    /// A timeline of disk and processor: x.json for Perfetto, x.html for a browser
    #[arg(long)]
    #[serde(serialize_with = "exact_if_any")]
    pub(super) trace: Option<PathBuf>,
    /// A JSON object for each prompt, and one with the figures
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(
    name = "stream-bench",
    after_help = "Examples:
  deepnvme stream-bench /mnt/nvme                            1.2 GB of weights in 300 MB of memory, batches 1, 4, 16
  deepnvme stream-bench /mnt/nvme --model-size 140GB --memory 16GB --batch 32 --batch 96
  deepnvme stream-bench /mnt/nvme --pack lossless            the same weights in two thirds of the bytes

It makes a Llama-shaped model of random bf16 weights in that folder, and removes it. The roofline is the slower of the disk
and the processor, each measured by itself in the same run."
)]
pub(super) struct StreamBenchOptions {
    /// Where the model is made
    #[serde(serialize_with = "exact")]
    pub(super) folder: PathBuf,
    /// Bytes of weights
    #[arg(long, default_value = "1.2GB")]
    pub(super) model_size: String,
    /// Memory for weights [default: a quarter of the model, in the dtype that is computed with]
    #[arg(long)]
    pub(super) memory: Option<String>,
    /// Pack the model before it is measured, as deepnvme pack --dtype does
    #[arg(long, value_enum)]
    pub(super) pack: Option<Dtype>,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512)]
    pub(super) prompt_tokens: usize,
    /// New tokens for each prompt
    #[arg(long, default_value_t = 32)]
    pub(super) new_tokens: usize,
    /// Prompts at a time; may be given several times [default: 1, 4, 16]
    #[arg(long)]
    pub(super) batch: Vec<usize>,
    /// Where it computes: cpu, cuda, cuda:1
    #[arg(long, default_value = "cpu")]
    pub(super) device: String,
    /// What weights are cast to when they come, and so what is computed in
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) dtype: Computed,
    /// For machines
    #[arg(long)]
    pub(super) json: bool,
}

/// A path for Python: a text, or the numbers of its bytes where it is no UTF-8.
fn exact<S: Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => serializer.serialize_str(text),
        None => serializer.collect_seq(path.as_os_str().as_encoded_bytes()),
    }
}

#[expect(clippy::ref_option, reason = "serde asks for it so")]
fn exact_if_any<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match path {
        Some(path) => exact(path, serializer),
        None => serializer.serialize_none(),
    }
}

/// The name of a command that Python runs, and its options as JSON; `None` for all others and for what is no command, which
/// [`run`](super::run) explains.
#[must_use]
pub fn for_python(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Option<(&'static str, String)> {
    let command = Cli::try_parse_from(arguments).ok()?.command;
    let (name, options) = match &command {
        Command::Generate(options) => ("generate", serde_json::to_string(options)),
        Command::StreamBench(options) => ("stream-bench", serde_json::to_string(options)),
        _ => return None,
    };
    Some((name, options.ok()?))
}

/// Has Python run the command that was typed: the program without Python around it is asked for it here.
pub(super) fn run(arguments: &[OsString], session: &Session<'_>) -> Result<()> {
    let probed = Process::new(&session.python).args(["-c", "import deepnvme"]).output();
    if !probed.is_ok_and(|probed| probed.status.success()) {
        return Err(Error::failed(format!(
            "this command needs Python's package: {} -m pip install deepnvme transformers torch",
            shown::path(&session.python)
        )));
    }
    let status = Process::new(&session.python).args(["-m", "deepnvme"]).args(arguments).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        // It has said itself what was wrong.
        Ok(_) => Err(Error::CutShort),
        Err(error) => Err(Error::failed(format!("{}: {error}", shown::path(&session.python)))),
    }
}
