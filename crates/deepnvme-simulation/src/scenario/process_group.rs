//! Messages between ranks. After each round, all ranks know all messages, or that a rank is gone.

use std::sync::Arc;

use deepnvme_checkpoint::Error;
use deepnvme_checkpoint::write::Saved;
use deepnvme_mem::sync::ignore_poison;
use deepnvme_simulation_runtime::sync::{Condvar, Mutex, MutexGuard};
use deepnvme_simulation_runtime::thread;

use super::context::Context;

/// A rank's message in a round.
#[derive(Clone, Default)]
pub(super) struct Message {
    pub(super) text: String,
    pub(super) other_text: String,
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) number: u64,
    pub(super) saved: Option<Saved>,
    pub(super) names: Vec<String>,
    pub(super) other_names: Vec<String>,
}

impl Message {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }
}

/// Reason why a round has no result.
#[derive(Debug)]
pub(super) enum Failure {
    /// A rank failed, and all know.
    Known(String),
    /// A rank is gone. The others may not know.
    Lost,
}

/// The ranks.
pub(super) struct ProcessGroup {
    ranks: usize,
    state: Mutex<GroupState>,
    changed: Condvar,
}

#[derive(Default)]
struct GroupState {
    messages: Vec<Option<Result<Message, String>>>,
    last: Arc<Vec<Result<Message, String>>>,
    round: u64,
    has_left: bool,
    is_interrupted: bool,
}

impl ProcessGroup {
    pub(super) fn new(ranks: usize) -> Self {
        let state = GroupState { messages: vec![None; ranks], ..GroupState::default() };
        Self { ranks, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
        ignore_poison(self.state.lock())
    }

    /// Lets each rank do its work, and returns all results in rank order.
    pub(super) fn gather(
        &self,
        context: &Context,
        rank: usize,
        work: impl FnOnce() -> Result<Message, Error>,
    ) -> Result<Vec<Message>, Failure> {
        let own = work().map_err(|error| error.to_string());
        if context.world.is_dead(thread::process()) {
            self.leave();
            return Err(Failure::Lost);
        }
        let mut state = self.state();
        if state.has_left {
            return Err(Failure::Lost);
        }
        let round = state.round;
        state.messages[rank] = Some(own);
        if state.messages.iter().all(Option::is_some) {
            state.last = Arc::new(state.messages.iter_mut().filter_map(Option::take).collect());
            state.round += 1;
            self.changed.notify_all();
        }
        while state.round == round && !state.has_left {
            state = ignore_poison(self.changed.wait(state));
        }
        if state.round == round {
            return Err(Failure::Lost);
        }
        let last = Arc::clone(&state.last);
        drop(state);
        last.iter().cloned().collect::<Result<_, _>>().map_err(Failure::Known)
    }

    /// Leaves the group. Ranks that wait for this one stop waiting.
    pub(super) fn leave(&self) {
        self.state().has_left = true;
        self.changed.notify_all();
    }

    /// Records an interruption: failures are expected from now on.
    pub(super) fn mark_interrupted(&self) {
        self.state().is_interrupted = true;
    }

    pub(super) fn is_interrupted(&self) -> bool {
        self.state().is_interrupted
    }
}
