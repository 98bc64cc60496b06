//! The machine: a handle by which everybody has its state, for steps, faults and power cuts.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread::{self, ProcessId};
use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;

use super::setup::Setup;
use super::state::{OUTSIDE, State};
use super::tree::Tree;
use super::watch::{Instant, Looks, Watch};

/// The machine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct World {
    state: Arc<Mutex<State>>,
}

impl World {
    /// Transfers that never came home.
    #[must_use]
    pub fn lost_transfers(&self) -> usize {
        self.state().in_flight.out.len()
    }

    /// A world with empty disks.
    ///
    /// # Errors
    /// When the kernel gives no memory.
    pub fn new(seed: u64, setup: Setup) -> Result<Self, Errno> {
        let tree = Tree::new(setup.disks)?;
        Ok(Self::of(State::new(seed, setup, tree)))
    }

    fn of(state: State) -> Self {
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Has `look` called just before some of the changes that are made from now on, or before all of them: with the machine as
    /// it is then, and the place of the look. Of all looks of a place the last counts. `look` must not ask this machine for
    /// anything.
    pub fn watch(&self, looks: Looks, rng: Rng, look: impl FnMut(Instant, usize) + Send + 'static) {
        self.state().watch = Some(Watch::new(looks, rng, look));
    }

    /// Has nobody look any more; how many moments there were to look at.
    pub fn unwatch(&self) -> u64 {
        self.state().watch.take().map_or(0, |watch| watch.moments)
    }

    /// The state, between two switches of threads.
    pub fn state(&self) -> MutexGuard<'_, State> {
        ignore_poison(self.state.lock())
    }

    /// One step of the calling process: others may run first. An error when the process is dead or the power is off.
    pub(crate) fn step(&self, what: &str, detail: &dyn std::fmt::Debug) -> Result<MutexGuard<'_, State>, Errno> {
        if thread::process() != OUTSIDE {
            thread::yield_now();
        }
        let mut state = self.state();
        state.begin_step(what, detail)?;
        Ok(state)
    }

    /// As [`step`](Self::step), of a call that a fault may make fail.
    pub(crate) fn fallible(
        &self,
        what: &str,
        detail: &dyn std::fmt::Debug,
        fault: Errno,
    ) -> Result<MutexGuard<'_, State>, Errno> {
        let mut state = self.step(what, detail)?;
        if state.fails() {
            state.note(what, &"fails");
            return Err(fault);
        }
        Ok(state)
    }

    /// Lets the code under test replace what has this name, whoever made it.
    pub fn allow_replacing(&self, path: &Path) {
        self.state().replaceable.push(path.to_path_buf());
    }

    /// Whether the process has been killed, or the power cut.
    #[must_use]
    pub fn is_dead(&self, process: ProcessId) -> bool {
        let state = self.state();
        !state.has_power || state.dead.contains_key(&process)
    }

    /// Whether the power is on.
    #[must_use]
    pub fn has_power(&self) -> bool {
        self.state().has_power
    }

    /// Cuts the power now, if it has not failed by itself.
    pub fn cut_power(&self) {
        self.state().has_power = false;
    }

    /// After all threads of all processes have ended: the disks as the power cut left them, and the power on again.
    ///
    /// # Errors
    /// When the kernel refuses the memory.
    pub fn restart(&self) -> Result<(), Errno> {
        let mut state = self.state();
        let State { tree, rng, setup, .. } = &mut *state;
        tree.crash(rng, setup.losses)?;
        state.note("restart", &"after a power cut");
        state.calm();
        Ok(())
    }

    /// From now on nothing fails, and nobody dies.
    pub fn calm(&self) {
        self.state().calm();
    }

    /// Of the calls that may fail, these do, counted from now on.
    pub fn refuse(&self, calls: Range<u64>) {
        let mut state = self.state();
        (state.calls, state.refused) = (0, calls);
    }

    /// Has the code under test fail to read what has this name now, after so many reads that work.
    pub fn refuse_reading(&self, path: &Path, after: u64) {
        let mut state = self.state();
        let found = state.tree.find(path, true);
        state.unreadable = found.ok().and_then(|place| place.inode).map(|inode| (inode, after));
    }

    /// Has it readable again.
    pub fn allow_reading(&self) {
        self.state().unreadable = None;
    }

    /// How many calls that may fail there were since [`refuse`](Self::refuse).
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Counts the steps of the code under test from now on.
    pub fn forget_steps(&self) {
        let mut state = self.state();
        (state.steps, state.changes, state.changes_by_renaming) = (0, 0, None);
    }

    /// What the code under test did that it must not do.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// A number that two executions have in common only if they did the same.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.state().trace
    }

    /// Steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.state().steps
    }
}

impl Instant {
    /// The machine as it is when all processes die in that instant, or when the power fails. Nothing else fails in it.
    ///
    /// # Errors
    /// When the kernel gives no memory.
    pub fn after_crash(&self, is_cut: bool) -> Result<World, Errno> {
        let mut state = State::new(self.seed, self.setup.clone(), self.disks.restored()?);
        state.replaceable.clone_from(&self.replaceable);
        state.calm();
        let world = World::of(state);
        if is_cut {
            world.restart()?;
        }
        Ok(world)
    }
}
