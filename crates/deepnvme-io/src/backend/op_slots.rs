//! The ops in a kernel queue, by slot number, with the iovecs that the kernel reads from their slots.

use crate::op::{Completion, Errno, Op};

/// Maximum bytes that Linux moves in one call (`MAX_RW_COUNT`). A longer range is a short transfer.
pub(super) const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// A fixed number of slots, each for one op in flight.
#[derive(Debug)]
pub(super) struct OpSlots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

#[derive(Debug, Default)]
struct Slot {
    op: Option<Op>,
    /// The iovecs of a vectored op. Filled before the op goes to the kernel and unchanged until it is back, so that the
    /// heap memory stays in place. Kept for reuse.
    iovecs: Vec<libc::iovec>,
}

/// The memory of one op, in the kernel's form.
#[derive(Clone, Copy, Debug)]
pub(super) enum OpMemory {
    /// No memory: a sync.
    None,
    /// One range, truncated to the maximum of one call.
    Contiguous { addr: usize, len: usize },
    /// `count` iovecs, which live while the op is in flight.
    Vectored { iovecs: *const libc::iovec, count: usize },
}

impl OpSlots {
    /// Allocates slots for `depth` ops.
    pub(super) fn new(depth: u32) -> Self {
        let slots = (0..depth).map(|_| Slot::default()).collect();
        Self { slots, free: (0..depth).rev().collect() }
    }

    /// Returns the number of ops.
    pub(super) fn len(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }

    /// Returns whether all slots are in use.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Inserts an op. Returns its slot number and its memory.
    ///
    /// # Panics
    /// If all slots are in use. The caller checks that.
    pub(super) fn insert(&mut self, op: Op) -> (u32, OpMemory) {
        assert!(!self.free.is_empty(), "no slot is free; check is_full first");
        let index = self.free.pop().unwrap_or_default();
        let slot = &mut self.slots[index as usize];
        let memory = match op.iovecs.as_slice() {
            [] => OpMemory::None,
            [iovec] => OpMemory::Contiguous { addr: iovec.addr(), len: iovec.len().min(TRANSFER_BYTES_MAX) },
            iovecs => {
                slot.iovecs.clear();
                slot.iovecs.extend(
                    iovecs
                        .iter()
                        .map(|iovec| libc::iovec { iov_base: iovec.addr() as *mut libc::c_void, iov_len: iovec.len() }),
                );
                OpMemory::Vectored { iovecs: slot.iovecs.as_ptr(), count: slot.iovecs.len() }
            }
        };
        slot.op = Some(op);
        (index, memory)
    }

    /// Returns the op in a slot, if any.
    pub(super) fn get(&self, index: u32) -> Option<&Op> {
        self.slots.get(index as usize)?.op.as_ref()
    }

    /// Takes the op out of a slot, with the kernel's result (bytes, or a negative error number).
    pub(super) fn complete(&mut self, index: u32, kernel_result: i64) -> Option<Completion> {
        let op = self.slots.get_mut(index as usize)?.op.take()?;
        self.free.push(index);
        Some(Completion { op, result: result_of(kernel_result) })
    }
}

/// Converts the kernel's number to bytes or an error.
pub(super) fn result_of(kernel_result: i64) -> Result<usize, Errno> {
    match usize::try_from(kernel_result) {
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(Errno::from_raw_os_error(-kernel_result as i32)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use deepnvme_mem::Region;
    use smallvec::smallvec;

    use super::*;
    use crate::op::{Iovecs, OpKind, Token};

    fn op(token: u64, iovecs: Iovecs) -> Op {
        let file = Arc::new(File::open("/dev/null").unwrap().into());
        Op { token: Token(token), kind: OpKind::Read, file, offset: 0, iovecs, cufile: None }
    }

    #[test]
    fn hands_every_op_back_under_its_number() {
        let mut ops = OpSlots::new(3);
        let numbers: Vec<u32> = (0..3).map(|token| ops.insert(op(token, smallvec![])).0).collect();
        assert!(ops.is_full() && ops.len() == 3);
        let back = ops.complete(numbers[1], -i64::from(libc::EIO)).unwrap();
        assert_eq!((back.op.token, back.result), (Token(1), Err(Errno::IO)));
        assert!(ops.complete(numbers[1], 0).is_none(), "an op comes back once");
        assert_eq!(ops.insert(op(7, smallvec![])).0, numbers[1]);
        assert_eq!(ops.complete(numbers[0], 4096).unwrap().result, Ok(4096));
        assert!(ops.get(99).is_none() && ops.complete(99, 0).is_none());
    }

    #[test]
    fn describes_the_memory_of_an_op() {
        let mut ops = OpSlots::new(2);
        let whole = Region::from_vec(vec![0; 100]);
        let addr = whole.addr();
        let (_, memory) = ops.insert(op(0, smallvec![whole.clone()]));
        assert!(matches!(memory, OpMemory::Contiguous { addr: a, len: 100 } if a == addr));
        let iovecs = smallvec![whole.slice(0..10), whole.slice(60..100)];
        let (number, memory) = ops.insert(op(1, iovecs));
        let OpMemory::Vectored { iovecs, count: 2 } = memory else {
            panic!("two iovecs make a vectored op, not {memory:?}")
        };
        let slot = &ops.slots[number as usize];
        assert_eq!(iovecs, slot.iovecs.as_ptr());
        assert_eq!((slot.iovecs[1].iov_base as usize, slot.iovecs[1].iov_len), (addr + 60, 40));
    }
}
