//! `deepnvme report`: what works here, why not, and what to do about it.
//!
//! `system` is the machine, `backends` which back ends of the engine work on it, `gpu` its GPUs, `packages` what Python has,
//! `folder` a place for data, `device` the disk under it, `gds` whether cuFile would serve it, `mounts` finds which file
//! system that is. `findings` judges.

use std::path::{Path, PathBuf};

use deepnvme_io::StripeSet;
use deepnvme_io::config::Config;
use deepnvme_io::probe::{GpuProbe, Probe};
use deepnvme_io::stripe::MANIFEST_SUFFIX;
use serde::Serialize;

use crate::tree::Tree;

mod backends;
pub mod device;
pub mod findings;
pub mod folder;
pub mod gds;
pub mod gpu;
mod mounts;
pub mod packages;
pub mod system;

pub use backends::Backend;
pub use device::Device;
pub use findings::{Finding, Severity};
pub use folder::{Direct, Folder, Gds, GpuPath};
pub use gpu::{Card, Gpu};
pub use packages::Package;
pub use system::System;

/// Everything that was found out.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Of deepnvme.
    pub version: &'static str,
    /// The machine and the limits of this process.
    pub system: System,
    /// `io_uring`, `aio` and `threads`, in the order in which they are chosen.
    pub backends: Vec<Backend>,
    /// What there is for GPU memory.
    pub gpu: Gpu,
    /// Python and the packages that deepnvme works with.
    pub packages: Vec<Package>,
    /// DeepSpeed's names for what works here.
    pub ops: Vec<Op>,
    /// The folders that were asked about.
    pub folders: Vec<Folder>,
    /// What costs speed, the worst first.
    pub findings: Vec<Finding>,
}

/// A line of `ds_report`: an op by DeepSpeed's name.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Op {
    /// `async_io` or `gds`.
    pub name: &'static str,
    /// Whether it is there without compiling anything.
    pub is_installed: bool,
    /// Whether it works here.
    pub is_compatible: bool,
    /// Why not.
    pub reason: Option<String>,
}

impl Report {
    /// Looks at this machine and at those folders; of a stripe set's manifest at the folders of its parts. Nothing is
    /// written, but for a file without a name in each folder. `python` is asked for its packages, and the CUDA driver,
    /// which this process loads for that, for its GPUs.
    #[must_use]
    pub fn gather(folders: &[PathBuf], python: &Path) -> Self {
        let tree = Tree::of_this_machine();
        let system = System::gather(&tree);
        let (packages, nvidia) = packages::of_interpreter(python);
        let gpu = Gpu::gather(
            &tree,
            &std::env::var("LD_LIBRARY_PATH").unwrap_or_default(),
            nvidia.as_deref(),
            GpuProbe::run(),
        );
        let backends = backends::of(&Probe::run());
        let folders: Vec<_> = folders.iter().flat_map(|path| places(path)).collect();
        let mut folders: Vec<_> = folders.iter().map(|path| Folder::gather(&tree, path)).collect();
        for folder in &mut folders {
            if folder.error.is_none() {
                let mode = gds::mode(folder, &gpu);
                folder.gpu_path = gds::path(&mode, &gpu);
                folder.gds = Some(mode);
            }
        }
        let pool_bytes = Config::default().pool_bound_bytes();
        let findings = findings::judge(&system, &backends, &folders, pool_bytes);
        let ops = ops(&backends, &gpu);
        Self { version: env!("CARGO_PKG_VERSION"), system, backends, gpu, packages, ops, folders, findings }
    }
}

/// The folders of a stripe set's parts, or the folder that was named.
fn places(path: &Path) -> Vec<PathBuf> {
    let is_manifest = path.as_os_str().as_encoded_bytes().ends_with(MANIFEST_SUFFIX.as_bytes());
    let set = is_manifest.then(|| StripeSet::from_manifest(path).ok()).flatten();
    let parts = set.iter().flat_map(StripeSet::parts).filter_map(|part| part.parent()).map(Path::to_path_buf);
    let mut folders: Vec<_> = parts.collect();
    folders.dedup();
    if folders.is_empty() { vec![path.to_path_buf()] } else { folders }
}

fn ops(backends: &[Backend], gpu: &Gpu) -> Vec<Op> {
    let works = backends.iter().any(|backend| backend.works);
    let has_gpu = !gpu.cuda_devices.is_empty();
    vec![
        Op {
            name: "async_io",
            is_installed: true,
            is_compatible: works,
            reason: (!works).then(|| "no back end works".into()),
        },
        Op {
            name: "gds",
            is_installed: true,
            is_compatible: has_gpu,
            reason: (!has_gpu).then(|| "there is no GPU that the CUDA driver knows".into()),
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
        assert!(report.system.cpus >= 1 && report.system.memory_bytes > 0);
        assert!(report.backends.iter().any(|backend| backend.is_chosen));
        assert_eq!(report.folders[0].error, None);
        assert!(report.folders[0].total_bytes > 0 && !report.folders[0].file_system.is_empty());
        assert!(report.folders[1].error.as_deref().is_some_and(|error| error.contains("/no/such/folder")));
        assert!(report.findings.iter().any(|finding| finding.text.contains("/no/such/folder")));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was left behind");
    }

    #[test]
    fn a_stripe_set_is_told_as_the_folders_of_its_parts() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let parts = folders.each_ref().map(|folder| folder.path().join("part"));
        let set = StripeSet::new(parts.to_vec(), 4096).unwrap();
        set.write_manifest().unwrap();
        assert_eq!(places(&set.manifest_path()), folders.each_ref().map(|folder| folder.path().to_path_buf()));
        assert_eq!(places(Path::new("/a")), [PathBuf::from("/a")]);
    }
}
