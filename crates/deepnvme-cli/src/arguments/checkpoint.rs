//! Options of `deepnvme inspect`, `deepnvme verify` and `deepnvme convert`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme inspect model.pt              list the upper levels of the names, with totals
  deepnvme inspect model.safetensors --all
  deepnvme inspect ./my-model --json | jq '.files[].tensors[] | select(.bytes > 1e8) | .name'

An index.json stands for all its files. A folder stands for its model, for all checkpoints of its `Checkpointer`, or for
all its checkpoint files.
Tensors are not read, and no code of the file is run.")]
pub(crate) struct InspectArguments {
    /// Torch archive, safetensors file, index of several, folder of these, or manifest of a stripe set
    pub(crate) path: PathBuf,
    /// Levels of the names to list
    #[arg(long, default_value_t = 2)]
    pub(crate) depth: usize,
    /// List every tensor
    #[arg(long, conflicts_with = "depth")]
    pub(crate) all: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme verify model.pt
  deepnvme verify run-7 && rsync -a run-7 backup:

Exit status: 0 all files match their checksums, 1 a file is damaged, unverifiable or unreadable, 2 usage error.
Archives of torch.save are verified by their CRC-32. Safetensors files of other programs have no checksums.
All bytes come from the drive, even those in the page cache, if the file system has direct I/O.")]
pub(crate) struct VerifyArguments {
    /// Torch archives, safetensors files, indexes, manifests of stripe sets, and folders of these or of a `Checkpointer`
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  deepnvme convert pytorch_model.bin model.safetensors
  deepnvme convert ./my-model one-file.safetensors      join all shards of a folder
  deepnvme convert model.safetensors model.pt           write a file for torch.load

The new file appears when it is complete, and has checksums. The source is verified while it is read. Tensors that share
memory stay shared in a torch archive and are written separately to a safetensors file. Entries that are not tensors are
omitted and listed.")]
pub(crate) struct ConvertArguments {
    /// Torch archive, safetensors file, index of several, folder with one of these, or manifest of a stripe set
    pub(crate) source: PathBuf,
    /// File to write, replaced if it exists: safetensors with that extension, else a torch archive
    pub(crate) target: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
