//! Switches cuFile's statistics on and off, and reads them.

use crate::abi::Out;
use crate::abi::cufile::INVALID_VALUE;
use crate::cufile::calls::cufile_calls;
use crate::cufile::session::check_open;
use crate::state::cufile::statistics::{GPUS_MAX, LEVEL_MAX, Level3, Statistics};

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
        check_open(&state)?;
        state.cufile.statistics.is_started = true;
        Ok(())
    }

    fn cuFileStatsStop() |mut state| {
        check_open(&state)?;
        state.cufile.statistics.is_started = false;
        Ok(())
    }

    fn cuFileStatsReset() |mut state| {
        check_open(&state)?;
        state.cufile.statistics.per_gpu = Default::default();
        Ok(())
    }

    fn cuFileGetStatsL3(statistics: Out<Level3>) |state| {
        check_open(&state)?;
        let Statistics { level, per_gpu, .. } = state.cufile.statistics;
        if level < LEVEL_MAX {
            return Err(INVALID_VALUE);
        }
        let gpus = state.devices.len().min(GPUS_MAX) as u32;
        statistics.put(Level3 { detailed: [0; 128], gpus, per_gpu }).map_err(|_| INVALID_VALUE)
    }
}
