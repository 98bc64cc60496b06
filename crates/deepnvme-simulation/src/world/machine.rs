//! Processes, faults and power cuts, and who may touch what.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deepnvme_simulation_runtime::thread::{self, ProcessId};
use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;

use super::folder::Inode;
use super::journal::ChangeId;
use super::tree::{Node, Tree};

/// The simulation itself, which makes worlds, looks at them and is never refused anything.
pub const OUTSIDE: ProcessId = 0;
/// Processes from this number on are those of users, whose files are nobody else's to touch.
pub const USERS_FROM: ProcessId = 1000;

/// What a world is like.
#[derive(Clone, Debug)]
pub struct Setup {
    /// How many disks it has.
    pub disks: usize,
    /// Whether files can be made without a name.
    pub has_unnamed: bool,
    /// Whether files can be locked.
    pub has_locks: bool,
    /// Whether files know when they were made.
    pub has_birth_times: bool,
    /// Whether files can be opened past the page cache.
    pub has_direct: bool,
    /// Calls that fail, of a thousand.
    pub failing: u32,
    /// Of the changes that are not durable, how many a power cut keeps, of a thousand.
    pub kept: u32,
    /// Whether a power cut keeps the changes of names up to one moment.
    pub is_ordered: bool,
    /// The step at which the power fails.
    pub power_cut_at: Option<u64>,
    /// Whether it fails at a call that changes something instead, of which there are fewer.
    pub is_cut_at_change: bool,
    /// The process that dies, and at which of its own steps.
    pub killed: Option<(ProcessId, u64)>,
    /// Whether that, or the power cut, comes soon after a renaming, where most can go wrong.
    pub is_at_renames: bool,
}

impl Setup {
    /// One that a seed draws.
    #[must_use]
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            disks: 3,
            has_unnamed: rng.chance(600),
            has_locks: rng.chance(850),
            has_birth_times: rng.chance(850),
            has_direct: rng.chance(500),
            failing: if rng.chance(300) { rng.within(1..40) as u32 } else { 0 },
            kept: rng.pick(&[0, 0, 300, 700, 1000]),
            is_ordered: rng.chance(250),
            power_cut_at: None,
            killed: None,
            is_at_renames: rng.chance(500),
            is_cut_at_change: rng.chance(500),
        }
    }
}

/// The machine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct World {
    state: Arc<Mutex<State>>,
}

/// What the world keeps under its lock, which nobody holds while threads are switched.
#[derive(Debug)]
pub struct State {
    /// The files.
    pub tree: Tree,
    /// What it is like.
    pub setup: Setup,
    rng: Rng,
    /// Calls that could have failed.
    calls: u64,
    refused: Range<u64>,
    steps: u64,
    /// Of these: calls that change names or lengths, and syncs.
    changes: u64,
    watch: Option<Watch>,
    has_power: bool,
    steps_of: HashMap<ProcessId, u64>,
    /// Who has died, and at which step.
    dead: HashMap<ProcessId, u64>,
    pub(crate) violations: Vec<String>,
    /// Names that the code under test may take from whatever has them.
    replaceable: Vec<PathBuf>,
    /// Ops that back ends have taken, by number, until they give them back.
    pub(crate) in_flight: Flights,
    /// What happened, folded into one number.
    trace: u64,
    is_told: bool,
}

/// Somebody who looks at what a crash would leave.
struct Watch {
    at: BTreeSet<u64>,
    look: Box<dyn FnMut(World, u64) + Send>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("at", &self.at).finish_non_exhaustive()
    }
}

/// The calls that decide what a crash leaves.
const CHANGES: [&str; 13] = [
    "open_unnamed",
    "link",
    "link_path",
    "rename",
    "rename_new",
    "unlink",
    "make_folder",
    "remove_folder",
    "set_mode",
    "truncate",
    "allocate",
    "sync begins",
    "sync",
];

/// The ops of all back ends: each comes home once.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    last: u64,
    out: BTreeSet<u64>,
}

impl Flights {
    /// Takes note of one that a back end has taken; its number.
    pub(crate) fn depart(&mut self) -> u64 {
        self.last += 1;
        self.out.insert(self.last);
        self.last
    }

    /// Takes note of one that is home; whether it was out.
    pub(crate) fn arrive(&mut self, number: u64) -> bool {
        self.out.remove(&number)
    }
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

    /// Has `look` called just before the code under test makes its change of these numbers, with the machine as it would be
    /// if all processes died then, and the step. Nothing fails in that copy. `look` must not ask this machine for anything.
    pub fn watch(&self, at: BTreeSet<u64>, look: impl FnMut(Self, u64) + Send + 'static) {
        self.state().watch = Some(Watch { at, look: Box::new(look) });
    }

    /// The state, between two switches of threads.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        tree.crash(rng, setup.kept, setup.is_ordered)?;
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

