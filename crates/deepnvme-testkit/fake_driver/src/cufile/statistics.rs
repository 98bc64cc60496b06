//! cuFile's statistics of transfers. They are counted while the level is 3 and counting has started.

use crate::abi::{Device, Out};
use crate::cufile::abi::{INVALID_VALUE, cufile_calls};
use crate::cufile::session::opened;
use crate::cufile::transfer::Direction;

/// The level that counts by GPU.
const LEVEL_MAX: i32 = 3;
/// Length of the struct's array of GPUs.
const GPUS_MAX: usize = 16;

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
struct PerGpu {
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
struct Level3 {
    detailed: [u64; 128],
    gpus: u32,
    per_gpu: [PerGpu; GPUS_MAX],
}

/// The level, and what was counted.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    level: i32,
    is_started: bool,
    per_gpu: [PerGpu; GPUS_MAX],
}

impl Statistics {
    /// Counts a transfer of a device. `is_copied`: through the host.
    pub(super) fn count(&mut self, direction: Direction, device: Option<Device>, bytes: usize, is_copied: bool) {
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

cufile_calls! {
    fn cuFileSetStatsLevel(level: i32) |mut state| {
        if !(0..=LEVEL_MAX).contains(&level) {
            return Err(INVALID_VALUE);
        }
        state.cufile.statistics.level = level;
        Ok(())
    }

    fn cuFileGetStatsLevel(level: Out<i32>) |state| {
        level.put(state.cufile.statistics.level).map_err(|_| INVALID_VALUE)
    }

    fn cuFileStatsStart() |mut state| {
        opened(&state)?;
        state.cufile.statistics.is_started = true;
        Ok(())
    }

    fn cuFileStatsStop() |mut state| {
        opened(&state)?;
        state.cufile.statistics.is_started = false;
        Ok(())
    }

    fn cuFileStatsReset() |mut state| {
        opened(&state)?;
        state.cufile.statistics.per_gpu = Default::default();
        Ok(())
    }

    fn cuFileGetStatsL3(statistics: Out<Level3>) |state| {
        opened(&state)?;
        let Statistics { level, per_gpu, .. } = state.cufile.statistics;
        if level < LEVEL_MAX {
            return Err(INVALID_VALUE);
        }
        let gpus = state.devices.len().min(GPUS_MAX) as u32;
        statistics.put(Level3 { detailed: [0; 128], gpus, per_gpu }).map_err(|_| INVALID_VALUE)
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
