//! The report as text: one screen, without colours.

use std::fmt::Write;

use deepnvme_io::display;
use deepnvme_io::gpu::GpuFacts;

use deepnvme_perf::report::{BlockDevice, FolderReport, GdsReads, OpReport, Report, Severity};
use deepnvme_perf::units::gb;

/// Draws the report as lines of text.
#[must_use]
pub fn draw(report: &Report) -> String {
    let mut out = String::new();
    let mut line = |label: &str, text: &str| {
        let _ = writeln!(out, "{}", format!("{label:<10}{text}").trim_end());
    };
    line("deepnvme", report.version);
    line("kernel", &kernel(report));
    line("cpu", &cpu(report));
    line("memory", &memory(report));
    for backend in &report.machine.backends {
        let state = match (backend.is_chosen, backend.works) {
            (true, _) => "works, chosen by default",
            (false, true) => "works",
            (false, false) => "does not work",
        };
        let errno = backend.errno.map_or_else(String::new, |errno| format!(" (errno {errno})"));
        let remedy = backend.remedy.as_ref().map_or_else(String::new, |remedy| format!("; {remedy}"));
        line(backend.name, &format!("{state}: {}{errno}{remedy}", backend.detail));
    }
    for (number, text) in gpu(report).iter().enumerate() {
        line(if number == 0 { "gpu" } else { "" }, text);
    }
    line("python", &packages(report));
    let has_gpu = report.machine.gpu.driver.is_some() || !report.machine.gpu.cuda_devices.is_empty();
    for folder in &report.folders {
        draw_folder(folder, has_gpu, &mut line);
    }
    out.push('\n');
    for op in &report.machine.ops {
        let _ = writeln!(out, "{}", op_line(op));
    }
    out.push('\n');
    if report.findings.is_empty() {
        out.push_str("no problems found\n");
    }
    for finding in &report.findings {
        let mark = match finding.severity {
            Severity::Broken => "broken",
            Severity::Slow => "slow",
            Severity::Note => "note",
        };
        let _ = writeln!(out, "{mark:<8}{}\n        > {}", finding.text, finding.remedy);
    }
    out
}

/// Draws the driver and the libraries, and a line for each GPU.
fn gpu(report: &Report) -> Vec<String> {
    let gpu = &report.machine.gpu;
    let missing = gpu.missing.as_deref();
    if gpu.driver.is_none() && gpu.cuda_devices.is_empty() {
        return vec![missing.map_or_else(|| "no NVIDIA driver".into(), |missing| format!("none: {missing}"))];
    }
    let of = |what: &str, version: &Option<String>| version.as_ref().map(|version| format!("{what} {version}"));
    let library = |name: &str, path: &Option<std::path::PathBuf>, version: &Option<String>| {
        let Some(path) = path else { return format!("no {name}") };
        let version = version.as_ref().map_or_else(String::new, |version| format!(" ({version})"));
        format!("{}{version}", display::path(path))
    };
    let mut facts = Vec::new();
    if gpu.cuda_devices.is_empty() {
        facts.push(if gpu.devices.is_empty() { "no GPU".into() } else { gpu.devices.join(", ") });
    }
    let versions = ["driver".to_owned()].into_iter().chain(gpu.driver.clone()).chain(of("for CUDA", &gpu.cuda_driver));
    facts.push(versions.collect::<Vec<_>>().join(" "));
    // If a GPU was found, libcuda was loaded from an unusual folder and is not missing.
    if gpu.libcuda.is_some() || gpu.cuda_devices.is_empty() {
        facts.push(library("libcuda", &gpu.libcuda, &gpu.cuda));
    }
    facts.push(library("libcufile", &gpu.libcufile, &gpu.cufile));
    facts.push(of("nvidia-fs", &gpu.nvidia_fs).unwrap_or_else(|| "no nvidia-fs".into()));
    let gpus = gpu.cuda_devices.iter().map(|gpu| {
        let GpuFacts { index, name, memory_bytes, pci_bus_id } = &gpu.facts;
        let node = gpu.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
        format!("cuda:{index}: {name}, {:.1} GB, PCI {pci_bus_id}{node}", gb(*memory_bytes))
    });
    let unusable = missing.map(|missing| format!("not usable: {missing}"));
    std::iter::once(facts.join("; ")).chain(gpus).chain(unusable).collect()
}

fn packages(report: &Report) -> String {
    if report.machine.packages.is_empty() {
        return "not found".into();
    }
    let found: Vec<_> =
        report.machine.packages.iter().map(|package| format!("{} {}", package.name, package.version)).collect();
    found.join(", ")
}

