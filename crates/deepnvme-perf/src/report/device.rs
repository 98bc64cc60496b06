//! The disk under a folder, as `/sys` tells it.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::tree::{Tree, chosen};

/// Layers of devices (a volume on an array on partitions) that are followed.
const DEPTH_MAX: usize = 8;

/// A block device.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Device {
    /// As below `/dev`: `nvme0n1`, `vda`, `md0`.
    pub name: String,
    /// As the device says; `None` of virtual ones.
    pub model: Option<String>,
    /// `nvme`, `virtio`, `scsi`, `raid0`, `device-mapper`, `loop`; `unknown`.
    pub kind: String,
    /// Whether it turns.
    pub is_rotational: Option<bool>,
    /// `none`, `mq-deadline`.
    pub scheduler: Option<String>,
    /// Requests that the kernel queues.
    pub queue_requests: Option<u64>,
    /// Bytes of the largest single request.
    pub request_bytes_max: Option<u64>,
    /// Pieces of memory that one request may be made of.
    pub segments_max: Option<u64>,
    /// Bytes of a sector.
    pub sector_bytes: Option<u64>,
    /// How it hangs on the PCI Express bus; `None` where it does not.
    pub pcie: Option<Pcie>,
    /// What an array or a volume is made of.
    pub members: Vec<Device>,
}

/// A PCI Express link.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
pub struct Pcie {
    /// 1 to 7, as it runs now.
    pub generation: u32,
    /// Lanes in use.
    pub lanes: u32,
    /// What the device could do.
    pub generation_max: u32,
    /// What the device could do.
    pub lanes_max: u32,
    /// Bytes per second of the link as it runs, less the encoding; protocols take some more of it.
    pub bytes_per_s: u64,
}

impl Device {
    /// The whole disk that holds the device of that number (`259:1`), and what it is made of.
    pub(super) fn of_number(tree: &Tree, number: &str) -> Option<Self> {
        let folder = tree.path(format!("/sys/dev/block/{number}")).canonicalize().ok()?;
        // A partition's folder lies in that of its disk.
        let whole = if folder.join("partition").exists() { folder.parent()?.to_path_buf() } else { folder };
        Some(Self::of_folder(tree, &whole, DEPTH_MAX))
    }

    fn of_folder(tree: &Tree, folder: &Path, depth: usize) -> Self {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let queue = |file: &str| folder.join("queue").join(file);
        let number = |file: &str| tree.number(queue(file));
        let model = tree.text(folder.join("device/model")).or_else(|| tree.text(folder.join("device/name")));
        Self {
            kind: kind(tree, &name, folder),
            model,
            is_rotational: number("rotational").map(|flag| flag == 1),
            scheduler: tree.text(queue("scheduler")).map(|text| chosen(&text).unwrap_or(&text).to_owned()),
            queue_requests: number("nr_requests"),
            request_bytes_max: number("max_sectors_kb").map(|kib| kib << 10),
            segments_max: number("max_segments"),
            sector_bytes: number("logical_block_size"),
            pcie: link(tree, folder),
            members: if depth == 0 { Vec::new() } else { members(tree, folder, depth - 1) },
            name,
        }
    }

    /// The disks at the bottom: the device itself, or what its members are made of.
    #[must_use]
    pub fn disks(&self) -> Vec<&Self> {
        if self.members.is_empty() { vec![self] } else { self.members.iter().flat_map(Self::disks).collect() }
    }
}

fn members(tree: &Tree, folder: &Path, depth: usize) -> Vec<Device> {
    let slaves = folder.join("slaves");
    let member = |name: String| {
        let target = tree.path(&slaves).join(name).canonicalize().ok()?;
        let whole = if target.join("partition").exists() { target.parent()?.to_path_buf() } else { target };
        Some(Device::of_folder(tree, &whole, depth))
    };
    tree.names(&slaves).into_iter().filter_map(member).collect()
}

fn kind(tree: &Tree, name: &str, folder: &Path) -> String {
    if name.starts_with("md") {
        return tree.text(folder.join("md/level")).unwrap_or_else(|| "md".into());
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

/// The first folder above the disk that has a link: its PCI function.
fn link(tree: &Tree, folder: &Path) -> Option<Pcie> {
    let function: PathBuf = folder
        .ancestors()
        .chain(folder.join("device").canonicalize().ok().iter().flat_map(|path| path.ancestors()))
        .find(|path| path.join("current_link_speed").exists())?
        .to_path_buf();
    let speed = |file: &str| tree.text(function.join(file)).and_then(|text| generation(&text));
    let width = |file: &str| tree.number(function.join(file)).map(|lanes| lanes as u32);
    let (generation, lanes) = (speed("current_link_speed")?, width("current_link_width")?);
    Some(Pcie {
        generation,
        lanes,
        generation_max: speed("max_link_speed").unwrap_or(generation),
        lanes_max: width("max_link_width").unwrap_or(lanes),
        bytes_per_s: u64::from(lanes) * lane_bytes_per_s(generation),
    })
}

/// `16.0 GT/s PCIe` is generation 4. Speeds: PCI Express Base Specification.
fn generation(text: &str) -> Option<u32> {
    let transfers = text.split_whitespace().next()?;
    let known =
        [("2.5", 1), ("5.0", 2), ("5", 2), ("8.0", 3), ("8", 3), ("16.0", 4), ("16", 4), ("32.0", 5), ("32", 5)];
    let newer = [("64.0", 6), ("64", 6), ("128.0", 7), ("128", 7)];
    known.iter().chain(&newer).find(|(speed, _)| *speed == transfers).map(|(_, generation)| *generation)
}

/// Up to generation 2 ten bits carry eight, up to 5 130 carry 128; what the frames of later ones take is left out.
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
    fn machine() -> (tempfile::TempDir, Tree) {
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
        let tree = Tree::at(&root);
        (folder, tree)
    }

    #[test]
    fn a_partition_is_told_as_its_disk() {
        let (_folder, tree) = machine();
        let disk = Device::of_number(&tree, "259:1").unwrap();
        assert_eq!((disk.name.as_str(), disk.kind.as_str()), ("nvme0n1", "nvme"));
        assert_eq!(disk.model.as_deref(), Some("Fast SSD 3000"));
        assert_eq!((disk.scheduler.as_deref(), disk.is_rotational), (Some("none"), Some(false)));
        assert_eq!((disk.queue_requests, disk.request_bytes_max), (Some(1023), Some(128 << 10)));
        assert_eq!((disk.segments_max, disk.sector_bytes), (Some(33), Some(512)));
        let pcie = disk.pcie.unwrap();
        assert_eq!((pcie.generation, pcie.lanes, pcie.generation_max, pcie.lanes_max), (4, 2, 4, 4));
        assert_eq!(pcie.bytes_per_s / 10_000_000, 393, "two lanes of generation 4");
        assert_eq!(Device::of_number(&tree, "1:1"), None);
    }

    #[test]
    fn an_array_is_told_with_its_members() {
        let (_folder, tree) = machine();
        let array = Device::of_number(&tree, "9:0").unwrap();
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
