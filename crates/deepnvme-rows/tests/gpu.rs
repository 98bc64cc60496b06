//! Rows go into GPU memory in stream order, at once and in the background. Runs with a fake driver.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../deepnvme-io/tests/gpu/fake_driver.rs"]
mod fake_driver;

use std::sync::Arc;

use deepnvme_codec::{Float, cast};
use deepnvme_io::mem::StreamHandle;
use deepnvme_io::{Config, Engine};
use deepnvme_rows::{BackgroundStore, Conversion, Element};

use crate::common::Model;
use crate::fake_driver::Gpu;

const ROW_BYTES: usize = 3000;
const ROWS: u64 = 4000;
/// Duration of a kernel that changes the memory before.
const DELAY_US: u64 = 40_000;

fn open() -> (Model, BackgroundStore) {
    let model = Model::new(ROW_BYTES, &[ROWS], 5);
    let engine = Arc::new(Engine::new(Config::default()).unwrap());
    let store = BackgroundStore::new(model.open(&engine, 4 << 20).unwrap());
    (model, store)
}

/// More rows than one piece of host memory holds, in no order.
fn rows() -> Vec<u64> {
    (0..ROWS).map(|index| index * 1117 % ROWS).collect()
}

#[test]
fn rows_follow_the_work_of_the_stream() {
    let gpu = Gpu::new();
    let ((model, store), stream, rows) = (open(), gpu.stream(0), rows());
    let memory = gpu.memory(0, rows.len() * ROW_BYTES, 1);
    gpu.fill(stream, &memory, 2, DELAY_US);
    store.store().gather(&rows, &memory.region_mut().after(stream), None, &|| false).unwrap();
    assert!(gpu.peek(&memory) == model.expected(&rows));
    gpu.end_stream(0, stream);
}

#[test]
fn rows_arrive_in_the_background() {
    let gpu = Gpu::new();
    let ((model, store), rows) = (open(), rows());
    let memories = [0, 1].map(|_| gpu.memory(0, rows.len() * ROW_BYTES, 1));
    let start = |memory: &fake_driver::GpuMemory| {
        let target = memory.region_mut().after(StreamHandle::DEFAULT);
        store.start_gather(rows.clone(), target, None).unwrap()
    };
    let started = memories.each_ref().map(start);
    for (pending, memory) in started.iter().zip(&memories) {
        assert!(pending.wait(None, &|| false).unwrap());
        pending.result().unwrap().unwrap();
        assert!(gpu.peek(memory) == model.expected(&rows));
    }
}

#[test]
fn converted_rows_are_those_of_the_host() {
    let gpu = Gpu::new();
    let ((model, store), rows) = (open(), rows());
    let conversion = Conversion { from: Element::Float(Float::Bf16), to: Float::F32, scale: None };
    let memory = gpu.memory(0, rows.len() * ROW_BYTES * 2, 1);
    store.store().gather(&rows, &memory.region_mut(), Some(conversion), &|| false).unwrap();
    let mut wide = vec![0; rows.len() * ROW_BYTES * 2];
    cast::convert(Float::Bf16, Float::F32, &model.expected(&rows), &mut wide).unwrap();
    assert!(gpu.peek(&memory) == wide);
}

#[test]
fn many_gathers_share_the_host_memory() {
    let gpu = Gpu::new();
    let (model, store) = open();
    let orders: Vec<Vec<u64>> =
        (0..9).map(|shift| rows().into_iter().map(|row| (row + shift * 31) % ROWS).collect()).collect();
    let memories: Vec<_> = orders.iter().map(|rows| gpu.memory(0, rows.len() * ROW_BYTES, 3)).collect();
    let start = |(rows, memory): (&Vec<u64>, &fake_driver::GpuMemory)| {
        store.start_gather(rows.clone(), memory.region_mut(), None).unwrap()
    };
    // More than there is host memory for, before anyone waits.
    let started: Vec<_> = orders.iter().zip(&memories).take(6).map(start).collect();
    let rest = orders.iter().zip(&memories).skip(6);
    std::thread::scope(|scope| {
        for (rows, memory) in rest {
            let store = store.store();
            let target = memory.region_mut();
            scope.spawn(move || store.gather(rows, &target, None, &|| false).unwrap());
        }
        started[5].cancel();
        for pending in started.iter().rev() {
            assert!(pending.wait(None, &|| false).unwrap());
        }
    });
    for (index, (rows, memory)) in orders.iter().zip(&memories).enumerate() {
        match started.get(index).map(|pending| pending.result().unwrap()) {
            Some(Err(error)) => assert!(index == 5 && matches!(error, deepnvme_rows::Error::Interrupted), "{error}"),
            _ => assert!(gpu.peek(memory) == model.expected(rows)),
        }
    }
}
