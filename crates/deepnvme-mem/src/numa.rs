//! NUMA placement of a mapping's pages.

use std::ptr::NonNull;

/// `MPOL_PREFERRED`: this node, or another if it has no free memory.
const PREFERRED: libc::c_int = 1;
/// The number of nodes in a mask.
const NODES_MAX: usize = 1024;
const WORD_BITS: usize = usize::BITS as usize;

/// Prefers a node for pages that are not allocated yet. Returns whether the kernel accepted.
pub(crate) fn prefer(start: NonNull<u8>, len: usize, node: u32) -> bool {
    let node = node as usize;
    if node >= NODES_MAX {
        return false;
    }
    let mut mask = [0usize; NODES_MAX / WORD_BITS];
    mask[node / WORD_BITS] = 1 << (node % WORD_BITS);
    // SAFETY: a memory policy changes no byte, and a bad address only makes the call fail. The mask has `NODES_MAX`
    // bits: the kernel reads one less than the `NODES_MAX + 1` stated, before the call returns.
    let code = unsafe {
        libc::syscall(libc::SYS_mbind, start.as_ptr(), len, PREFERRED, mask.as_ptr(), NODES_MAX + 1, 0 as libc::c_uint)
    };
    code == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no kernel to ask")]
    fn memory_is_there_whatever_the_node() {
        let mapping = Mapping::new(1 << 20).unwrap();
        let taken = prefer(mapping.start(), 1 << 20, 0);
        // Kernels without NUMA, and sandboxes, do not know the call.
        if !taken {
            eprintln!("skipped: memory_is_there_whatever_the_node: the kernel does not take advice about nodes");
        }
        assert!(!prefer(mapping.start(), 1 << 20, 900), "there is no such node");
        assert!(!prefer(mapping.start(), 1 << 20, 5000));
        // SAFETY: the mapping has these bytes, with no other access.
        let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.start().as_ptr(), 1 << 20) };
        bytes.fill(3);
        assert_eq!(bytes[1 << 19], 3);
    }
}
