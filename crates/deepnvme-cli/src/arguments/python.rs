//! What may be typed of the commands that Python runs, and how its package is told.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};

use super::pack::Dtype;

/// What a model computes in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Computed {
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
pub(crate) struct GenerateOptions {
    /// A folder with config.json, a tokenizer and weights, as Hugging Face lays it out
    #[arg(long)]
    #[serde(serialize_with = "exact")]
    pub(crate) model: PathBuf,
    /// A prompt; may be given several times
    #[arg(long, required_unless_present = "prompt_file")]
    pub(crate) prompt: Vec<String>,
    /// A file with a prompt on each line
    #[arg(long, conflicts_with = "prompt")]
    #[serde(serialize_with = "exact_if_any")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Memory for weights; activations and the KV cache come on top
    #[arg(long)]
    pub(crate) memory: String,
    /// Prompts at a time [default: as many as half of the free memory has room for]
    #[arg(long)]
    pub(crate) batch: Option<usize>,
    /// New tokens for each prompt
    #[arg(long, default_value_t = 128)]
    pub(crate) max_new_tokens: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Of the random numbers
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Where it computes: cpu, cuda, cuda:1
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// What weights are cast to when they come, and so what is computed in
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: Computed,
    /// A timeline of disk and processor: x.json for Perfetto, x.html for a browser
    #[arg(long)]
    #[serde(serialize_with = "exact_if_any")]
    pub(crate) trace: Option<PathBuf>,
    /// A JSON object for each prompt, and one with the figures
    #[arg(long)]
    pub(crate) json: bool,
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
pub(crate) struct StreamBenchOptions {
    /// Where the model is made
    #[serde(serialize_with = "exact")]
    pub(crate) folder: PathBuf,
    /// Bytes of weights
    #[arg(long, default_value = "1.2GB")]
    pub(crate) model_size: String,
    /// Memory for weights [default: a quarter of the model, in the dtype that is computed with]
    #[arg(long)]
    pub(crate) memory: Option<String>,
    /// Pack the model before it is measured, as deepnvme pack --dtype does
    #[arg(long, value_enum)]
    pub(crate) pack: Option<Dtype>,
    /// Tokens of each prompt
    #[arg(long, default_value_t = 512)]
    pub(crate) prompt_tokens: usize,
    /// New tokens for each prompt
    #[arg(long, default_value_t = 32)]
    pub(crate) new_tokens: usize,
    /// Prompts at a time; may be given several times [default: 1, 4, 16]
    #[arg(long)]
    pub(crate) batch: Vec<usize>,
    /// Where it computes: cpu, cuda, cuda:1
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// What weights are cast to when they come, and so what is computed in
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: Computed,
    /// For machines
    #[arg(long)]
    pub(crate) json: bool,
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
