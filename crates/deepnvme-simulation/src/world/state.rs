//! The machine's locked state: live processes, possible faults, access rules and watched moments.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use deepnvme_io::mem::mapped_bytes as memory;
use deepnvme_simulation_runtime::thread::{self, ProcessId};
use deepnvme_testkit::rng::Rng;
use rustix::io::Errno;

use super::crash_points::{CrashPointKind, CrashPointPicker, CrashPoints, MachineSnapshot};
use super::folder::Inode;
use super::journal::ChangeId;
use super::setup::{FaultTrigger, Setup};
use super::tree::{Losses, Node, Tree};

/// The simulation itself. It creates and inspects worlds, and is never refused anything.
pub const SIMULATOR: ProcessId = 0;
/// Processes from this number on are users'. Only users may touch their files.
pub const FIRST_USER: ProcessId = 1000;

/// The world's locked state. The lock is never held across a thread switch.
#[derive(Debug)]
pub struct WorldState {
    /// The files.
    pub tree: Tree,
    /// Parameters of the world.
    pub setup: Setup,
    pub(super) rng: Rng,
    /// Calls that could fail.
    pub(super) calls: u64,
    pub(super) failing_calls: Range<u64>,
    pub(super) steps: u64,
    /// Calls so far that change names or lengths, and syncs.
    pub(super) changes: u64,
    /// Value of `changes` at the last rename or removal.
    pub(super) changes_by_renaming: Option<u64>,
    pub(super) picker: Option<CrashPointPicker>,
    pub(super) has_power: bool,
    steps_of: HashMap<ProcessId, u64>,
    /// Dead processes, and the step of their death.
    pub(super) dead: HashMap<ProcessId, u64>,
    pub(crate) violations: Vec<String>,
    /// Names that the code under test may replace, even foreign ones.
    pub(super) replaceable: Vec<PathBuf>,
    /// A file with bad sectors, and the reads left before they show.
    pub(super) unreadable: Option<(Inode, u64)>,
    /// Reads that have hit bad sectors since faults were last stopped.
    pub bad_reads: u64,
    /// Current memory bound of engines and their work, if any.
    pub(super) memory_bound: Option<u64>,
    /// Numbers of the ops that backends have accepted and not yet completed.
    pub(crate) in_flight: InFlightOps,
    /// Hash of all events.
    pub(super) trace: u64,
    is_logged: bool,
}

/// Changes for which a rename or removal counts as recent. The syncs that must follow it are among them.
const RECENT_CHANGES: u64 = 6;
/// Calls that decide the state after a crash.
const CHANGES: [&str; 15] = [
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
    SYNC_OF_NAMES.0,
    SYNC_OF_NAMES.1,
];
/// Promise of a sync: the file, its changes, and the last change of names.
pub(crate) type Promise = (Inode, Vec<ChangeId>, ChangeId);

/// Start and end events of a folder's sync.
pub(crate) const SYNC_OF_NAMES: (&str, &str) = ("sync of names begins", "sync of names");

/// Ops of all backends. Each completes once.
#[derive(Debug, Default)]
pub(crate) struct InFlightOps {
    last: u64,
    pub(super) numbers: BTreeSet<u64>,
}

impl InFlightOps {
    /// Records an accepted op. Returns its number.
    pub(crate) fn add(&mut self) -> u64 {
        self.last += 1;
        self.numbers.insert(self.last);
        self.last
    }

    /// Records a completed op. Returns whether it was in flight.
    pub(crate) fn remove(&mut self, number: u64) -> bool {
        self.numbers.remove(&number)
    }
}

/// The key of the random numbers of a machine.
const WORLD_KEY: u64 = 0x0077_6f72;

/// A text hashed into one number.
struct Fnv1a(u64);

impl Write for Fnv1a {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 = text.bytes().fold(self.0, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Ok(())
    }
}

