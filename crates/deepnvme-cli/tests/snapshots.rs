//! Compares every text output with a reviewed snapshot, for fixed values.
//! `INSTA_UPDATE=always cargo test -p deepnvme-cli --test snapshots` rewrites the snapshots: review the difference.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use deepnvme_cli::show;
use deepnvme_io::gpu::GpuFacts;
use deepnvme_io::{BackendChoice, Config, Durability};
use deepnvme_perf::bench::{BenchOutcome, ChosenBackend, FolderSummary, ToolResult, summary};
use deepnvme_perf::measure::{AccessOrder, Cache, Direction, Memory, MemoryPlace, RouteBytes, Sample, Workload};
use deepnvme_perf::report::device::Pcie;
use deepnvme_perf::report::{
    BackendReport, BlockDevice, Cpu, CudaDevice, DefaultGpuRoute, DirectReport, Finding, FolderReport, GdsReport,
    GpuReport, Machine, Mount, OpReport, Package, Report, Routes, Severity, System, SystemMemory,
};
use deepnvme_perf::tune::{self, Choice, FolderResult, SearchSpace, Trial};

fn disk(name: &str) -> BlockDevice {
    BlockDevice {
        name: name.into(),
        model: Some("Fast SSD 3000".into()),
        kind: "nvme".into(),
        is_rotational: Some(false),
        scheduler: Some("none".into()),
        queue_requests: Some(1023),
        request_bytes_max: Some(128 << 10),
        segments_max: Some(33),
        sector_bytes: Some(512),
        pcie: Some(Pcie { generation: 4, lanes: 4, generation_max: 4, lanes_max: 4, bytes_per_s: 7_876_923_072 }),
        members: vec![],
    }
}

fn gpu(index: u32) -> GpuFacts {
    let (name, pci_bus_id) = ("NVIDIA H100 80GB HBM3".into(), format!("0000:{:02x}:00.0", 0x65 + index));
    GpuFacts { index, name, memory_bytes: 85_029_158_912, pci_bus_id }
}

fn card(index: u32, numa_node: Option<u64>) -> CudaDevice {
    CudaDevice { facts: gpu(index), numa_node }
}

