//! Real file systems: direct I/O support and its reporting, full disks, read-only folders, file size limits. Most tests
//! mount file systems, which requires root. Otherwise they are skipped visibly.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod common;

use std::path::Path;
use std::process::Command;

use common::mounts::{LoopDevice, Mounted};
use common::program_run::ProgramRun;
use common::{all_real, available, engine, open, skipped, small_config};
use deepnvme_io::{
    Access, Config, DirectMode, DirectState, Engine, ErrorKind, OpenOptions, SubmitMode, TensorFile, WriteMode,
    WriteOptions,
};
use deepnvme_testkit::data::{
    bytes_of, difference, own_memory_bytes, random_bytes, region_at, region_holding, temp_dir,
};
use deepnvme_testkit::model::{Model, Program, Scope};

const WHOLE: WriteOptions = WriteOptions { mode: WriteMode::WholeFile, durability: deepnvme_io::Durability::None };

fn any_engine() -> Engine {
    Engine::new(small_config(2, SubmitMode::Batch)).expect("some backend works")
}

/// Runs a random program on a new file of the folder, over every backend.
fn exercise(folder: &Path, mode: DirectMode) {
    for (kind, make) in all_real() {
        let engine = engine(small_config(2, SubmitMode::Batch), make);
        let path = folder.join(format!("{}.bin", kind.name()));
        let content = random_bytes(1, 500_001);
        std::fs::write(&path, &content).expect("a file of the folder");
        let scope = Scope { range: 0..600_000, block_bytes: 32 << 10, step_bytes_max: 300_000 };
        let label = format!("{} in {}, {mode:?}", kind.name(), folder.display());
        let file = open(&path, mode).expect("a file of the folder");
        let mut run = ProgramRun::new(&engine, file, Model::new(0, content), label);
        run.run(&Program::new(9, 60, &scope));
        let found = std::fs::read(&path).expect("the file");
        assert_eq!(difference(&found, run.model.bytes()), None, "{} in {}", kind.name(), folder.display());
    }
}

fn expect_direct(folder: &Path, sector_bytes: u64) {
    let file = open(&folder.join("direct.bin"), DirectMode::Required).expect("this file system has direct I/O");
    let DirectState::Direct { memory_alignment_bytes, offset_alignment_bytes } = file.direct() else {
        panic!("direct I/O was required, and the file is {:?}", file.direct());
    };
    assert!(memory_alignment_bytes.is_power_of_two() && memory_alignment_bytes <= 4096);
    assert_eq!(offset_alignment_bytes, sector_bytes, "of {}", folder.display());
}

fn expect_buffered(folder: &Path, reason_says: &str) {
    let path = folder.join("buffered.bin");
    let file = open(&path, DirectMode::Preferred).expect("preferred is not required");
    let DirectState::Buffered { reason } = file.direct() else {
        panic!("{} is direct: {:?}", path.display(), file.direct());
    };
    assert!(reason.contains(reason_says), "the reason does not say `{reason_says}`: {reason}");
    let error = open(&path, DirectMode::Required).expect_err("required cannot be had");
    assert_eq!((error.kind(), error.path()), (ErrorKind::Unsupported, Some(path.as_path())), "{error}");
    assert!(path.exists(), "what was there before stays");
    let new = folder.join("new.bin");
    let error = open(&new, DirectMode::Required).expect_err("required cannot be had");
    assert_eq!((error.kind(), error.path()), (ErrorKind::Unsupported, Some(new.as_path())), "{error}");
    assert!(!new.exists(), "a refusal leaves no file behind");
}

#[test]
fn ext4_and_xfs_of_both_sector_sizes_take_direct_io() {
    let wanted = [("ext4", 48, 512), ("ext4", 48, 4096), ("xfs", 320, 512), ("xfs", 320, 4096)];
    let image = |(kind, image_mib, sector_bytes)| {
        Mounted::image(kind, image_mib, sector_bytes, "defaults").map(|mounted| (mounted, sector_bytes))
    };
    for (mounted, sector_bytes) in available(wanted.map(image)) {
        expect_direct(mounted.folder(), sector_bytes);
        exercise(mounted.folder(), DirectMode::Required);
        exercise(mounted.folder(), DirectMode::Preferred);
    }
}

#[test]
fn a_journalled_ext4_goes_through_the_page_cache() {
    for mounted in available([Mounted::image("ext4", 48, 512, "data=journal")]) {
        expect_buffered(mounted.folder(), "direct I/O");
        exercise(mounted.folder(), DirectMode::Preferred);
    }
}

