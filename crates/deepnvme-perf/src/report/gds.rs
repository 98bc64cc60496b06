//! Support for GPUDirect Storage: transfers between a folder and a GPU without host memory. Pure.
//!
//! The rules are from NVIDIA's documentation (GPUDirect Storage: Overview Guide, Release Notes): `nvidia-fs` is loaded, the
//! file system is XFS or ext4 with data=ordered, and it is on NVMe drives, alone or in an array. In all other cases cuFile
//! uses its compatibility mode, through host memory.

pub use super::folder::{GdsReport, GpuPath};
use super::{BlockDevice, FolderReport, GpuReport};

impl GdsReport {
    fn because(mode: &'static str, reason: impl Into<String>) -> Self {
        Self { mode, reason: Some(reason.into()) }
    }
}

/// Returns the mode of cuFile for a folder.
#[must_use]
pub fn mode(folder: &FolderReport, gpu: &GpuReport) -> GdsReport {
    if gpu.driver.is_none() && gpu.cuda_devices.is_empty() {
        return GdsReport::because("none", "no NVIDIA driver");
    }
    if gpu.libcufile.is_none() {
        return GdsReport::because("none", "no libcufile; install the CUDA toolkit or torch's CUDA packages");
    }
    let compatibility = |reason: &str| GdsReport::because("compatibility", reason);
    if gpu.nvidia_fs.is_none() {
        return compatibility("the kernel module nvidia-fs is not loaded; modprobe nvidia-fs");
    }
    let has_option = |name: &str| folder.mount.options.iter().any(|option| option == name);
    match folder.mount.file_system.as_str() {
        "xfs" => {}
        "ext4" if has_option("data=journal") || has_option("data=writeback") => {
            return compatibility("ext4 must be mounted with data=ordered");
        }
        "ext4" => {}
        other => return compatibility(&format!("{other} is neither ext4 nor XFS")),
    }
    if folder.routes.direct.as_ref().is_some_and(|direct| !direct.works) {
        return compatibility("direct I/O does not work");
    }
    let Some(device) = &folder.device else { return compatibility("its disk is unknown") };
    match device.disks().iter().find(|disk| disk.kind != "nvme") {
        Some(BlockDevice { name, kind, .. }) => compatibility(&format!("{name} is not an NVMe drive ({kind})")),
        None => GdsReport { mode: "direct", reason: None },
    }
}

/// Returns the default route to a GPU for a folder with this mode.
#[must_use]
pub fn path(mode: &GdsReport, gpu: &GpuReport) -> Option<GpuPath> {
    let reason = match mode.mode {
        "direct" => "the default; with gds=\"preferred\" cuFile transfers without host memory here",
        "compatibility" => "cuFile would use host memory as well",
        _ => "no cuFile",
    };
    (!gpu.cuda_devices.is_empty()).then(|| GpuPath { route: "bounce", reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use deepnvme_io::gpu::GpuFacts;

    use super::super::{CudaDevice, Mount};
    use super::*;

    fn folder(file_system: &str, options: &[&str], kinds: &[&str]) -> FolderReport {
        let disk = |kind: &&str| BlockDevice { name: "disk0".into(), kind: (*kind).into(), ..BlockDevice::default() };
        FolderReport {
            mount: Mount {
                file_system: file_system.into(),
                options: options.iter().map(|option| (*option).to_owned()).collect(),
                ..Mount::default()
            },
            device: (!kinds.is_empty())
                .then(|| BlockDevice { members: kinds.iter().map(disk).collect(), ..BlockDevice::default() }),
            ..FolderReport::default()
        }
    }

    #[test]
    fn the_default_route_is_the_bounce_buffer_and_has_a_reason() {
        let facts = GpuFacts { index: 0, name: "GPU".into(), memory_bytes: 1, pci_bus_id: "0000:01:00.0".into() };
        let gpu = GpuReport { cuda_devices: vec![CudaDevice { facts, numa_node: None }], ..GpuReport::default() };
        let reason = |mode| path(&GdsReport { mode, reason: None }, &gpu).unwrap().reason;
        assert!(reason("direct").contains("gds=\"preferred\""));
        assert!(reason("compatibility").contains("host memory as well") && reason("none").contains("no cuFile"));
        assert_eq!(path(&GdsReport { mode: "direct", reason: None }, &GpuReport::default()), None);
        assert_eq!(
            mode(&FolderReport::default(), &gpu).reason.as_deref().map(|why| why.contains("libcufile")),
            Some(true)
        );
    }

    #[test]
    fn each_lower_mode_has_a_reason() {
        let full = GpuReport {
            driver: Some("550".into()),
            nvidia_fs: Some("2.17".into()),
            libcufile: Some("/usr/lib/libcufile.so.0".into()),
            ..GpuReport::default()
        };
        let good = folder("ext4", &["rw"], &["nvme", "nvme"]);
        assert_eq!(mode(&good, &full), GdsReport { mode: "direct", reason: None });
        assert_eq!(mode(&folder("xfs", &[], &["nvme"]), &full).mode, "direct");
        let cases = [
            (good.clone(), GpuReport { driver: None, ..full.clone() }, "none", "driver"),
            (good.clone(), GpuReport { libcufile: None, ..full.clone() }, "none", "libcufile"),
            (good, GpuReport { nvidia_fs: None, ..full.clone() }, "compatibility", "modprobe"),
            (folder("ext4", &["data=journal"], &["nvme"]), full.clone(), "compatibility", "data=ordered"),
            (folder("btrfs", &[], &["nvme"]), full.clone(), "compatibility", "btrfs"),
            (folder("ext4", &[], &["nvme", "virtio"]), full.clone(), "compatibility", "disk0 is not an NVMe drive"),
            (folder("xfs", &[], &[]), full, "compatibility", "its disk is unknown"),
        ];
        for (folder, gpu, expected, part) in cases {
            let found = mode(&folder, &gpu);
            assert!(found.mode == expected && found.reason.as_ref().is_some_and(|why| why.contains(part)), "{found:?}");
        }
    }
}
