//! The innermost loops: rows of equal runs, with the common sizes as single loads and stores.

use std::ptr;

/// Copies `count` runs of `run_bytes` between `strided`, where they lie `stride_bytes` apart, and `flat`, where they
/// lie side by side: to `flat` when gathering, from it otherwise.
///
/// # Safety
/// The side that is read is valid for reads, the other for writes, over every run.
pub(crate) unsafe fn copy_row<const GATHER: bool>(
    strided: *mut u8,
    stride_bytes: isize,
    flat: *mut u8,
    run_bytes: usize,
    count: usize,
) {
    // SAFETY: passed on to the caller; each type has exactly `run_bytes` bytes.
    unsafe {
        match run_bytes {
            1 => copy_items::<u8, GATHER>(strided, stride_bytes, flat, count),
            2 => copy_items::<u16, GATHER>(strided, stride_bytes, flat, count),
            4 => copy_items::<u32, GATHER>(strided, stride_bytes, flat, count),
            8 => copy_items::<u64, GATHER>(strided, stride_bytes, flat, count),
            16 => copy_items::<u128, GATHER>(strided, stride_bytes, flat, count),
            _ => {
                for index in 0..count {
                    let run = strided.offset(index as isize * stride_bytes);
                    copy_piece::<GATHER>(run, flat.add(index * run_bytes), run_bytes);
                }
            }
        }
    }
}

/// Copies `len` bytes between `strided` and `flat`: to `flat` when gathering, from it otherwise.
///
/// # Safety
/// The side that is read is valid for reads of `len` bytes, the other for writes.
pub(crate) unsafe fn copy_piece<const GATHER: bool>(strided: *mut u8, flat: *mut u8, len: usize) {
    let (source, target) = if GATHER { (strided, flat) } else { (flat, strided) };
    // SAFETY: passed on to the caller. The two sides may be parts of one arena, therefore not `copy_nonoverlapping`.
    unsafe { ptr::copy(source, target, len) }
}

/// `copy_row` for runs that fit a register. No alignment is assumed: a tensor may start anywhere.
unsafe fn copy_items<T: Copy, const GATHER: bool>(strided: *mut u8, stride_bytes: isize, flat: *mut u8, count: usize) {
    for index in 0..count {
        // SAFETY: passed on to the caller; integers of any bits are values, and both accesses allow any address.
        unsafe {
            let item = strided.offset(index as isize * stride_bytes).cast::<T>();
            let side = flat.cast::<T>().add(index);
            if GATHER {
                side.write_unaligned(item.read_unaligned());
            } else {
                item.write_unaligned(side.read_unaligned());
            }
        }
    }
}
