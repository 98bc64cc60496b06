//! Registers files and buffers.

use std::sync::Arc;

use crate::abi::cufile::{
    CUDA_POINTER_INVALID, CUDA_POINTER_RANGE_ERROR, Description, FileOutcome, GPU_MEMORY_PINNING_FAILED,
    HANDLE_ALREADY_REGISTERED, INVALID_VALUE, IO_NOT_SUPPORTED, MEMORY_ALREADY_REGISTERED,
};
use crate::abi::{Device, Handle, In, Out};
use crate::cufile::calls::{behind_gate, cufile_calls};
use crate::cufile::session::check_open;
use crate::state::DriverState;
use crate::state::cufile::file::File;

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const DESCRIPTOR: i32 = 1;
/// `CU_FILE_RDMA_REGISTER` and `CU_FILE_RDMA_RELAXED_ORDERING`.
const BUFFER_FLAGS: i32 = 3;

cufile_calls! {
    fn cuFileHandleRegister(out: Out<Handle>, description: In<Description>) |mut state| {
        check_open(&state)?;
        let description = description.get().map_err(|_| INVALID_VALUE)?;
        if out.is_null() || description.kind != DESCRIPTOR {
            return Err(INVALID_VALUE);
        }
        let mut file = File::new(description.fd.0)?;
        let is_unsupported = state.call_log.call("cuFileHandleRegister@unsupported").is_some();
        if is_unsupported && !state.cufile.allows_compat() {
            return Err(IO_NOT_SUPPORTED);
        }
        file.is_copied = is_unsupported || state.cufile.compat;
        if state.cufile.handles.values().any(|other| other.fd == file.fd) {
            return Err(HANDLE_ALREADY_REGISTERED);
        }
        let handle = state.handle();
        state.cufile.handles.insert(handle, Arc::new(file));
        out.put(handle).map_err(|_| INVALID_VALUE)
    }

    fn cuFileBufRegister(base: u64, bytes: usize, flags: i32) |mut state| {
        check_open(&state)?;
        if base == 0 || bytes == 0 || flags & !BUFFER_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        device_of(&state, base, bytes)?;
        if state.cufile.buffers_in(base, bytes) {
            return Err(MEMORY_ALREADY_REGISTERED);
        }
        let pinned: usize = state.cufile.buffers.values().sum();
        if pinned + bytes > state.cufile.properties.max_pinned as usize * 1024 {
            return Err(GPU_MEMORY_PINNING_FAILED);
        }
        state.cufile.buffers.insert(base, bytes);
        Ok(())
    }

    fn cuFileBufDeregister(base: u64) |mut state| {
        check_open(&state)?;
        let bytes = state.cufile.buffers.remove(&base).ok_or(INVALID_VALUE)?;
        let busy = state.races.users(base, bytes).find(|entry| !entry.over && entry.label.starts_with("cuFile"));
        if let Some(label) = busy.map(|entry| entry.label) {
            state.call_log.violation(format!("lifetime: cuFileBufDeregister of {base:#x} used by {label}"));
        }
        Ok(())
    }
}

/// Removes a registration. The function has no result, so an invalid handle is a violation.
// SAFETY: the name is the library's own, and nothing else in this one has it.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
extern "C" fn cuFileHandleDeregister(handle: Handle) {
    // There is no result; violations go to the call log.
    let _ = behind_gate("cuFileHandleDeregister", |mut state| {
        match state.cufile.handles.remove(&handle) {
            None => state.call_log.violation(format!("lifetime: cuFileHandleDeregister of {handle:#x}, which is none")),
            Some(file) if Arc::strong_count(&file) > 1 => {
                state.call_log.violation(format!("lifetime: cuFileHandleDeregister of {handle:#x} during a transfer"));
            }
            Some(_) => (),
        }
        Ok(())
    });
}

/// Returns the device of a range in one allocation; `None` for host memory that devices can access.
pub(super) fn device_of(state: &DriverState, start: u64, bytes: usize) -> FileOutcome<Option<Device>> {
    let fits = |found: bool| if found { Ok(()) } else { Err(CUDA_POINTER_RANGE_ERROR) };
    if let Some(found) = state.memory.allocation_containing(start) {
        return fits(state.memory.holding(start, bytes as u64).is_ok()).map(|()| Some(found.device));
    }
    let found = state.host.range_containing(start as usize).ok_or(CUDA_POINTER_INVALID)?;
    fits(bytes <= found.bytes - (start as usize - found.start)).map(|()| None)
}
