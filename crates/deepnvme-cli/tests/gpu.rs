//! Benchmarks and reports with GPUs, on a fake driver.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "../../deepnvme-io/tests/gpu/fake_driver.rs"]
mod fake_driver;

use std::path::Path;

use deepnvme_cli::Launcher;
use deepnvme_cli::commands::{self as command, Session};
use deepnvme_io::Config;
use deepnvme_perf::measure::{Direction, Memory, MemoryPlace, NoObserver, Runner, Workload};
use fake_driver::Gpu;
use serde_json::Value;

/// Runs a command. Returns the exit status, standard output and standard error.
fn run(arguments: &[&str]) -> (u8, String, String) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = command::run(
        ["deepnvme"].iter().chain(arguments).copied(),
        &mut Session {
            stdout: &mut stdout,
            stderr: &mut stderr,
            interrupted: &|| false,
            launcher: Launcher { program: "/bin/false".into(), arguments: vec![] },
            python: "python3".into(),
        },
    );
    (status, String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Runs a command that succeeds. Returns its standard output.
fn succeed(arguments: &[&str]) -> String {
    let (status, stdout, stderr) = run(arguments);
    assert_eq!((status, stderr.as_str()), (0, ""), "{arguments:?}");
    stdout
}

/// Runs a command that succeeds with JSON on its standard output.
fn succeed_with_json(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(arguments)).unwrap()
}

