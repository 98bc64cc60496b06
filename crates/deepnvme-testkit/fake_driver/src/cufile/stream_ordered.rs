//! `cuFileReadAsync` and `cuFileWriteAsync`: transfers that are ops of a stream.
//!
//! Size and offsets are pointers, read when the op runs unless `cuFileStreamRegister` declared them fixed when
//! queued. Until the op runs, the values at queue time decide which memory it accesses; the header requires the
//! largest size there.

use std::sync::Arc;

use crate::abi::cufile::{FileOutcome, HANDLE_NOT_REGISTERED, INVALID_VALUE};
use crate::abi::{self, Handle, Out};
use crate::cufile::calls::cufile_calls;
use crate::cufile::registered::device_of;
use crate::cufile::session::check_open;
use crate::cufile::transfer::{Request, RequestedMemory};
use crate::operations::queue::{Delay, StreamOp};
use crate::state::clock::{Clock, Point};
use crate::state::cufile::file::File;
use crate::state::cufile::transfer::Direction;
use crate::state::{DriverGuard, lock};

/// Flags of `cuFileStreamRegister`.
const FIXED_MEMORY_OFFSET: u32 = 1;
const FIXED_FILE_OFFSET: u32 = 2;
const FIXED_SIZE: u32 = 4;
const ALIGNED: u32 = 8;
const PAGE: u64 = 4096;

/// The arguments of both functions.
struct Queued {
    direction: Direction,
    handle: Handle,
    /// Kept until the op is complete, so that an early deregistration is noticed.
    _file: Arc<File>,
    base: u64,
    bytes: Parameter<usize>,
    file_offset: Parameter<i64>,
    memory_offset: Parameter<i64>,
    done: usize,
}

/// A value, or its address.
#[derive(Clone, Copy)]
enum Parameter<T> {
    Fixed(T),
    At(usize, std::marker::PhantomData<T>),
}

cufile_calls! {
    fn cuFileReadAsync(handle: Handle, base: u64, bytes: Out<usize>, file_offset: Out<i64>, memory_offset: Out<i64>,
        done: Out<isize>, stream: Handle) |state| {
        queue(state, "cuFileReadAsync", (Direction::Read, handle, base), (bytes, file_offset, memory_offset, done), stream)
    }

    fn cuFileWriteAsync(handle: Handle, base: u64, bytes: Out<usize>, file_offset: Out<i64>, memory_offset: Out<i64>,
        done: Out<isize>, stream: Handle) |state| {
        queue(state, "cuFileWriteAsync", (Direction::Write, handle, base), (bytes, file_offset, memory_offset, done), stream)
    }

    fn cuFileStreamRegister(stream: Handle, flags: u32) |mut state| {
        check_open(&state)?;
        if flags > 15 {
            return Err(INVALID_VALUE);
        }
        let device = state.current()?;
        let id = state.stream(stream, device).map_err(|_| INVALID_VALUE)?;
        if state.streams.get_mut(id)?.cufile.replace(flags).is_some() {
            return Err(INVALID_VALUE);
        }
        Ok(())
    }

    fn cuFileStreamDeregister(stream: Handle) |mut state| {
        check_open(&state)?;
        let device = state.current()?;
        let id = state.stream(stream, device).map_err(|_| INVALID_VALUE)?;
        state.streams.get_mut(id)?.cufile.take().map(drop).ok_or(INVALID_VALUE)
    }
}

type Pointers = (Out<usize>, Out<i64>, Out<i64>, Out<isize>);

fn queue(
    mut state: DriverGuard,
    label: &'static str,
    (direction, handle, base): (Direction, Handle, u64),
    (bytes, file_offset, memory_offset, done): Pointers,
    stream: Handle,
) -> FileOutcome {
    check_open(&state)?;
    let device = state.current()?;
    let id = state.stream_for_work(stream, device)?;
    if done.is_null() || bytes.is_null() || file_offset.is_null() || memory_offset.is_null() {
        return Err(INVALID_VALUE);
    }
    let file = state.cufile.handles.get(&handle).map(Arc::clone).ok_or(HANDLE_NOT_REGISTERED)?;
    device_of(&state, base, 1)?;
    let flags = state.streams.get(id)?.cufile.unwrap_or(0);
    let queued = Queued {
        direction,
        handle,
        _file: file,
        base,
        bytes: Parameter::new(bytes, flags & FIXED_SIZE != 0)?,
        file_offset: Parameter::new(file_offset, flags & FIXED_FILE_OFFSET != 0)?,
        memory_offset: Parameter::new(memory_offset, flags & FIXED_MEMORY_OFFSET != 0)?,
        done: done.address(),
    };
    let expected = queued.request()?.used()?;
    // Not more than the allocation: a value that is not there yet must not make a race with strangers.
    let uses = if device_of(&state, expected.start, 1).is_ok() { vec![expected] } else { Vec::new() };
    let point = state.next_point(id)?;
    let work = Box::new(move |_: &Clock| queued.run(label, point, flags & ALIGNED != 0));
    state.enqueue(id, StreamOp { label, uses, delay: Delay::Random, work })?;
    Ok(())
}

impl Queued {
    fn request(&self) -> FileOutcome<Request> {
        let Self { direction, handle, base, .. } = *self;
        let (bytes, file_offset) = (self.bytes.value()?, self.file_offset.value()?);
        let memory = RequestedMemory { base, offset: self.memory_offset.value()?, bytes };
        Ok(Request::new(direction, handle, file_offset, memory))
    }

    fn run(&self, label: &str, point: Point, aligned: bool) {
        let result = match self.moved(label, point, aligned) {
            Ok(bytes) => bytes as isize,
            Err(code) if code.abs() > 5000 => -(code.abs() as isize),
            // The number of the error has nowhere to go: `errno` would be that of the stream's thread.
            Err(_) => -1,
        };
        // The pointer was checked when the op was queued.
        let _ = Out::<isize>::at(self.done).put(result);
    }

    fn moved(&self, label: &str, point: Point, aligned: bool) -> Result<usize, i32> {
        let transfer = {
            let mut state = lock();
            if let Some(code) = state.call_log.call(&format!("{label}@stream")) {
                return Err(code);
            }
            let request = self.request()?;
            if aligned && !request.is_aligned(PAGE) {
                return Err(INVALID_VALUE);
            }
            let transfer = state.transfer_on(request)?;
            let found = state.races.correct(point, transfer.used);
            state.record_violations(found);
            transfer
        };
        transfer.run()
    }
}

impl<T: Copy> Parameter<T> {
    fn new(pointer: Out<T>, fixed: bool) -> FileOutcome<Self> {
        let value = pointer.get().map_err(|_| INVALID_VALUE)?;
        Ok(if fixed { Self::Fixed(value) } else { Self::At(pointer.address(), std::marker::PhantomData) })
    }

    fn value(&self) -> FileOutcome<T> {
        match self {
            Self::Fixed(value) => Ok(*value),
            Self::At(address, _) => Out::<T>::at(*address).get().map_err(|_: abi::Code| INVALID_VALUE),
        }
    }
}
