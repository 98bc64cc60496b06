//! The disk under a folder, from `/sys`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::system_files::{SystemFiles, bracketed};

/// Maximum layers of devices: a volume on an array on partitions has three.
const DEPTH_MAX: usize = 8;

/// A block device.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct BlockDevice {
    /// Its name below `/dev`: `nvme0n1`, `vda`, `md0`.
    pub name: String,
    /// The device's own model name; `None` for virtual devices.
    pub model: Option<String>,
    /// A word such as `nvme`, `virtio`, `scsi`, `raid0`, `device-mapper` or `loop`; else `unknown`.
    pub kind: String,
    /// Whether it is a spinning disk.
    pub is_rotational: Option<bool>,
    /// The I/O scheduler: `none`, `mq-deadline`.
    pub scheduler: Option<String>,
    /// Maximum requests in the kernel's queue.
    pub queue_requests: Option<u64>,
    /// Bytes of the largest request.
    pub request_bytes_max: Option<u64>,
    /// Maximum memory segments of a request.
    pub segments_max: Option<u64>,
    /// Bytes of a sector.
    pub sector_bytes: Option<u64>,
    /// Its PCI Express link, if it has one.
    pub pcie: Option<Pcie>,
    /// The devices of an array or a volume.
    pub members: Vec<BlockDevice>,
}

/// A PCI Express link.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct Pcie {
    /// The generation in use, 1 to 7.
    pub generation: u32,
    /// Lanes in use.
    pub lanes: u32,
    /// The generation that the device supports.
    pub generation_max: u32,
    /// The lanes that the device supports.
    pub lanes_max: u32,
    /// Bytes per second of the link in use, after encoding and before protocol overhead.
    pub bytes_per_s: u64,
}

impl BlockDevice {
    /// Finds the whole disk of a device number (`259:1`), and its members.
    pub(super) fn of_number(files: &SystemFiles, number: &str) -> Option<Self> {
        let folder = files.path(format!("/sys/dev/block/{number}")).canonicalize().ok()?;
        // The folder of a partition is inside the folder of its disk.
        let whole = if folder.join("partition").exists() { folder.parent()?.to_path_buf() } else { folder };
        Some(Self::of_folder(files, &whole, DEPTH_MAX))
    }

    fn of_folder(files: &SystemFiles, folder: &Path, depth: usize) -> Self {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let queue = |file: &str| folder.join("queue").join(file);
        let number = |file: &str| files.number(queue(file));
        let model = files.text(folder.join("device/model")).or_else(|| files.text(folder.join("device/name")));
        Self {
            kind: kind(files, &name, folder),
            model,
            is_rotational: number("rotational").map(|flag| flag == 1),
            scheduler: files.text(queue("scheduler")).map(|text| bracketed(&text).unwrap_or(&text).to_owned()),
            queue_requests: number("nr_requests"),
            request_bytes_max: number("max_sectors_kb").map(|kib| kib << 10),
            segments_max: number("max_segments"),
            sector_bytes: number("logical_block_size"),
            pcie: link(files, folder),
            members: if depth == 0 { Vec::new() } else { members(files, folder, depth - 1) },
            name,
        }
    }

    /// Returns the physical disks: the device itself, or those of its members.
    #[must_use]
    pub fn disks(&self) -> Vec<&Self> {
        if self.members.is_empty() { vec![self] } else { self.members.iter().flat_map(Self::disks).collect() }
    }
}

fn members(files: &SystemFiles, folder: &Path, depth: usize) -> Vec<BlockDevice> {
    let slaves = folder.join("slaves");
    let member = |name: String| {
        let target = files.path(&slaves).join(name).canonicalize().ok()?;
        let whole = if target.join("partition").exists() { target.parent()?.to_path_buf() } else { target };
        Some(BlockDevice::of_folder(files, &whole, depth))
    };
    files.names(&slaves).into_iter().filter_map(member).collect()
}

fn kind(files: &SystemFiles, name: &str, folder: &Path) -> String {
    if name.starts_with("md") {
        return files.text(folder.join("md/level")).unwrap_or_else(|| "md".into());
    }
    let by_name = [
        ("nvme", "nvme"),
        ("vd", "virtio"),
        ("xvd", "xen"),
        ("sd", "scsi"),
        ("dm-", "device-mapper"),
        ("loop", "loop"),
        ("mmcblk", "mmc"),
        ("zram", "memory"),
        ("ram", "memory"),
    ];
    by_name.iter().find(|(prefix, _)| name.starts_with(prefix)).map_or("unknown", |(_, kind)| kind).into()
}

/// Reads the PCI link from the nearest parent folder of the disk, or of its device, that has one.
fn link(files: &SystemFiles, folder: &Path) -> Option<Pcie> {
    let function: PathBuf = folder
        .ancestors()
        .chain(folder.join("device").canonicalize().ok().iter().flat_map(|path| path.ancestors()))
        .find(|path| path.join("current_link_speed").exists())?
        .to_path_buf();
    let speed = |file: &str| files.text(function.join(file)).and_then(|text| generation(&text));
    let width = |file: &str| files.number(function.join(file)).map(|lanes| lanes as u32);
    let (generation, lanes) = (speed("current_link_speed")?, width("current_link_width")?);
    Some(Pcie {
        generation,
        lanes,
        generation_max: speed("max_link_speed").unwrap_or(generation),
        lanes_max: width("max_link_width").unwrap_or(lanes),
        bytes_per_s: u64::from(lanes) * lane_bytes_per_s(generation),
    })
}

