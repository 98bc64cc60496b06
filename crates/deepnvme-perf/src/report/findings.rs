//! Problems in the facts, and their remedies. This module does no I/O.

use serde::Serialize;

use deepnvme_io::display;

use super::backends::BackendReport;
use super::{BlockDevice, FolderReport, System};
use crate::units::gb;

/// Percentage of free space below which a folder gets a note.
const FREE_PERCENT_MIN: u64 = 5;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something does not work.
    Broken,
    /// Something is slower than it could be.
    Slow,
    /// Something to know.
    Note,
}

/// A problem and its remedy.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// The problem.
    pub text: String,
    /// The remedy: a command to type if possible.
    pub remedy: String,
}

impl Finding {
    fn new(severity: Severity, text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { severity, text: text.into(), remedy: remedy.into() }
    }
}

/// Judges the facts; returns the worst findings first. `pool_bytes` is the size of a default engine's pinned pool.
pub(super) fn judge(
    system: &System,
    backends: &[BackendReport],
    folders: &[FolderReport],
    pool_bytes: u64,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    judge_backends(backends, &mut findings);
    judge_system(system, pool_bytes, &mut findings);
    for folder in folders {
        judge_folder(folder, &mut findings);
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

fn judge_backends(backends: &[BackendReport], findings: &mut Vec<Finding>) {
    if !backends.iter().any(|backend| backend.works) {
        findings.push(Finding::new(Severity::Broken, "no backend works", "see the reasons above"));
    }
    let before_chosen = backends.iter().take_while(|backend| !backend.is_chosen);
    for backend in before_chosen.filter(|backend| !backend.works) {
        let text = format!("{} does not work: {}", backend.name, backend.detail);
        // Some remedies are a command in back quotes.
        let remedy = backend.remedy.as_deref().unwrap_or_default().trim_matches('`');
        findings.push(Finding::new(Severity::Slow, text, remedy));
    }
}

fn judge_system(system: &System, pool_bytes: u64, findings: &mut Vec<Finding>) {
    if let Some(limit) =
        system.memory.memlock_bytes.filter(|limit| *limit < pool_bytes && !system.memory.may_lock_freely)
    {
        findings.push(Finding::new(
            Severity::Slow,
            format!("RLIMIT_MEMLOCK is {} KiB: the engine's {} KiB cannot be pinned", limit >> 10, pool_bytes >> 10),
            "ulimit -l unlimited   (a service: LimitMEMLOCK=infinity; a container: --ulimit memlock=-1)",
        ));
    }
    if system.memory.huge_pages.as_deref() == Some("never") {
        findings.push(Finding::new(
            Severity::Slow,
            "transparent huge pages are off: large transfers need more requests and more CPU time",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ));
    }
}

fn judge_folder(folder: &FolderReport, findings: &mut Vec<Finding>) {
    let path = display::path(&folder.path);
    if let Some(error) = &folder.error {
        findings.push(Finding::new(Severity::Broken, error.clone(), "name a folder that exists"));
        return;
    }
    if !folder.is_writable {
        let read_only = folder.mount.options.iter().any(|option| option == "ro");
        let (text, remedy) = if read_only {
            (
                "the file system is mounted read-only",
                format!("mount -o remount,rw {}", display::path(&folder.mount.point)),
            )
        } else {
            ("no file can be made in it", format!("chown or chmod {path}, or name another folder"))
        };
        findings.push(Finding::new(Severity::Note, format!("{path}: {text}; reading works"), remedy));
    }
    if let Some(reason) = folder.routes.direct.as_ref().and_then(|direct| direct.reason.as_ref()) {
        findings.push(Finding::new(
            Severity::Slow,
            format!("{path}: every transfer goes through the page cache: {reason}"),
            "use a folder on a local ext4 or xfs file system",
        ));
    }
    if folder.total_bytes > 0 && folder.free_bytes * 100 < folder.total_bytes * FREE_PERCENT_MIN {
        findings.push(Finding::new(
            Severity::Note,
            format!("{path}: {:.1} GB are free of {:.0}", gb(folder.free_bytes), gb(folder.total_bytes)),
            "free some space: a full file system fragments new files",
        ));
    }
    for disk in folder.device.iter().flat_map(BlockDevice::disks) {
        judge_disk(disk, findings);
    }
}

fn judge_disk(disk: &BlockDevice, findings: &mut Vec<Finding>) {
    let name = &disk.name;
    if disk.is_rotational == Some(true) && disk.kind != "virtio" {
        findings.push(Finding::new(
            Severity::Slow,
            format!("{name} is a spinning disk"),
            "use an NVMe drive, or several with a stripe set",
        ));
    }
    if let Some(pcie) = disk.pcie.filter(|pcie| pcie.generation < pcie.generation_max || pcie.lanes < pcie.lanes_max) {
        findings.push(Finding::new(
            Severity::Slow,
            format!(
                "{name} runs at PCIe {} x{} and supports {} x{}",
                pcie.generation, pcie.lanes, pcie.generation_max, pcie.lanes_max
            ),
            "move it to another slot, or check bifurcation in the firmware settings",
        ));
    }
    if disk.kind == "nvme"
        && let Some(scheduler) = disk.scheduler.as_ref().filter(|scheduler| *scheduler != "none")
    {
        findings.push(Finding::new(
            Severity::Slow,
            format!("{name} has the scheduler {scheduler}, which NVMe drives do not need"),
            format!("echo none > /sys/block/{name}/queue/scheduler"),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::Pcie;
    use super::super::{DirectReport, Mount, Routes, SystemMemory};
    use super::*;

    fn backend(name: &'static str, works: bool, is_chosen: bool) -> BackendReport {
        let remedy = (!works).then(|| "allow it".to_owned());
        BackendReport { name, works, is_chosen, detail: "detail".into(), errno: None, remedy }
    }

    fn good_folder() -> FolderReport {
        FolderReport {
            path: "/data".into(),
            is_writable: true,
            total_bytes: 100,
            free_bytes: 50,
            routes: Routes {
                direct: Some(DirectReport {
                    works: true,
                    memory_alignment_bytes: Some(4),
                    offset_alignment_bytes: Some(512),
                    reason: None,
                }),
                ..Routes::default()
            },
            device: Some(BlockDevice {
                name: "nvme0n1".into(),
                kind: "nvme".into(),
                is_rotational: Some(false),
                scheduler: Some("none".into()),
                ..BlockDevice::default()
            }),
            ..FolderReport::default()
        }
    }

    fn texts(folder: FolderReport) -> Vec<(Severity, String)> {
        let memory = SystemMemory { huge_pages: Some("madvise".into()), ..SystemMemory::default() };
        let system = System { memory, ..System::default() };
        let found = judge(&system, &[backend("io_uring", true, true)], &[folder], 1 << 20);
        found.into_iter().map(|finding| (finding.severity, finding.text + " -> " + &finding.remedy)).collect()
    }

    #[test]
    fn a_good_machine_has_no_findings() {
        assert_eq!(texts(good_folder()), []);
    }

    #[test]
    fn each_problem_is_found_with_its_remedy() {
        let disk = |change: &dyn Fn(&mut BlockDevice)| {
            let mut folder = good_folder();
            change(folder.device.as_mut().unwrap());
            folder
        };
        let link = Pcie { generation: 3, lanes: 4, generation_max: 4, lanes_max: 4, bytes_per_s: 1 };
        let read_only = Mount { options: vec!["ro".into()], ..Mount::default() };
        let cases = [
            (FolderReport { error: Some("/no: missing".into()), ..good_folder() }, Severity::Broken, "/no: missing"),
            (FolderReport { free_bytes: 4, ..good_folder() }, Severity::Note, "are free"),
            (FolderReport { is_writable: false, ..good_folder() }, Severity::Note, "chown"),
            (FolderReport { is_writable: false, mount: read_only, ..good_folder() }, Severity::Note, "remount,rw"),
            (disk(&|disk| disk.is_rotational = Some(true)), Severity::Slow, "spinning"),
            (disk(&|disk| disk.scheduler = Some("mq-deadline".into())), Severity::Slow, "/sys/block/nvme0n1/queue"),
            (disk(&|disk| disk.pcie = Some(link)), Severity::Slow, "PCIe 3 x4 and supports 4 x4"),
        ];
        for (folder, severity, text) in cases {
            let found = texts(folder);
            assert!(found.len() == 1 && found[0].0 == severity && found[0].1.contains(text), "{text}: {found:?}");
        }
        let mut buffered = good_folder();
        buffered.routes.direct = Some(DirectReport {
            works: false,
            memory_alignment_bytes: None,
            offset_alignment_bytes: None,
            reason: Some("memory".into()),
        });
        assert!(texts(buffered)[0].1.contains("page cache: memory"));
    }

    #[test]
    fn the_memlock_limit_matters_only_when_it_binds() {
        let memory =
            |memlock_bytes, may_lock_freely| SystemMemory { memlock_bytes, may_lock_freely, ..SystemMemory::default() };
        let of = |memory: SystemMemory| System { memory, ..System::default() };
        let count = |memory: SystemMemory| judge(&of(memory), &[backend("threads", true, true)], &[], 8 << 20).len();
        assert_eq!(count(memory(Some(64 << 10), false)), 1);
        assert_eq!(count(memory(Some(64 << 10), true)), 0);
        assert_eq!(count(memory(Some(64 << 20), false)), 0);
        assert_eq!(count(memory(None, false)), 0);
        assert_eq!(count(SystemMemory { huge_pages: Some("never".into()), ..memory(None, false) }), 1);
    }

    #[test]
    fn only_preferred_back_ends_are_reported_and_the_worst_finding_is_first() {
        let backends = [backend("io_uring", false, false), backend("aio", true, true), backend("threads", true, false)];
        let found =
            judge(&System::default(), &backends, &[FolderReport { error: Some("gone".into()), ..good_folder() }], 0);
        let texts: Vec<_> = found.iter().map(|finding| finding.text.as_str()).collect();
        assert_eq!(texts, ["gone", "io_uring does not work: detail"]);
        let later = [backend("io_uring", true, true), backend("aio", false, false), backend("threads", true, false)];
        assert_eq!(judge(&System::default(), &later, &[], 0), []);
    }
}
