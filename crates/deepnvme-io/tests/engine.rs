//! The engine's public interface: requests, pendings, whole files, descriptors, errors.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

mod common;

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use deepnvme_io::{
    Access, BackendChoice, Config, DirectMode, DirectState, Durability, Engine, ErrorKind, OpenOptions, ReadItem,
    SubmitMode, TensorFile, Transfer, WriteItem, WriteMode, WriteOptions,
};
use deepnvme_mem::{Region, RegionMut};
use deepnvme_testkit::data::read_back;
use deepnvme_testkit::rng::random_bytes as random;

const CHOICES: [BackendChoice; 3] = [BackendChoice::Uring, BackendChoice::Aio, BackendChoice::Threads];
const WHOLE: WriteOptions = WriteOptions { mode: WriteMode::WholeFile, durability: Durability::None };

/// Returns the backend choices that work on this machine.
fn choices() -> Vec<BackendChoice> {
    common::available(CHOICES.map(|backend| match Engine::new(Config { backend, ..Config::default() }) {
        Ok(_) => Ok(backend),
        Err(error) => Err(error.to_string()),
    }))
}

fn engine(backend: BackendChoice) -> Engine {
    let config = Config { backend, workers: 2, queue_depth: 4, block_bytes: 16384, ..Config::default() };
    Engine::new(config).unwrap()
}

/// Returns an engine per backend that works here, and a folder for it.
fn engines() -> impl Iterator<Item = (BackendChoice, Engine, tempfile::TempDir)> {
    choices().into_iter().map(|choice| (choice, engine(choice), folder()))
}

fn open(path: &Path, access: Access, direct: DirectMode) -> Arc<TensorFile> {
    TensorFile::open(path, OpenOptions { access, create: access != Access::Read, direct }).unwrap()
}

fn write(engine: &Engine, file: &Arc<TensorFile>, offset: u64, bytes: &[u8], options: WriteOptions) {
    let (source, result) = engine.write(file, offset, Region::from_vec(bytes.to_vec()), options).unwrap().wait();
    assert_eq!(result.unwrap().bytes, bytes.len() as u64);
    assert_eq!(source.unwrap().len(), bytes.len(), "the memory is returned");
}

fn folder() -> tempfile::TempDir {
    match std::env::var_os("DEEPNVME_TEST_DIR") {
        Some(base) => tempfile::tempdir_in(base).unwrap(),
        None => tempfile::tempdir().unwrap(),
    }
}

#[test]
fn every_backend_moves_awkward_sizes_and_offsets_exactly() {
    for choice in choices() {
        for direct in [DirectMode::Preferred, DirectMode::Disabled] {
            let engine = engine(choice);
            let folder = folder();
            let path = folder.path().join("file");
            let before = random(200_000, 1);
            fs::write(&path, &before).unwrap();
            let mut expected = before.clone();
            let file = open(&path, Access::ReadWrite, direct);
            for (seed, (offset, bytes)) in
                [(0, 0), (1, 1), (511, 2), (4095, 2), (4096, 4096), (5000, 30_000), (16_384, 65_536), (199_999, 70_001)]
                    .into_iter()
                    .enumerate()
            {
                let data = random(bytes, seed as u64);
                write(&engine, &file, offset as u64, &data, WriteOptions::default());
                expected.resize(expected.len().max(offset + bytes), 0);
                expected[offset..offset + bytes].copy_from_slice(&data);
                assert_eq!(read_back(&engine, &file, offset as u64, bytes), data, "{choice:?} {offset}+{bytes}");
            }
            assert!(fs::read(&path).unwrap() == expected, "{choice:?} {direct:?}: neighbours are intact");
        }
    }
}

#[test]
fn a_whole_file_write_cuts_a_longer_file_and_extends_a_shorter_one() {
    for (choice, engine, folder) in engines() {
        let path = folder.path().join("file");
        for (seed, bytes) in [100_000, 4096, 300_001, 0, 17].into_iter().enumerate() {
            let data = random(bytes, seed as u64);
            let file = open(&path, Access::Write, DirectMode::Preferred);
            let options = WriteOptions { durability: Durability::Full, ..WHOLE };
            write(&engine, &file, 0, &data, options);
            assert!(fs::read(&path).unwrap() == data, "{choice:?}: {bytes} bytes");
        }
        assert!(engine.stats().syncs >= 10, "file and folder of each write");
    }
}

#[test]
fn a_short_file_is_an_error_that_says_how_much_was_there() {
    for (_, engine, folder) in engines() {
        let path = folder.path().join("short");
        for there in [0usize, 1, 1000, 4096, 50_000] {
            fs::write(&path, random(there, 3)).unwrap();
            let file = open(&path, Access::Read, DirectMode::Preferred);
            let (target, result) = engine.read(&file, 0, RegionMut::from_vec(vec![0; 50_001])).unwrap().wait();
            assert_eq!(target.unwrap().len(), 50_001, "the memory is returned on failure");
            let error = result.unwrap_err();
            assert_eq!((error.kind(), error.path()), (ErrorKind::UnexpectedEof, Some(path.as_path())));
            assert!(error.to_string().contains(&format!("of which {there} are there")), "{error}");
        }
    }
}

