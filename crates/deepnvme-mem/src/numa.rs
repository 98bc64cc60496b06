//! Which node of a machine with several memories the pages of a mapping come from.

use std::ptr::NonNull;

/// `MPOL_PREFERRED`: from this node, or from another where it has none left.
const PREFERRED: libc::c_int = 1;
/// Nodes that a mask has room for.
const NODES_MAX: usize = 1024;
const WORD_BITS: usize = usize::BITS as usize;

/// Has pages that nobody has touched yet come from that node; whether the kernel takes the advice.
pub(crate) fn prefer(start: NonNull<u8>, len: usize, node: u32) -> bool {
    let node = node as usize;
    if node >= NODES_MAX {
        return false;
    }
    let mut mask = [0usize; NODES_MAX / WORD_BITS];
    mask[node / WORD_BITS] = 1 << (node % WORD_BITS);
    // SAFETY: the caller's live mapping, which starts on a page; where its pages come from changes no byte of it. The mask
    // has as many bits as are said (the kernel reads one less), and is read before the call returns.
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
        // SAFETY: the mapping has these bytes, and nobody else.
        let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.start().as_ptr(), 1 << 20) };
        bytes.fill(3);
        assert_eq!(bytes[1 << 19], 3);
    }
}
