//! Requesting huge pages changes no byte, and small or unaligned memory is left alone.

use deepnvme_mem::RegionMut;

#[test]
fn the_bytes_stay_and_small_memory_is_left_alone() {
    let bytes: Vec<u8> = (0..9_000_000u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (start, end) in [(0, bytes.len()), (1, bytes.len() - 1), (4097, 4_200_000)] {
        let region = RegionMut::from_vec(bytes.clone());
        let middle = region.split_at(end).0.split_at(start).1;
        let _taken = middle.advise_huge();
        let mut seen = vec![0; middle.len()];
        middle.region().copy_to_slice(0, &mut seen);
        assert!(seen == bytes[start..end]);
    }
    assert!(!RegionMut::from_vec(vec![1; 4096]).advise_huge(), "no huge page fits");
    assert!(!RegionMut::from_vec(Vec::new()).advise_huge());
}
