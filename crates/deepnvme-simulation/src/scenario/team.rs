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
pub(super) struct Said {
    pub(super) text: String,
    pub(super) other_text: String,
    pub(super) bytes: Option<Vec<u8>>,
    pub(super) number: u64,
    pub(super) saved: Option<Saved>,
    pub(super) names: Vec<String>,
    pub(super) other_names: Vec<String>,
}

impl Said {
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
pub(super) struct Team {
    ranks: usize,
    board: Mutex<Board>,
    changed: Condvar,
}

#[derive(Default)]
struct Board {
    said: Vec<Option<Result<Said, String>>>,
    last: Arc<Vec<Result<Said, String>>>,
    round: u64,
    has_parted: bool,
    is_disturbed: bool,
}

impl Team {
    pub(super) fn new(ranks: usize) -> Self {
        let board = Board { said: vec![None; ranks], ..Board::default() };
        Self { ranks, board: Mutex::new(board), changed: Condvar::new() }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        ignore_poison(self.board.lock())
    }

    /// Let each rank do its work, and return all results in rank order.
    pub(super) fn agree(
        &self,
        context: &Context,
        rank: usize,
        work: impl FnOnce() -> Result<Said, Error>,
    ) -> Result<Vec<Said>, Failure> {
        let own = work().map_err(|error| error.to_string());
        if context.world.is_dead(thread::process()) {
            self.part();
            return Err(Failure::Lost);
        }
        let mut board = self.board();
        if board.has_parted {
            return Err(Failure::Lost);
        }
        let round = board.round;
        board.said[rank] = Some(own);
        if board.said.iter().all(Option::is_some) {
            board.last = Arc::new(board.said.iter_mut().filter_map(Option::take).collect());
            board.round += 1;
            self.changed.notify_all();
        }
        while board.round == round && !board.has_parted {
            board = ignore_poison(self.changed.wait(board));
        }
        if board.round == round {
            return Err(Failure::Lost);
        }
        let last = Arc::clone(&board.last);
        drop(board);
        last.iter().cloned().collect::<Result<_, _>>().map_err(Failure::Known)
    }

    /// Leave. Ranks that wait for this one stop waiting.
    pub(super) fn part(&self) {
        self.board().has_parted = true;
        self.changed.notify_all();
    }

    /// Record an interruption: failures are expected from now on.
    pub(super) fn disturb(&self) {
        self.board().is_disturbed = true;
    }

    pub(super) fn is_disturbed(&self) -> bool {
        self.board().is_disturbed
    }
}
