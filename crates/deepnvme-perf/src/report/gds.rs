//! Whether GPUDirect Storage could move bytes between a folder and a GPU without host memory: a pure function of the facts.
//!
//! The rules are those of NVIDIA's documentation (GPUDirect Storage: Overview Guide, Release Notes): `nvidia-fs` is
//! loaded, the file system is ext4 in its ordered mode or XFS, and it lies on NVMe drives, alone or in an array. cuFile
//! serves all else in its compatibility mode, through host memory.

pub use super::folder::{Gds, GpuPath};
use super::{Device, Folder, Gpu};

impl Gds {
    fn because(mode: &'static str, reason: impl Into<String>) -> Self {
        Self { mode, reason: Some(reason.into()) }
    }
}

/// The mode of a folder on a machine with such GPUs.
#[must_use]
pub fn mode(folder: &Folder, gpu: &Gpu) -> Gds {
    if gpu.driver.is_none() && gpu.cuda_devices.is_empty() {
        return Gds::because("none", "no NVIDIA driver");
    }
    if gpu.libcufile.is_none() {
        return Gds::because("none", "no libcufile; it comes with the CUDA toolkit and with torch's CUDA packages");
    }
    let compatibility = |reason: &str| Gds::because("compatibility", reason);
    if gpu.nvidia_fs.is_none() {
        return compatibility("the kernel module nvidia-fs is not loaded; modprobe nvidia-fs");
    }
    let has_option = |name: &str| folder.mount_options.iter().any(|option| option == name);
    match folder.file_system.as_str() {
        "xfs" => {}
        "ext4" if has_option("data=journal") || has_option("data=writeback") => {
            return compatibility("ext4 must be mounted with data=ordered");
        }
        "ext4" => {}
        other => return compatibility(&format!("{other} is neither ext4 nor XFS")),
    }
    if folder.direct.as_ref().is_some_and(|direct| !direct.works) {
        return compatibility("there is no direct I/O");
    }
    let Some(device) = &folder.device else { return compatibility("no disk is known to lie below it") };
    match device.disks().iter().find(|disk| disk.kind != "nvme") {
        Some(Device { name, kind, .. }) => compatibility(&format!("{name} is no NVMe drive ({kind})")),
        None => Gds { mode: "direct", reason: None },
    }
}

/// The way that bytes take, where this is the mode of their folder.
#[must_use]
pub fn path(mode: &Gds, gpu: &Gpu) -> Option<GpuPath> {
    let reason = match mode.mode {
        "direct" => "that is the default; with gds=\"preferred\" cuFile needs no host memory here",
        "compatibility" => "cuFile would go through host memory, too",
        _ => "there is no cuFile",
    };
    (!gpu.cuda_devices.is_empty()).then(|| GpuPath { way: "bounce", reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use deepnvme_io::probe::GpuFacts;

    use super::super::Card;
    use super::*;

    fn folder(file_system: &str, options: &[&str], kinds: &[&str]) -> Folder {
        let disk = |kind: &&str| Device { name: "disk0".into(), kind: (*kind).into(), ..Device::default() };
        Folder {
            file_system: file_system.into(),
            mount_options: options.iter().map(|option| (*option).to_owned()).collect(),
            device: (!kinds.is_empty())
                .then(|| Device { members: kinds.iter().map(disk).collect(), ..Device::default() }),
            ..Folder::default()
        }
    }

    #[test]
    fn bytes_go_by_way_of_slots_and_the_reason_is_the_one_that_counts() {
        let facts = GpuFacts { index: 0, name: "GPU".into(), memory_bytes: 1, pci_bus_id: "0000:01:00.0".into() };
        let gpu = Gpu { cuda_devices: vec![Card { facts, numa_node: None }], ..Gpu::default() };
        let reason = |mode| path(&Gds { mode, reason: None }, &gpu).unwrap().reason;
        assert!(reason("direct").contains("gds=\"preferred\""));
        assert!(reason("compatibility").contains("host memory, too") && reason("none").contains("no cuFile"));
        assert_eq!(path(&Gds { mode: "direct", reason: None }, &Gpu::default()), None);
        assert_eq!(mode(&Folder::default(), &gpu).reason.as_deref().map(|why| why.contains("libcufile")), Some(true));
    }

    #[test]
    fn each_step_down_says_why() {
        let full = Gpu {
            driver: Some("550".into()),
            nvidia_fs: Some("2.17".into()),
            libcufile: Some("/usr/lib/libcufile.so.0".into()),
            ..Gpu::default()
        };
        let good = folder("ext4", &["rw"], &["nvme", "nvme"]);
        assert_eq!(mode(&good, &full), Gds { mode: "direct", reason: None });
        assert_eq!(mode(&folder("xfs", &[], &["nvme"]), &full).mode, "direct");
        let cases = [
            (good.clone(), Gpu { driver: None, ..full.clone() }, "none", "driver"),
            (good.clone(), Gpu { libcufile: None, ..full.clone() }, "none", "libcufile"),
            (good, Gpu { nvidia_fs: None, ..full.clone() }, "compatibility", "modprobe"),
            (folder("ext4", &["data=journal"], &["nvme"]), full.clone(), "compatibility", "data=ordered"),
            (folder("btrfs", &[], &["nvme"]), full.clone(), "compatibility", "btrfs"),
            (folder("ext4", &[], &["nvme", "virtio"]), full.clone(), "compatibility", "disk0 is no NVMe drive"),
            (folder("xfs", &[], &[]), full, "compatibility", "no disk"),
        ];
        for (folder, gpu, expected, part) in cases {
            let found = mode(&folder, &gpu);
            assert!(found.mode == expected && found.reason.as_ref().is_some_and(|why| why.contains(part)), "{found:?}");
        }
    }
}
