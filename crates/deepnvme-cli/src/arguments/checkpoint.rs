//! What may be typed of `deepnvme inspect`, `deepnvme verify` and `deepnvme convert`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme inspect model.pt              the upper levels of the names, with totals
  deepnvme inspect model.safetensors --all
  deepnvme inspect ./my-model --json | jq '.[].tensors[] | select(.bytes > 1e8) | .name'

A folder or an index.json means all its files. No tensor is read, and no code of the file is run.")]
pub(crate) struct InspectOptions {
    /// A torch archive, a safetensors file, an index of several, or a folder with one of these
    pub(crate) path: PathBuf,
    /// How many levels of the names
    #[arg(long, default_value_t = 2)]
    pub(crate) depth: usize,
    /// Every tensor
    #[arg(long, conflicts_with = "depth")]
    pub(crate) all: bool,
    /// For machines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme verify model.pt
  deepnvme verify run-7 && rsync -a run-7 backup:

Exit status: 0 all is as it was saved; 1 something is damaged (what and where is said), cannot be verified, or cannot
be read. Archives of torch.save are compared with their CRC-32; safetensors of others have nothing to compare with.")]
pub(crate) struct VerifyOptions {
    /// Torch archives, safetensors files, indexes, folders of a model, and folders of a `Checkpointer`
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// For machines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme convert pytorch_model.bin model.safetensors
  deepnvme convert ./my-model one-file.safetensors      all shards of a folder
  deepnvme convert model.safetensors model.pt           for torch.load

The new file appears when it is whole, with checksums; the old one is compared with its own on the way. Tensors that share
memory share it in a torch archive, and are there each by itself in a safetensors file. What is no tensor is left out,
and named.")]
pub(crate) struct ConvertOptions {
    /// A torch archive, a safetensors file, an index of several, or a folder with one of these
    pub(crate) source: PathBuf,
    /// The new file: safetensors if it is called so, else a torch archive
    pub(crate) target: PathBuf,
    /// For machines
    #[arg(long)]
    pub(crate) json: bool,
}
