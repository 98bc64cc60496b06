//! Choose the next thread from the seed, by one of several policies.

use std::collections::HashMap;

use deepnvme_testkit::rng::Rng;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};

/// The scheduling policy.
#[derive(Debug)]
enum Policy {
    /// Any runnable thread.
    Uniform,
    /// Mostly the current thread.
    Sticky,
    /// The thread of highest priority. Priorities are random, and sometimes change (PCT).
    Priority { priorities: HashMap<TaskId, u64>, lowest: u64 },
}

/// The key of the random numbers of a scheduler.
const SCHEDULER_KEY: u64 = 0x0073_6368;

/// A scheduler for one execution.
#[derive(Debug)]
pub struct SeededScheduler {
    seed: u64,
    rng: Rng,
    policy: Policy,
    is_started: bool,
}

impl SeededScheduler {
    /// Creates the scheduler of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::keyed(seed, &[SCHEDULER_KEY]);
        let policy = match rng.below(4) {
            0 => Policy::Uniform,
            1 => Policy::Priority { priorities: HashMap::new(), lowest: u64::MAX / 2 },
            _ => Policy::Sticky,
        };
        Self { seed, rng, policy, is_started: false }
    }
}

impl Scheduler for SeededScheduler {
    fn new_execution(&mut self) -> Option<Schedule> {
        let is_first = !std::mem::replace(&mut self.is_started, true);
        is_first.then(|| Schedule::new(self.seed))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, _is_yielding: bool) -> Option<TaskId> {
        let rng = &mut self.rng;
        let any = |rng: &mut Rng| runnable[rng.below(runnable.len() as u64) as usize].id();
        let chosen = match &mut self.policy {
            Policy::Uniform => any(rng),
            Policy::Sticky => match current.filter(|id| runnable.iter().any(|task| task.id() == *id)) {
                Some(current) if rng.chance(850) => current,
                _ => any(rng),
            },
            Policy::Priority { priorities, lowest } => {
                // The current thread sometimes loses its priority, which also ends every polling wait.
                if let Some(current) = current.filter(|_| rng.chance(40)) {
                    *lowest -= 1;
                    priorities.insert(current, *lowest);
                }
                let mut best = None;
                for task in runnable {
                    let priority = *priorities.entry(task.id()).or_insert_with(|| u64::MAX / 2 + rng.below(1 << 40));
                    if best.is_none_or(|(_, highest)| priority > highest) {
                        best = Some((task.id(), priority));
                    }
                }
                best?.0
            }
        };
        Some(chosen)
    }

    fn next_u64(&mut self) -> u64 {
        self.rng.next_u64()
    }
}
