//! How much memory engines, and what is done with them, may have: compared at every step (`state`).

use deepnvme_io::mem::simulated as memory;

use super::machine::World;

/// Memory that somebody may have until this is dropped.
#[derive(Debug)]
pub struct Room {
    world: World,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(bound) = &mut self.world.state().memory_bound {
            *bound = bound.saturating_sub(self.bytes);
        }
    }
}

impl World {
    /// From now on no more memory may be held than is held now, and than [`room`](Self::room) was made for.
    pub fn bound_memory(&self) {
        self.state().memory_bound = Some(memory::mapped_bytes());
    }

    /// Makes room for what is about to be done.
    #[must_use]
    pub fn room(&self, bytes: u64) -> Room {
        if let Some(bound) = &mut self.state().memory_bound {
            *bound += bytes;
        }
        Room { world: self.clone(), bytes }
    }

    /// Nothing is compared any more.
    pub fn unbound_memory(&self) {
        self.state().memory_bound = None;
    }
}
