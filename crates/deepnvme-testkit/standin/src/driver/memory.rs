//! Device memory, page-locked memory, and registrations.

use crate::abi::{INVALID_VALUE, NOT_FOUND, Out};
use crate::calls::driver_calls;
use crate::lifetime;
use crate::rng::splitmix64;

/// All flags that `cuMemHostAlloc` and `cuMemHostRegister` know.
const ALLOC_FLAGS: u32 = 7;
const REGISTER_FLAGS: u32 = 15;

driver_calls! {
    fn cuMemAlloc_v2(out: Out<u64>, bytes: usize) needs Context |mut world, device| {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let (room, seed) = (world.room(device), world.config.seed);
        out.put(world.memory.allocate(device, bytes, room, seed)?)
    }

    fn cuMemFree_v2(address: u64) needs Context |world, _| {
        // As with `free`, nothing is to be done for null.
        if address == 0 { Ok(()) } else { lifetime::free(world, address) }
    }

    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) needs Context |world, _| {
        let found = world.memory.around(address).ok_or(NOT_FOUND)?;
        if !base.is_null() {
            base.put(found.base)?;
        }
        if bytes.is_null() { Ok(()) } else { bytes.put(found.bytes) }
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) needs Context |world, device| {
        free.put(world.room(device) as usize)?;
        total.put(world.config.memory_bytes as usize)
    }

    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32) needs Context |mut world, device| {
        if flags & !REGISTER_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        world.host.register(address, bytes, device)
    }

    fn cuMemHostUnregister(address: usize) needs Context |world, _| {
        lifetime::unregister(world, address)
    }

    fn cuMemHostAlloc(out: Out<usize>, bytes: usize, flags: u32) needs Context |mut world, device| {
        if out.is_null() || flags & !ALLOC_FLAGS != 0 {
            return Err(INVALID_VALUE);
        }
        let seed = splitmix64(world.config.seed ^ world.handle());
        out.put(world.host.allocate(bytes, device, seed)?)
    }

    fn cuMemFreeHost(address: usize) needs Context |world, _| {
        lifetime::free_host(world, address)
    }
}
