//! Fake kernels: they take a given time, and write known bytes.

use std::time::Duration;

use crate::abi::{Code, Device, Handle, Outcome};
use crate::access::Shape;
use crate::calls::{Needs, driver};
use crate::operations::locate::Side;
use crate::operations::queue::{Delay, StreamOp};
use crate::state::DriverGuard;
use crate::state::clock::Clock;

/// `fake_driver_fill_kernel`: fills memory with [`crate::pattern`] after the delay.
pub(crate) fn fill(stream: Handle, to: u64, bytes: usize, seed: u64, delay_us: u64) -> Code {
    driver("fake_driver_fill_kernel", Needs::Context, move |state, device| {
        let to = state.locate(Side::Device(to), Shape::line(bytes), true)?;
        let (uses, range) = (vec![to.used], to.range);
        let work = Box::new(move |_: &Clock| range.fill_pattern(seed));
        queue(
            state,
            (device, stream),
            delay_us,
            StreamOp { label: "fake_driver_fill_kernel", uses, delay: Delay::None, work },
        )
    })
}

/// `fake_driver_copy_kernel`: copies memory on the device after the delay.
pub(crate) fn copy(stream: Handle, to: u64, from: u64, bytes: usize, delay_us: u64) -> Code {
    driver("fake_driver_copy_kernel", Needs::Context, move |state, device| {
        let shape = Shape::line(bytes);
        let (from, to) =
            (state.locate(Side::Device(from), shape, false)?, state.locate(Side::Device(to), shape, true)?);
        let uses = vec![from.used, to.used];
        let (from, to) = (from.range, to.range);
        let work = Box::new(move |_: &Clock| from.copy_to(&to));
        queue(
            state,
            (device, stream),
            delay_us,
            StreamOp { label: "fake_driver_copy_kernel", uses, delay: Delay::None, work },
        )
    })
}

fn queue(mut state: DriverGuard, (device, stream): (Device, Handle), delay_us: u64, op: StreamOp) -> Outcome {
    let id = state.stream_for_work(stream, device)?;
    let delay = Delay::Exactly(Duration::from_micros(delay_us));
    state.enqueue(id, StreamOp { delay, ..op }).map(drop)
}
