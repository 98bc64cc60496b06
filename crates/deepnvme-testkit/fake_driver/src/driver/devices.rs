//! `cuInit`, and what can be asked of a device without a context.

use std::ffi::c_char;

use crate::abi::{Device, INVALID_DEVICE, INVALID_VALUE, Out, Outcome};
use crate::calls::driver_calls;
use crate::state::DriverState;

/// `CUDA_VERSION` of the driver that this stands in for.
const DRIVER_VERSION: i32 = 13000;
/// The last attribute that the headers of that version know.
const ATTRIBUTE_LAST: i32 = 161;
/// The first device's PCI bus; the others have the next ones.
const FIRST_BUS: i32 = 0x10;

driver_calls! {
    fn cuInit(flags: u32) needs Nothing |mut state, _| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if state.devices.is_empty() {
            return Err(crate::abi::NO_DEVICE);
        }
        state.initialise();
        Ok(())
    }

    fn cuDriverGetVersion(version: Out<i32>) needs Nothing |_, _| {
        version.put(DRIVER_VERSION)
    }

    fn cuDeviceGetCount(count: Out<i32>) needs Init |state, _| {
        count.put(state.devices.len() as i32)
    }

    fn cuDeviceGet(device: Out<Device>, ordinal: i32) needs Init |mut state, _| {
        state.device(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: Out<c_char>, capacity: i32, device: Device) needs Init |mut state, _| {
        state.device(device)?;
        put_text(name, capacity, &format!("Fake GPU {device}"), true)
    }

    fn cuDeviceGetPCIBusId(name: Out<c_char>, capacity: i32, device: Device) needs Init |mut state, _| {
        state.device(device)?;
        put_text(name, capacity, &format!("0000:{:02x}:00.0", FIRST_BUS + device), false)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: Device) needs Init |mut state, _| {
        uuid.put(uuid_of(&mut state, device)?)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: Device) needs Init |mut state, _| {
        uuid.put(uuid_of(&mut state, device)?)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: Device) needs Init |mut state, _| {
        state.device(device)?;
        bytes.put(state.config.devices.memory_bytes as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: Device) needs Init |mut state, _| {
        state.device(device).map_err(|_| INVALID_DEVICE)?;
        value.put(attribute_of(attribute, device)?)
    }
}

/// Writes a C string into the caller's buffer. One that does not fit is truncated if `cut`, and refused otherwise.
fn put_text(name: Out<c_char>, capacity: i32, text: &str, cut: bool) -> Outcome {
    let capacity = usize::try_from(capacity).ok().filter(|capacity| *capacity > 0).ok_or(INVALID_VALUE)?;
    if text.len() >= capacity && !cut {
        return Err(INVALID_VALUE);
    }
    let text = &text.as_bytes()[..text.len().min(capacity - 1)];
    for (index, byte) in text.iter().chain([&0]).enumerate() {
        name.put_at(index, byte.cast_signed())?;
    }
    Ok(())
}

fn uuid_of(state: &mut DriverState, device: Device) -> Outcome<[u8; 16]> {
    state.device(device)?;
    Ok([0x5a, 0x1d, 0, 0, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, device as u8])
}

/// By number, as in `CUdevice_attribute`. Attributes that are not listed are capabilities, which the fake driver has.
fn attribute_of(attribute: i32, device: Device) -> Outcome<i32> {
    if !(1..=ATTRIBUTE_LAST).contains(&attribute) {
        return Err(INVALID_VALUE);
    }
    Ok(match attribute {
        // Threads of a block, with its x, y and z; x, y and z of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        // Shared memory of a block, constant memory, warp, pitch of a 2D copy, registers of a block.
        8 => 48 << 10,
        9 | 12 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        // Clocks in kHz, width of the memory bus in bits, L2 cache, alignment of textures and surfaces.
        13 | 36 => 1_500_000,
        37 => 4096,
        38 => 50 << 20,
        14 | 30 => 512,
        // Multiprocessors, threads of each, copy engines.
        16 => 8,
        39 => 2048,
        40 => 3,
        // Timeout, integrated, mode, ECC, TCC; PCI device and domain; several GPUs on a board.
        17 | 18 | 20 | 32 | 35 | 34 | 50 | 84 | 85 => 0,
        33 => FIRST_BUS + device,
        // Compute capability 9.0.
        75 => 9,
        76 => 0,
        // Pageable memory access of three kinds, NUMA.
        88 | 100 | 101 | 130 | 131 | 134 => 0,
        _ => 1,
    })
}
