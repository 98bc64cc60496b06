//! Primary contexts, and the stack of current ones that each thread has.

use crate::abi::{Device, Handle, INVALID_CONTEXT, INVALID_VALUE, Out};
use crate::calls::driver_calls;
use crate::operations::context;
use crate::state::context::with_context_stack;

driver_calls! {
    fn cuDevicePrimaryCtxRetain(out: Out<Handle>, device: Device) needs Init |mut state, _| {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        out.put(state.retain_primary_context(device)?)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: Device) needs Init |state, _| {
        context::release_primary_context(state, device)
    }

    fn cuDevicePrimaryCtxGetState(device: Device, flags: Out<u32>, active: Out<i32>) needs Init |mut state, _| {
        let is_active = state.device(device)?.handle.is_some();
        flags.put(0)?;
        active.put(i32::from(is_active))
    }

    fn cuCtxPushCurrent_v2(context: Handle) needs Init |state, _| {
        state.check_live_context(context)?;
        with_context_stack(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(out: Out<Handle>) needs Init |_, _| {
        let popped = with_context_stack(Vec::pop).ok_or(INVALID_CONTEXT)?;
        // The pointer may be null, for a caller that does not need the handle.
        if out.is_null() { Ok(()) } else { out.put(popped) }
    }

    fn cuCtxSetCurrent(context: Handle) needs Init |state, _| {
        if context != 0 {
            state.check_live_context(context)?;
        }
        with_context_stack(|stack| {
            stack.pop();
            stack.extend((context != 0).then_some(context));
        });
        Ok(())
    }

    fn cuCtxGetCurrent(out: Out<Handle>) needs Init |_, _| {
        out.put(with_context_stack(|stack| stack.last().copied()).unwrap_or(0))
    }

    fn cuCtxGetDevice(out: Out<Device>) needs Context |_, device| {
        out.put(device)
    }

    fn cuCtxSynchronize() needs Context |mut state, device| {
        state.call_log.count("device_synchronises");
        drop(context::synchronise_device(state, device));
        Ok(())
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) needs Context |_, _| {
        // Either may be null.
        if !least.is_null() {
            least.put(0)?;
        }
        if greatest.is_null() { Ok(()) } else { greatest.put(-5) }
    }
}
