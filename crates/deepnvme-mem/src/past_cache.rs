//! Copies that go past the processor's caches.
//!
//! Memory that is filled now and read much later is better not in a cache: others lose their place there, and before a
//! line of it is written, what was in it is read for nothing. Stores that go past the cache spare both.

/// What is shorter stays near: the fence at the end costs as much as is gained.
const LEN_MIN: usize = 4096;

/// Copies bytes of which it is known that nobody reads them soon. Whoever is told by another thread that they are there,
/// by a lock or an atomic, sees them.
///
/// # Safety
/// `source` is valid for reads of `len` bytes and `target` for writes, and they do not overlap.
pub(crate) unsafe fn copy(source: *const u8, target: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= LEN_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: as the caller says, and the processor has the instructions.
        return unsafe { streamed(source, target, len) };
    }
    // SAFETY: as the caller says.
    unsafe { std::ptr::copy_nonoverlapping(source, target, len) }
}

/// # Safety
/// As [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn streamed(source: *const u8, target: *mut u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    const LINE: usize = 64;
    let head = target.align_offset(LINE).min(len);
    let lines_end = head + (len - head) / LINE * LINE;
    // SAFETY: both ends lie inside of what the caller says is valid; lines begin at a multiple of their size in the
    // target, and anywhere in the source.
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
    // Such stores are in no order with others, and so with the lock that says that they are done.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_and_no_other_changes() {
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
