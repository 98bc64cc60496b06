//! Facts about the machine and its folders, and findings with remedies.
//!
//! ```text
//! system      the machine and the limits of this process
//! backends    the engine's backends
//! gpu         GPUs, drivers and libraries
//! packages    Python and its packages
//!
//! folder      a folder for data
//! mounts      its mount
//! device      its disk
//! gds         its path to GPU memory
//!
//! findings    problems, and what to do about them
//! ```

use std::path::{Path, PathBuf};

use deepnvme_file::StripeSet;
use deepnvme_file::stripe_set::MANIFEST_SUFFIX;
use deepnvme_io::config::Config;
use deepnvme_io::gpu::GpuProbe;
use deepnvme_io::probe::Probe;
use serde::Serialize;

use crate::system_files::SystemFiles;

mod backends;
pub mod device;
pub mod findings;
pub mod folder;
pub mod gds;
pub mod gpu;
mod mounts;
pub mod packages;
pub mod system;

pub use backends::BackendReport;
pub use device::BlockDevice;
pub use findings::{Finding, Severity};
pub use folder::{DefaultGpuRoute, DirectReport, FolderReport, GdsReads, GdsReport, Routes};
pub use gpu::{CudaDevice, GpuReport};
pub use mounts::Mount;
pub use packages::Package;
pub use system::{Cpu, System, SystemMemory};

/// A report on this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The version of deepnvme.
    pub version: &'static str,
    /// The machine, without the folders.
    #[serde(flatten)]
    pub machine: Machine,
    /// The folders.
    pub folders: Vec<FolderReport>,
    /// Problems and their remedies, the worst first.
    pub findings: Vec<Finding>,
}

/// A machine, and what is installed on it.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The machine and the limits of this process.
    pub system: System,
    /// `io_uring`, `aio` and `threads`, in order of preference.
    pub backends: Vec<BackendReport>,
    /// GPUs, drivers and libraries.
    pub gpu: GpuReport,
    /// Python and the packages that deepnvme works with.
    pub packages: Vec<Package>,
    /// DeepSpeed's ops, and whether they work here.
    pub ops: Vec<OpReport>,
}

/// An op by DeepSpeed's name, as in `ds_report`.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct OpReport {
    /// `async_io` or `gds`.
    pub name: &'static str,
    /// Always true, since nothing is compiled; `ds_report` has this column.
    pub is_installed: bool,
    /// Whether DeepSpeed may use it. `gds` needs a GPU only: without cuFile, transfers bounce.
    pub is_compatible: bool,
    /// Why it does not work.
    pub reason: Option<String>,
}

impl Report {
    /// Gathers the facts of this machine and these folders. The manifest of a stripe set stands for the folders of its
    /// parts. Writes nothing but temporary files in each folder. Runs `python` to list its packages, and loads the CUDA
    /// driver to list the GPUs. If there is a GPU, reads a temporary file of 1 MiB in each folder into its memory with
    /// cuFile.
    #[must_use]
    pub fn gather(folders: &[PathBuf], python: &Path) -> Self {
        let files = SystemFiles::of_this_machine();
        let system = System::gather(&files);
        let (packages, nvidia) = packages::of_interpreter(python);
        let gpu = GpuReport::gather(
            &files,
            &std::env::var("LD_LIBRARY_PATH").unwrap_or_default(),
            nvidia.as_deref(),
            GpuProbe::run(),
        );
        let backends = backends::of(&Probe::run());
        let folders: Vec<_> = folders.iter().flat_map(|path| folders_of(path)).collect();
        let mut folders: Vec<_> = folders.iter().map(|path| FolderReport::gather(&files, path)).collect();
        for folder in &mut folders {
            if folder.error.is_none() {
                let mode = gds::mode(folder, &gpu);
                folder.routes.gpu_route = gds::route(&mode, &gpu);
                folder.routes.gds = Some(mode);
            }
        }
        let pool_bytes = Config::default().pool_bound_bytes();
        let findings = findings::judge(&system, &backends, &folders, pool_bytes);
        let ops = ops(&backends, &gpu);
        let machine = Machine { system, backends, gpu, packages, ops };
        Self { version: env!("CARGO_PKG_VERSION"), machine, folders, findings }
    }
}

/// Returns the folders of a stripe set's parts, or the folder itself.
fn folders_of(path: &Path) -> Vec<PathBuf> {
    let is_manifest = path.as_os_str().as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes());
    let set = is_manifest.then(|| StripeSet::from_manifest(path).ok()).flatten();
    let parts = set.iter().flat_map(StripeSet::parts).filter_map(|part| part.parent()).map(Path::to_path_buf);
    let mut folders: Vec<_> = parts.collect();
    folders.dedup();
    if folders.is_empty() { vec![path.to_path_buf()] } else { folders }
}

fn ops(backends: &[BackendReport], gpu: &GpuReport) -> Vec<OpReport> {
    let works = backends.iter().any(|backend| backend.works);
    let has_gpu = !gpu.cuda_devices.is_empty();
    vec![
        OpReport {
            name: "async_io",
            is_installed: true,
            is_compatible: works,
            reason: (!works).then(|| "no backend works".into()),
        },
        OpReport {
            name: "gds",
            is_installed: true,
            is_compatible: has_gpu,
            // `GpuReport::missing` has the reason, which may be the lack of a driver.
            reason: (!has_gpu).then(|| "no GPU can be used; gpu says why".into()),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_be_reported_on() {
        let folder = tempfile::tempdir().unwrap();
        let report = Report::gather(&[folder.path().to_path_buf(), "/no/such/folder".into()], Path::new("python3"));
        assert!(report.machine.system.cpu.cpus >= 1 && report.machine.system.memory.bytes > 0);
        assert!(report.machine.backends.iter().any(|backend| backend.is_chosen));
        assert_eq!(report.folders[0].error, None);
        assert!(report.folders[0].total_bytes > 0 && !report.folders[0].mount.file_system.is_empty());
        assert!(report.folders[1].error.as_deref().is_some_and(|error| error.contains("/no/such/folder")));
        assert!(report.findings.iter().any(|finding| finding.text.contains("/no/such/folder")));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file stays behind");
    }

    #[test]
    fn the_lack_of_a_driver_has_one_reason() {
        let missing = Some("the CUDA driver could not be loaded".to_owned());
        let gds = &ops(&[], &GpuReport { missing, ..GpuReport::default() })[1];
        assert_eq!((gds.is_compatible, gds.reason.as_deref()), (false, Some("no GPU can be used; gpu says why")));
    }

    #[test]
    fn a_stripe_set_is_reported_as_the_folders_of_its_parts() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let parts = folders.each_ref().map(|folder| folder.path().join("part"));
        let set = StripeSet::new(parts.to_vec(), 4096).unwrap();
        set.write_manifest().unwrap();
        assert_eq!(folders_of(&set.manifest_path()), folders.each_ref().map(|folder| folder.path().to_path_buf()));
        assert_eq!(folders_of(Path::new("/a")), [PathBuf::from("/a")]);
    }
}
