//! Batches. Each has a thread, which performs the entries late and in any order.

use std::thread;
use std::time::{Duration, Instant};

use crate::abi::cufile::{BATCH_FULL, FileOutcome, INTERNAL_ERROR, INVALID_VALUE, IoEvent, IoParams};
use crate::abi::{Handle, In, Out};
use crate::cufile::calls::{behind_gate, cufile_calls};
use crate::cufile::session::check_open;
use crate::cufile::transfer::{Request, RequestedMemory};
use crate::state::clock::Point;
use crate::state::cufile::batch::{Batch, BatchEntry};
use crate::state::cufile::transfer::Direction;
use crate::state::{DriverGuard, DriverState, lock, notify, wait_until, wait_until_or};

/// `CUFILE_CANCELED`, `CUFILE_COMPLETE` and `CUFILE_FAILED`.
const CANCELED: i32 = 8;
const COMPLETE: i32 = 16;
const FAILED: i32 = 64;
/// `CUFILE_BATCH`.
const MODE: i32 = 1;

cufile_calls! {
    fn cuFileBatchIOSetUp(out: Out<Handle>, capacity: u32) |mut state| {
        check_open(&state)?;
        if out.is_null() || capacity == 0 || capacity > state.cufile.properties.max_batch {
            return Err(INVALID_VALUE);
        }
        let handle = state.handle();
        let (capacity, rng) = (capacity as usize, state.rng(handle));
        let batch = Batch { capacity, waiting: Vec::new(), running: 0, completed: Vec::new(), rng };
        state.cufile.batches.insert(handle, batch);
        let spawned = thread::Builder::new().name("fake_driver batch".to_owned()).spawn(move || perform_entries(handle));
        if spawned.is_err() {
            state.cufile.batches.remove(&handle);
            return Err(INTERNAL_ERROR);
        }
        out.put(handle).map_err(|_| INVALID_VALUE)
    }

    fn cuFileBatchIOSubmit(handle: Handle, count: u32, parameters: In<IoParams>, flags: u32) |state| {
        submit(state, handle, count as usize, &parameters, flags)
    }

    fn cuFileBatchIOGetStatus(handle: Handle, least: u32, count: Out<u32>, events: Out<IoEvent>,
        timeout: In<libc::timespec>) |state| {
        status(state, handle, least as usize, (count, events), &timeout)
    }

    fn cuFileBatchIOCancel(handle: Handle) |mut state| {
        let batch = state.batch(handle)?;
        for BatchEntry { cookie, point, .. } in std::mem::take(&mut batch.waiting) {
            batch.completed.push((IoEvent { cookie, status: CANCELED, result: 0 }, point));
        }
        let canceled: Vec<Point> = batch.completed.iter().map(|(_, point)| *point).collect();
        canceled.into_iter().for_each(|point| state.races.end(point));
        notify();
        Ok(())
    }
}

/// Destroys a batch. The function has no result, so an invalid handle is a violation, as are unfinished entries.
// SAFETY: the name is the library's own, and nothing else in this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuFileBatchIODestroy(handle: Handle) {
    // There is no result; violations go to the call log.
    let _ = behind_gate("cuFileBatchIODestroy", |mut state| {
        let Ok(batch) = state.batch(handle) else {
            state.call_log.violation(format!("lifetime: cuFileBatchIODestroy of {handle:#x}, which is none"));
            return Ok(());
        };
        let left = batch.waiting.len() + batch.running;
        if left > 0 {
            state
                .call_log
                .violation(format!("lifetime: batch {handle:#x} was destroyed with {left} unfinished entries"));
        }
        let idle = |state: &DriverState| state.cufile.batches.get(&handle).is_none_or(|batch| batch.running == 0);
        let mut state = wait_until(state, idle);
        if let Some(batch) = state.cufile.batches.remove(&handle) {
            let points =
                batch.waiting.iter().map(|entry| entry.point).chain(batch.completed.iter().map(|entry| entry.1));
            points.for_each(|point| state.races.forget(point));
        }
        notify();
        Ok(())
    });
}