/// Draws an op as `ds_report` does: installed, and compatible.
fn op_line(op: &OpReport) -> String {
    let installed = if op.is_installed { "[YES]" } else { "[NO]" };
    let compatible = if op.is_compatible { "[OKAY]" } else { "[NO]" };
    let dots = |width: usize, text: &str| ".".repeat(width.saturating_sub(text.len()));
    let why = op.reason.as_ref().map_or_else(String::new, |reason| format!("  {reason}"));
    format!("{} {} {installed} {} {compatible}{why}", op.name, dots(23, op.name), dots(11, installed))
}

fn kernel(report: &Report) -> String {
    let system = &report.machine.system;
    let mut text = format!("{} {}", system.kernel, system.machine);
    if let Some(name) = &system.container {
        let _ = write!(text, ", in a container ({name})");
    }
    if let Some(name) = &system.virtual_machine {
        let _ = write!(text, ", in a virtual machine ({name})");
    }
    text
}

fn cpu(report: &Report) -> String {
    let system = &report.machine.system;
    let model = system.cpu.model.as_deref().unwrap_or("unknown CPU");
    let nodes =
        if system.cpu.numa_nodes == 1 { "1 NUMA node".into() } else { format!("{} NUMA nodes", system.cpu.numa_nodes) };
    format!("{} x {model}, {nodes}", system.cpu.cpus)
}

fn memory(report: &Report) -> String {
    let system = &report.machine.system;
    let limit = match system.memory.memlock_bytes {
        _ if system.memory.may_lock_freely => "no limit on pinned memory".into(),
        None => "no limit on pinned memory".into(),
        Some(bytes) => format!("{} KiB may be pinned", bytes >> 10),
    };
    let huge = system.memory.huge_pages.as_deref().unwrap_or("unknown");
    format!(
        "{:.1} GB, {:.1} available; {limit}; huge pages: {huge}",
        gb(system.memory.bytes),
        gb(system.memory.available_bytes)
    )
}

fn draw_folder(folder: &FolderReport, has_gpu: bool, line: &mut impl FnMut(&str, &str)) {
    if folder.error.is_some() {
        return;
    }
    line("", "");
    line("folder", &display::path(&folder.path).to_string());
    let options = folder.mount.options.join(",");
    line("", &format!("{} of {} ({options})", folder.mount.file_system, folder.mount.source));
    line("", &format!("{:.1} GB free of {:.1}", gb(folder.free_bytes), gb(folder.total_bytes)));
    match &folder.routes.direct {
        Some(direct) if direct.works => {
            let bytes = |alignment: Option<u64>| alignment.unwrap_or(1);
            let (memory, offset) = (bytes(direct.memory_alignment_bytes), bytes(direct.offset_alignment_bytes));
            line("", &format!("direct I/O works: memory aligned to {memory}, offsets to {offset} bytes"));
        }
        Some(direct) => line("", &format!("no direct I/O: {}", direct.reason.as_deref().unwrap_or("unknown"))),
        None => line("", "direct I/O not tested: no file can be made here"),
    }
    if let Some(gds) = folder.routes.gds.as_ref().filter(|_| has_gpu) {
        let why = gds.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        let way = gds.reads.filter(|_| gds.mode == "direct").map_or("", direct_way);
        line("", &format!("GPUDirect Storage: {}{way}{why}", gds.mode));
    }
    if let Some(route) = &folder.routes.gpu_route {
        line("", &format!("to and from GPUs through bounce buffers: {}", route.reason));
    }
    if let Some(device) = &folder.device {
        draw_device(device, 0, line);
    }
}

/// Returns the way that a direct read has taken.
fn direct_way(reads: GdsReads) -> &'static str {
    match (reads.nvidia_fs, reads.peer_to_peer) {
        (1.., _) => " through nvidia-fs, by cuFile's own statistics",
        (0, 1..) => " through peer-to-peer transfers, by cuFile's own statistics",
        _ => "",
    }
}

fn draw_device(device: &BlockDevice, depth: usize, line: &mut impl FnMut(&str, &str)) {
    let mut facts = vec![device.kind.clone()];
    facts.extend(device.model.clone());
    facts.extend(device.is_rotational.filter(|turns| *turns).map(|_| "rotational".into()));
    facts.extend(device.scheduler.as_ref().map(|scheduler| format!("scheduler {scheduler}")));
    if let (Some(requests), Some(bytes)) = (device.queue_requests, device.request_bytes_max) {
        facts.push(format!("{requests} requests of up to {} KiB", bytes >> 10));
    }
    facts.extend(device.segments_max.map(|segments| format!("{segments} segments each")));
    if let Some(pcie) = device.pcie {
        facts.push(format!("PCIe {} x{}: {:.1} GB/s", pcie.generation, pcie.lanes, gb(pcie.bytes_per_s)));
    }
    line("", &format!("{}{}: {}", "  ".repeat(depth), device.name, facts.join(", ")));
    for member in &device.members {
        draw_device(member, depth + 1, line);
    }
}
