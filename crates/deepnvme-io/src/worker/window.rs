//! Limits the ops in flight. This module does no I/O.
//!
//! The devices of virtual machines take all available ops and report them together when all are done, so a deep queue
//! keeps them busy. On a slow device, the same queue is many seconds of work, which delays other programs and
//! cancellation. The window therefore covers the work of a device within [`LATENCY_TARGET`], between [`OPS_MIN`] and
//! the queue depth.

use std::time::Duration;

/// Target latency of submitted ops.
const LATENCY_TARGET: Duration = Duration::from_millis(200);
/// Minimum window, unless the queue depth is smaller.
const OPS_MIN: u32 = 16;
/// Initial window, until an op has completed.
const OPS_INITIAL: u32 = 32;

/// The maximum number of ops in flight at one backend.
#[derive(Debug)]
pub(super) struct Window {
    ops: u32,
    ops_min: u32,
    ops_max: u32,
}

impl Window {
    /// Creates a window that adapts to the device.
    pub(super) fn adapting(queue_depth: u32) -> Self {
        Self { ops: OPS_INITIAL.min(queue_depth), ops_min: OPS_MIN.min(queue_depth), ops_max: queue_depth }
    }

    /// Creates a window that always equals the queue depth.
    pub(super) fn fixed(queue_depth: u32) -> Self {
        Self { ops: queue_depth, ops_min: queue_depth, ops_max: queue_depth }
    }

    pub(super) fn has_room(&self, in_flight: u32) -> bool {
        in_flight < self.ops
    }

    /// Learns from a completed op: the ops in flight at its submission and its latency. Their ratio is the device's
    /// rate.
    pub(super) fn learn(&mut self, in_flight: u32, latency: Duration) {
        let ops = u128::from(in_flight) * LATENCY_TARGET.as_nanos() / latency.as_nanos().max(1);
        self.ops = ops.clamp(self.ops_min.into(), self.ops_max.into()) as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Returns the ops in flight after `done` completions, on a device that does one op at a time.
    fn in_flight(mut window: Window, per_op: Duration, done: u32) -> u32 {
        let mut now = Duration::ZERO;
        let mut queue = VecDeque::new();
        for _ in 0..done {
            while window.has_room(queue.len() as u32) {
                queue.push_back((queue.len() as u32 + 1, now));
            }
            now += per_op;
            if let Some((depth, submitted)) = queue.pop_front() {
                window.learn(depth, now - submitted);
            }
        }
        queue.len() as u32
    }

    #[test]
    fn a_fast_device_gets_the_whole_queue() {
        let per_op = Duration::from_micros(500);
        for done in [2, 10, 1000] {
            assert_eq!(in_flight(Window::adapting(128), per_op, done), 127);
        }
        assert_eq!(in_flight(Window::adapting(4), per_op, 200), 3, "a queue depth below OPS_MIN");
    }

    #[test]
    fn a_slow_device_gets_the_ops_of_the_target_latency() {
        for done in [35, 100, 1000] {
            let in_flight = in_flight(Window::adapting(128), Duration::from_millis(5), done);
            assert!((38..=42).contains(&in_flight), "40 of 5 ms each: {in_flight}");
        }
        assert_eq!(in_flight(Window::adapting(128), Duration::from_millis(300), 1000), OPS_MIN - 1);
    }

    #[test]
    fn a_distant_but_wide_device_gets_the_whole_queue() {
        let mut window = Window::adapting(128);
        for _ in 0..5 {
            window.learn(window.ops, Duration::from_millis(80));
        }
        assert_eq!(window.ops, 128);
    }

    #[test]
    fn a_drained_queue_is_refilled_to_its_depth() {
        assert_eq!(in_flight(Window::fixed(64), Duration::from_millis(300), 1000), 63);
    }

    proptest! {
        #[test]
        fn it_is_always_within_its_bounds(
            depth in 1..5000u32,
            learnt in proptest::collection::vec((any::<u32>(), any::<u64>()), 0..300),
        ) {
            let mut window = Window::adapting(depth);
            for (in_flight, latency_ns) in learnt {
                prop_assert!(window.has_room(OPS_MIN.min(depth) - 1));
                prop_assert!(!window.has_room(depth));
                window.learn(in_flight, Duration::from_nanos(latency_ns));
            }
        }
    }
}