fn set_up() -> (Gpu, tempfile::TempDir) {
    (Gpu::new(), folder())
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

const SMALL: [&str; 6] = ["--size", "3M", "--loops", "2", "--block-bytes", "64K"];

#[test]
fn gpu_memory_is_measured_and_validated() {
    let (gpu, folder) = set_up();
    for (direction, order) in [("read", None), ("write", None), ("read", Some("--random")), ("write", Some("--random"))]
    {
        let more = ["--gpu=1", "--validate", "--json", text(folder.path())];
        let outcome = succeed_with_json(&[&["bench", direction], &SMALL[..], order.as_slice(), &more].concat());
        assert_eq!((&outcome["gpu"]["index"], &outcome["gpu"]["name"]), (&1.into(), &"Fake GPU 1".into()));
        assert_eq!((&outcome["workload"]["gpu"], &outcome["is_validated"]), (&1.into(), &true.into()));
        assert_eq!(outcome["notes"], Value::Array(vec![]), "the slots are registered");
        let summary = &outcome["results"][0]["summary"];
        assert_eq!((&summary["bytes_bounced"], &summary["bytes_direct"]), (&(3 << 20).into(), &0.into()), "{summary}");
        assert_eq!(gpu.live("device_allocations"), 0);
        gpu.assert_clean();
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_table_names_the_gpu_and_its_route() {
    let (_gpu, folder) = set_up();
    let table = succeed(&[&["bench", "read"], &SMALL[..], &["--gpu", text(folder.path())]].concat());
    assert!(table.contains(", cold, memory of cuda:0\n"), "{table}");
    assert!(table.contains("\ncuda:0 (Fake GPU 0), through bounce buffers\n"), "{table}");
}

#[test]
fn cufile_is_measured_or_fails_with_the_reason() {
    let (gpu, folder) = set_up();
    for direction in ["read", "write"] {
        let more = ["--gpu", "--gds", "--validate", text(folder.path())];
        let table = succeed(&[&["bench", direction], &SMALL[..], &more].concat());
        assert!(table.contains("\ncuda:0 (Fake GPU 0), with cuFile\n"), "{table}");
        let outcome = succeed_with_json(&[&["bench", direction], &SMALL[..], &more, &["--json"]].concat());
        let summary = &outcome["results"][0]["summary"];
        assert_eq!((&summary["bytes_direct"], &summary["bytes_bounced"]), (&(3 << 20).into(), &0.into()), "{summary}");
        gpu.assert_clean();
    }
    let (status, _, stderr) = run(&[&["bench", "read"], &SMALL[..], &["--gds", text(folder.path())]].concat());
    assert!(status == 2 && stderr.contains("add --gpu"), "{status}: {stderr}");
    gpu.fail("cuFileDriverOpen", 0, 5001);
    let (status, _, stderr) = run(&[&["bench", "read"], &SMALL[..], &["--gpu", "--gds", text(folder.path())]].concat());
    assert!(
        status != 0 && stderr.contains("5001") && stderr.contains("GPUDirect Storage is required"),
        "{status}: {stderr}"
    );
}

#[test]
fn staged_copies_are_noted() {
    let (gpu, folder) = set_up();
    gpu.fail("cuMemHostRegister_v2", 0, 2);
    let options = ["--workers", "1", "--gpu", text(folder.path())];
    let (status, table, _) = run(&[&["bench", "write"], &SMALL[..], &options].concat());
    assert_eq!(status, 0, "{table}");
    assert!(table.contains("note: the driver staged the copies from and to the GPU: "), "{table}");
    gpu.clear();
}

#[test]
fn invalid_options_are_refused() {
    let (gpu, folder) = set_up();
    let place = text(folder.path());
    for (arguments, expected) in [
        (&["bench", "read", place, "--gpu=7"][..], "--gpu=7: there is no such GPU; there are 2"),
        (&["bench", "read", place, "--gpu", "--memory", "plain"], "host memory"),
        (&["bench", "read", place, "--gpu", "1"], "write --gpu=1"),
        (&["bench", "read", place, "--gds"], "--gds needs GPU memory; add --gpu"),
        (&["tune", place, "--gpu=2"], "there are 2"),
        (&["tune", place, "--gds"], "--gds needs GPU memory; add --gpu"),
        (
            &["ds_io", "--folder", place, "--io_size", "1M", "--gpu", "--multi_process", "3"],
            "--gpu=2: there is no such",
        ),
        (&["ds_nvme_tune", "--nvme_dir", place, "--gds"], "use deepnvme tune --gpu --gds"),
    ] {
        let (status, _, stderr) = run(arguments);
        assert_eq!(status, 2, "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
    gpu.fail("cuMemAlloc_v2", 0, 2);
    let (status, _, stderr) = run(&[&["bench", "read", place, "--gpu"], &SMALL[..]].concat());
    assert!(status == 1 && stderr.contains("cuda:0 has no") && stderr.contains("bytes left"), "{stderr}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn settings_are_searched_with_gpu_memory() {
    let (gpu, folder) = set_up();
    let elsewhere = self::folder();
    let settings = elsewhere.path().join("found.toml");
    let sweep = elsewhere.path().join("sweep.json");
    std::fs::write(&sweep, r#"{"block_size": ["64K", "128K"], "queue_depth": [4], "io_parallel": [1]}"#).unwrap();
    let options = ["--budget", "1s", "--size", "1M", "--gpu", "--json", "--output", text(&settings)];
    let found =
        succeed_with_json(&[&["tune", text(folder.path()), "--sweep-config", text(&sweep)], &options[..]].concat());
    assert_eq!(found["gpu"], 0);
    assert!(found["results"][0]["read"]["gb_per_s"].as_f64().unwrap() > 0.0);
    assert!(settings.is_file());
    assert_eq!(gpu.live("device_allocations"), 0);
}

#[test]
fn settings_for_cufile_are_searched_or_the_reason_is_reported() {
    let (gpu, folder) = set_up();
    let elsewhere = self::folder();
    let settings = elsewhere.path().join("found.toml");
    let options = ["--budget", "1s", "--size", "2M", "--gpu", "--gds", "--output", text(&settings)];
    let arguments = [&["tune", text(folder.path())], &options[..]].concat();
    let found = succeed_with_json(&[&arguments[..], &["--json"]].concat());
    let place = &found["results"][0];
    assert_eq!((&place["gds"]["kind"], &place["gds"]["reason"]), (&"cufile".into(), &Value::Null));
    for direction in ["read", "write"] {
        let tried = place[direction]["tried"].as_array().unwrap();
        assert!(tried.iter().all(|trial| trial["config"]["gds"] == "preferred"), "{tried:?}");
        assert!(tried.iter().all(|trial| trial["config"]["window"] == "sliding"), "{tried:?}");
    }
    assert!(std::fs::read_to_string(&settings).unwrap().contains("gds = \"preferred\""));
    let (status, table, _) = run(&arguments);
    assert!(status == 0 && table.contains("\nwith cuFile\n"), "{table}");
    gpu.assert_clean();

    gpu.fail_always("cuFileDriverOpen", 5001);
    let (status, table, _) = run(&arguments);
    assert!(status == 0 && table.contains("\nthrough bounce buffers: cuFile does not start"), "{table}");
    let found = succeed_with_json(&[&arguments[..], &["--json"]].concat());
    assert_eq!(found["results"][0]["gds"]["kind"], "bounce");
    assert_eq!(found["results"][0]["both"]["gds"], "disabled");
    gpu.clear();
}

#[test]
fn a_new_engine_registers_its_slots_before_it_is_measured() {
    let (_gpu, folder) = set_up();
    let config = Config { block_bytes: 64 << 10, ..Config::default() };
    let workload = Workload {
        place: MemoryPlace { memory: Memory::Pinned, gpu: Some(0) },
        config: config.clone(),
        ..Workload::new(Direction::Write, vec![folder.path().into()], 1 << 20)
    };
    let mut runner = Runner::prepare(workload, &mut NoObserver).unwrap();
    runner.reconfigure(Direction::Read, &config, &mut NoObserver).unwrap();
    assert_eq!(runner.engine().stats().bytes_to_gpu, 0, "only the direction changes, the engine stays");
    runner.reconfigure(Direction::Read, &Config { queue_depth: 4, ..config }, &mut NoObserver).unwrap();
    assert_eq!(runner.engine().stats().bytes_to_gpu, 1 << 20);
}

#[test]
fn deepspeeds_commands_use_gpu_memory() {
    let (gpu, folder) = set_up();
    let logs = self::folder();
    let mapping = format!("{}:1", text(folder.path()));
    let copied = gpu.calls("cuMemcpyHtoDAsync_v2");
    let lines =
        succeed(&["ds_io", "--folder_to_device_mapping", &mapping, "--io_size", "1M", "--gpu", "--read", "--validate"]);
    assert!(lines.contains("E2E Read Speed = "), "{lines}");
    assert!(gpu.calls("cuMemcpyHtoDAsync_v2") > copied);
    let sweep = logs.path().join("sweep.json");
    std::fs::write(&sweep, r#"{"block_size": ["64K"], "queue_depth": [4], "io_parallel": [1]}"#).unwrap();
    let lines = succeed(&[
        "ds_nvme_tune",
        "--nvme_dir",
        text(folder.path()),
        "--io_size",
        "1M",
        "--gpu",
        "--sweep_config",
        text(&sweep),
        "--log_dir",
        text(logs.path()),
    ]);
    assert!(lines.contains("Best performance (GB/sec): "), "{lines}");
}

#[test]
fn a_report_has_the_facts_of_the_driver() {
    let (_gpu, folder) = set_up();
    let (status, lines, _) = run(&["report", text(folder.path())]);
    assert_eq!(status, 0);
    assert!(lines.contains("for CUDA 13.0") && !lines.contains("no libcuda"), "{lines}");
    for index in 0..2 {
        let card = format!("cuda:{index}: Fake GPU {index}, ");
        assert!(lines.contains(&card) && lines.contains(&format!("PCI 0000:1{index}:00.0")), "{lines}");
    }
    assert!(lines.contains("to and from GPUs through bounce buffers: "), "{lines}");
    let report = succeed_with_json(&["report", "--json", text(folder.path())]);
    assert_eq!(report["gpu"]["cuda_devices"][1]["pci_bus_id"], "0000:11:00.0");
    assert_eq!((&report["gpu"]["cuda_driver"], &report["gpu"]["missing"]), (&"13.0".into(), &Value::Null));
    assert_eq!(report["folders"][0]["gpu_route"]["kind"], "bounce");
}

#[test]
fn a_report_tries_cufile_in_each_folder() {
    let (gpu, folder) = set_up();
    let report = || succeed_with_json(&["report", "--json", text(folder.path())])["folders"][0]["gds"].clone();
    let direct = serde_json::json!({"nvidia_fs": 1, "peer_to_peer": 0, "posix": 0});
    assert_eq!(report(), serde_json::json!({"mode": "direct", "reason": null, "reads": direct}));
    let (_, lines, _) = run(&["report", text(folder.path())]);
    assert!(lines.contains("GPUDirect Storage: direct through nvidia-fs, by cuFile's own statistics\n"), "{lines}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file stays behind");

    gpu.fail("cuFileHandleRegister@unsupported", 0, 1);
    let refused = report();
    assert_eq!((&refused["mode"], &refused["reads"]), (&"compatibility".into(), &Value::Null));
    assert!(refused["reason"].as_str().unwrap().contains("(5008)"), "{refused}");

    // Another library of the process has opened cuFile, and allows copies.
    // SAFETY: the functions have this type; their result of eight bytes is not used.
    let call = |symbol| unsafe { gpu.function::<unsafe extern "C" fn() -> u64>(symbol)() };
    assert_eq!(call("cuFileDriverOpen"), 0);
    gpu.fail("cuFileHandleRegister@unsupported", 0, 1);
    let copied = report();
    assert_eq!((&copied["mode"], &copied["reads"]["posix"]), (&"compatibility".into(), &1.into()));
    assert!(copied["reason"].as_str().unwrap().contains("copies through host memory"), "{copied}");
    assert_eq!(report()["mode"], "direct");
    assert_eq!(call("cuFileDriverClose"), 0);

    // A read that fails is no copy through the host.
    gpu.fail("cuFileRead", 0, 5030);
    let failed = report();
    // The rules name the mode. They know more if the `python3` of this shell has NVIDIA's package of cuFile.
    assert!(["none", "compatibility"].iter().any(|mode| failed["mode"] == **mode), "{failed}");
    assert!(failed["reason"].as_str().unwrap().contains("5030"), "{failed}");
    // Without an answer, the report is still made.
    gpu.fail_always("cuFileDriverOpen", 5001);
    let not_started = report();
    assert!(not_started["reason"].as_str().unwrap().contains("cuFile does not start"), "{not_started}");
    gpu.fail_always("cuMemAlloc_v2", 2);
    assert_ne!(report()["mode"], Value::Null);
}