impl WorldState {
    pub(super) fn new(seed: u64, setup: Setup, tree: Tree) -> Self {
        Self {
            tree,
            setup,
            rng: Rng::keyed(seed, &[WORLD_KEY]),
            calls: 0,
            failing_calls: 0..0,
            steps: 0,
            changes: 0,
            changes_by_renaming: None,
            picker: None,
            has_power: true,
            steps_of: HashMap::new(),
            dead: HashMap::new(),
            violations: Vec::new(),
            replaceable: Vec::new(),
            unreadable: None,
            bad_reads: 0,
            memory_bound: None,
            in_flight: InFlightOps::default(),
            trace: seed,
            is_logged: std::env::var_os("DEEPNVME_SIMULATION_TELL").is_some(),
        }
    }

    pub(super) fn begin_step(&mut self, what: &str, detail: &dyn std::fmt::Debug) -> Result<(), Errno> {
        let process = thread::process();
        if process == SIMULATOR {
            return Ok(());
        }
        if process < FIRST_USER {
            self.steps += 1;
            let steps = self.steps_of.entry(process).or_default();
            *steps += 1;
            if self.setup.killed == Some((process, *steps)) {
                self.dead.insert(process, self.steps);
                self.note("killed", &process);
            }
            self.check_memory();
            let is_change = CHANGES.contains(&what);
            self.changes += u64::from(is_change);
            let is_due = match self.setup.power_cut_at {
                // Only one step in four is such a call.
                Some(at) if self.setup.fault_trigger == FaultTrigger::Changes => {
                    is_change && self.changes == at.div_ceil(4)
                }
                at => at == Some(self.steps),
            };
            if is_change && self.has_power {
                self.sample_crash_point(what);
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

    /// Called before each call that decides the state after a crash.
    fn sample_crash_point(&mut self, what: &str) {
        let is_recent = self.changes_by_renaming.is_some_and(|by| self.changes <= by + RECENT_CHANGES);
        let is_sync = [SYNC_OF_NAMES.0, SYNC_OF_NAMES.1].contains(&what);
        let kind = match (is_recent, is_sync) {
            (true, true) => CrashPointKind::Sync,
            (true, false) => CrashPointKind::Recent,
            (false, _) => CrashPointKind::Any,
        };
        if let Some(picker) = self.picker.as_mut().filter(|picker| !matches!(picker.points, CrashPoints::All(_)))
            && let Some(slot) = picker.slot(kind)
        {
            self.take_snapshot(slot);
        }
    }

    /// Called before each change of the machine. Promises only grow between two changes, so each state is looked at
    /// once, at its end.
    pub(crate) fn before_change(&mut self) {
        let Some(CrashPointPicker { points: CrashPoints::All(numbers), points_seen, .. }) = &mut self.picker else {
            return;
        };
        let number = *points_seen;
        *points_seen += 1;
        if numbers.contains(&number) {
            self.take_snapshot(number as usize);
        }
    }

    /// Passes a snapshot of the machine to the picker.
    fn take_snapshot(&mut self, slot: usize) {
        let Some(mut picker) = self.picker.take() else { return };
        match self.tree.snapshot() {
            Ok(disks) => {
                // This machine's final losses say nothing about its losses now.
                let mut rng = Rng::keyed(picker.seed, &[slot as u64, self.steps]);
                let setup = Setup { losses: Losses::draw(&mut rng), ..self.setup.clone() };
                let (replaceable, step) = (self.replaceable.clone(), self.steps);
                (picker.on_snapshot)(MachineSnapshot { disks, setup, replaceable, seed: rng.next_u64(), step }, slot);
            }
            Err(errno) => self.violations.push(format!("no copy of the disks: {errno}")),
        }
        self.picker = Some(picker);
    }

    /// Checks the memory in use. Reports an excess once.
    fn check_memory(&mut self) {
        let held = memory::mapped_bytes();
        if let Some(bound) = self.memory_bound.take_if(|bound| held > *bound) {
            self.violations.push(format!("{held} bytes of memory are held at step {}, of {bound}", self.steps));
        }
    }

    /// Records an event, for comparison and display.
    pub(crate) fn note(&mut self, what: &str, detail: &dyn std::fmt::Debug) {
        let process = thread::process();
        let mut hash = Fnv1a(self.trace);
        let written = write!(hash, "{process} {what} {detail:?}");
        debug_assert!(written.is_ok(), "a number takes any text");
        self.trace = hash.0;
        if self.is_logged {
            self.log(&format!("{:>5} p{process} {what} {detail:?}", self.steps));
        }
    }

    #[allow(clippy::print_stderr, reason = "asked for by whoever follows one seed")]
    fn log(&self, line: &str) {
        eprintln!("{line}");
    }

    /// Records a rename or removal. Planned faults may move to a few steps after it.
    pub(crate) fn names_changed(&mut self) {
        if !self.caller_is_under_test() {
            return;
        }
        self.changes_by_renaming = Some(self.changes);
        let FaultTrigger::AfterRenames { chance } = self.setup.fault_trigger else { return };
        if !self.rng.chance(chance) {
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

    pub(super) fn stop_faults(&mut self) {
        self.has_power = true;
        self.dead.clear();
        self.setup.failing_per_mille = 0;
        self.failing_calls = 0..0;
        (self.unreadable, self.bad_reads) = (None, 0);
        self.setup.power_cut_at = None;
        self.setup.killed = None;
    }

    /// Returns whether the seed makes this call fail.
    pub(crate) fn fails(&mut self) -> bool {
        if !self.caller_is_under_test() {
            return false;
        }
        self.calls += 1;
        let is_refused = self.failing_calls.contains(&(self.calls - 1));
        is_refused || (self.setup.failing_per_mille > 0 && self.rng.chance(self.setup.failing_per_mille))
    }

    /// Returns whether the caller cannot read this file, now and from now on.
    pub(crate) fn is_unreadable(&mut self, inode: Inode) -> bool {
        if !self.caller_is_under_test() {
            return false;
        }
        match &mut self.unreadable {
            Some((bad, left)) if *bad == inode => {
                let is_bad = *left == 0;
                self.bad_reads += u64::from(is_bad);
                *left = left.saturating_sub(1);
                is_bad
            }
            _ => false,
        }
    }

    /// Returns the world's own random numbers.
    pub(crate) fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }

    /// Returns whether the caller is code under test.
    pub(crate) fn caller_is_under_test(&self) -> bool {
        (1..FIRST_USER).contains(&thread::process())
    }

    /// Records a violation if the code under test touches a foreign file.
    pub(crate) fn check_ownership(&mut self, inode: Option<Inode>, action: &str, may_replace: Option<&Path>) {
        let Some(inode) = inode else { return };
        let is_foreign = self.tree.entry(inode).is_ok_and(|entry| entry.is_foreign);
        if !self.caller_is_under_test() || !is_foreign {
            return;
        }
        let path = self.tree.path_of(inode).unwrap_or_default();
        let is_allowed = may_replace.is_some_and(|path| self.replaceable.iter().any(|allowed| allowed == path))
            && self.replaceable.contains(&path);
        if !is_allowed {
            self.violations.push(format!("{action} {}, which somebody else made", path.display()));
        }
    }

    /// Records bytes written to a file.
    pub(crate) fn wrote(
        &mut self,
        inode: Inode,
        offset: u64,
        bytes: Vec<u8>,
        is_reported: bool,
    ) -> Result<ChangeId, Errno> {
        self.check_ownership(Some(inode), "writes to", None);
        let id = self.tree.next_change();
        self.tree.journal(inode)?.wrote(id, offset as usize, bytes, is_reported);
        self.tree.touch(inode)?;
        Ok(id)
    }

    /// Returns the promise of a sync of this descriptor that starts now.
    pub(crate) fn promise(&mut self, file: BorrowedFd<'_>) -> Result<Promise, Errno> {
        let inode = self.tree.inode_of(file)?;
        let promised = match &self.tree.entry(inode)?.node {
            Node::File(journal) => journal.promised(),
            _ => Vec::new(),
        };
        Ok((inode, promised, self.tree.last_change()))
    }
}