fn a_report() -> Report {
    let raid = BlockDevice {
        members: vec![disk("nvme0n1"), disk("nvme1n1")],
        kind: "raid0".into(),
        name: "md0".into(),
        ..BlockDevice::default()
    };
    let direct =
        DirectReport { works: true, memory_alignment_bytes: Some(4), offset_alignment_bytes: Some(512), reason: None };
    let folder = FolderReport {
        path: "/mnt/data".into(),
        mount: Mount {
            file_system: "xfs".into(),
            source: "/dev/md0".into(),
            point: "/mnt/data".into(),
            options: vec!["rw".into(), "noatime".into()],
            ..Mount::default()
        },
        total_bytes: 7_680_000_000_000,
        free_bytes: 1_200_000_000_000,
        is_writable: true,
        routes: Routes {
            direct: Some(direct),
            gds: Some(GdsReport {
                mode: "compatibility",
                reason: Some("the kernel module nvidia-fs is not loaded".into()),
                reads: None,
            }),
            gpu_route: Some(DefaultGpuRoute { kind: "bounce", reason: "something better is not there".into() }),
        },
        device: Some(raid),
        error: None,
    };
    let missing = FolderReport { path: "/no".into(), error: Some("/no: not found".into()), ..FolderReport::default() };
    let backend = |name, works, is_chosen, detail: &str, errno, remedy: Option<&str>| BackendReport {
        name,
        works,
        is_chosen,
        detail: detail.into(),
        errno,
        remedy: remedy.map(Into::into),
    };
    let finding = |severity, text: &str, remedy: &str| Finding { severity, text: text.into(), remedy: remedy.into() };
    Report {
        version: "1.2.3",
        machine: Machine {
            system: System {
                kernel: "6.18.0".into(),
                machine: "x86_64".into(),
                container: Some("docker".into()),
                virtual_machine: None,
                cpu: Cpu { model: Some("Some CPU".into()), cpus: 64, numa_nodes: 2 },
                memory: SystemMemory {
                    bytes: 512_000_000_000,
                    available_bytes: 500_000_000_000,
                    memlock_bytes: Some(8 << 20),
                    may_lock_freely: false,
                    huge_pages: Some("madvise".into()),
                },
            },
            backends: vec![
                backend(
                    "io_uring",
                    false,
                    false,
                    "the container's filter forbids it",
                    Some(1),
                    Some("allow io_uring_setup"),
                ),
                backend("aio", true, true, "3 of 65536 system-wide ops in use", None, None),
                backend("threads", true, false, "up to 16 threads per worker", None, None),
            ],
            gpu: GpuReport {
                devices: vec!["NVIDIA H100".into()],
                driver: Some("550.54.15".into()),
                nvidia_fs: None,
                libcuda: Some("/usr/lib64/libcuda.so.1".into()),
                cuda: Some("12.4.1".into()),
                libcufile: Some("/usr/lib64/libcufile.so.0".into()),
                cufile: Some("1.9.0".into()),
                cuda_driver: Some("12.4".into()),
                cuda_devices: vec![card(0, Some(0)), card(1, None)],
                missing: None,
            },
            packages: vec![
                Package { name: "Python".into(), version: "3.12.1".into() },
                Package { name: "torch".into(), version: "2.9.0".into() },
            ],
            ops: vec![
                OpReport { name: "async_io", is_installed: true, is_compatible: true, reason: None },
                OpReport { name: "gds", is_installed: false, is_compatible: false, reason: Some("not here".into()) },
            ],
        },
        folders: vec![folder, missing],
        findings: vec![
            finding(Severity::Broken, "/no: not found", "name a folder that exists"),
            finding(
                Severity::Slow,
                "io_uring does not work: the container's filter forbids it",
                "allow io_uring_setup",
            ),
            finding(Severity::Note, "something to know", "look at it"),
        ],
    }
}

#[test]
fn report_text() {
    insta::assert_snapshot!("report", show::report::draw(&a_report()));
    let machine = Machine { gpu: GpuReport::default(), packages: vec![], ..a_report().machine };
    let nothing = Report { findings: vec![], folders: vec![], machine, ..a_report() };
    insta::assert_snapshot!("report_without_findings", show::report::draw(&nothing));
    // Only the lines about GPUs differ.
    let lines = |gpu: GpuReport| {
        let machine = Machine { gpu, ..a_report().machine };
        let text = show::report::draw(&Report { machine, folders: vec![], ..a_report() });
        text.lines().skip_while(|line| !line.starts_with("gpu")).take(2).collect::<Vec<_>>().join("\n")
    };
    let reason = || Some("the CUDA driver could not be loaded (not found); install it".to_owned());
    let hidden = GpuReport { cuda_devices: vec![], cuda_driver: None, missing: reason(), ..a_report().machine.gpu };
    insta::assert_snapshot!("report_without_libcuda", lines(hidden));
    insta::assert_snapshot!("report_without_gpu", lines(GpuReport { missing: reason(), ..GpuReport::default() }));
}

fn sample(wall_s: f64, us: u64) -> Sample {
    Sample {
        bytes: 2 << 30,
        wall_s,
        transfer_s: wall_s,
        cpu_s: 0.01,
        by_route: RouteBytes { direct: 2 << 30, ..RouteBytes::default() },
        latencies_us: [(us, 99), (us * 3, 1)].into(),
        timeline: vec![(wall_s / 2.0, 1 << 30), (wall_s, 2 << 30)],
    }
}