#[test]
fn a_batch_over_several_files_and_holes_is_one_request() {
    for (_, engine, folder) in engines() {
        let paths: Vec<PathBuf> = (0..3).map(|index| folder.path().join(index.to_string())).collect();
        let tensors: Vec<_> = (0..300usize).map(|index| random(index * 37 % 5000, index as u64)).collect();
        let mut ends = [0u64; 3];
        let mut places = Vec::new();
        for (index, tensor) in tensors.iter().enumerate() {
            let end = &mut ends[index % 3];
            *end += [0, 0, 64, 9000][index % 4];
            places.push((index % 3, *end));
            *end += tensor.len() as u64;
        }
        let files: Vec<_> = paths.iter().map(|path| open(path, Access::ReadWrite, DirectMode::Preferred)).collect();
        let item = |(tensor, (file, offset)): (&Vec<u8>, &(usize, u64))| WriteItem {
            file: Arc::clone(&files[*file]),
            offset: *offset,
            source: Region::from_vec(tensor.clone()),
        };
        let items: Vec<_> = tensors.iter().zip(&places).map(item).rev().collect();
        let (sources, result) = engine.write_batch(items, WriteOptions::default()).unwrap().wait();
        let total: usize = tensors.iter().map(Vec::len).sum();
        assert_eq!((sources.unwrap().len(), result.unwrap().bytes), (300, total as u64));
        let ops_before = engine.stats().ops;
        let item = |(tensor, (file, offset)): (&Vec<u8>, &(usize, u64))| ReadItem {
            file: Arc::clone(&files[*file]),
            offset: *offset,
            target: RegionMut::from_vec(vec![0; tensor.len()]),
        };
        let items: Vec<_> = tensors.iter().zip(&places).map(item).collect();
        let (targets, result) = engine.read_batch(items).unwrap().wait();
        result.unwrap();
        for (target, tensor) in targets.unwrap().iter().zip(&tensors) {
            let mut out = vec![0; tensor.len()];
            target.region().copy_to_slice(0, &mut out);
            assert_eq!(&out, tensor);
        }
        assert!(engine.stats().ops - ops_before < 200, "neighbours travel together");
    }
}

/// tmpfs accepts the flag for direct I/O, and has none.
#[test]
fn a_direct_descriptor_of_a_file_without_direct_io_is_used_through_the_cache() {
    let Ok(named) = tempfile::NamedTempFile::new_in("/dev/shm") else { return common::skipped("there is no /dev/shm") };
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::DIRECT;
    let Ok(direct) = rustix::fs::open(named.path(), flags, rustix::fs::Mode::empty()) else {
        return common::skipped("tmpfs refuses O_DIRECT before Linux 6.6");
    };
    let required = TensorFile::from_fd(direct.as_fd(), None, Access::ReadWrite, DirectMode::Required).unwrap_err();
    assert_eq!(required.kind(), ErrorKind::Unsupported);
    let file = TensorFile::from_fd(direct.as_fd(), None, Access::ReadWrite, DirectMode::Preferred).unwrap();
    assert!(matches!(file.direct(), deepnvme_io::DirectState::Buffered { .. }));
    let engine = Engine::new(Config::default()).unwrap();
    let bytes = random(10_001, 77);
    write(&engine, &file, 3, &bytes, WriteOptions::default());
    assert!(read_back(&engine, &file, 3, bytes.len()) == bytes);
}

#[test]
fn a_descriptor_is_used_at_offsets_and_left_open() {
    let engine = engine(BackendChoice::Auto);
    let folder = folder();
    let path = folder.path().join("file");
    let data = random(100_000, 9);
    let append = fs::File::options().append(true).read(true).create(true).open(&path).unwrap();
    let file = TensorFile::from_fd(append.as_fd(), None, Access::ReadWrite, DirectMode::Preferred).unwrap();
    write(&engine, &file, 0, &data, WriteOptions::default());
    write(&engine, &file, 10, &data[..50], WriteOptions::default());
    drop(file);
    let mut expected = data.clone();
    expected[10..60].copy_from_slice(&data[..50]);
    assert!(fs::read(&path).unwrap() == expected, "also where the descriptor appends");
    assert_eq!(append.metadata().unwrap().len(), 100_000, "the caller's descriptor is open");

    let (reader, _writer) = std::io::pipe().unwrap();
    let error = TensorFile::from_fd(reader.as_fd(), None, Access::Read, DirectMode::Preferred).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let read_only = fs::File::open(&path).unwrap();
    let error = TensorFile::from_fd(read_only.as_fd(), None, Access::Write, DirectMode::Preferred).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_file_is_closed_when_its_last_request_has_been_waited_for() {
    for (choice, engine, folder) in engines() {
        let path = folder.path().join("file");
        for round in 0..200 {
            let file = open(&path, Access::ReadWrite, DirectMode::Preferred);
            let data = random(40_000 + round, 1);
            let pending = engine.write(&file, 0, Region::from_vec(data), WHOLE).unwrap();
            drop(file);
            pending.wait().1.unwrap();
            let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| fs::read_link(entry.unwrap().path()));
            let open = links.filter(|link| link.as_ref().is_ok_and(|link| *link == path)).count();
            assert_eq!(open, 0, "{choice:?}, round {round}");
        }
    }
}

