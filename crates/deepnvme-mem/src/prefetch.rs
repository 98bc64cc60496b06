//! Memory that is wanted soon, asked for.

/// Asks the processor to bring the line of memory at that place near. Nothing is read: any place will do, also one that
/// lies beyond the end of its slice, or where there is no memory. Where the processor has no such instruction, nothing
/// happens.
///
/// ```
/// let values = [1.0_f32; 64];
/// deepnvme_mem::prefetch(values.as_ptr().wrapping_add(1000));
/// ```
#[inline(always)]
pub fn prefetch<T>(place: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which faults at no address; every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint, which faults at no address, changes no register and no memory.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) place, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = place;
}
