//! Bound the memory of engines and their work; `state` checks it at every step.

use deepnvme_io::mem::simulated as memory;

use super::machine::World;

/// Memory allowance until this is dropped.
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
    /// Bound memory to the current use, plus each [`room`](Self::room).
    pub fn bound_memory(&self) {
        self.state().memory_bound = Some(memory::mapped_bytes());
    }

    /// Allow `bytes` more for the following work.
    #[must_use]
    pub fn room(&self, bytes: u64) -> Room {
        if let Some(bound) = &mut self.state().memory_bound {
            *bound += bytes;
        }
        Room { world: self.clone(), bytes }
    }

    /// Stop checking memory.
    pub fn unbound_memory(&self) {
        self.state().memory_bound = None;
    }
}