#[test]
fn a_failed_open_names_the_path() {
    let folder = folder();
    let options = OpenOptions { access: Access::Read, create: false, direct: DirectMode::Preferred };
    let missing = folder.path().join("missing");
    let error = TensorFile::open(&missing, options).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::NotFound, Some(missing.as_path())));
    let error = TensorFile::open(folder.path(), options).unwrap_err();
    assert_eq!(error.errno(), Some(rustix::io::Errno::ISDIR.raw_os_error()));
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = TensorFile::open(&pipe, options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "at once, though nobody writes: {error}");
    let socket = folder.path().join("socket");
    let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for (path, name) in [(&pipe, "it is a pipe;"), (&socket, "it is a socket;")] {
        for access in [Access::Read, Access::Write] {
            for direct in [DirectMode::Preferred, DirectMode::Disabled] {
                let error = TensorFile::open(path, OpenOptions { access, create: true, direct }).unwrap_err();
                assert_eq!((error.kind(), error.path()), (ErrorKind::InvalidInput, Some(path.as_path())), "{error}");
                assert!(error.to_string().contains(name), "{error}");
            }
        }
    }
}

#[test]
fn many_requests_from_many_threads_all_come_back() {
    for (_, engine, folder) in engines() {
        let engine = Arc::new(engine);
        let path = folder.path().join("file");
        let data = random(64 * 4096, 5);
        fs::write(&path, &data).unwrap();
        let file = open(&path, Access::Read, DirectMode::Preferred);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (engine, file, data) = (&engine, &file, &data);
                scope.spawn(move || {
                    let start = |index: u64| {
                        let offset = (index * 7919 + thread * 13) % (data.len() as u64 - 4096);
                        let target = RegionMut::from_vec(vec![0; 4096]);
                        (offset as usize, engine.read(file, offset, target).unwrap())
                    };
                    let pendings: Vec<_> = (0..250).map(start).collect();
                    for (offset, pending) in pendings {
                        let (target, result) = pending.wait();
                        result.unwrap();
                        let mut out = vec![0; 4096];
                        target.unwrap().region().copy_to_slice(0, &mut out);
                        assert!(out == data[offset..offset + 4096]);
                    }
                });
            }
        });
        assert_eq!((engine.stats().requests, engine.stats().requests_failed), (1000, 0));
    }
}

#[test]
fn dropping_the_engine_finishes_submitted_requests() {
    for choice in choices() {
        let folder = folder();
        let path = folder.path().join("file");
        let data = random(1 << 20, 11);
        let file = open(&path, Access::Write, DirectMode::Preferred);
        let engine = engine(choice);
        drop(engine.write(&file, 0, Region::from_vec(data.clone()), WHOLE).unwrap());
        drop((file, engine));
        assert!(fs::read(&path).unwrap() == data);
    }
}

#[test]
fn a_cancelled_request_ends_as_cancelled_and_returns_its_memory() {
    let config = Config { workers: 1, queue_depth: 1, block_bytes: 4096, ..Config::default() };
    let engine = Engine::new(config).unwrap();
    let folder = folder();
    let path = folder.path().join("file");
    let data = random(16 << 20, 13);
    fs::write(&path, &data).unwrap();
    let file = open(&path, Access::Read, DirectMode::Preferred);
    let pending = engine.read(&file, 0, RegionMut::from_vec(vec![0; data.len()])).unwrap();
    assert!(pending.cancel(), "thousands of blocks are still unclaimed");
    let progress_total = pending.progress().bytes_total;
    let (target, result) = pending.wait();
    let error = result.unwrap_err();
    assert_eq!((error.kind(), progress_total), (ErrorKind::Cancelled, data.len() as u64));
    assert!(error.bytes_done() < data.len() as u64);
    assert_eq!(target.unwrap().len(), data.len());
    let done = engine.read(&file, 0, RegionMut::from_vec(vec![0; 4096])).unwrap();
    assert!(done.wait_timeout(Duration::from_secs(30)));
    assert!(!done.cancel(), "there is nothing left to cancel");
    done.wait().1.unwrap();
}

