//! Bound the memory of engines and their work; `state` checks it at every step.

use deepnvme_io::mem::mapped_bytes as memory;

use super::machine::World;

/// Memory allowance until this is dropped.
#[derive(Debug)]
pub struct MemoryAllowance {
    world: World,
    bytes: u64,
}

impl Drop for MemoryAllowance {
    fn drop(&mut self) {
        if let Some(bound) = &mut self.world.state().memory_bound {
            *bound = bound.saturating_sub(self.bytes);
        }
    }
}

impl World {
    /// Bounds memory to the current use, plus each [`allow_memory`](Self::allow_memory).
    pub fn bound_memory(&self) {
        self.state().memory_bound = Some(memory::mapped_bytes());
    }

    /// Allows `bytes` more for the following work.
    #[must_use]
    pub fn allow_memory(&self, bytes: u64) -> MemoryAllowance {
        if let Some(bound) = &mut self.state().memory_bound {
            *bound += bytes;
        }
        MemoryAllowance { world: self.clone(), bytes }
    }

    /// Stops checking memory.
    pub fn unbound_memory(&self) {
        self.state().memory_bound = None;
    }
}