/// Submits entries. All are checked before any is accepted, so a refused call has no effect.
fn submit(mut state: DriverGuard, handle: Handle, count: usize, parameters: &In<IoParams>, flags: u32) -> FileOutcome {
    let batch = state.batch(handle)?;
    if count == 0 || flags != 0 || parameters.is_null() {
        return Err(INVALID_VALUE);
    }
    if batch.outstanding() + count > batch.capacity {
        return Err(BATCH_FULL);
    }
    let mut checked = Vec::with_capacity(count);
    for index in 0..count {
        let IoParams { mode, base, file_offset, memory_offset, bytes, handle, opcode, cookie } =
            parameters.get_at(index)?;
        let direction = match opcode {
            0 => Direction::Read,
            1 => Direction::Write,
            _ => return Err(INVALID_VALUE),
        };
        if mode != MODE {
            return Err(INVALID_VALUE);
        }
        let memory = RequestedMemory { base, offset: memory_offset, bytes };
        let request = Request::new(direction, handle, file_offset, memory);
        checked.push((cookie, state.transfer(request)?));
    }
    for (cookie, transfer) in checked {
        let point = state.begin_transfer("cuFileBatchIOSubmit", transfer.used);
        state.batch(handle)?.waiting.push(BatchEntry { cookie, point, transfer });
    }
    notify();
    Ok(())
}

/// Waits for at least `least` completed entries, and reports at most `count`.
fn status(
    mut state: DriverGuard,
    handle: Handle,
    least: usize,
    (count, events): (Out<u32>, Out<IoEvent>),
    timeout: &In<libc::timespec>,
) -> FileOutcome {
    let outstanding = state.batch(handle)?.outstanding();
    let events_max = count.get().map_err(|_| INVALID_VALUE)? as usize;
    // A wait for more entries than the batch contains would never end.
    if events.is_null() || events_max == 0 || least > events_max || least > outstanding {
        return Err(INVALID_VALUE);
    }
    // Some releases of cuFile return at once without an entry, although they should wait.
    if state.call_log.call("cuFileBatchIOGetStatus@silent").is_some() {
        return count.put(0).map_err(|_| INVALID_VALUE);
    }
    let enough =
        |state: &DriverState| state.cufile.batches.get(&handle).is_none_or(|batch| batch.completed.len() >= least);
    state = match timeout.get() {
        Ok(time) => wait_until_or(state, Instant::now() + duration(time)?, enough),
        Err(_) => wait_until(state, enough),
    };
    let batch = state.batch(handle)?;
    let reported: Vec<_> = batch.completed.drain(..events_max.min(batch.completed.len())).collect();
    for (index, (event, point)) in reported.iter().enumerate() {
        state.races.forget(*point);
        events.put_at(index, *event)?;
    }
    count.put(reported.len() as u32)?;
    Ok(())
}

fn duration(time: libc::timespec) -> FileOutcome<Duration> {
    let seconds = u64::try_from(time.tv_sec).map_err(|_| INVALID_VALUE)?;
    let nanoseconds = u32::try_from(time.tv_nsec).ok().filter(|nanoseconds| *nanoseconds < 1_000_000_000);
    Ok(Duration::new(seconds.min(1 << 30), nanoseconds.ok_or(INVALID_VALUE)?))
}

/// Performs the entries of a batch until it is destroyed. Runs on the thread of the batch.
fn perform_entries(handle: Handle) {
    loop {
        let ready =
            |state: &DriverState| state.cufile.batches.get(&handle).is_none_or(|batch| !batch.waiting.is_empty());
        let mut state = wait_until(lock(), ready);
        let Some(batch) = state.cufile.batches.get_mut(&handle) else { return };
        let picked = batch.rng.below(batch.waiting.len() as u64) as usize;
        let BatchEntry { cookie, point, transfer } = batch.waiting.swap_remove(picked);
        batch.running = 1;
        let fault = state.call_log.call("cuFileBatchIO@entry");
        let slow = state.call_log.call("cuFileBatchIO@slow");
        drop(state);
        std::thread::sleep(Duration::from_millis(slow.map_or(0, i32::unsigned_abs).into()));
        let moved = fault.map_or_else(|| transfer.run(), Err);
        let (status, result) = moved.map_or_else(|code| (FAILED, -(code.abs() as isize)), |n| (COMPLETE, n as isize));
        let mut state = lock();
        state.races.end(point);
        if let Some(batch) = state.cufile.batches.get_mut(&handle) {
            batch.running = 0;
            batch.completed.push((IoEvent { cookie, status, result }, point));
        }
        notify();
    }
}

impl DriverState {
    fn batch(&mut self, handle: Handle) -> FileOutcome<&mut Batch> {
        self.cufile.batches.get_mut(&handle).ok_or(INVALID_VALUE)
    }
}