/// Parses the generation: `16.0 GT/s PCIe` is 4. Speeds: PCI Express Base Specification.
fn generation(text: &str) -> Option<u32> {
    let transfers = text.split_whitespace().next()?;
    let known =
        [("2.5", 1), ("5.0", 2), ("5", 2), ("8.0", 3), ("8", 3), ("16.0", 4), ("16", 4), ("32.0", 5), ("32", 5)];
    let newer = [("64.0", 6), ("64", 6), ("128.0", 7), ("128", 7)];
    known.iter().chain(&newer).find(|(speed, _)| *speed == transfers).map(|(_, generation)| *generation)
}

/// Returns the bandwidth of a lane. Generations 1 and 2 encode 8 bits in 10, later ones 128 in 130. The frames of
/// generation 6 and later are not counted.
fn lane_bytes_per_s(generation: u32) -> u64 {
    match generation {
        1 => 250_000_000,
        2 => 500_000_000,
        _ => (8_000_000_000_u64 << (generation - 3).min(8)) / 130 * 128 / 8,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine with a partitioned NVMe disk at half its lanes, another one, and a stripe over both.
    fn machine() -> (tempfile::TempDir, SystemFiles) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (index, lanes) in [(0, "2"), (1, "4")] {
            let function = format!("sys/devices/pci0/0000:0{index}:00.0");
            let disk = format!("{function}/nvme/nvme{index}/nvme{index}n1");
            put(&format!("{function}/current_link_speed"), "16.0 GT/s PCIe");
            put(&format!("{function}/max_link_speed"), "16.0 GT/s PCIe");
            put(&format!("{function}/current_link_width"), lanes);
            put(&format!("{function}/max_link_width"), "4");
            put(&format!("{disk}/queue/rotational"), "0");
            put(&format!("{disk}/queue/scheduler"), "[none] mq-deadline kyber\n");
            put(&format!("{disk}/queue/nr_requests"), "1023");
            put(&format!("{disk}/queue/max_sectors_kb"), "128");
            put(&format!("{disk}/queue/max_segments"), "33");
            put(&format!("{disk}/queue/logical_block_size"), "512");
            put(&format!("{disk}/nvme{index}n1p1/partition"), "1");
            put(&format!("sys/devices/pci0/0000:0{index}:00.0/nvme/nvme{index}/model"), "Fast SSD 3000  ");
            symlink(root.join(format!("{function}/nvme/nvme{index}")), root.join(&disk).join("device")).unwrap();
        }
        put("sys/devices/virtual/block/md0/md/level", "raid0\n");
        put("sys/devices/virtual/block/md0/queue/rotational", "0");
        fs::create_dir_all(root.join("sys/devices/virtual/block/md0/slaves")).unwrap();
        fs::create_dir_all(root.join("sys/dev/block")).unwrap();
        let disk = |index| format!("sys/devices/pci0/0000:0{index}:00.0/nvme/nvme{index}/nvme{index}n1");
        symlink(root.join(disk(0)).join("nvme0n1p1"), root.join("sys/devices/virtual/block/md0/slaves/nvme0n1p1"))
            .unwrap();
        symlink(root.join(disk(1)), root.join("sys/devices/virtual/block/md0/slaves/nvme1n1")).unwrap();
        symlink(root.join(disk(0)).join("nvme0n1p1"), root.join("sys/dev/block/259:1")).unwrap();
        symlink(root.join("sys/devices/virtual/block/md0"), root.join("sys/dev/block/9:0")).unwrap();
        let files = SystemFiles::at(&root);
        (folder, files)
    }

    #[test]
    fn a_partition_is_reported_as_its_disk() {
        let (_folder, files) = machine();
        let disk = BlockDevice::of_number(&files, "259:1").unwrap();
        assert_eq!((disk.name.as_str(), disk.kind.as_str()), ("nvme0n1", "nvme"));
        assert_eq!(disk.model.as_deref(), Some("Fast SSD 3000"));
        assert_eq!((disk.scheduler.as_deref(), disk.is_rotational), (Some("none"), Some(false)));
        assert_eq!((disk.queue_requests, disk.request_bytes_max), (Some(1023), Some(128 << 10)));
        assert_eq!((disk.segments_max, disk.sector_bytes), (Some(33), Some(512)));
        let pcie = disk.pcie.unwrap();
        assert_eq!((pcie.generation, pcie.lanes, pcie.generation_max, pcie.lanes_max), (4, 2, 4, 4));
        assert_eq!(pcie.bytes_per_s / 10_000_000, 393, "two lanes of generation 4");
        assert_eq!(BlockDevice::of_number(&files, "1:1"), None);
    }

    #[test]
    fn an_array_is_reported_with_its_members() {
        let (_folder, files) = machine();
        let array = BlockDevice::of_number(&files, "9:0").unwrap();
        assert_eq!((array.name.as_str(), array.kind.as_str(), array.pcie), ("md0", "raid0", None));
        let disks: Vec<_> = array.disks().iter().map(|disk| disk.name.clone()).collect();
        assert_eq!(disks, ["nvme0n1", "nvme1n1"]);
    }

    #[test]
    fn speeds_of_links() {
        assert_eq!(
            [generation("2.5 GT/s PCIe"), generation("32.0 GT/s PCIe"), generation("Unknown")],
            [Some(1), Some(5), None]
        );
        let gb_per_s = |generation, lanes: u64| lanes * lane_bytes_per_s(generation) / 1_000_000;
        assert_eq!([gb_per_s(1, 4), gb_per_s(3, 4), gb_per_s(4, 4), gb_per_s(5, 4)], [1000, 3938, 7876, 15753]);
    }
}
