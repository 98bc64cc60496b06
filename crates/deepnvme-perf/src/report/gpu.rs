//! GPUs, their driver, and the libraries for GPU transfers.

use std::path::{Path, PathBuf};

use deepnvme_io::display;
use deepnvme_io::gpu::{GpuFacts, GpuProbe};
use serde::Serialize;

use crate::system_files::SystemFiles;

/// Usual library folders, searched after those of `LD_LIBRARY_PATH`.
const LIBRARY_FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/cuda/lib64",
    "/usr/lib/wsl/lib",
];

/// GPUs, drivers and libraries: from files, and from the CUDA driver.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct GpuReport {
    /// Names of the GPUs, from `/proc`.
    pub devices: Vec<String>,
    /// Version of NVIDIA's driver.
    pub driver: Option<String>,
    /// Version of `nvidia-fs`, the kernel module of GPUDirect Storage.
    pub nvidia_fs: Option<String>,
    /// Path of the CUDA driver library.
    #[serde(serialize_with = "display::serialize_option")]
    pub libcuda: Option<PathBuf>,
    /// Version of the CUDA toolkit in `/usr/local/cuda`.
    pub cuda: Option<String>,
    /// Path of cuFile.
    #[serde(serialize_with = "display::serialize_option")]
    pub libcufile: Option<PathBuf>,
    /// Version of cuFile, from its file name.
    pub cufile: Option<String>,
    /// The CUDA version of the driver.
    pub cuda_driver: Option<String>,
    /// The GPUs that CUDA gives this process.
    pub cuda_devices: Vec<CudaDevice>,
    /// Why there is none, or not all.
    pub missing: Option<String>,
}

/// A GPU, described by its driver.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct CudaDevice {
    /// The driver's facts.
    #[serde(flatten)]
    pub facts: GpuFacts,
    /// The nearest NUMA node, if the kernel knows one.
    pub numa_node: Option<u64>,
}

impl CudaDevice {
    fn of(files: &SystemFiles, facts: GpuFacts) -> Self {
        // -1 on a machine with one node; it does not parse as a number.
        let numa_node = files.number(format!("/sys/bus/pci/devices/{}/numa_node", facts.pci_bus_id));
        Self { facts, numa_node }
    }
}

impl GpuReport {
    /// Gathers the facts. `library_path` is `LD_LIBRARY_PATH`, `packages` the folder of NVIDIA's Python packages,
    /// `probe` the answer of the CUDA driver.
    pub(crate) fn gather(files: &SystemFiles, library_path: &str, packages: Option<&Path>, probe: GpuProbe) -> Self {
        let cards = "/proc/driver/nvidia/gpus";
        let model = |card: String| files.field(format!("{cards}/{card}/information"), "Model");
        let in_packages = packages.iter().flat_map(|packages| {
            let names = files.names(packages).into_iter();
            names.map(|name| packages.join(name).join("lib")).collect::<Vec<_>>()
        });
        let standard =
            library_path.split(':').filter(|folder| !folder.is_empty()).chain(LIBRARY_FOLDERS).map(PathBuf::from);
        let folders: Vec<_> = standard.chain(in_packages).collect();
        let find = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|path| files.path(path).exists());
        let libcufile = find("libcufile.so.0");
        Self {
            devices: files.names(cards).into_iter().filter_map(model).collect(),
            driver: files.text("/proc/driver/nvidia/version").as_deref().and_then(driver),
            nvidia_fs: files.text("/proc/driver/nvidia-fs/version").as_deref().and_then(last_word),
            libcuda: find("libcuda.so.1"),
            cuda: files.text("/usr/local/cuda/version.json").as_deref().and_then(toolkit),
            cufile: libcufile.as_ref().and_then(|path| version_of(&files.path(path))),
            libcufile,
            cuda_driver: probe.cuda_version,
            cuda_devices: probe.devices.into_iter().map(|facts| CudaDevice::of(files, facts)).collect(),
            missing: probe.reason,
        }
    }
}

/// Parses the driver's version, the first word of digits and dots:
/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …`.
fn driver(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// Parses the toolkit's version: `{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}, …}`.
fn toolkit(text: &str) -> Option<String> {
    let versions: serde_json::Value = serde_json::from_str(text).ok()?;
    versions.get("cuda")?.get("version")?.as_str().map(str::to_owned)
}

/// Reads the version from the target of a link: `libcufile.so.0` links to `libcufile.so.1.9.0`.
fn version_of(path: &Path) -> Option<String> {
    let real = path.canonicalize().ok()?;
    let (_, version) = real.file_name()?.to_str()?.split_once(".so.")?;
    version.contains('.').then(|| version.to_owned())
}

/// Returns the last word of the first line: `version: 2.17`.
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
        put("opt/lib/libcufile.so.1.9.0", "");
        std::os::unix::fs::symlink("libcufile.so.1.9.0", folder.path().join("opt/lib/libcufile.so.0")).unwrap();
        put("usr/local/cuda/version.json", r#"{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}"#);
        put("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n");
        put("sys/bus/pci/devices/0000:02:00.0/numa_node", "-1\n");
        let facts = |index: u32, bus: &str| GpuFacts {
            index,
            name: "NVIDIA H100".into(),
            memory_bytes: 80 << 30,
            pci_bus_id: bus.into(),
        };
        let devices = vec![facts(0, "0000:01:00.0"), facts(1, "0000:02:00.0")];
        let probe = GpuProbe { cuda_version: Some("12.4".into()), devices, reason: None };
        let gpu = GpuReport::gather(&SystemFiles::at(folder.path()), "/nowhere:/opt/lib", None, probe);
        assert_eq!((gpu.cuda.as_deref(), gpu.cufile.as_deref()), (Some("12.4.1"), Some("1.9.0")));
        assert_eq!(gpu.devices, ["NVIDIA H100"]);
        assert_eq!(gpu.cuda_driver.as_deref(), Some("12.4"));
        let nodes: Vec<_> = gpu.cuda_devices.iter().map(|card| (card.facts.index, card.numa_node)).collect();
        assert_eq!(nodes, [(0, Some(1)), (1, None)]);
        assert_eq!((gpu.driver.as_deref(), gpu.nvidia_fs.as_deref()), (Some("550.54.15"), Some("2.17")));
        assert_eq!(gpu.libcuda, Some("/usr/lib64/libcuda.so.1".into()));
        assert_eq!(gpu.libcufile, Some("/opt/lib/libcufile.so.0".into()));
        assert_eq!(
            GpuReport::gather(&SystemFiles::at(Path::new("/nowhere")), "", None, GpuProbe::default()),
            GpuReport::default()
        );
        put("site/nvidia/cu13/lib/libcufile.so.0", "");
        let packages = GpuReport::gather(
            &SystemFiles::at(folder.path()),
            "",
            Some(Path::new("/site/nvidia")),
            GpuProbe::default(),
        );
        assert_eq!(packages.libcufile, Some("/site/nvidia/cu13/lib/libcufile.so.0".into()));
        assert_eq!(packages.cufile, None, "the file name has no version");
    }
}
