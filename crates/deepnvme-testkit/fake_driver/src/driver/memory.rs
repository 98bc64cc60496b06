//! Device memory, pinned memory, and registrations.

use crate::abi::{INVALID_VALUE, NOT_FOUND, Out};
use crate::calls::driver_calls;
use crate::operations::release;
use crate::rng::splitmix64;

/// All flags that `cuMemHostAlloc` and `cuMemHostRegister` know.
const ALLOC_FLAGS: u32 = 7;
const REGISTER_FLAGS: u32 = 15;

driver_calls! {
    fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) needs Context |mut state, device| {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let (free_bytes, seed) = (state.free_bytes(device), state.config.seed);
        out.put(state.memory.allocate(device, bytes, free_bytes, seed)?)
    }

    fn cuMemFree_v2(address: u64) needs Context |state, _| {
        // As with `free`, nothing is to be done for null.
        if address == 0 { Ok(()) } else { release::free(state, address) }
    }

    fn cuMemGetRegistrableRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) needs Context |state, _| {
        let found = state.memory.allocation_containing(address).ok_or(NOT_FOUND)?;
        if !base.is_null() {
            base.put(found.base())?;
        }
        if bytes.is_null() { Ok(()) } else { bytes.put(found.bytes) }
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) needs Context |state, device| {
        free.put(state.free_bytes(device) as usize)?;
        total.put(state.config.devices.memory_bytes as usize)
    }

    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32) needs Context |mut state, device| {
        if flags & !REGISTER_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        state.host.register(address, bytes, device)
    }

    fn cuMemHostUnregister(address: usize) needs Context |state, _| {
        release::unregister(state, address)
    }

    fn cuMemHostAlloc(out: Out<usize>, bytes: usize, flags: u32) needs Context |mut state, device| {
        if out.is_null() || flags & !ALLOC_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        let seed = splitmix64(state.config.seed ^ state.handle());
        out.put(state.host.allocate(bytes, device, seed)?)
    }

    fn cuMemFreeHost(address: usize) needs Context |state, _| {
        release::free_host(state, address)
    }
}