/// Starts to write a new file.
fn started_write() -> (Engine, tempfile::TempDir, Transfer<Region>) {
    let engine = engine(BackendChoice::Auto);
    let folder = folder();
    let file = open(&folder.path().join("file"), Access::Write, DirectMode::Preferred);
    let pending = engine.write(&file, 0, Region::from_vec(random(100_000, 1)), WHOLE).unwrap();
    (engine, folder, pending)
}

#[test]
fn a_pending_can_be_watched_through_an_eventfd() {
    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
    let (_engine, _folder, pending) = started_write();
    for _ in 0..2 {
        let mine = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        pending.notify(mine.try_clone().unwrap());
        let mut fds = [PollFd::new(&mine, PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&timeout)).unwrap(), 1, "before and after it is done");
        assert!(pending.is_done());
    }
}

#[test]
fn a_pending_calls_its_watchers_once() {
    let (engine, _folder, pending) = started_write();
    let (called, calls) = std::sync::mpsc::channel();
    for name in ["before", "after"] {
        let called = called.clone();
        pending.on_done(move || called.send(name).unwrap());
        assert_eq!(calls.recv_timeout(Duration::from_secs(30)), Ok(name), "before and after it is done");
        assert!(pending.is_done());
    }
    drop((called, engine));
    assert!(calls.recv().is_err(), "no watcher is called again");
}

#[test]
fn a_small_transfer_that_is_waited_for_is_made_by_its_caller() {
    for (choice, by_caller) in
        [(BackendChoice::Auto, true), (BackendChoice::Threads, true), (BackendChoice::Aio, false)]
    {
        let engine = engine(choice);
        let folder = folder();
        let file = open(&folder.path().join("file"), Access::ReadWrite, DirectMode::Preferred);
        let data = random(60_000, 23);
        let whole = WriteOptions { durability: Durability::Data, ..WHOLE };
        let (_, result) = engine.write_now(&file, 0, Region::from_vec(data.clone()), whole).unwrap().wait();
        result.unwrap();
        for (offset, bytes) in [(0, 4096), (1, 1), (4095, 9000), (100, 0), (59_999, 1), (0, 60_000)] {
            let target = RegionMut::from_vec(vec![0; bytes]);
            let pending = engine.read_now(&file, offset, target).unwrap();
            // All of the data has more blocks than a caller runs itself.
            if by_caller && bytes < 60_000 {
                assert!(pending.is_done(), "{choice:?}: when it returns");
            }
            let (target, result) = pending.wait();
            result.unwrap();
            let mut out = vec![0; bytes];
            target.unwrap().region().copy_to_slice(0, &mut out);
            assert!(out == data[offset as usize..][..bytes], "{choice:?}");
        }
        let past_end = engine.read_now(&file, 59_000, RegionMut::from_vec(vec![0; 2000])).unwrap().wait().1;
        assert!(past_end.unwrap_err().to_string().contains("of which 1000 are there"));
        assert_eq!((engine.stats().requests, engine.stats().requests_failed), (8, 1));
    }
}

#[test]
fn settings_out_of_range_name_the_range() {
    let cases = [
        (Config { workers: 0, ..Config::default() }, "workers is 0; it must be between 1 and 64"),
        (Config { queue_depth: 5000, ..Config::default() }, "queue_depth is 5000; it must be between 1 and 4096"),
        (Config { block_bytes: 5000, ..Config::default() }, "block_bytes is 5000; it must be a multiple of 4096"),
        (Config { pool_bytes: Some(1), ..Config::default() }, "pool_bytes is 1; it must be at least"),
    ];
    for (config, message) in cases {
        let error = Engine::new(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn the_bounce_pool_stays_within_its_bound() {
    let bound = 4 * 16384;
    let config = Config {
        workers: 2,
        queue_depth: 64,
        block_bytes: 16384,
        pool_bytes: Some(bound),
        submit: SubmitMode::Single,
        ..Config::default()
    };
    let engine = Engine::new(config).unwrap();
    let folder = folder();
    let file = open(&folder.path().join("file"), Access::ReadWrite, DirectMode::Preferred);
    let data = random(3 << 20, 19);
    let (_, misaligned) = RegionMut::from_vec([vec![0], data.clone()].concat()).split_at(1);
    let (_, result) = engine.write(&file, 0, misaligned.region(), WHOLE).unwrap().wait();
    result.unwrap();
    assert!(read_back(&engine, &file, 0, data.len()) == data);
    let stats = engine.stats();
    assert!(stats.pool_bytes <= bound, "{} bytes", stats.pool_bytes);
    if matches!(file.direct(), DirectState::Direct { .. }) {
        assert!(stats.bytes_bounced > 0);
    }
}
