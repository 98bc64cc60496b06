//! Tells which file systems cuFile transfers from and to directly. This is needed if cuFile accepts files that it would
//! copy through the host.
//!
//! cuFile chooses by file system and disk. So the first transfer in each direction is a trial, which cuFile itself
//! counts. Without such counts, the rules of NVIDIA's documentation decide (GPUDirect Storage: Overview Guide, Release
//! Notes): XFS or ext4 with data=ordered on NVMe drives, alone or in an array.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use deepnvme_cuda::TransferCounts;

use crate::op::OpKind;
use crate::sync::{Mutex, lock};

/// Maximum layers of block devices. A volume on an array on partitions has three.
const DEPTH_MAX: usize = 8;

/// The file systems that an engine has tried, by device number.
#[derive(Debug, Default)]
pub(super) struct FileSystems {
    known: Mutex<BTreeMap<u64, Known>>,
    /// Held during a trial, so that the trials of one engine do not repeat each other.
    pub(super) trial: Mutex<()>,
}

/// The results of the trials of a file system.
#[derive(Clone, Debug, Default)]
struct Known {
    reads_directly: bool,
    writes_directly: bool,
    /// Why its files use bounce buffers.
    refusal: Option<String>,
}

/// Whether a transfer is direct.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Directness {
    Direct,
    /// The reason why it is not.
    Copied(String),
    /// Not tried yet, or the counts cannot tell.
    Unknown,
}

impl FileSystems {
    /// Returns why the files of a file system use bounce buffers, if they do.
    pub(super) fn refusal(&self, device: u64) -> Option<String> {
        lock(&self.known).get(&device)?.refusal.clone()
    }

    pub(super) fn directness(&self, device: u64, kind: OpKind) -> Directness {
        let known = lock(&self.known);
        match known.get(&device) {
            Some(Known { refusal: Some(reason), .. }) => Directness::Copied(reason.clone()),
            Some(Known { reads_directly: true, .. }) if kind == OpKind::Read => Directness::Direct,
            Some(Known { writes_directly: true, .. }) if kind != OpKind::Read => Directness::Direct,
            _ => Directness::Unknown,
        }
    }

    /// Records the result of a trial.
    pub(super) fn learn(&self, device: u64, kind: OpKind, directness: &Directness) {
        let mut known = lock(&self.known);
        let known = known.entry(device).or_default();
        match directness {
            Directness::Direct if kind == OpKind::Read => known.reads_directly = true,
            Directness::Direct => known.writes_directly = true,
            Directness::Copied(reason) => known.refusal = Some(reason.clone()),
            Directness::Unknown => {}
        }
    }
}

/// Judges a transfer by cuFile's counts, which include those of other transfers at the same time.
pub(crate) fn judge(counts: TransferCounts) -> Directness {
    match (counts.direct(), counts.posix) {
        (1.., 0) => Directness::Direct,
        (0, 1..) => {
            let posix = counts.posix;
            Directness::Copied(format!(
                "cuFile copies through host memory here: its statistics count {posix} by POSIX calls and none by nvidia-fs or \
                 peer-to-peer"
            ))
        }
        _ => Directness::Unknown,
    }
}

/// Returns the device number of an open file's file system.
pub(crate) fn device_of(file: impl AsFd) -> Option<u64> {
    rustix::fs::fstat(file).ok().map(|status| status.st_dev)
}

/// Returns why cuFile would copy through the host, by the rules, for the file system with this device number. `None`:
/// it is direct.
pub(crate) fn obstacle_of(device: Option<u64>) -> Option<String> {
    device.map_or_else(|| Some(UNKNOWN.into()), |device| obstacle_at(Path::new("/"), device))
}

const UNKNOWN: &str = "its file system is unknown";

/// Returns why cuFile would copy through the host, by the rules, which ask for the file system, its mount options and
/// the names of its disks. `None`: it is direct.
#[must_use]
pub fn obstacle<'a>(
    file_system: &str,
    mount_options: &[String],
    disks: impl IntoIterator<Item = &'a str>,
) -> Option<String> {
    let has_option = |name: &str| mount_options.iter().any(|option| option == name);
    match file_system {
        "xfs" => {}
        "ext4" if has_option("data=journal") || has_option("data=writeback") => {
            return Some("ext4 must be mounted with data=ordered".into());
        }
        "ext4" => {}
        other => return Some(format!("{other} is neither ext4 nor XFS")),
    }
    let mut disks = disks.into_iter().peekable();
    if disks.peek().is_none() {
        return Some("its disk is unknown".into());
    }
    disks.find(|name| !name.starts_with("nvme")).map(|name| format!("{name} is not an NVMe drive"))
}

/// Applies the rules to a file system, as `/proc` and `/sys` below a root describe it.
fn obstacle_at(root: &Path, device: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let Some((file_system, options)) = mounts.lines().find_map(|line| mount_of(line, &number)) else {
        return Some(UNKNOWN.into());
    };
    let disks = disks_of(&root.join("sys/dev/block").join(number), DEPTH_MAX);
    obstacle(&file_system, &options, disks.iter().map(String::as_str))
}

