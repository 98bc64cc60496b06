//! Many blocks with cuFile's batches and a fake driver: few submissions, and a separate completion per block.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

#[path = "gpu/fake_driver.rs"]
mod fake_driver;
#[path = "gpu/files.rs"]
mod files;

use deepnvme_io::{Config, DirectMode, Engine, WriteOptions};
use fake_driver::{Gpu, pattern};
use files::{config, folder, on_host, open, read, write};

#[test]
fn many_blocks_are_few_submissions_or_calls_where_there_are_no_batches() {
    let (gpu, folder) = (Gpu::new(), folder());
    let bytes = 32 << 20;
    let (written, overwritten) = (pattern(3, bytes), pattern(4, bytes));
    let memory = gpu.memory(0, bytes, 3);
    for refused in [None, Some("cuFileBatchIOSetUp"), Some("cuFileBatchIOSubmit")] {
        let engine = Engine::new(Config { workers: 1, queue_depth: 64, ..config(DirectMode::Required) }).unwrap();
        let file = open(&folder.path().join("file"), DirectMode::Required);
        if let Some(call) = refused {
            gpu.fail_always(call, 5039);
        }
        gpu.poke(&memory, &written);
        write(&engine, &file, 0, memory.region());
        gpu.poke(&memory, &overwritten);
        read(&engine, &file, 0, memory.region_mut());
        assert!(gpu.peek(&memory) == written, "{refused:?}");
        let (stats, calls) = (engine.stats(), gpu.calls("cuFileRead") + gpu.calls("cuFileWrite"));
        assert_eq!((stats.ops, stats.bytes_gds), (512, 2 * bytes as u64), "{refused:?}");
        match refused {
            None => {
                assert!(stats.gds_batches > 0 && stats.gds_batches + calls < 400, "{} and {calls}", stats.gds_batches);
            }
            Some(call) => {
                assert_eq!((stats.gds_batches, calls), (0, 512), "{call}");
                assert!(gpu.calls(call) < 9, "it is not tried again and again");
            }
        }
        drop((engine, file));
        gpu.clear();
    }
}

#[test]
fn each_entry_of_a_batch_ends_by_itself() {
    let (gpu, folder) = (Gpu::new(), folder());
    let bytes = 8 << 20;
    let expected = pattern(3, bytes);
    let memory = gpu.memory(0, bytes, 3);
    // A disk error, a refusal, and a status that is temporarily unavailable.
    for (place, code, ends) in [
        ("cuFileBatchIO@entry", 28, Err(28)),
        ("cuFileBatchIO@entry", 5008, Ok(true)),
        ("cuFileBatchIOGetStatus", 5041, Ok(false)),
    ] {
        for after in [0, 3, 17] {
            let engine = Engine::new(Config { workers: 1, queue_depth: 32, ..config(DirectMode::Preferred) }).unwrap();
            let path = folder.path().join("file");
            let file = open(&path, DirectMode::Required);
            gpu.fail(place, after, code);
            let wrote = engine.write(&file, 0, memory.region(), WriteOptions::default()).unwrap().wait().1;
            match ends {
                Ok(is_refusal) => {
                    wrote.unwrap();
                    assert!(on_host(&engine, &file, 0, bytes) == expected, "{place} {code} {after}");
                    assert_eq!(engine.stats().gds_reason.is_some(), is_refusal, "{place} {code} {after}");
                }
                Err(errno) => {
                    let error = wrote.unwrap_err();
                    assert_eq!(error.errno(), Some(errno), "{error}");
                    assert!(error.to_string().contains("file"), "{error}");
                }
            }
            drop((engine, file));
            std::fs::remove_file(&path).unwrap();
            gpu.clear();
        }
    }
}
