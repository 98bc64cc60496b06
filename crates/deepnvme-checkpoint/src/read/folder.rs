//! A model in several files, as Hugging Face lays it out: a folder, or its index.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepnvme_format::safetensors::Index;
use deepnvme_io::{Error as IoError, ErrorKind};

use crate::error::{Error, Result};

/// What the names of indexes end with.
pub const INDEX_SUFFIX: &str = ".index.json";
/// The longest index that is read.
const INDEX_BYTES_MAX: u64 = 256 << 20;
/// What a folder is searched for, the best first. One file comes before an index of several, as Hugging Face's loaders
/// have it: who saves one file over several leaves the index, and who saves several removes the one.
const IN_FOLDER: [&str; 6] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
];

/// The files that a path means, each with the tensors that an index says are in it (`None`: all).
///
/// # Errors
/// `Io` when there is nothing, `Format` for a damaged index.
pub fn locate(path: &Path) -> Result<Vec<(PathBuf, Option<Vec<String>>)>> {
    let path = if path.is_dir() { in_folder(path)? } else { path.to_path_buf() };
    if !path.to_string_lossy().ends_with(INDEX_SUFFIX) {
        return Ok(vec![(path, None)]);
    }
    let refused = |error: std::io::Error| Error::Io(IoError::from_io("read", &error).at_path(&path));
    if fs::metadata(&path).map_err(refused)?.len() > INDEX_BYTES_MAX {
        let text = format!("an index has {INDEX_BYTES_MAX} bytes at the most");
        return Err(Error::format(&path, deepnvme_format::Error::Unsupported(text)));
    }
    let index = Index::parse(&fs::read(&path).map_err(refused)?).map_err(|error| Error::format(&path, error))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut files: Vec<(PathBuf, Option<Vec<String>>)> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (name, file) in index.weight_map {
        let at = *known.entry(file.clone()).or_insert_with(|| {
            files.push((folder.join(&file), Some(Vec::new())));
            files.len() - 1
        });
        files[at].1.get_or_insert_default().push(name);
    }
    files.sort_by(|left, right| left.0.cmp(&right.0));
    Ok(files)
}

fn in_folder(folder: &Path) -> Result<PathBuf> {
    let found = IN_FOLDER.iter().map(|name| folder.join(name)).find(|path| path.exists());
    found.ok_or_else(|| {
        let text = format!("the folder has none of {}; name a file in it", IN_FOLDER.join(", "));
        IoError::new(ErrorKind::NotFound, "open", text).at_path(folder).into()
    })
}
