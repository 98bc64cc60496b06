//! GPUs, and what moves bytes between them and a disk.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::tree::Tree;

/// Folders that the loader looks into on usual systems, besides those of `LD_LIBRARY_PATH`.
const LIBRARY_FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/cuda/lib64",
    "/usr/lib/wsl/lib",
];

/// What there is for GPU memory. Nothing is loaded, and no GPU is woken up.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Gpu {
    /// Names of the GPUs.
    pub devices: Vec<String>,
    /// Version of NVIDIA's driver.
    pub driver: Option<String>,
    /// Version of `nvidia-fs`, the kernel's side of GPUDirect Storage.
    pub nvidia_fs: Option<String>,
    /// Where CUDA's driver library lies.
    pub libcuda: Option<PathBuf>,
    /// Where cuFile lies.
    pub libcufile: Option<PathBuf>,
}

impl Gpu {
    pub(crate) fn gather(tree: &Tree, library_path: &str) -> Self {
        let cards = "/proc/driver/nvidia/gpus";
        let model = |card: String| tree.field(format!("{cards}/{card}/information"), "Model");
        let folders = || library_path.split(':').filter(|folder| !folder.is_empty()).chain(LIBRARY_FOLDERS);
        let find =
            |name: &str| folders().map(|folder| Path::new(folder).join(name)).find(|path| tree.path(path).exists());
        Self {
            devices: tree.names(cards).into_iter().filter_map(model).collect(),
            driver: tree.text("/proc/driver/nvidia/version").as_deref().and_then(driver),
            nvidia_fs: tree.text("/proc/driver/nvidia-fs/version").as_deref().and_then(last_word),
            libcuda: find("libcuda.so.1"),
            libcufile: find("libcufile.so.0"),
        }
    }
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …`: the first word of digits and dots.
fn driver(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// `version: 2.17`.
fn last_word(text: &str) -> Option<String> {
    text.lines().next()?.split_whitespace().last().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_with_a_gpu_and_one_without() {
        let folder = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H100\nIRQ:   \t\t 5\n");
        put(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\nGCC version: 12.2\n",
        );
        put("proc/driver/nvidia-fs/version", "version: 2.17\n");
        put("usr/lib64/libcuda.so.1", "");
        put("opt/lib/libcufile.so.0", "");
        let gpu = Gpu::gather(&Tree::at(folder.path()), "/nowhere:/opt/lib");
        assert_eq!(gpu.devices, ["NVIDIA H100"]);
        assert_eq!((gpu.driver.as_deref(), gpu.nvidia_fs.as_deref()), (Some("550.54.15"), Some("2.17")));
        assert_eq!(gpu.libcuda, Some("/usr/lib64/libcuda.so.1".into()));
        assert_eq!(gpu.libcufile, Some("/opt/lib/libcufile.so.0".into()));
        assert_eq!(Gpu::gather(&Tree::at(Path::new("/nowhere")), ""), Gpu::default());
    }
}