/// Returns the type and the options of the mount in a line of `mountinfo`, if it has this device number.
fn mount_of(line: &str, number: &str) -> Option<(String, Vec<String>)> {
    let (left, right) = line.split_once(" - ")?;
    if left.split(' ').nth(2)? != number {
        return None;
    }
    let mut right = right.split(' ');
    let (file_system, options) = (right.next()?, right.nth(1).unwrap_or_default());
    Some((file_system.to_owned(), options.split(',').map(str::to_owned).collect()))
}

/// Returns the names of the disks under a block device in `/sys`.
fn disks_of(folder: &Path, depth: usize) -> Vec<String> {
    let Ok(folder) = folder.canonicalize() else { return Vec::new() };
    // The folder of a partition is inside the folder of its disk.
    let whole = if folder.join("partition").exists() { folder.parent().map(Path::to_path_buf) } else { Some(folder) };
    let Some(whole) = whole else { return Vec::new() };
    // `read_dir` panics if closing the folder fails, which cannot happen in /sys.
    let members = fs::read_dir(whole.join("slaves")).into_iter().flatten().flatten().map(|entry| entry.path());
    let members: Vec<PathBuf> = members.collect();
    if members.is_empty() || depth == 0 {
        return whole.file_name().map(|name| name.to_string_lossy().into_owned()).into_iter().collect();
    }
    members.iter().flat_map(|member| disks_of(member, depth - 1)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn counts_are_judged() {
        let counts = |nvidia_fs, peer_to_peer, posix| TransferCounts { nvidia_fs, peer_to_peer, posix };
        assert_eq!(judge(counts(1, 0, 0)), Directness::Direct);
        assert_eq!(judge(counts(0, 9, 0)), Directness::Direct);
        assert!(matches!(judge(counts(0, 0, 3)), Directness::Copied(reason) if reason.contains("3 by POSIX")));
        assert_eq!(judge(counts(1, 0, 1)), Directness::Unknown, "one of them is a stranger's");
        assert_eq!(judge(counts(0, 0, 0)), Directness::Unknown);
    }

    #[test]
    fn a_direction_is_tried_once_and_a_copy_counts_for_both() {
        let file_systems = FileSystems::default();
        assert_eq!(file_systems.directness(1, OpKind::Read), Directness::Unknown);
        file_systems.learn(1, OpKind::Read, &Directness::Direct);
        assert_eq!(file_systems.directness(1, OpKind::Read), Directness::Direct);
        assert_eq!(file_systems.directness(1, OpKind::Write), Directness::Unknown);
        assert_eq!(file_systems.directness(2, OpKind::Read), Directness::Unknown);
        file_systems.learn(1, OpKind::Write, &Directness::Copied("so".into()));
        assert_eq!(file_systems.directness(1, OpKind::Read), Directness::Copied("so".into()));
        assert_eq!((file_systems.refusal(1), file_systems.refusal(2)), (Some("so".into()), None));
    }

    #[test]
    fn the_rules_read_the_machine() {
        let root = tempfile::tempdir().unwrap();
        let disk = |name: &str, part: &str, number: &str| {
            let folder = root.path().join("sys/devices").join(name).join(part);
            fs::create_dir_all(&folder).unwrap();
            fs::create_dir_all(root.path().join("sys/dev/block")).unwrap();
            if !part.is_empty() {
                fs::write(folder.join("partition"), "1").unwrap();
            }
            symlink(&folder, root.path().join("sys/dev/block").join(number)).unwrap();
            folder
        };
        let nvme = disk("nvme0n1", "nvme0n1p1", "259:1");
        let virtio = disk("vda", "", "254:0");
        for (number, member) in [("9:0", &nvme), ("9:1", &virtio)] {
            let array = disk(&format!("md{number}"), "", number);
            fs::create_dir(array.join("slaves")).unwrap();
            symlink(&nvme, array.join("slaves/nvme0n1p1")).unwrap();
            symlink(member, array.join("slaves/other")).unwrap();
        }
        fs::create_dir_all(root.path().join("proc/self")).unwrap();
        let mounts = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 1 259:1 / /data rw - xfs /dev/nvme0n1p1 rw
24 1 9:0 / /array rw - ext4 /dev/md0 rw
25 1 9:1 / /mixed rw - ext4 /dev/md1 rw
26 1 259:2 / /journal rw - ext4 /dev/nvme0n1p2 rw,data=journal
27 1 0:30 / /shm rw - tmpfs none rw
28 1 259:3 / /gone rw - xfs /dev/nvme9n1 rw
";
        fs::write(root.path().join("proc/self/mountinfo"), mounts).unwrap();
        let reason = |major, minor| obstacle_at(root.path(), rustix::fs::makedev(major, minor));
        assert_eq!((reason(259, 1), reason(9, 0)), (None, None));
        let cases = [
            ((254, 0), "vda is not an NVMe drive"),
            ((9, 1), "vda is not an NVMe drive"),
            ((259, 2), "data=ordered"),
            ((0, 30), "tmpfs is neither"),
            ((259, 3), "its disk is unknown"),
            ((7, 7), UNKNOWN),
        ];
        for ((major, minor), expected) in cases {
            let reason = reason(major, minor).unwrap();
            assert!(reason.contains(expected), "{expected}: {reason}");
        }
        assert_eq!(obstacle_of(None), Some(UNKNOWN.into()));
    }
}
