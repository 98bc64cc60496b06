//! Copies of rows with a pitch.

use crate::abi::{Handle, INVALID_VALUE, In, NOT_SUPPORTED, Outcome};
use crate::access::Shape;
use crate::calls::driver_calls;
use crate::driver::copies::copy;
use crate::operations::locate::Side;

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Memcpy2D {
    from: End,
    to: End,
    width_bytes: usize,
    height: usize,
}

/// One half of it; the header spells both halves out, in the same order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct End {
    x_bytes: usize,
    y: usize,
    memory_type: u32,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

driver_calls! {
    fn cuMemcpy2DAsync_v2(copied: In<Memcpy2D>, stream: Handle) needs Context |mut state, device| {
        let Memcpy2D { from, to, width_bytes, height } = copied.get()?;
        let ends = (from.place(width_bytes)?, to.place(width_bytes)?);
        if width_bytes == 0 || height == 0 {
            return state.stream_for_work(stream, device).map(drop);
        }
        let shape = |end: &End| Shape { pitch: end.pitch as u64, width: width_bytes as u64, height: height as u64 };
        let located = (state.locate(ends.0, shape(&from), false)?, state.locate(ends.1, shape(&to), true)?);
        copy(state, "cuMemcpy2DAsync_v2", located.0, located.1, (device, stream, false))
    }
}

impl End {
    /// Where the first byte is.
    fn place(&self, width_bytes: usize) -> Outcome<Side> {
        if self.x_bytes.checked_add(width_bytes).is_none_or(|end| end > self.pitch) {
            return Err(INVALID_VALUE);
        }
        let skipped = self.y.checked_mul(self.pitch).and_then(|skipped| skipped.checked_add(self.x_bytes));
        let skipped = skipped.ok_or(INVALID_VALUE)? as u64;
        let behind = |start: u64| start.checked_add(skipped).ok_or(INVALID_VALUE);
        Ok(match self.memory_type {
            1 => Side::Host(behind(self.host as u64)? as usize),
            2 => Side::Device(behind(self.device)?),
            3 => return Err(NOT_SUPPORTED),
            4 => Side::Either(behind(self.device)?),
            _ => return Err(INVALID_VALUE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_struct_is_laid_out_as_the_header_has_it() {
        assert_eq!(size_of::<Memcpy2D>(), 128);
        assert_eq!(std::mem::offset_of!(Memcpy2D, to), 56);
        assert_eq!(std::mem::offset_of!(End, host), 24);
        assert_eq!(std::mem::offset_of!(Memcpy2D, height), 120);
    }
}
