//! Attributes of addresses: `cuPointerGetAttribute` and its plural.

use crate::abi::{Device, Handle, INVALID_VALUE, In, Out, Outcome};
use crate::calls::driver_calls;
use crate::state::DriverState;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// The attributes of an address.
#[derive(Clone, Copy, Debug)]
struct Described {
    memory_type: u32,
    device: Device,
    context: Handle,
    start: u64,
    bytes: usize,
    id: u64,
}

driver_calls! {
    fn cuPointerGetAttribute(data: Out<u64>, attribute: i32, address: u64) needs Init |state, _| {
        let found = describe(&state, address).ok_or(INVALID_VALUE)?;
        put_attribute(data, attribute, address, &found)
    }

    fn cuPointerGetAttributes(count: u32, attributes: In<i32>, data: In<Out<u64>>, address: u64) needs Init |state, _| {
        // An address that no device knows is no error here: every answer is then nothing.
        let nothing = Described { memory_type: 0, device: -2, context: 0, start: 0, bytes: 0, id: 0 };
        let found = describe(&state, address).unwrap_or(nothing);
        if count == 0 || attributes.is_null() || data.is_null() {
            return Err(INVALID_VALUE);
        }
        for index in 0..count as usize {
            put_attribute(data.get_at(index)?, attributes.get_at(index)?, address, &found)?;
        }
        Ok(())
    }
}

fn describe(state: &DriverState, address: u64) -> Option<Described> {
    if let Some(found) = state.memory.around(address) {
        let (device, start, bytes) = (found.device, found.base(), found.bytes);
        return Some(Described {
            memory_type: DEVICE,
            device,
            context: state.primary_context_of(device),
            start,
            bytes,
            id: found.id,
        });
    }
    let found = state.host.around(address as usize)?;
    let (device, start, bytes) = (found.device, found.start as u64, found.bytes);
    Some(Described { memory_type: HOST, device, context: state.primary_context_of(device), start, bytes, id: start })
}

/// Answers are as wide as `CUpointer_attribute` says for each; the caller's value is no wider.
fn put_attribute(data: Out<u64>, attribute: i32, address: u64, of: &Described) -> Outcome {
    let known = of.memory_type != 0;
    let narrow = |value: u32| Out::<u32>::at(data.address()).put(value);
    let flag = |value: bool| Out::<u8>::at(data.address()).put(u8::from(value));
    match attribute {
        1 => data.put(of.context),
        2 => narrow(of.memory_type),
        3 => data.put(if known { address } else { 0 }),
        4 if of.memory_type == HOST => data.put(address),
        4 if known => Err(INVALID_VALUE),
        4 => data.put(0),
        6 => narrow(0),
        7 => data.put(of.id),
        8 => flag(false),
        9 => narrow(of.device.cast_unsigned()),
        10 => flag(of.memory_type == DEVICE),
        11 => data.put(of.start),
        12 => data.put(of.bytes as u64),
        13 => flag(known),
        15 => flag(of.memory_type == DEVICE),
        _ => Err(INVALID_VALUE),
    }
}