fn workload() -> Workload {
    Workload {
        durability: Durability::Data,
        validate: true,
        config: config(2, 16),
        ..Workload::new(Direction::Write, vec!["/mnt/data".into()], 2 << 30)
    }
}

fn config(workers: u32, queue_depth: u32) -> Config {
    Config { backend: BackendChoice::Uring, workers, queue_depth, block_bytes: 2 << 20, ..Config::default() }
}

#[test]
fn bench_text() {
    let (ours, theirs) = ([sample(0.5, 700), sample(0.4, 800)], [sample(0.6, 5000), sample(0.7, 6000)]);
    let line = |name: &str, samples: &[Sample]| ToolResult {
        name: name.into(),
        summary: summary::summarise(samples),
        samples: samples.to_vec(),
    };
    let outcome = BenchOutcome {
        version: "1.2.3",
        workload: workload(),
        processes: 1,
        backend: ChosenBackend { name: "io_uring".into(), reason: "it was asked for".into() },
        folders: vec![FolderSummary {
            path: "/mnt/data".into(),
            file_system: "xfs".into(),
            device: Some("md0".into()),
        }],
        gpu: None,
        results: vec![line("deepnvme", &ours), line("fio-3.36", &theirs)],
        ratio: Some(summary::ratio(&ours, &theirs)),
        is_validated: true,
        notes: vec!["the memory is not pinned: RLIMIT_MEMLOCK is 8192 KiB".into()],
    };
    insta::assert_snapshot!("bench", show::bench::draw(&outcome));
    let folders = vec!["/a".into(), "/b".into()];
    let striped = Workload {
        direction: Direction::Read,
        folders,
        stripe_bytes: Some(1 << 20),
        order: AccessOrder::Random,
        place: MemoryPlace { memory: Memory::Plain, gpu: None },
        buffer_bytes: Some(4 << 20),
        cache: Cache::Warm,
        ..workload()
    };
    let alone = BenchOutcome {
        workload: striped,
        processes: 4,
        results: vec![line("deepnvme", &ours)],
        ratio: None,
        is_validated: false,
        notes: vec![],
        ..outcome
    };
    insta::assert_snapshot!("bench_striped", show::bench::draw(&alone));
    let on_gpu = BenchOutcome {
        workload: Workload { place: MemoryPlace { memory: Memory::Pinned, gpu: Some(1) }, ..workload() },
        processes: 1,
        gpu: Some(gpu(1)),
        results: vec![line("deepnvme", &ours), line("fio-3.36 (host)", &theirs)],
        ratio: Some(summary::ratio(&ours, &theirs)),
        ..alone
    };
    insta::assert_snapshot!("bench_gpu", show::bench::draw(&on_gpu));
}

#[test]
fn tune_text() {
    let trial = |workers, depth, speeds: &[f64]| Trial { config: config(workers, depth), gb_per_s: speeds.to_vec() };
    let choice = Choice {
        config: config(1, 8),
        gb_per_s: 6.1,
        gb_per_s_default: 5.0,
        confidence: "within 1.6% of the best of 3 tried, 2 candidates indistinguishable; the smallest was chosen"
            .into(),
        tried: vec![trial(4, 32, &[6.2, 6.3, 6.1]), trial(1, 8, &[6.1, 6.0, 6.2]), trial(2, 16, &[5.0])],
    };
    let result = FolderResult {
        folders: vec!["/mnt/data".into()],
        gds: None,
        read: Some(choice.clone()),
        write: Some(choice),
        both: Some(config(1, 8)),
    };
    let outcome = tune::TuneOutcome {
        version: "1.2.3",
        space: SearchSpace::of_machine(4, vec![BackendChoice::Auto], false),
        space_len: 480,
        io_bytes: 400 << 20,
        gpu: Some(1),
        seconds: 59.6,
        results: vec![result],
        is_interrupted: true,
    };
    insta::assert_snapshot!("tune", show::tune::draw(&outcome, Some("deepnvme.toml".as_ref())));
}
