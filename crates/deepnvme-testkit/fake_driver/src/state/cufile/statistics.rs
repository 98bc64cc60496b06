//! Counted transfers. They are counted while the level is 3 and counting has started.

use super::transfer::Direction;
use crate::abi::Device;

/// The level that counts by GPU.
pub(crate) const LEVEL_MAX: i32 = 3;
/// Length of the struct's array of GPUs.
pub(crate) const GPUS_MAX: usize = 16;

/// Transfers of one GPU in one direction.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Counts {
    bytes: u64,
    bandwidth: u64,
    utilisation: u64,
    duration_us: u64,
    total: u64,
    peer_to_peer: u64,
    nvidia_fs: u64,
    posix: u64,
    unaligned: u64,
    dynamic_routing: u64,
}

/// `CUfilePerGpuStats_t`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct PerGpu {
    uuid: [u8; 16],
    reads: Counts,
    /// Sparse regions, inline regions, errors.
    more_of_reads: [u64; 3],
    writes: Counts,
    write_errors: u64,
    registrations: [u64; 5],
}

/// `CUfileStatsLevel3_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Level3 {
    pub(crate) detailed: [u64; 128],
    pub(crate) gpus: u32,
    pub(crate) per_gpu: [PerGpu; GPUS_MAX],
}

/// The level, and what was counted.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    pub(crate) level: i32,
    pub(crate) is_started: bool,
    pub(crate) per_gpu: [PerGpu; GPUS_MAX],
}

impl Statistics {
    /// Counts a transfer of a device. `is_copied`: through the host.
    pub(crate) fn count(&mut self, direction: Direction, device: Option<Device>, bytes: usize, is_copied: bool) {
        let gpu = device.and_then(|device| usize::try_from(device).ok()).unwrap_or(0);
        if !self.is_started || self.level < LEVEL_MAX || gpu >= GPUS_MAX {
            return;
        }
        let counts = match direction {
            Direction::Read => &mut self.per_gpu[gpu].reads,
            Direction::Write => &mut self.per_gpu[gpu].writes,
        };
        counts.bytes += bytes as u64;
        counts.total += 1;
        *(if is_copied { &mut counts.posix } else { &mut counts.nvidia_fs }) += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structs_are_laid_out_as_the_header_has_them() {
        assert_eq!((size_of::<PerGpu>(), size_of::<Level3>()), (248, 5000));
        assert_eq!((offset_of!(Level3, gpus), offset_of!(Level3, per_gpu)), (1024, 1032));
        let (reads, writes) = (offset_of!(PerGpu, reads), offset_of!(PerGpu, writes));
        let inner = [offset_of!(Counts, peer_to_peer), offset_of!(Counts, nvidia_fs), offset_of!(Counts, posix)];
        assert_eq!(inner.map(|inner| reads + inner), [56, 64, 72]);
        assert_eq!(inner.map(|inner| writes + inner), [160, 168, 176]);
    }
}
