//! Options of the commands that Python runs, and their JSON for the Python package.

use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, ValueEnum};
use serde::{Serialize, Serializer};

use super::pack::PackedForm;

/// The dtype of the computation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ComputeDtype {
    /// The dtype of the model's config, else of its files
    Auto,
    /// Half the memory of float32; slower for batches and long prompts on CPUs without bf16 instructions
    #[value(alias = "bf16")]
    Bfloat16,
    /// Like bfloat16
    #[value(alias = "fp16")]
    Float16,
    /// Twice the memory; faster for batches and long prompts on such CPUs
    #[value(alias = "fp32")]
    Float32,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(group = ArgGroup::new("prompts").args(["prompt", "prompt_file"]).required(true))]
#[command(after_help = "Examples:
  deepnvme generate --model ./llama-70b --prompt 'Once upon a time' --memory 16GB
  deepnvme generate --model ./llama-70b --prompt-file prompts.txt --memory 16GB --batch 16 --json > answers.jsonl

The weights stay on disk and are streamed through the given memory. Each byte read serves the whole batch, so larger
batches give more tokens a second.

Sizes: 2GB is 2 x 10^9 bytes, 2GiB and 2G are 2 x 2^30.")]
pub(crate) struct GenerateArguments {
    /// Hugging Face model folder (config.json, tokenizer and weights), or the name of a model in the local cache
    #[arg(long)]
    #[serde(serialize_with = "serialize_path")]
    pub(crate) model: PathBuf,
    /// Prompt; may be repeated
    #[arg(long)]
    pub(crate) prompt: Vec<String>,
    /// File with one prompt per line
    #[arg(long)]
    #[serde(serialize_with = "serialize_path_if_any")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Memory for weights; activations and the KV cache need more
    #[arg(long)]
    pub(crate) memory: String,
    /// Prompts at a time [default: as many as fit into half of the free memory, at most 1024]
    #[arg(long)]
    pub(crate) batch: Option<usize>,
    /// New tokens per prompt
    #[arg(long, default_value_t = 128)]
    pub(crate) max_new_tokens: usize,
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, default_value_t = 0.0, value_parser = parse_temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Device of the computation: cpu, cuda, cuda:1
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// Dtype of the computation; weights are cast to it when they are read
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: ComputeDtype,
    /// Write a timeline of disk and CPU: .json for Perfetto, .html for a browser
    #[arg(long)]
    #[serde(serialize_with = "serialize_path_if_any")]
    pub(crate) trace: Option<PathBuf>,
    /// Print a JSON object for each prompt, and one with the metrics
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(after_help = "Examples:
  deepnvme demo                        in the current folder
  deepnvme demo /mnt/nvme --size 8GB

Saves, loads, generates and trains beside torch and accelerate, in alternating rounds, and compares every result bit for
bit. Needs torch, and names other packages that are missing. pip install 'deepnvme[demo]' installs all of them, in a
checkout pip install '.[demo]'.")]
pub(crate) struct DemoArguments {
    /// Folder on the disk to measure; only a picture stays there
    #[arg(default_value = ".")]
    #[serde(serialize_with = "serialize_path")]
    pub(crate) folder: PathBuf,
    /// Size of the saved state. The generating model takes half of it, at least 0.88 GB, the trained parameters a quarter
    #[arg(long, default_value = "2GB")]
    pub(crate) size: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Debug, Args, Serialize)]
#[command(
    name = "stream-bench",
    after_help = "Examples:
  deepnvme stream-bench /mnt/nvme                            stream 1.2 GB of weights through 300 MB, batches of 1, 4, 16
  deepnvme stream-bench /mnt/nvme --model-size 140GB --memory 16GB --batch 32 --batch 96
  deepnvme stream-bench /mnt/nvme --pack lossless            stream the same weights, compressed to two thirds

Makes a Llama-shaped model with random bf16 weights in the folder, and removes it at the end. The roofline is the slower of
disk and CPU, each measured alone in the same run.

Sizes: 2GB is 2 x 10^9 bytes, 2GiB and 2G are 2 x 2^30."
)]
pub(crate) struct StreamBenchArguments {
    /// Folder for the model
    #[serde(serialize_with = "serialize_path")]
    pub(crate) folder: PathBuf,
    /// Bytes of weights
    #[arg(long, default_value = "1.2GB")]
    pub(crate) model_size: String,
    /// Memory for weights [default: a quarter of the model, in the dtype of the computation]
    #[arg(long)]
    pub(crate) memory: Option<String>,
    /// Pack the model first, like deepnvme pack --dtype
    #[arg(long, value_enum)]
    pub(crate) pack: Option<PackedForm>,
    /// Tokens per prompt
    #[arg(long, default_value_t = 512)]
    pub(crate) prompt_tokens: usize,
    /// New tokens per prompt
    #[arg(long, default_value_t = 32)]
    pub(crate) new_tokens: usize,
    /// Prompts at a time; may be repeated [default: 1, 4, 16]
    #[arg(long)]
    pub(crate) batch: Vec<usize>,
    /// Device of the computation: cpu, cuda, cuda:1
    #[arg(long, default_value = "cpu")]
    pub(crate) device: String,
    /// Dtype of the computation; weights are cast to it when they are read
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) dtype: ComputeDtype,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_temperature(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "it must be a number of at least 0".into())
}

/// Serialises a path for Python: a string, or a list of bytes if it is not UTF-8.
fn serialize_path<S: Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => serializer.serialize_str(text),
        None => serializer.collect_seq(path.as_os_str().as_encoded_bytes()),
    }
}

#[expect(clippy::ref_option, reason = "serde requires this signature")]
fn serialize_path_if_any<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match path {
        Some(path) => serialize_path(path, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperatures_are_finite_and_not_negative() {
        assert_eq!(["0", "0.7", "2"].map(parse_temperature), [Ok(0.0), Ok(0.7), Ok(2.0)]);
        for text in ["nan", "inf", "-1", "-inf", "", "warm"] {
            assert!(parse_temperature(text).is_err(), "{text}");
        }
    }
}
