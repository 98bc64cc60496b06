//! Functions and structs of cuFile's statistics, from `cufile.h`.

use std::ffi::c_int;

use libloading::Library;

use super::error::Status;
use crate::library::function_table;

/// GPUs that the struct has room for.
const GPUS_MAX: usize = 16;

/// How many transfers took which way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TransferCounts {
    /// Directly, through the kernel module nvidia-fs.
    pub nvidia_fs: u64,
    /// Directly, through the kernel's own peer-to-peer transfers.
    pub peer_to_peer: u64,
    /// Through host memory (compatibility mode).
    pub posix: u64,
}

impl TransferCounts {
    /// Returns the transfers that bypassed host memory.
    #[must_use]
    pub const fn direct(&self) -> u64 {
        self.nvidia_fs + self.peer_to_peer
    }
}

/// One direction in `CUfilePerGpuStats_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    /// Bytes, bandwidth, utilisation, duration, transfers.
    _totals: [u64; 5],
    peer_to_peer: u64,
    nvidia_fs: u64,
    posix: u64,
    /// Unaligned transfers, transfers with dynamic routing.
    _others: [u64; 2],
}

/// `CUfilePerGpuStats_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct PerGpu {
    _uuid: [u8; 16],
    reads: Counters,
    /// Sparse regions, inline regions, errors.
    _more_of_reads: [u64; 3],
    writes: Counters,
    _write_errors: u64,
    _registrations: [u64; 5],
}

/// `CUfileStatsLevel3_t`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Level3 {
    _detailed: [u64; 128],
    gpus: u32,
    per_gpu: [PerGpu; GPUS_MAX],
    // Space for the fields of later versions.
    _later_fields: [u64; 256],
}

impl Level3 {
    const fn zeroed() -> Self {
        let counters = Counters { _totals: [0; 5], peer_to_peer: 0, nvidia_fs: 0, posix: 0, _others: [0; 2] };
        let gpu = PerGpu {
            _uuid: [0; 16],
            reads: counters,
            _more_of_reads: [0; 3],
            writes: counters,
            _write_errors: 0,
            _registrations: [0; 5],
        };
        Self { _detailed: [0; 128], gpus: 0, per_gpu: [gpu; GPUS_MAX], _later_fields: [0; 256] }
    }

    /// Returns the sums of all GPUs.
    fn counts(&self, is_read: bool) -> TransferCounts {
        let mut sum = TransferCounts::default();
        for gpu in self.per_gpu.iter().take(self.gpus as usize) {
            let counters = if is_read { &gpu.reads } else { &gpu.writes };
            sum.nvidia_fs += counters.nvidia_fs;
            sum.peer_to_peer += counters.peer_to_peer;
            sum.posix += counters.posix;
        }
        sum
    }
}

function_table! {
    /// The functions of statistics.
    pub(super) struct Functions {
        set_level = b"cuFileSetStatsLevel\0" (c_int) -> Status;
        get_level = b"cuFileGetStatsLevel\0" (*mut c_int) -> Status;
        start = b"cuFileStatsStart\0" () -> Status;
        stop = b"cuFileStatsStop\0" () -> Status;
        get = b"cuFileGetStatsL3\0" (*mut Level3) -> Status;
    }
}

impl Functions {
    /// Returns the counts so far, while the driver is open.
    pub(super) fn counts(&self, is_read: bool) -> Option<TransferCounts> {
        let mut level3 = Box::new(Level3::zeroed());
        // SAFETY: the pointer is to a struct with the library's layout, and the driver is open while `CuFile` lives.
        let status = unsafe { (self.get)(&raw mut *level3) };
        (status.code == 0).then(|| level3.counts(is_read))
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structs_match_the_header() {
        assert_eq!((size_of::<PerGpu>(), offset_of!(Level3, _later_fields)), (248, 5000));
        assert_eq!((offset_of!(Level3, gpus), offset_of!(Level3, per_gpu)), (1024, 1032));
        let (reads, writes) = (offset_of!(PerGpu, reads), offset_of!(PerGpu, writes));
        let ways = [offset_of!(Counters, peer_to_peer), offset_of!(Counters, nvidia_fs), offset_of!(Counters, posix)];
        assert_eq!(ways.map(|way| reads + way), [56, 64, 72]);
        assert_eq!(ways.map(|way| writes + way), [160, 168, 176]);
    }

    #[test]
    fn gpus_are_added() {
        let mut level3 = Level3::zeroed();
        level3.gpus = 2;
        for (gpu, number) in level3.per_gpu.iter_mut().zip(1..) {
            gpu.reads = Counters { nvidia_fs: number, peer_to_peer: 10 * number, posix: 100 * number, ..gpu.reads };
            gpu.writes.posix = 7;
        }
        assert_eq!(level3.counts(true), TransferCounts { nvidia_fs: 3, peer_to_peer: 30, posix: 300 });
        assert_eq!(level3.counts(false), TransferCounts { posix: 14, ..TransferCounts::default() });
    }
}
