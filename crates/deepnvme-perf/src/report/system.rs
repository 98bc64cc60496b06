//! The machine, and the limits of this process.

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::system_files::{SystemFiles, bracketed};

/// Facts about the machine. A fact that cannot be read is `None` or empty.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct System {
    /// Release of the kernel, such as `6.18.44`.
    pub kernel: String,
    /// `x86_64`, `aarch64`.
    pub machine: String,
    /// `docker`, `podman`, `kubernetes`, `lxc`; `None` outside a container.
    pub container: Option<String>,
    /// The hypervisor or the product name of the virtual machine; `None` on real hardware.
    pub virtual_machine: Option<String>,
    /// Its CPUs.
    #[serde(flatten)]
    pub cpu: Cpu,
    /// Its memory.
    #[serde(flatten)]
    pub memory: SystemMemory,
}

/// The CPUs of the machine.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Cpu {
    /// The CPU's name.
    #[serde(rename = "cpu_model")]
    pub model: Option<String>,
    /// CPUs that this process may run on.
    pub cpus: usize,
    /// NUMA nodes.
    pub numa_nodes: usize,
}

/// The memory of the machine, and how much this process may use.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct SystemMemory {
    /// Bytes of memory.
    #[serde(rename = "memory_bytes")]
    pub bytes: u64,
    /// Bytes that programs can allocate without swapping.
    #[serde(rename = "memory_available_bytes")]
    pub available_bytes: u64,
    /// `RLIMIT_MEMLOCK`: bytes that this process may page-lock; `None` without a limit.
    pub memlock_bytes: Option<u64>,
    /// Whether the process has `CAP_IPC_LOCK`; the limit does not bind then.
    pub may_lock_freely: bool,
    /// `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
}

/// The bit of `CAP_IPC_LOCK` in a capability set.
const CAP_IPC_LOCK: u32 = 14;

impl System {
    pub(crate) fn gather(files: &SystemFiles) -> Self {
        let name = rustix::system::uname();
        Self {
            kernel: name.release().to_string_lossy().into_owned(),
            machine: name.machine().to_string_lossy().into_owned(),
            container: container(files),
            virtual_machine: virtual_machine(files),
            cpu: Cpu {
                model: files.field("/proc/cpuinfo", "model name"),
                cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
                numa_nodes: numa_nodes(files),
            },
            memory: SystemMemory::gather(files),
        }
    }
}

impl SystemMemory {
    fn gather(files: &SystemFiles) -> Self {
        let bytes = |field| kib(files.field("/proc/meminfo", field)).unwrap_or(0);
        let capabilities = files.field("/proc/thread-self/status", "CapEff");
        let capabilities = capabilities.and_then(|bits| u64::from_str_radix(&bits, 16).ok()).unwrap_or(0);
        let huge = files.text("/sys/kernel/mm/transparent_hugepage/enabled");
        Self {
            bytes: bytes("MemTotal"),
            available_bytes: bytes("MemAvailable"),
            memlock_bytes: getrlimit(Resource::Memlock).current,
            may_lock_freely: capabilities >> CAP_IPC_LOCK & 1 == 1,
            huge_pages: huge.as_deref().and_then(bracketed).map(str::to_owned),
        }
    }
}

/// Parses `24105 kB` into bytes.
fn kib(text: Option<String>) -> Option<u64> {
    text?.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

fn container(files: &SystemFiles) -> Option<String> {
    if files.path("/run/.containerenv").exists() {
        return Some("podman".into());
    }
    if files.path("/.dockerenv").exists() {
        return Some("docker".into());
    }
    let environment = std::fs::read(files.path("/proc/1/environ")).unwrap_or_default();
    let named = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(b"container="));
    if let Some(name) = named.filter(|name| !name.is_empty()) {
        return Some(String::from_utf8_lossy(name).into_owned());
    }
    let groups = files.text("/proc/1/cgroup").unwrap_or_default();
    let marks = [("kubepods", "kubernetes"), ("docker", "docker"), ("libpod", "podman"), ("lxc", "lxc")];
    marks.iter().find(|(mark, _)| groups.contains(mark)).map(|(_, name)| (*name).to_owned())
}

fn virtual_machine(files: &SystemFiles) -> Option<String> {
    if let Some(kind) = files.text("/sys/hypervisor/type") {
        return Some(kind);
    }
    let product = files.text("/sys/class/dmi/id/product_name").unwrap_or_default();
    let vendor = files.text("/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let known = ["KVM", "QEMU", "VMware", "VirtualBox", "Xen", "Amazon EC2", "Google", "Virtual Machine", "Bochs"];
    let both = format!("{vendor} {product}");
    if known.iter().any(|name| both.contains(name)) && !product.contains("metal") {
        return Some(both.trim().to_owned());
    }
    let flags = files.field("/proc/cpuinfo", "flags").unwrap_or_default();
    flags.split_whitespace().any(|flag| flag == "hypervisor").then(|| "unknown hypervisor".into())
}

fn numa_nodes(files: &SystemFiles) -> usize {
    let is_node = |name: &String| {
        name.strip_prefix("node").is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    files.names("/sys/devices/system/node").iter().filter(|name| is_node(name)).count().max(1)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemFiles) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let files = SystemFiles::at(folder.path());
        (folder, files)
    }

    #[test]
    fn containers_are_detected() {
        for (files, expected) in [
            (&[(".dockerenv", "")][..], Some("docker")),
            (&[("run/.containerenv", "")], Some("podman")),
            (&[("proc/1/environ", "HOME=/\0container=lxc\0")], Some("lxc")),
            (&[("proc/1/cgroup", "0::/kubepods/besteffort/pod1")], Some("kubernetes")),
            (&[("proc/1/cgroup", "0::/init.scope"), ("proc/1/environ", "HOME=/\0")], None),
        ] {
            let (_folder, files) = machine(files);
            assert_eq!(container(&files).as_deref(), expected, "{files:?}");
        }
    }

    #[test]
    fn virtual_machines_are_detected_by_name_or_cpu() {
        for (files, expected) in [
            (&[("sys/hypervisor/type", "xen\n")][..], Some("xen")),
            (
                &[("sys/class/dmi/id/sys_vendor", "QEMU"), ("sys/class/dmi/id/product_name", "Standard PC")],
                Some("QEMU Standard PC"),
            ),
            (&[("proc/cpuinfo", "model name\t: X\nflags\t\t: fpu hypervisor avx\n")], Some("unknown hypervisor")),
            (&[("sys/class/dmi/id/sys_vendor", "Amazon EC2"), ("sys/class/dmi/id/product_name", "i4i.metal")], None),
            (&[("proc/cpuinfo", "flags\t\t: fpu avx\n")], None),
        ] {
            let (_folder, files) = machine(files);
            assert_eq!(virtual_machine(&files).as_deref(), expected, "{files:?}");
        }
    }

    #[test]
    fn nodes_and_sizes() {
        let (_folder, files) = machine(&[
            ("sys/devices/system/node/node0/cpulist", "0"),
            ("sys/devices/system/node/node1/cpulist", "1"),
            ("sys/devices/system/node/online", "0-1"),
            ("proc/meminfo", "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ]);
        let system = System::gather(&files);
        let memory = &system.memory;
        assert_eq!((system.cpu.numa_nodes, memory.bytes, memory.available_bytes), (2, 2 << 20, 1 << 20));
        assert_eq!(memory.huge_pages.as_deref(), Some("madvise"));
        assert_eq!(numa_nodes(&SystemFiles::at(std::path::Path::new("/nowhere"))), 1);
    }
}
