//! Copies with non-temporal stores, which bypass the caches.
//!
//! Memory that is read much later should not be cached: it evicts other data, and an ordinary store first reads the
//! cache line that it overwrites. Non-temporal stores avoid both. CPUs without AVX copy as usual.

/// Shorter copies use ordinary stores: the final fence costs as much as they save.
const LEN_MIN: usize = 4096;

/// Copies bytes that are not read soon, past the caches if possible. Other threads see them once they synchronise by a
/// lock or an atomic.
///
/// # Safety
/// `source` is valid for reads of `len` bytes and `target` for writes, and they do not overlap.
pub(crate) unsafe fn copy(source: *const u8, target: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= LEN_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: both sides are valid for `len` bytes and do not overlap, as the caller of `copy` ensures. The
        // CPU has AVX, as just detected.
        return unsafe { copy_streaming(source, target, len) };
    }
    // SAFETY: both sides are valid for `len` bytes and do not overlap, as the caller of `copy` ensures.
    unsafe { std::ptr::copy_nonoverlapping(source, target, len) }
}

/// # Safety
/// As [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn copy_streaming(source: *const u8, target: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    const LINE: usize = 64;
    let head = target.align_offset(LINE).min(len);
    let lines_end = head + (len - head) / LINE * LINE;
    // SAFETY: `head` and `lines_end` are at most `len`, so that both sides stay inside the ranges of `copy`, which are
    // valid and do not overlap. Stores are aligned to a cache line in the target; loads need no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(source, target, head);
        for at in (head..lines_end).step_by(LINE) {
            let (from, to) = (source.add(at).cast::<__m256i>(), target.add(at).cast::<__m256i>());
            let (first, second) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, first);
            _mm256_stream_si256(to.add(1), second);
        }
        std::ptr::copy_nonoverlapping(source.add(lines_end), target.add(lines_end), len - lines_end);
    }
    // Non-temporal stores are not ordered with others, including the lock that publishes them.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_every_byte_and_changes_no_other() {
        let source: Vec<u8> = (0..40_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let lens = [0, 1, 63, 64, LEN_MIN - 1, LEN_MIN, LEN_MIN + 1, LEN_MIN + 63, LEN_MIN + 64, 3 * LEN_MIN + 77];
        for len in lens {
            for from in [0, 1, 31, 64] {
                for to in [0, 1, 32, 63, 64, 65] {
                    let before: Vec<u8> = source.iter().rev().copied().collect();
                    let mut target = before.clone();
                    assert!(from + len <= source.len() && to + len <= target.len(), "both are long enough");
                    // SAFETY: both ranges lie in their vectors, which are two.
                    unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
                    assert!(target[to..to + len] == source[from..from + len], "{len} from {from} to {to}");
                    assert!(target[..to] == before[..to] && target[to + len..] == before[to + len..]);
                }
            }
        }
    }
}
