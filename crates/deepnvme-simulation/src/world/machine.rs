//! The machine: a shared handle to its state, for steps, faults and power cuts.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::thread::{self, ProcessId};
use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;

use super::crash_points::{CrashPointPicker, CrashPoints, MachineSnapshot};
use super::setup::Setup;
use super::state::{SIMULATOR, WorldState};
use super::tree::Tree;

/// The machine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct World {
    state: Arc<Mutex<WorldState>>,
}

impl World {
    /// Returns the number of transfers that never completed.
    #[must_use]
    pub fn incomplete_transfers(&self) -> usize {
        self.state().in_flight.numbers.len()
    }

    /// Creates a world with empty disks.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn new(seed: u64, setup: Setup) -> Result<Self, Errno> {
        let tree = Tree::new(setup.disks)?;
        Ok(Self::of(WorldState::new(seed, setup, tree)))
    }

    fn of(state: WorldState) -> Self {
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Calls `on_snapshot` just before some of the following changes, or all of them, with a snapshot of the machine
    /// and its slot. A later snapshot replaces an earlier one of its slot. `on_snapshot` must not use this machine.
    pub fn pick_crash_points(
        &self,
        points: CrashPoints,
        rng: Rng,
        on_snapshot: impl FnMut(MachineSnapshot, usize) + Send + 'static,
    ) {
        self.state().picker = Some(CrashPointPicker::new(points, rng, on_snapshot));
    }

    /// Stops picking. Returns the number of crash points seen.
    pub fn stop_picking(&self) -> u64 {
        self.state().picker.take().map_or(0, |picker| picker.points_seen)
    }

    /// Locks the state. Don't switch threads while holding it.
    pub fn state(&self) -> MutexGuard<'_, WorldState> {
        ignore_poison(self.state.lock())
    }

    /// Starts a step of the calling process, after a possible thread switch. Fails if the process is dead or the power
    /// is off.
    pub(crate) fn step(&self, what: &str, detail: &dyn std::fmt::Debug) -> Result<MutexGuard<'_, WorldState>, Errno> {
        if thread::process() != SIMULATOR {
            thread::yield_now();
        }
        let mut state = self.state();
        state.begin_step(what, detail)?;
        Ok(state)
    }

    /// Like [`step`](Self::step), for a call that can fail by an injected fault.
    pub(crate) fn fallible(
        &self,
        what: &str,
        detail: &dyn std::fmt::Debug,
        fault: Errno,
    ) -> Result<MutexGuard<'_, WorldState>, Errno> {
        let mut state = self.step(what, detail)?;
        if state.fails() {
            state.note(what, &"fails");
            return Err(fault);
        }
        Ok(state)
    }

    /// Lets the code under test replace the file of this name, even a foreign one.
    pub fn allow_replacing(&self, path: &Path) {
        self.state().replaceable.push(path.to_path_buf());
    }

    /// Returns whether the process was killed or the power was cut.
    #[must_use]
    pub fn is_dead(&self, process: ProcessId) -> bool {
        let state = self.state();
        !state.has_power || state.dead.contains_key(&process)
    }

    /// Returns whether the power is on.
    #[must_use]
    pub fn has_power(&self) -> bool {
        self.state().has_power
    }

    /// Cuts the power now, unless it is already off.
    pub fn cut_power(&self) {
        self.state().has_power = false;
    }

    /// Restarts after a power cut, once all threads of all processes have ended. The disks contain what remained.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn restart(&self) -> Result<(), Errno> {
        let mut state = self.state();
        let WorldState { tree, rng, setup, .. } = &mut *state;
        tree.crash(rng, setup.losses)?;
        state.note("restart", &"after a power cut");
        state.stop_faults();
        Ok(())
    }

    /// Stops all faults and deaths.
    pub fn stop_faults(&self) {
        self.state().stop_faults();
    }

    /// Fails these of the calls that can fail, counted from now on.
    pub fn fail_calls(&self, calls: Range<u64>) {
        let mut state = self.state();
        (state.calls, state.failing_calls) = (0, calls);
    }

    /// Makes the file of this name unreadable for the code under test, after `after` successful reads.
    pub fn make_unreadable(&self, path: &Path, after: u64) {
        let mut state = self.state();
        let found = state.tree.find(path, true);
        state.unreadable = found.ok().and_then(|place| place.inode).map(|inode| (inode, after));
    }

    /// Makes it readable again.
    pub fn make_readable(&self) {
        self.state().unreadable = None;
    }

    /// Returns the number of calls that could fail since [`fail_calls`](Self::fail_calls).
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Restarts the step counts of the code under test.
    pub fn reset_steps(&self) {
        let mut state = self.state();
        (state.steps, state.changes, state.changes_by_renaming) = (0, 0, None);
    }

    /// Returns the violations by the code under test.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// Returns a hash of all steps, equal for identical executions.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.state().trace
    }

    /// Returns the number of steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.state().steps
    }
}

impl MachineSnapshot {
    /// Creates the machine as it is after all processes die, or the power fails, at that moment. It injects no further
    /// faults.
    ///
    /// # Errors
    /// If the kernel provides no memory.
    pub fn after_crash(&self, is_cut: bool) -> Result<World, Errno> {
        let mut state = WorldState::new(self.seed, self.setup.clone(), self.disks.restored()?);
        state.replaceable.clone_from(&self.replaceable);
        state.stop_faults();
        let world = World::of(state);
        if is_cut {
            world.restart()?;
        }
        Ok(world)
    }
}
