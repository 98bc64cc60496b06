//! Measure the CPU time of a borrow and its release: `borrow_cost [borrows] [items...]`.
//!
//! `memory`: all items fit. `disk`: a quarter of them fit, and every borrow changes its item, so that items are read and
//! written back all the time. An item has one page, or one to eight (`mixed`). `us` is the CPU time of the caller
//! and of the swapper's thread, which includes the submission of I/O, and `workers` that of the engine's workers. The
//! last two columns are the same for as many reads and writes without a swapper, one at a time, of one page each, also
//! for `mixed`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for the terminal")]

use std::sync::Arc;
use std::time::Instant;

use deepnvme_io::mem::{Buffer, Region};
use deepnvme_io::{Access, Config, DirectMode, Engine, OpenOptions, WriteOptions};
use deepnvme_swap::{Swapper, SwapperOptions};
use rustix::time::{ClockId, clock_gettime};

const PAGE_BYTES: usize = 4096;

/// The order of the borrows.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Round and round, as the schedule says.
    Scheduled,
    /// At random, without a schedule.
    Random,
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().unwrap());
    let borrows = arguments.next().unwrap_or(40_000);
    let counts: Vec<usize> = arguments.collect();
    let counts = if counts.is_empty() { vec![200, 2000, 20_000] } else { counts };
    let engine = Arc::new(Engine::new(Config::default()).unwrap());
    println!("per borrow:                       us  workers  elapsed   reads  writes   without swapper: us  workers");
    for items in counts {
        for is_mixed in [false, true] {
            for is_on_disk in [false, true] {
                for order in [Order::Scheduled, Order::Random] {
                    measure(&engine, (items, is_mixed, is_on_disk), order, borrows);
                }
            }
        }
    }
}

fn measure(engine: &Arc<Engine>, (items, is_mixed, is_on_disk): (usize, bool, bool), order: Order, borrows: usize) {
    let folder = tempfile::tempdir_in(".").unwrap();
    let mut random = Random(7);
    let pages: Vec<usize> = (0..items).map(|_| if is_mixed { 1 + random.below(8) } else { 1 }).collect();
    let total = pages.iter().sum::<usize>() * PAGE_BYTES;
    let memory_bytes = if is_on_disk { total / 4 } else { total };
    let swapper = Swapper::new(Arc::clone(engine), &SwapperOptions::new(folder.path(), memory_bytes)).unwrap();
    let names: Vec<String> = (0..items).map(|index| format!("model.layers.{index}.moment")).collect();
    for (name, pages) in names.iter().zip(&pages) {
        swapper.put(name, &Region::from_vec(vec![1; pages * PAGE_BYTES])).unwrap();
    }
    if matches!(order, Order::Scheduled) {
        swapper.schedule(names.iter().map(String::as_str), true).unwrap();
    }
    let mut next = |step: usize| match order {
        Order::Scheduled => step % items,
        Order::Random => random.below(items),
    };
    let mut borrow = |step| {
        let borrowed = swapper.borrow(&names[next(step)], true, &mut || false).unwrap();
        if !is_on_disk {
            borrowed.mark_clean();
        }
    };
    // Until memory is full of what the order needs.
    let warm_up = borrows / 4;
    (0..warm_up).for_each(&mut borrow);
    let (before, cpu_before, began) = (swapper.stats(), CpuTime::now(), Instant::now());
    (warm_up..warm_up + borrows).for_each(&mut borrow);
    let (after, cpu, elapsed_s) = (swapper.stats(), cpu_before.elapsed(), began.elapsed().as_secs_f64());
    let (reads, writes) = (after.reads - before.reads, after.write_backs - before.write_backs);
    let alone = engine_alone(engine, folder.path(), (reads, writes));
    let us = |seconds: f64| seconds / borrows as f64 * 1e6;
    println!(
        "{items:<7} {:<6} {:<6} {:<10} {:>7.1} {:>8.1} {:>8.1} {:>7.3} {:>7.3} {:>21.1} {:>8.1}",
        if is_mixed { "mixed" } else { "equal" },
        if is_on_disk { "disk" } else { "memory" },
        format!("{order:?}").to_lowercase(),
        us(cpu.rest_s),
        us(cpu.workers_s),
        us(elapsed_s),
        reads as f64 / borrows as f64,
        writes as f64 / borrows as f64,
        us(alone.rest_s),
        us(alone.workers_s),
    );
}

/// Returns the CPU time of these numbers of reads and writes of one page each, without a swapper.
fn engine_alone(engine: &Engine, folder: &std::path::Path, (reads, writes): (u64, u64)) -> CpuTime {
    const PAGES: usize = 4096;
    let options = OpenOptions { access: Access::ReadWrite, create: true, direct: DirectMode::Preferred };
    let file = deepnvme_file::open(&folder.join("alone").into(), options).unwrap();
    let whole = Buffer::zeroed(PAGES * PAGE_BYTES).unwrap().into_region();
    engine.write(&file, 0, whole.region(), WriteOptions::default()).unwrap().wait().1.unwrap();
    let mut page = Some(Buffer::zeroed(PAGE_BYTES).unwrap().into_region());
    let before = CpuTime::now();
    for index in 0..reads.max(writes) {
        let offset = (index as usize * 7 % PAGES * PAGE_BYTES) as u64;
        if index < reads {
            let (back, read) = engine.read(&file, offset, page.take().unwrap()).unwrap().wait();
            read.unwrap();
            page = back;
        }
        if index < writes {
            let source = page.as_ref().unwrap().region();
            engine.write(&file, offset, source, WriteOptions::default()).unwrap().wait().1.unwrap();
        }
    }
    before.elapsed()
}

/// The CPU time of this process's threads.
#[derive(Clone, Copy)]
struct CpuTime {
    workers_s: f64,
    rest_s: f64,
}

impl CpuTime {
    fn now() -> Self {
        let all = clock_gettime(ClockId::ProcessCPUTime);
        let all_s = all.tv_sec as f64 + all.tv_nsec as f64 * 1e-9;
        let mut workers_s = 0.0;
        for thread in std::fs::read_dir("/proc/self/task").unwrap() {
            let thread = thread.unwrap().path();
            let text = |name: &str| std::fs::read_to_string(thread.join(name)).unwrap_or_default();
            let is_worker = text("comm").trim().strip_prefix("deepnvme-").is_some_and(|name| name != "swap");
            let ns = text("schedstat").split(' ').next().and_then(|ns| ns.parse::<u64>().ok());
            workers_s += ns.filter(|_| is_worker).unwrap_or(0) as f64 * 1e-9;
        }
        Self { workers_s, rest_s: all_s - workers_s }
    }

    fn elapsed(self) -> Self {
        let now = Self::now();
        Self { workers_s: now.workers_s - self.workers_s, rest_s: now.rest_s - self.rest_s }
    }
}

/// Random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