#[test]
fn tmpfs_goes_through_the_page_cache() {
    let mounted = Mounted::tmpfs(16);
    let shared = Path::new("/dev/shm");
    let folder = match &mounted {
        Ok(mounted) => mounted.folder().to_path_buf(),
        Err(_) if shared.is_dir() => tempfile::tempdir_in(shared).expect("a folder of tmpfs").keep(),
        Err(why) => return skipped(why),
    };
    expect_buffered(&folder, "direct I/O");
    exercise(&folder, DirectMode::Preferred);
    let stats_engine = any_engine();
    let file = open(&folder.join("stats.bin"), DirectMode::Preferred).expect("preferred is not required");
    let source = region_holding(0, &random_bytes(2, 100_000)).region();
    stats_engine.write(&file, 0, source, WHOLE).expect("accepted").wait().1.expect("written");
    let stats = stats_engine.stats();
    assert_eq!((stats.bytes_buffered, stats.bytes_direct, stats.bytes_bounced), (100_000, 0, 0));
    std::fs::remove_dir_all(&folder)
        .or_else(|error| if mounted.is_ok() { Ok(()) } else { Err(error) })
        .expect("clean up");
}

#[test]
fn an_overlay_works_in_whatever_state_it_reports() {
    let uppers = available([Mounted::image("ext4", 48, 512, "defaults"), Mounted::tmpfs(16)]);
    for overlay in available(uppers.iter().map(|upper| Mounted::overlay(upper.folder()))) {
        let file = open(&overlay.folder().join("state.bin"), DirectMode::Preferred).expect("preferred");
        if let DirectState::Buffered { reason } = file.direct() {
            assert!(!reason.is_empty());
        }
        exercise(overlay.folder(), DirectMode::Preferred);
    }
}

#[test]
fn a_block_device_is_a_file_of_fixed_size() {
    for device in available([512, 4096].map(|sector_bytes| LoopDevice::new(8, sector_bytes))) {
        let engine = any_engine();
        let options = OpenOptions { access: Access::ReadWrite, create: false, direct: DirectMode::Preferred };
        let file = TensorFile::open(&device.path, options).expect("a block device is a file");
        let bytes = random_bytes(3, 100_001);
        for (offset, write) in [(0, WHOLE), (12_345, WriteOptions::default())] {
            let source = region_holding(7, &bytes).region();
            engine.write(&file, offset, source, write).expect("accepted").wait().1.expect("written");
            let (returned, result) = engine.read(&file, offset, region_at(1, 100_001)).expect("accepted").wait();
            result.expect("read");
            let returned = bytes_of(&returned.expect("memory is returned").region());
            assert_eq!(difference(&returned, &bytes), None, "at {offset}");
        }
    }
}

#[test]
fn a_full_disk_names_the_needed_bytes_and_keeps_the_old_file() {
    let systems =
        [Mounted::image("ext4", 48, 512, "defaults"), Mounted::image("xfs", 320, 512, "defaults"), Mounted::tmpfs(16)];
    for mounted in available(systems) {
        let engine = any_engine();
        let path = mounted.folder().join("grows.bin");
        let old = random_bytes(4, 300_000);
        std::fs::write(&path, &old).expect("there is room for this");
        let file = open(&path, DirectMode::Preferred).expect("the file");
        let too_much = 400 << 20;
        // Untouched zeros of the source use no memory.
        let source = region_at(0, too_much).region();
        let (returned, result) = engine.write(&file, 0, source.clone(), WHOLE).expect("accepted").wait();
        let error = result.expect_err("the disk is too small");
        assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, Some(28)), "{error}");
        assert_eq!(error.path(), Some(path.as_path()));
        let missing = format!("{} bytes are needed", too_much - old.len());
        assert!(error.to_string().contains(&missing), "the needed bytes are not named: {error}");
        assert_eq!(returned.map(|returned| returned.len()), Some(too_much));
        let found = std::fs::read(&path).expect("the file");
        assert_eq!(difference(&found, &old), None, "the old content is gone after: {error}");

        // Writes in place do not allocate first: as much as fits is written, and the error reports how much.
        let (_, result) = engine.write(&file, 100_001, source, WriteOptions::default()).expect("accepted").wait();
        let error = result.expect_err("the disk is too small");
        assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, Some(28)), "{error}");
        assert!(error.bytes_done() < too_much as u64 && error.path() == Some(path.as_path()), "{error}");
        assert!(std::fs::read(&path).expect("the file")[..100_001] == old[..100_001]);

        // A smaller whole-file write frees the space, and succeeds.
        let small = random_bytes(5, 70_000);
        let source = region_holding(0, &small).region();
        engine.write(&file, 0, source, WHOLE).expect("accepted").wait().1.expect("there is room for this");
        assert_eq!(difference(&std::fs::read(&path).expect("the file"), &small), None);
    }
}

