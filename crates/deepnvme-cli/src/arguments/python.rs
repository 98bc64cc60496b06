//! Options of the commands that Python runs, and their JSON for the Python package.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser as _};
use clap::{ArgGroup, Args, ValueEnum};
use deepnvme_io::display;
use deepnvme_perf::units::parse_bytes;
use serde::{Serialize, Serializer};

use super::pack::PackedForm;

/// The dtype of the computation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ComputeDtype {
    /// The dtype of the model's config, else of its files
    Auto,
    /// bfloat16: half the memory of fp32; slower for batches and long prompts on CPUs without bf16 instructions
    #[value(name = "bf16", alias = "bfloat16")]
    Bfloat16,
    /// float16: like bf16
    #[value(name = "fp16", alias = "float16")]
    Float16,
    /// float32: twice the memory; faster for batches and long prompts on such CPUs
    #[value(name = "fp32", alias = "float32")]
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
    #[arg(long, value_parser = PathBufValueParser::new().try_map(checked_model))]
    #[serde(serialize_with = "serialize_path")]
    pub(crate) model: PathBuf,
    /// Prompt; may be repeated
    #[arg(long)]
    pub(crate) prompt: Vec<String>,
    /// File with one prompt per line
    #[arg(long)]
    #[serde(serialize_with = "serialize_path_if_any")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Memory for weights, on the device; activations and the KV cache come on top
    #[arg(long, value_parser = checked_size)]
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
    /// Dtype of the computation; weights are cast to it when they are read. torch's names work as well
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

Saves, loads, generates and trains in turn with torch and accelerate, in alternating rounds, and compares every result bit for
bit. Needs torch, and names other packages that are missing. In a checkout, pip install '.[demo]' installs all of them.")]
pub(crate) struct DemoArguments {
    /// Folder on the disk to measure; only a chart (deepnvme-demo.svg) stays there
    #[arg(default_value = ".")]
    #[serde(serialize_with = "serialize_path")]
    pub(crate) folder: PathBuf,
    /// Size of the saved state. The model for generation has half of this size, at least 0.88 GB. The trained parameters have a quarter
    #[arg(long, default_value = "2GB", value_parser = checked_size)]
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

Makes a Llama-shaped model with random bf16 weights in the folder, and removes it at the end. The roofline is the longer of
two durations: the work of the disk, and that of the CPU, each measured alone in the same run.

Sizes: 2GB is 2 x 10^9 bytes, 2GiB and 2G are 2 x 2^30."
)]
pub(crate) struct StreamBenchArguments {
    /// Folder for the model
    #[arg(value_parser = PathBufValueParser::new().try_map(checked_folder))]
    #[serde(serialize_with = "serialize_path")]
    pub(crate) folder: PathBuf,
    /// Bytes of weights
    #[arg(long, default_value = "1.2GB", value_parser = checked_size)]
    pub(crate) model_size: String,
    /// Memory for weights [default: a quarter of the model, in the dtype of the computation]
    #[arg(long, value_parser = checked_size)]
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
    /// Dtype of the computation; weights are cast to it when they are read. torch's names work as well
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

/// Checks a size, which Python parses by the same rules. Python starts only after that: it takes seconds.
pub(super) fn checked_size(text: &str) -> Result<String, String> {
    parse_bytes(text).map(|_| text.to_owned())
}

/// Checks that a folder has a model. Any other path may name a model of the Hub.
fn checked_model(path: PathBuf) -> Result<PathBuf, String> {
    if path.is_dir() && !path.join("config.json").is_file() {
        let name = display::path(&path);
        return Err(format!("{name} has no config.json; --model must be a Hugging Face model folder"));
    }
    Ok(path)
}

fn checked_folder(path: PathBuf) -> Result<PathBuf, String> {
    if path.is_dir() {
        return Ok(path);
    }
    Err(format!("{} is not a folder; name an existing folder for the temporary model", display::path(&path)))
}

/// Serialises a path for Python: a string, or a list of bytes if it is not UTF-8.
pub(super) fn serialize_path<S: Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match path.to_str() {
        Some(text) => serializer.serialize_str(text),
        None => serializer.collect_seq(path.as_os_str().as_encoded_bytes()),
    }
}

#[expect(clippy::ref_option, reason = "serde requires this signature")]
pub(super) fn serialize_path_if_any<S: Serializer>(
    path: &Option<PathBuf>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match path {
        Some(path) => serialize_path(path, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_found_before_python_starts() {
        assert_eq!(checked_size("1.5GB"), Ok("1.5GB".into()));
        assert!(checked_size("1XB").unwrap_err().contains("is not a size"));
        let folder = tempfile::tempdir().unwrap();
        assert!(checked_model(folder.path().into()).unwrap_err().contains("has no config.json"));
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        assert!(checked_model(folder.path().into()).is_ok() && checked_model("org/model".into()).is_ok());
        assert!(checked_folder(folder.path().into()).is_ok() && checked_folder("/no/such".into()).is_err());
    }

    #[test]
    fn temperatures_are_finite_and_not_negative() {
        assert_eq!(["0", "0.7", "2"].map(parse_temperature), [Ok(0.0), Ok(0.7), Ok(2.0)]);
        for text in ["nan", "inf", "-1", "-inf", "", "warm"] {
            assert!(parse_temperature(text).is_err(), "{text}");
        }
    }
}
