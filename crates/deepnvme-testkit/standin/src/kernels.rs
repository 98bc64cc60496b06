//! Work for a stream that stands for a kernel: it takes as long as the test says, and what it writes is known.

use std::time::Duration;

use crate::abi::{Code, Device, Handle, Outcome};
use crate::bytes::Side;
use crate::calls::{Needs, driver};
use crate::order::Clock;
use crate::queue::{Delay, Op};
use crate::span::Shape;
use crate::world::Guard;

/// `standin_fill_kernel`: after the delay, memory holds [`crate::pattern`].
pub(crate) fn fill(stream: Handle, to: u64, bytes: usize, seed: u64, delay_us: u64) -> Code {
    driver("standin_fill_kernel", Needs::Context, move |world, device| {
        let to = world.locate(Side::Device(to), Shape::line(bytes), true)?;
        let (uses, stretch) = (vec![to.used], to.stretch);
        let work = Box::new(move |_: &Clock| stretch.fill_pattern(seed));
        queue(world, (device, stream), delay_us, Op { label: "standin_fill_kernel", uses, delay: Delay::None, work })
    })
}

/// `standin_copy_kernel`: after the delay, memory is copied on the device.
pub(crate) fn copy(stream: Handle, to: u64, from: u64, bytes: usize, delay_us: u64) -> Code {
    driver("standin_copy_kernel", Needs::Context, move |world, device| {
        let shape = Shape::line(bytes);
        let (from, to) =
            (world.locate(Side::Device(from), shape, false)?, world.locate(Side::Device(to), shape, true)?);
        let uses = vec![from.used, to.used];
        let (from, to) = (from.stretch, to.stretch);
        let work = Box::new(move |_: &Clock| from.copy_to(&to));
        queue(world, (device, stream), delay_us, Op { label: "standin_copy_kernel", uses, delay: Delay::None, work })
    })
}

fn queue(mut world: Guard, (device, stream): (Device, Handle), delay_us: u64, op: Op) -> Outcome {
    let id = world.stream_for_work(stream, device)?;
    let delay = Delay::Exactly(Duration::from_micros(delay_us));
    world.enqueue(id, Op { delay, ..op }).map(drop)
}
