//! Opens and closes the driver, and reads and sets its properties.
//!
//! A parameter is pending until the driver is opened: it applies to the next attempt, even if that fails.

use crate::abi::Out;
use crate::abi::cufile::{
    ALLOW_COMPAT_MODE, DRIVER_ALREADY_OPEN, DRIVER_NOT_INITIALIZED, DriverProperties, FileOutcome, INVALID_VALUE,
};
use crate::cufile::calls::cufile_calls;
use crate::state::{DriverGuard, DriverState, is_forked, lock};

/// 1000 times the major version, plus 10 times the minor one.
const VERSION: i32 = 15000;
/// `CU_FILE_USE_POLL_MODE`, as a bit of the control flags.
const POLL: u32 = 1;
/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`.
const COMPAT_PARAMETER: i32 = 1;
/// The number of boolean parameters.
const PARAMETERS: i32 = 12;

cufile_calls! {
    fn cuFileDriverOpen() |mut state| {
        if state.cufile.use_count == 0 {
            open(&mut state)?;
        }
        state.cufile.use_count += 1;
        Ok(())
    }

    fn cuFileDriverClose() |state| {
        close(state)
    }

    fn cuFileDriverClose_v2() |state| {
        close(state)
    }

    fn cuFileSetParameterBool(parameter: i32, value: bool) |mut state| {
        if state.cufile.use_count > 0 {
            return Err(DRIVER_ALREADY_OPEN);
        }
        if !(0..PARAMETERS).contains(&parameter) {
            return Err(INVALID_VALUE);
        }
        if parameter == COMPAT_PARAMETER {
            state.cufile.pending_compat = Some(value);
        }
        Ok(())
    }

    fn cuFileGetVersion(version: Out<i32>) |_| {
        version.put(VERSION).map_err(|_| INVALID_VALUE)
    }

    fn cuFileDriverGetProperties(properties: Out<DriverProperties>) |state| {
        properties.put(state.cufile.properties).map_err(|_| INVALID_VALUE)
    }

    fn cuFileDriverSetPollMode(poll: bool, threshold_kb: usize) |mut state| {
        set(&mut state, threshold_kb, |properties, kb| {
            properties.control_flags = properties.control_flags & !POLL | u32::from(poll);
            properties.poll_threshold = kb as usize;
        })
    }

    fn cuFileDriverSetMaxDirectIOSize(kb: usize) |mut state| {
        set(&mut state, kb, |properties, kb| properties.max_direct_io = kb as usize)
    }

    fn cuFileDriverSetMaxCacheSize(kb: usize) |mut state| {
        set(&mut state, kb, |properties, kb| properties.max_cache = kb)
    }

    fn cuFileDriverSetMaxPinnedMemSize(kb: usize) |mut state| {
        set(&mut state, kb, |properties, kb| properties.max_pinned = kb)
    }
}

/// Returns how often the driver is open. It has no error code, so it skips the entry checks; it is counted.
// SAFETY: the name is the library's own, and nothing else in this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuFileUseCount() -> std::ffi::c_long {
    if is_forked() {
        return 0;
    }
    let mut state = lock();
    state.call_log.call("cuFileUseCount");
    state.cufile.use_count.into()
}

/// Uses up the pending parameter. By default, compatibility mode is allowed.
fn open(state: &mut DriverState) -> FileOutcome {
    let allows_compat = state.cufile.pending_compat.take().unwrap_or(true);
    if state.cufile.compat && !allows_compat {
        return Err(DRIVER_NOT_INITIALIZED);
    }
    let flags = &mut state.cufile.properties.control_flags;
    *flags = if allows_compat { *flags | ALLOW_COMPAT_MODE } else { *flags & !ALLOW_COMPAT_MODE };
    Ok(())
}

/// Checks that the driver is open.
pub(super) fn check_open(state: &DriverState) -> FileOutcome {
    if state.cufile.use_count > 0 { Ok(()) } else { Err(DRIVER_NOT_INITIALIZED) }
}

/// Closes the driver once. The last close records the remaining registrations as violations, and leaves them.
fn close(mut state: DriverGuard) -> FileOutcome {
    check_open(&state)?;
    state.cufile.use_count -= 1;
    if state.cufile.use_count > 0 {
        return Ok(());
    }
    let cufile = &state.cufile;
    let left = [
        (cufile.handles.len(), "files"),
        (cufile.buffers.len(), "buffers"),
        (cufile.batches.len(), "batches"),
        (state.streams.created_with(|stream| stream.cufile.is_some()), "streams"),
    ];
    for (count, what) in left.into_iter().filter(|(count, _)| *count > 0) {
        state.call_log.violation(format!("lifetime: cuFile was closed with {count} {what} left"));
    }
    Ok(())
}

/// Changes a property. Once the driver is open, the header says, nothing happens.
fn set(state: &mut DriverState, kb: usize, change: impl FnOnce(&mut DriverProperties, u32)) -> FileOutcome {
    let kb = u32::try_from(kb).ok().filter(|kb| *kb > 0 && kb % 4 == 0).ok_or(INVALID_VALUE)?;
    if state.cufile.use_count == 0 {
        change(&mut state.cufile.properties, kb);
    }
    Ok(())
}
