//! Support for GPUDirect Storage: transfers between a folder and a GPU without host memory.
//!
//! cuFile itself says whether it transfers directly: a private file of the folder is read into GPU memory, and cuFile's
//! statistics are compared before and after. Without a GPU or without cuFile, the rules of NVIDIA's documentation
//! decide (`deepnvme_io::backend::gds`). They also explain the answer of cuFile.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::Builder;
use std::time::Duration;

use deepnvme_file::Temporary;
use deepnvme_io::backend::gds::obstacle;
use deepnvme_io::gpu::{GdsAccess, GdsTrial, TransferCounts};
use deepnvme_io::{Access, DirectMode, TensorFile, start_thread};

pub use super::folder::{DefaultGpuRoute, GdsReads, GdsReport};
use super::{FolderReport, GpuReport};

/// Bytes of the trial.
const TRIAL_BYTES: usize = 1 << 20;
/// The longest that a report waits for cuFile.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(20);

impl GdsReport {
    fn because(mode: &'static str, reason: impl Into<String>) -> Self {
        Self { mode, reason: Some(reason.into()), reads: None }
    }
}

/// Returns the mode of cuFile for a folder. Tries it if there is a GPU, and the folder supports direct I/O.
#[must_use]
pub fn mode(folder: &FolderReport, gpu: &GpuReport) -> GdsReport {
    let by_rules = mode_by_rules(folder, gpu);
    let has_direct_io = folder.routes.direct.as_ref().is_some_and(|direct| direct.works);
    match gpu.cuda_devices.first() {
        Some(gpu) if has_direct_io => {
            let (path, index) = (folder.path.clone(), gpu.facts.index);
            match within(TRIAL_TIMEOUT, move || try_folder(&path, index)) {
                Ok(Some(trial)) => combine(trial, by_rules),
                // Nothing was tried.
                Ok(None) => by_rules,
                Err(reason) => GdsReport::because("none", reason),
            }
        }
        _ => by_rules,
    }
}

/// Reads a private file of a folder with cuFile. Returns `None` if the file cannot be created, opened for direct I/O or
/// written.
fn try_folder(folder: &Path, gpu: u32) -> Option<GdsTrial> {
    let private = Temporary::new(&folder.join("deepnvme-report")).ok()?;
    let file = TensorFile::from_fd(private.file(), Some(folder), Access::ReadWrite, DirectMode::Required).ok()?;
    let content = std::fs::File::from(private.file().try_clone_to_owned().ok()?);
    content.write_all_at(&vec![1; TRIAL_BYTES], 0).and_then(|()| content.sync_all()).ok()?;
    // Without its name, the file ends with this process even if cuFile does not return.
    drop(private);
    Some(GdsAccess::new().try_read(gpu, &file, TRIAL_BYTES))
}

/// Runs a call on a thread of its own. Fails if it panics, or has no result within `limit`; then the thread is left to
/// itself.
fn within<T: Send + 'static>(limit: Duration, call: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let run = move || {
        // Nobody waits after the limit.
        let _ = sender.send(call());
    };
    start_thread(|| Builder::new().name("deepnvme-report".into()).spawn(run)).map_err(|error| error.to_string())?;
    receiver.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => format!("cuFile has not answered within {} s", limit.as_secs_f32()),
        RecvTimeoutError::Disconnected => "the trial of cuFile panicked".into(),
    })
}

/// Combines cuFile's answer with the rules, which explain it.
fn combine(trial: GdsTrial, by_rules: GdsReport) -> GdsReport {
    let reads = |counts: Option<TransferCounts>| {
        counts.map(|TransferCounts { nvidia_fs, peer_to_peer, posix }| GdsReads { nvidia_fs, peer_to_peer, posix })
    };
    let explained = |reason: String| match &by_rules.reason {
        Some(rule) if *rule != reason => format!("{reason}; {rule}"),
        _ => reason,
    };
    match trial {
        GdsTrial::NotFound => by_rules,
        GdsTrial::Direct(counts) => GdsReport { mode: "direct", reason: None, reads: reads(counts) },
        GdsTrial::Copied(reason, counts) => {
            GdsReport { mode: "compatibility", reason: Some(explained(reason)), reads: reads(counts) }
        }
        GdsTrial::NotStarted(reason) | GdsTrial::Failed(reason) => {
            let mode = if by_rules.mode == "direct" { "none" } else { by_rules.mode };
            GdsReport::because(mode, explained(reason))
        }
    }
}

/// Returns the mode by the rules.
fn mode_by_rules(folder: &FolderReport, gpu: &GpuReport) -> GdsReport {
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
    if folder.routes.direct.as_ref().is_some_and(|direct| !direct.works) {
        return compatibility("direct I/O does not work");
    }
    let disks = folder.device.iter().flat_map(super::BlockDevice::disks).map(|disk| disk.name.as_str());
    match obstacle(&folder.mount.file_system, &folder.mount.options, disks) {
        Some(reason) => compatibility(&reason),
        None => GdsReport { mode: "direct", reason: None, reads: None },
    }
}

