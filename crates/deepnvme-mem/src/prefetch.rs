//! Prefetch of memory that is read soon.

/// Prefetches the cache line at `address`. Nothing is read: the address may be past the end of its slice or unmapped.
/// A CPU without such an instruction does nothing.
///
/// ```
/// let values = [1.0_f32; 64];
/// deepnvme_mem::prefetch(values.as_ptr().wrapping_add(1000));
/// ```
#[inline(always)]
pub fn prefetch<T>(address: *const T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint that never faults. Every x86-64 CPU has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint that never faults and changes no register or memory.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = address;
}
