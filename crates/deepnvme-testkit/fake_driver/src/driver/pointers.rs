//! Attributes of addresses: `cuPointerGetAttribute` and its plural.

use crate::abi::{Device, Handle, INVALID_VALUE, In, Out, Outcome};
use crate::calls::driver_calls;
use crate::state::DriverState;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

/// The values of `CUpointer_attribute` that the driver answers.
mod attribute {
    pub(super) const CONTEXT: i32 = 1;
    pub(super) const MEMORY_TYPE: i32 = 2;
    pub(super) const DEVICE_POINTER: i32 = 3;
    pub(super) const HOST_POINTER: i32 = 4;
    pub(super) const SYNC_MEMOPS: i32 = 6;
    pub(super) const BUFFER_ID: i32 = 7;
    pub(super) const IS_MANAGED: i32 = 8;
    pub(super) const DEVICE_ORDINAL: i32 = 9;
    pub(super) const IS_LEGACY_CUDA_IPC_CAPABLE: i32 = 10;
    pub(super) const RANGE_START_ADDR: i32 = 11;
    pub(super) const RANGE_SIZE: i32 = 12;
    pub(super) const MAPPED: i32 = 13;
    pub(super) const IS_GPU_DIRECT_RDMA_CAPABLE: i32 = 15;
}

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
    if let Some(found) = state.memory.allocation_containing(address) {
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
    let found = state.host.range_containing(address as usize)?;
    let (device, start, bytes) = (found.device, found.start as u64, found.bytes);
    Some(Described { memory_type: HOST, device, context: state.primary_context_of(device), start, bytes, id: start })
}

/// Writes an attribute, with the width that `CUpointer_attribute` has for it: the caller's variable has no more bytes.
fn put_attribute(data: Out<u64>, attribute: i32, address: u64, of: &Described) -> Outcome {
    let known = of.memory_type != 0;
    let narrow = |value: u32| Out::<u32>::at(data.address()).put(value);
    let flag = |value: bool| Out::<u8>::at(data.address()).put(u8::from(value));
    match attribute {
        attribute::CONTEXT => data.put(of.context),
        attribute::MEMORY_TYPE => narrow(of.memory_type),
        attribute::DEVICE_POINTER => data.put(if known { address } else { 0 }),
        attribute::HOST_POINTER if of.memory_type == HOST => data.put(address),
        attribute::HOST_POINTER if known => Err(INVALID_VALUE),
        attribute::HOST_POINTER => data.put(0),
        attribute::SYNC_MEMOPS => narrow(0),
        attribute::BUFFER_ID => data.put(of.id),
        attribute::IS_MANAGED => flag(false),
        attribute::DEVICE_ORDINAL => narrow(of.device.cast_unsigned()),
        attribute::IS_LEGACY_CUDA_IPC_CAPABLE => flag(of.memory_type == DEVICE),
        attribute::RANGE_START_ADDR => data.put(of.start),
        attribute::RANGE_SIZE => data.put(of.bytes as u64),
        attribute::MAPPED => flag(known),
        attribute::IS_GPU_DIRECT_RDMA_CAPABLE => flag(of.memory_type == DEVICE),
        _ => Err(INVALID_VALUE),
    }
}
