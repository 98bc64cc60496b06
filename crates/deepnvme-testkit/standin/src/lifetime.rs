//! The end of memory: a program that gives memory back must have waited for all that uses it.
//!
//! What is found is a violation, and then the call waits for the users, so that the process lives to report it.

use crate::abi::{INVALID_VALUE, Outcome};
use crate::order::Point;
use crate::world::{Guard, wait_until};

/// Ends what occupies a range: notes who still uses it, waits for them, and forgets them.
pub(crate) fn vacate(mut world: Guard, action: &str, start: u64, bytes: usize) -> Guard {
    let users: Vec<(Point, String)> = world
        .order
        .users(start, bytes)
        .map(|entry| {
            let how = if entry.over { "that nobody has waited for" } else { "that is not over" };
            let Point { stream, seq } = entry.point;
            let text = format!("lifetime: {action} of {start:#x} used by {} {how}", entry.label);
            (entry.point, format!("{text} (stream {stream:#x}, op {seq})"))
        })
        .collect();
    world.violations(users.iter().map(|(_, text)| text.clone()).collect());
    let over = |world: &crate::world::World, point: Point| {
        !world.order.users(start, bytes).any(|entry| entry.point == point && !entry.over)
    };
    world = wait_until(world, |world| users.iter().all(|(point, _)| over(world, *point)));
    world.order.forget_range(start, bytes);
    world
}

/// `cuMemFree`.
pub(crate) fn free(mut world: Guard, base: u64) -> Outcome {
    let bytes = world.memory.at(base).ok_or(INVALID_VALUE)?.bytes;
    if world.cufile.buffers_in(base, bytes) {
        world.ledger.violation(format!("lifetime: cuMemFree of {base:#x}, which is registered with cuFile"));
    }
    world = vacate(world, "cuMemFree", base, bytes);
    world.memory.remove(base);
    Ok(())
}

/// `cuMemHostUnregister`.
pub(crate) fn unregister(mut world: Guard, start: usize) -> Outcome {
    let bytes = world.host.registration(start)?.bytes;
    world = vacate(world, "cuMemHostUnregister", start as u64, bytes);
    world.host.remove(start);
    Ok(())
}

/// `cuMemFreeHost`.
pub(crate) fn free_host(mut world: Guard, start: usize) -> Outcome {
    let bytes = world.host.allocation(start)?.bytes;
    world = vacate(world, "cuMemFreeHost", start as u64, bytes);
    world.host.remove(start);
    Ok(())
}
