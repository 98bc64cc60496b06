//! The binary as users and scripts run it: its output, its messages, and its exit status.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn deepnvme(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepnvme"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = deepnvme(arguments).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Runs a command line whose arguments contain no spaces.
fn run_line(line: &str) -> (i32, String, String) {
    run(&line.split(' ').collect::<Vec<_>>())
}

fn folder() -> tempfile::TempDir {
    match std::env::var_os("DEEPNVME_TEST_DIR") {
        Some(base) => tempfile::tempdir_in(base).unwrap(),
        None => tempfile::tempdir().unwrap(),
    }
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

/// Metrics become `#`, and runs of blanks one blank, so that what is left is the same everywhere.
fn masked(text: &str) -> String {
    let mut out = String::new();
    let mut was_digit = false;
    for c in text.chars() {
        let is_digit = c.is_ascii_digit() || (was_digit && c == '.');
        match (is_digit, was_digit) {
            (true, false) => out.push('#'),
            (true, true) => {}
            (false, _) if c == ' ' && out.ends_with(' ') => {}
            (false, _) => out.push(c),
        }
        was_digit = is_digit;
    }
    out
}

const SMALL: [&str; 6] = ["--size", "2M", "--loops", "2", "--warm-up", "0"];

fn bench(direction: &str, folders: &[&Path], more: &[&str]) -> (i32, String, String) {
    let folders: Vec<_> = folders.iter().map(|folder| folder.to_str().unwrap()).collect();
    run(&[&["bench", direction], &SMALL[..], more, &folders].concat())
}

#[test]
fn help_has_examples_and_ends_with_0() {
    let (status, help, stderr) = run(&["--help"]);
    assert_eq!((status, stderr.as_str()), (0, ""));
    assert!(help.contains("Examples:") && help.contains("report") && help.contains("bench"), "{help}");
    assert!(!help.contains("bench-process") && !help.contains('\u{1b}'), "{help}");
    for command in [&["report"][..], &["bench"], &["rows", "inspect"], &["rows", "pack"], &["rows", "bench"]] {
        let (status, help, _) = run(&[command, &["--help"]].concat());
        assert!(status == 0 && help.contains("Examples:"), "{help}");
    }
    assert_eq!(run(&["--version"]).1.trim(), format!("deepnvme {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_full_disk_is_an_error_and_a_closed_pipe_is_not() {
    for arguments in [&["--help"][..], &["--version"], &["completions", "bash"], &["man"], &["report", "/tmp"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let Output { status, stderr, .. } = deepnvme(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8(stderr).unwrap();
        assert!(said.starts_with("deepnvme: cannot write to standard output: No space left"), "{arguments:?}: {said}");
        assert_eq!(status.code(), Some(1), "{arguments:?}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let Output { status, stderr, .. } = deepnvme(arguments).stdout(writer).output().unwrap();
        assert_eq!((status.code(), &*stderr), (Some(0), &b""[..]), "{arguments:?}");
    }
}

#[test]
fn usage_errors_end_with_2_and_a_hint() {
    for (arguments, hint) in [
        (&["bench", "read", "/tmp", "--quue-depth", "3"][..], "--queue-depth"),
        (&["repotr"], "report"),
        (&["bench", "read"], "FOLDERS"),
        (&["bench", "read", "/dev/null"], "is a device"),
        (&["bench", "read", "/proc/self/status"], "never touched"),
        (&["bench", "write", "/tmp", "--size", "1.5Q"], "512MiB"),
        (&["bench", "write", "/tmp", "--loops", "0"], "between 1 and 1000"),
        (&["bench", "write", "/tmp", "--workers", "99"], "between 1 and 64"),
        (&["bench", "read", "/tmp", "--gds"], "add --gpu"),
        (&["bench", "read", "/tmp", "--plot", "picture.png"], ".svg or .html"),
        (&["rows"], "inspect"),
        (&["rows", "inspect", "a", "--shape", "9,x", "--dtype", "int8"], "--shape"),
        (&["rows", "inspect", "a", "--shape", "9,3"], "--dtype"),
        (&["rows", "inspect", "a", "--tensor", "t", "--shape", "9,3", "--dtype", "int8"], "cannot be used with"),
        (&["rows", "inspect", "a", "--scales", "s"], "--tensor"),
        (&["rows", "inspect", "a", "--offset", "7"], "--shape"),
        (&["rows", "pack", "a", "b"], "--tensor"),
        (&["rows", "bench", "a", "--memory", "1XB"], "512MiB"),
        (&["rows", "bench", "a", "--rows", "16,0"], "--rows"),
        (&["rows", "bench", "a", "--zipf", "nan"], "between 0 and 10"),
        (&["rows", "bench", "a", "--against", "fio,dd"], "mmap"),
    ] {
        let (status, output, stderr) = run(arguments);
        assert_eq!((status, output.as_str()), (2, ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains(hint), "{arguments:?}: {stderr}");
    }
    assert_eq!(run(&[]).0, 2, "without a command there is only help");
}

#[test]
fn a_missing_driver_is_reported_with_its_path() {
    for (arguments, status) in [
        (&["bench", "read", "/tmp", "--gpu"][..], 1),
        (&["tune", "/tmp", "--gpu=1"], 1),
        (&["ds_nvme_tune", "--nvme_dir", "/tmp", "--gpu"], 1),
        // One of the findings about its arguments, as DeepSpeed reports them.
        (&["ds_io", "--folder", "/tmp", "--io_size", "1M", "--gpu"], 2),
    ] {
        let output = deepnvme(arguments).env("DEEPNVME_LIBCUDA", "/no/such/libcuda.so").output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {stderr}");
        let parts =
            ["--gpu: the CUDA driver could not be loaded", "/no/such/libcuda.so: cannot open", "DEEPNVME_LIBCUDA"];
        assert!(parts.iter().all(|part| stderr.contains(part)), "{arguments:?}: {stderr}");
    }
}

#[test]
fn several_processes_use_gpu_memory() {
    let folder = folder();
    let options = ["--processes", "2", "--gpu=1", "--validate", folder.path().to_str().unwrap()];
    let mut command = deepnvme(&[&["bench", "write"], &SMALL[..], &options].concat());
    let output = command.env("DEEPNVME_LIBCUDA", deepnvme_fake_driver::library_path()).output().unwrap();
    let (text, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{stderr}");
    assert!(text.contains(" by each of 2 processes, ") && text.contains(", memory of cuda:1, "), "{text}");
    assert!(is_empty(folder.path()));
}

#[test]
fn report_has_every_section_as_text_and_json() {
    let folder = folder();
    let path = folder.path().to_str().unwrap();
    let (status, text, stderr) = run(&["report", path, "/no/such/folder"]);
    assert_eq!((status, stderr.as_str()), (0, ""));
    for part in
        ["deepnvme ", "kernel ", "cpu ", "memory ", "io_uring ", "aio ", "threads ", "gpu ", "python ", "folder "]
    {
        assert!(text.lines().any(|line| line.starts_with(part)), "{part}: {text}");
    }
    assert!(text.contains("async_io ............... [YES] ...... [OKAY]"), "{text}");
    assert!(text.contains("gds .................... [YES] ...... [NO]"), "{text}");
    assert!(text.contains("broken  /no/such/folder") && text.contains("        > name a folder that exists"), "{text}");
    let (_, json, _) = run(&["report", "--json", path]);
    let report: Value = serde_json::from_str(&json).unwrap();
    let keys: Vec<_> = report.as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys.len(), 8, "{keys:?}");
    assert_eq!(report["backends"].as_array().unwrap().len(), 3);
    assert_eq!(report["folders"][0]["path"], path);
    assert!(is_empty(folder.path()), "no file stays behind");
}

#[test]
fn bench_prints_its_table_and_removes_its_files() {
    let folder = folder();
    let (status, text, stderr) =
        bench("read", &[folder.path()], &["--validate", "--backend", "threads", "--workers", "1"]);
    assert_eq!((status, stderr.as_str()), (0, ""), "no progress bar without a terminal");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], "read 2 MiB, sequential, cold, pinned memory");
    assert_eq!(lines[1], "threads, 1 worker x depth 128, blocks of 2 MiB");
    assert!(lines[2].starts_with(folder.path().to_str().unwrap()), "{text}");
    assert_eq!(masked(lines[4]).trim(), "GB/s min - max block p# p# CPU s/GB direct bounced buffered");
    assert!(lines[5].starts_with("deepnvme "), "{text}");
    assert_eq!(lines[7], "every byte of every round was compared");
    assert!(is_empty(folder.path()));
}

#[test]
fn every_kind_of_workload_runs_and_validates() {
    let folders = [folder(), folder()];
    let both = [folders[0].path(), folders[1].path()];
    for more in [
        &["--random", "--block-bytes", "64K"][..],
        &["--memory", "plain", "--durability", "full"],
        &["--direct", "disabled", "--cache", "warm"],
        &["--stripe-bytes", "64K"],
        &["--processes", "2", "--submit", "single"],
        &["--size", "1234567", "--backend", "aio"],
    ] {
        for direction in ["read", "write"] {
            let (status, json, stderr) = bench(direction, &both, &[more, &["--validate", "--json"]].concat());
            assert_eq!(status, 0, "{direction} {more:?}: {stderr}");
            let outcome: Value = serde_json::from_str(&json).unwrap();
            let summary = &outcome["results"][0]["summary"];
            assert!(
                summary["gb_per_s"].as_f64().unwrap() > 0.0 && summary["latency_us_p99"].as_u64().is_some(),
                "{json}"
            );
            let sample = &outcome["results"][0]["samples"][1];
            let routes =
                ["bytes_direct", "bytes_bounced", "bytes_buffered"].map(|route| sample[route].as_u64().unwrap());
            let files = if more.contains(&"--stripe-bytes") { 1 } else { 2 };
            let processes = if more.contains(&"--processes") { 2 } else { 1 };
            let bytes = if more.contains(&"1234567") { 1_234_567 } else { 2 << 20 };
            assert_eq!(sample["bytes"], files * processes * bytes, "{direction} {more:?}");
            assert_eq!(routes.iter().sum::<u64>(), files * processes * bytes, "{direction} {more:?}: {routes:?}");
            assert!(folders.iter().all(|folder| is_empty(folder.path())), "{direction} {more:?}");
        }
    }
}

#[test]
fn plots_are_pictures_and_pages() {
    let folder = folder();
    let work = folder.path().join("work");
    std::fs::create_dir(&work).unwrap();
    for (name, begin) in [("plot.svg", "<svg"), ("plot.html", "<!doctype html>")] {
        let plot = folder.path().join(name);
        let (status, _, stderr) = bench("write", &[&work], &["--plot", plot.to_str().unwrap()]);
        assert_eq!((status, stderr.as_str()), (0, ""));
        let text = std::fs::read_to_string(plot).unwrap();
        assert!(text.starts_with(begin) && text.contains("latency of blocks") && text.contains("GB/s"), "{name}");
        assert!(!text.contains("http://") || text.contains("http://www.w3.org/2000/svg"), "it is self-contained");
    }
}

#[test]
fn fio_runs_with_the_same_parameters() {
    let folder = folder();
    let more = ["--against", "fio", "--size", "8M"];
    let (status, text, stderr) = bench("read", &[folder.path()], &more);
    if stderr.contains("fio is not installed") {
        assert_eq!(status, 2);
        // Written past the test harness, so that scripts/run_tests.py counts it as skipped.
        let _ = writeln!(std::io::stderr(), "skipped: fio_runs_with_the_same_parameters: fio is not installed");
        return;
    }
    assert_eq!((status, stderr.as_str()), (0, ""));
    assert!(text.lines().any(|line| line.starts_with("fio-")), "{text}");
    let last = masked(text.lines().rfind(|line| line.contains("times fio")).unwrap());
    assert_eq!(last, "# times fio's speed: median of # rounds, # to #");
    assert!(is_empty(folder.path()));
    let (status, _, stderr) = bench("write", &[folder.path()], &[&more[..], &["--stripe-bytes", "1M"]].concat());
    assert!(status == 2 && stderr.contains("--stripe-bytes"), "{stderr}");
}

#[test]
fn refusals_of_the_machine_end_with_1_and_a_remedy() {
    let (status, _, stderr) = bench("write", &[Path::new("/proc/sys")], &[]);
    assert!(status == 1 && stderr.starts_with("deepnvme: /proc/sys: cannot make a file"), "{stderr}");
    let folder = folder();
    let (status, _, stderr) = bench("write", &[folder.path()], &["--size", "900T"]);
    assert!(
        status == 1 && stderr.contains("900 TiB are needed, and ") && stderr.contains("--size smaller"),
        "{stderr}"
    );
    assert!(is_empty(folder.path()));
}

#[test]
fn a_failure_of_python_is_told_once_and_keeps_its_exit_status() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let python = folder.path().join("python3");
    std::fs::write(&python, "#!/bin/sh\n[ \"$1\" = -c ] && exit 0\necho 'deepnvme: no such model' >&2\nexit 2\n")
        .unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ended = deepnvme(&["generate", "--model", "none", "--memory", "1GB", "--prompt", "a"])
        .env("PATH", folder.path())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(ended.stderr).unwrap(), "deepnvme: no such model\n");
    assert_eq!(ended.status.code(), Some(2));
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = deepnvme(&["bench", "--help"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let status = child.wait().unwrap();
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!((status.code(), stderr.as_str()), (Some(0), ""));
    let mut child = deepnvme(&["report"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// Interrupts the benchmark once its files exist; every process must clean up.
#[test]
fn an_interrupted_benchmark_removes_its_files() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, more) in [(Signal::INT, &[][..]), (Signal::TERM, &["--processes", "2"])] {
        let folder = folder();
        let path = folder.path().to_str().unwrap();
        let arguments = [&["bench", "write", path, "--size", "4M", "--loops", "1000"][..], more].concat();
        let child = deepnvme(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let began = Instant::now();
        while is_empty(folder.path()) {
            assert!(began.elapsed() < Duration::from_secs(30), "no file appeared");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(100));
        kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("interrupted"), "{stderr}");
        assert!(is_empty(folder.path()), "{:?}", std::fs::read_dir(folder.path()).unwrap().collect::<Vec<_>>());
    }
}

#[test]
fn a_folder_removed_during_the_measurement_is_an_error() {
    let settings = folder();
    let output = settings.path().join("deepnvme.toml");
    for command in [
        &["bench", "read", "--size", "1M", "--loops", "1000"][..],
        &["tune", "--size", "1M", "--budget", "60s", "--output", output.to_str().unwrap()],
    ] {
        let folder = folder();
        let work = folder.path().join("work");
        std::fs::create_dir(&work).unwrap();
        let path = work.to_str().unwrap();
        let arguments = [command, &[path][..]].concat();
        let child = deepnvme(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let began = Instant::now();
        while is_empty(&work) && began.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_millis(100));
        std::fs::remove_dir_all(&work).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{command:?}: {stderr}");
        assert!(stderr.contains(path), "{command:?}: {stderr}");
    }
    assert!(is_empty(settings.path()), "no settings were written");
}

#[test]
fn completions_and_the_manual_page_have_all_options() {
    for shell in ["bash", "zsh", "fish"] {
        let (status, text, _) = run(&["completions", shell]);
        assert!(status == 0 && text.contains("deepnvme") && text.contains("queue-depth"), "{shell}");
    }
    let (status, page, _) = run(&["man"]);
    assert!(status == 0 && page.contains(".TH deepnvme") && page.contains("queue\\-depth"), "{page}");
    assert!(page.contains("deepnvme rows bench") && page.contains("zipf"), "commands of commands: {page}");
}

#[test]
fn tune_prints_its_tables_writes_its_settings_and_compares_them() {
    let (folder, results) = (folder(), folder());
    let (output, map) = (results.path().join("deepnvme.toml"), results.path().join("map.html"));
    let path = folder.path().to_str().unwrap();
    let line = format!("tune {path} --budget 2s --size 2M --output {} --plot {}", output.display(), map.display());
    let (status, text, stderr) = run_line(&line);
    assert_eq!((status, stderr.as_str()), (0, ""));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines[0], format!("{path}, 2 MiB in each trial"));
    assert_eq!(masked(lines[2]), "read GB/s trials settings");
    assert!(text.contains("\nwrite     GB/s  trials  settings\n") && text.contains("\nboth  "), "{text}");
    let chosen = lines.iter().filter(|line| line.starts_with('*')).count();
    assert_eq!(chosen, 2, "{text}");
    assert!(lines.iter().any(|line| masked(line).ends_with("times the default's # GB/s")), "{text}");
    assert!(text.contains("\"intra_op_parallelism\": ") && text.contains("DEEPNVME_CONFIG="), "{text}");
    let settings = std::fs::read_to_string(&output).unwrap();
    assert!(settings.starts_with("# Found by deepnvme tune") && settings.contains("[folder.read]"), "{settings}");
    assert!(std::fs::read_to_string(map).unwrap().contains("worker"));
    let compare = ["tune", path, "--size", "2M", "--compare", output.to_str().unwrap()];
    let (status, text, stderr) = run(&compare);
    assert_eq!(status, 0, "{stderr}");
    assert_eq!(text.matches("times as fast").count(), 2, "{text}");
    assert!(is_empty(folder.path()));
}

#[test]
fn deepspeeds_commands_take_its_options_and_print_its_lines() {
    let (folder, logs) = (folder(), folder());
    let path = folder.path().to_str().unwrap();
    for direction in [&["--read"][..], &[]] {
        let size = ["ds_io", "--folder", path, "--io_size", "1M", "--loops", "2", "--multi_process", "2", "--validate"];
        let (status, text, stderr) = run(&[&size[..], direction].concat());
        assert_eq!((status, stderr.as_str()), (0, ""));
        let name = if direction.is_empty() { "Write" } else { "Read" };
        let metrics: Vec<_> = text.lines().rev().take(4).map(masked).collect();
        let expected =
            ["E#E _ Speed = # GB/sec", "E#E _ Latency = # sec", "Task _ Speed = # GB/sec", "Task _ Latency = # sec"];
        assert_eq!(metrics, expected.map(|line| line.replace('_', name)));
        assert!(text.contains(&format!("[1]: process 1 <----> {path}\n")), "{text}");
    }
    let (status, text, stderr) = run(&["ds_io", "--io_size", "1M"]);
    assert!(
        status == 2 && stderr.contains("Found 1 validation error(s)\n  1: At least one of --folder"),
        "{text}{stderr}"
    );
    let (status, _, stderr) = run(&["ds_io", "--io_sise", "1M"]);
    assert!(status == 2 && stderr.contains("--io_size"), "{stderr}");
    let sweep = logs.path().join("sweep.json");
    std::fs::write(&sweep, r#"{"block_size": ["128K"], "queue_depth": [4], "io_parallel": [1, 2]}"#).unwrap();
    let log_dir = logs.path().join("logs");
    let (status, text, stderr) = run_line(&format!(
        "ds_nvme_tune --nvme_dir {path} --io_size 1M --sweep_config {} --log_dir {} --verbose",
        sweep.display(),
        log_dir.display()
    ));
    assert_eq!((status, stderr.as_str()), (0, ""));
    assert!(text.starts_with(&format!("Running DeepNVMe performance tuning on ['{path}']\n")), "{text}");
    assert!(masked(&text).contains("\nBest performance (GB/sec): read = #, write = #\n{\n \"aio\": {\n"), "{text}");
    assert!(log_dir.join("_aio_bench_write_logs/write_block_overlap_ftd1_d4_bs128K_p2.txt").exists());
    assert!(is_empty(folder.path()));
}

#[test]
fn commands_that_change_nothing_report_an_interrupt() {
    use deepnvme_cli::commands::{Session, run};
    let folder = tempfile::tempdir().unwrap();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = run(
        ["deepnvme", "report", folder.path().to_str().unwrap()],
        &mut Session {
            stdout: &mut stdout,
            stderr: &mut stderr,
            interrupted: &|| true,
            launcher: deepnvme_cli::Launcher { program: "/bin/false".into(), arguments: vec![] },
            python: "python3".into(),
        },
    );
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!((status, stdout.as_slice()), (1, &[][..]), "{said}");
    assert!(said.starts_with("deepnvme: interrupted"), "{said}");
}