    /// How many calls that may fail there were since [`refuse`](Self::refuse).
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Counts the steps of the code under test from now on.
    pub fn forget_steps(&self) {
        let mut state = self.state();
        (state.steps, state.changes) = (0, 0);
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

/// A text, folded into one number.
struct Folded(u64);

impl Write for Folded {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 = text.bytes().fold(self.0, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Ok(())
    }
}

impl State {
    fn new(seed: u64, setup: Setup, tree: Tree) -> Self {
        Self {
            tree,
            setup,
            rng: Rng::keyed(seed, &[0x0077_6f72]),
            calls: 0,
            refused: 0..0,
            steps: 0,
            changes: 0,
            watch: None,
            has_power: true,
            steps_of: HashMap::new(),
            dead: HashMap::new(),
            violations: Vec::new(),
            replaceable: Vec::new(),
            in_flight: Flights::default(),
            trace: seed,
            is_told: std::env::var_os("DEEPNVME_SIMULATION_TELL").is_some(),
        }
    }

    fn begin_step(&mut self, what: &str, detail: &dyn std::fmt::Debug) -> Result<(), Errno> {
        let process = thread::process();
        if process == OUTSIDE {
            return Ok(());
        }
        if process < USERS_FROM {
            self.steps += 1;
            let steps = self.steps_of.entry(process).or_default();
            *steps += 1;
            if self.setup.killed == Some((process, *steps)) {
                self.dead.insert(process, self.steps);
                self.note("killed", &process);
            }
            let is_change = CHANGES.contains(&what);
            self.changes += u64::from(is_change);
            let is_due = match self.setup.power_cut_at {
                // Most of what can go wrong goes wrong around such a call; it is one step of four.
                Some(at) if self.setup.is_cut_at_change => is_change && self.changes == at.div_ceil(4),
                at => at == Some(self.steps),
            };
            if is_change && self.has_power {
                self.look();
            }
            if is_due && self.has_power {
                self.has_power = false;
                self.note("power cut", &self.steps.clone());
            }
        }
        if !self.has_power || self.dead.contains_key(&process) {
            return Err(Errno::IO);
        }
        self.note(what, detail);
        Ok(())
    }

    /// Shows the machine to whoever watches for this change.
    fn look(&mut self) {
        let Some(mut watch) = self.watch.take_if(|watch| watch.at.remove(&self.changes)) else { return };
        if let Ok(tree) = self.tree.copy() {
            let mut copy = Self::new(self.changes, self.setup.clone(), tree);
            copy.replaceable.clone_from(&self.replaceable);
            copy.calm();
            (watch.look)(World::of(copy), self.steps);
        }
        self.watch = Some(watch);
    }

    /// Notes what happens, for those who compare or watch.
    pub(crate) fn note(&mut self, what: &str, detail: &dyn std::fmt::Debug) {
        let process = thread::process();
        let mut folded = Folded(self.trace);
        let written = write!(folded, "{process} {what} {detail:?}");
        debug_assert!(written.is_ok(), "a number takes any text");
        self.trace = folded.0;
        if self.is_told {
            self.tell(&format!("{:>5} p{process} {what} {detail:?}", self.steps));
        }
    }

    #[allow(clippy::print_stderr, reason = "asked for by whoever follows one seed")]
    fn tell(&self, line: &str) {
        eprintln!("{line}");
    }

    /// Notes that something got another name: what was to fail at some step may fail a few steps after this one instead.
    pub(crate) fn renamed(&mut self) {
        if !self.is_tested() || !self.setup.is_at_renames || !self.rng.chance(200) {
            return;
        }
        let process = thread::process();
        let soon = 1 + self.rng.below(12);
        if self.setup.power_cut_at.is_some_and(|at| at > self.steps) {
            self.setup.power_cut_at = Some(self.steps + soon);
        }
        let own_steps = self.steps_of.get(&process).copied().unwrap_or(0);
        if self.setup.killed.is_some_and(|(killed, at)| killed == process && at > own_steps) {
            self.setup.killed = Some((process, own_steps + soon));
        }
    }

    fn calm(&mut self) {
        self.has_power = true;
        self.dead.clear();
        self.setup.failing = 0;
        self.refused = 0..0;
        self.setup.power_cut_at = None;
        self.setup.killed = None;
    }

    /// Whether the seed has this call fail.
    pub(crate) fn fails(&mut self) -> bool {
        if !self.is_tested() {
            return false;
        }
        self.calls += 1;
        let is_refused = self.refused.contains(&(self.calls - 1));
        is_refused || (self.setup.failing > 0 && self.rng.chance(self.setup.failing))
    }

    /// The world's own random numbers.
    pub(crate) fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }

    /// Whether the caller is code under test.
    pub(crate) fn is_tested(&self) -> bool {
        (1..USERS_FROM).contains(&thread::process())
    }

    /// Notes that the code under test is about to touch what is not its own.
    pub(crate) fn guard(&mut self, inode: Option<Inode>, does: &str, may_replace: Option<&Path>) {
        let Some(inode) = inode else { return };
        let is_foreign = self.tree.entry(inode).is_ok_and(|entry| entry.is_foreign);
        if !self.is_tested() || !is_foreign {
            return;
        }
        let path = self.tree.path_of(inode).unwrap_or_default();
        let is_allowed = may_replace.is_some_and(|path| self.replaceable.iter().any(|allowed| allowed == path))
            && self.replaceable.contains(&path);
        if !is_allowed {
            self.violations.push(format!("{does} {}, which somebody else made", path.display()));
        }
    }

    /// Notes bytes that were written to a file.
    pub(crate) fn wrote(
        &mut self,
        inode: Inode,
        offset: u64,
        bytes: Vec<u8>,
        is_reported: bool,
    ) -> Result<ChangeId, Errno> {
        self.guard(Some(inode), "writes to", None);
        let id = self.tree.next_change();
        let now = self.tree.tick();
        self.tree.journal(inode)?.wrote(id, offset as usize, bytes, is_reported);
        self.tree.entry_mut(inode)?.modified_ns = now;
        Ok(id)
    }

    /// What a sync of that descriptor promises, if it begins now.
    pub(crate) fn promise(&mut self, file: BorrowedFd<'_>) -> Result<(Inode, Vec<ChangeId>, ChangeId), Errno> {
        let inode = self.tree.inode_of(file)?;
        let promised = match &self.tree.entry(inode)?.node {
            Node::File(journal) => journal.promised(),
            _ => Vec::new(),
        };
        Ok((inode, promised, self.tree.last_change()))
    }
}