#[test]
fn a_read_only_file_system_refuses_writers_and_serves_readers() {
    for mounted in available([Mounted::image("ext4", 48, 512, "defaults")]) {
        check_read_only(&mounted);
    }
}

fn check_read_only(mounted: &Mounted) {
    let path = mounted.folder().join("fixed.bin");
    let content = random_bytes(6, 50_000);
    std::fs::write(&path, &content).expect("still writable");
    mounted.make_read_only();
    for (path, create) in [(&path, false), (&mounted.folder().join("new.bin"), true)] {
        let options = OpenOptions { access: Access::Write, create, direct: DirectMode::Preferred };
        let error = TensorFile::open(path, options).expect_err("the file system is read-only");
        assert_eq!((error.kind(), error.path()), (ErrorKind::PermissionDenied, Some(path.as_path())), "{error}");
        assert!(error.to_string().contains("read-only"), "{error}");
    }
    let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
    let file = TensorFile::open(&path, options).expect("readable");
    let (returned, result) = any_engine().read(&file, 0, region_at(1, 50_000)).expect("accepted").wait();
    result.expect("read");
    assert_eq!(bytes_of(&returned.expect("memory is returned").region()), content);
}

#[test]
fn a_folder_without_permission_refuses_new_files() {
    use std::os::unix::fs::PermissionsExt;
    if rustix::process::geteuid().is_root() {
        return skipped("permissions do not bind root; see the read-only file system");
    }
    let dir = temp_dir();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o555)).expect("our folder");
    let path = dir.path().join("new.bin");
    let error = open(&path, DirectMode::Preferred).expect_err("the folder is read-only");
    assert_eq!((error.kind(), error.path()), (ErrorKind::PermissionDenied, Some(path.as_path())), "{error}");
}

/// The working folder of `a_file_size_limit_is_no_space`'s child.
const CHILD_FOLDER: &str = "DEEPNVME_TEST_CHILD_FOLDER";
const LIMIT_BYTES: u64 = 1 << 20;

#[test]
fn a_file_size_limit_is_no_space() {
    let dir = temp_dir();
    let test = std::env::current_exe().expect("the test's own program");
    // The signal at the limit would kill the child. Ignored signals stay ignored in the program.
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; exec \"$0\" --exact child_with_a_file_size_limit --ignored --nocapture"])
        .arg(test)
        .env(CHILD_FOLDER, dir.path())
        .output()
        .expect("a shell");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "the child failed:\n{said}");
}

#[test]
#[ignore = "run by a_file_size_limit_is_no_space, in a process of its own"]
fn child_with_a_file_size_limit() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let folder = std::env::var_os(CHILD_FOLDER).expect("only its parent runs this");
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT_BYTES), maximum: None }).expect("lowering a limit");
    for (kind, make) in all_real() {
        let engine = engine(Config::default(), make);
        let path = Path::new(&folder).join(format!("{}.bin", kind.name()));
        for mode in [DirectMode::Preferred, DirectMode::Disabled] {
            for options in [WriteOptions::default(), WHOLE] {
                let what = format!("{}, {mode:?}, {options:?}", kind.name());
                let file = open(&path, mode).expect("the file");
                let source = region_at(0, 4 << 20).region();
                let (returned, result) = engine.write(&file, 0, source, options).expect("accepted").wait();
                let error = result.expect_err("the limit holds");
                assert_eq!((error.kind(), error.errno()), (ErrorKind::NoSpace, Some(27)), "{what}: {error}");
                assert!(error.to_string().contains("ulimit -f"), "{what}: no remedy: {error}");
                assert_eq!(returned.map(|returned| returned.len()), Some(4 << 20), "{what}");
                assert!(std::fs::metadata(&path).expect("the file").len() <= LIMIT_BYTES, "{what}");
                let bytes = random_bytes(7, 100_000);
                let source = region_holding(0, &bytes).region();
                engine.write(&file, 0, source, WHOLE).expect("accepted").wait().1.expect("below the limit");
                assert_eq!(std::fs::read(&path).expect("the file"), bytes, "{what}");
            }
        }
    }
    assert!(own_memory_bytes("VmRSS:").is_some());
}