/// Returns the default route to a GPU for a folder with this mode.
#[must_use]
pub fn route(mode: &GdsReport, gpu: &GpuReport) -> Option<DefaultGpuRoute> {
    let reason = match mode.mode {
        "direct" => "the default; with gds=\"preferred\" cuFile transfers without host memory here",
        "compatibility" => "cuFile would use host memory as well",
        _ => "no cuFile",
    };
    (!gpu.cuda_devices.is_empty()).then(|| DefaultGpuRoute { kind: "bounce", reason: reason.into() })
}

#[cfg(test)]
mod tests {
    use deepnvme_io::gpu::GpuFacts;

    use super::super::{BlockDevice, CudaDevice, Mount};
    use super::*;

    fn folder(file_system: &str, options: &[&str], disks: &[&str]) -> FolderReport {
        let disk = |name: &&str| BlockDevice { name: (*name).into(), ..BlockDevice::default() };
        FolderReport {
            mount: Mount {
                file_system: file_system.into(),
                options: options.iter().map(|option| (*option).to_owned()).collect(),
                ..Mount::default()
            },
            device: (!disks.is_empty())
                .then(|| BlockDevice { members: disks.iter().map(disk).collect(), ..BlockDevice::default() }),
            ..FolderReport::default()
        }
    }

    #[test]
    fn the_default_route_is_the_bounce_buffer_and_has_a_reason() {
        let facts = GpuFacts { index: 0, name: "GPU".into(), memory_bytes: 1, pci_bus_id: "0000:01:00.0".into() };
        let gpu = GpuReport { cuda_devices: vec![CudaDevice { facts, numa_node: None }], ..GpuReport::default() };
        let reason = |mode| route(&GdsReport { mode, reason: None, reads: None }, &gpu).unwrap().reason;
        assert!(reason("direct").contains("gds=\"preferred\""));
        assert!(reason("compatibility").contains("host memory as well") && reason("none").contains("no cuFile"));
        assert_eq!(route(&GdsReport { mode: "direct", reason: None, reads: None }, &GpuReport::default()), None);
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
        let good = folder("ext4", &["rw"], &["nvme0n1", "nvme1n1"]);
        assert_eq!(mode(&good, &full), GdsReport { mode: "direct", reason: None, reads: None });
        assert_eq!(mode(&folder("xfs", &[], &["nvme0n1"]), &full).mode, "direct");
        let cases = [
            (good.clone(), GpuReport { driver: None, ..full.clone() }, "none", "driver"),
            (good.clone(), GpuReport { libcufile: None, ..full.clone() }, "none", "libcufile"),
            (good, GpuReport { nvidia_fs: None, ..full.clone() }, "compatibility", "modprobe"),
            (folder("ext4", &["data=journal"], &["nvme0n1"]), full.clone(), "compatibility", "data=ordered"),
            (folder("btrfs", &[], &["nvme0n1"]), full.clone(), "compatibility", "btrfs"),
            (folder("ext4", &[], &["nvme0n1", "vda"]), full.clone(), "compatibility", "vda is not an NVMe drive"),
            (folder("xfs", &[], &[]), full, "compatibility", "its disk is unknown"),
        ];
        for (folder, gpu, expected, part) in cases {
            let found = mode(&folder, &gpu);
            assert!(found.mode == expected && found.reason.as_ref().is_some_and(|why| why.contains(part)), "{found:?}");
        }
    }

    #[test]
    fn the_answer_of_cufile_comes_first() {
        let rule = || GdsReport::because("compatibility", "tmpfs is neither");
        let counts = Some(TransferCounts { nvidia_fs: 1, peer_to_peer: 2, posix: 3 });
        let reads = Some(GdsReads { nvidia_fs: 1, peer_to_peer: 2, posix: 3 });
        let direct = GdsReport { mode: "direct", reason: None, reads };
        assert_eq!(combine(GdsTrial::Direct(counts), rule()), direct);
        let copied = combine(GdsTrial::Copied("refused".into(), counts), rule());
        let reason = Some("refused; tmpfs is neither".into());
        assert_eq!(copied, GdsReport { mode: "compatibility", reason, reads });
        assert_eq!(combine(GdsTrial::NotFound, rule()), rule());
        let not_started = |by_rules| combine(GdsTrial::NotStarted("no".into()), by_rules);
        assert_eq!(not_started(rule()), GdsReport::because("compatibility", "no; tmpfs is neither"));
        assert_eq!(
            not_started(GdsReport { mode: "direct", reason: None, reads: None }),
            GdsReport::because("none", "no")
        );
    }

    #[test]
    fn a_call_that_does_not_return_is_left() {
        assert_eq!(within(TRIAL_TIMEOUT, || 5), Ok(5));
        let late = within(Duration::from_millis(20), || std::thread::sleep(Duration::from_secs(3)));
        assert!(late.unwrap_err().contains("has not answered within 0.02 s"));
    }

    #[test]
    fn a_call_that_panics_is_not_late() {
        let panicked = within(TRIAL_TIMEOUT, || [0_u32; 0].iter().copied().max().unwrap());
        assert_eq!(panicked, Err("the trial of cuFile panicked".into()));
    }
}
