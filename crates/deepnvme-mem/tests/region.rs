//! Regions: ownership of memory, bounds of copies, and conversion back to a buffer.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use deepnvme_mem::{Buffer, Device, Region, RegionMut, Strided};

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes);
    bytes
}

/// Memory of a GPU that does not exist. Its address is never dereferenced.
fn on_gpu(len: usize) -> RegionMut {
    let start = ptr::without_provenance_mut(1 << 30);
    // SAFETY: the host never copies GPU memory, which the tests check.
    unsafe { RegionMut::from_raw(start, len, Device::Cuda { index: 0 }, Arc::new(())) }
}

#[test]
fn a_vector_becomes_a_region_in_place() {
    let vector: Vec<u8> = (0..200).collect();
    let address = vector.as_ptr().addr();
    let region = Region::from_vec(vector);
    assert_eq!((region.addr(), region.len(), region.device()), (address, 200, Device::Host));
    assert!(region.is_contiguous() && !region.is_empty());
    let part = region.slice(50..60).slice(2..9);
    drop(region);
    assert_eq!((part.addr(), bytes_of(&part)), (address + 52, (52..59).collect()));
    assert!(part.slice(7..7).is_empty());
    assert!(Region::from_vec(Vec::new()).is_empty());
}

#[test]
fn the_last_region_drops_the_owner() {
    struct Tell(Arc<AtomicBool>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let gone = Arc::new(AtomicBool::new(false));
    let owner = Arc::new(Tell(Arc::clone(&gone)));
    // SAFETY: the region has no bytes.
    let target = unsafe { RegionMut::from_raw(ptr::null_mut(), 0, Device::Host, owner) };
    let source = target.region();
    let (left, right) = target.split_at(0);
    drop((left, source));
    assert!(!gone.load(Ordering::SeqCst));
    thread::spawn(move || drop(right)).join().unwrap();
    assert!(gone.load(Ordering::SeqCst));
}

#[test]
fn copies_write_the_right_range() {
    let target = RegionMut::from_vec(vec![0; 10]);
    target.copy_from_slice(3, &[1, 2, 3]);
    target.copy_from_slice(10, &[]);
    assert_eq!(bytes_of(&target.region()), [0, 0, 0, 1, 2, 3, 0, 0, 0, 0]);
    let (left, right) = target.split_at(4);
    right.copy_from_slice(0, &[9; 6]);
    left.copy_from_slice(0, &[8]);
    assert_eq!((left.len(), right.len(), right.addr()), (4, 6, left.addr() + 4));
    assert_eq!(bytes_of(&left.region()), [8, 0, 0, 1]);
    let mut middle = [0; 2];
    right.region().copy_to_slice(4, &mut middle);
    assert_eq!(middle, [9, 9]);
}

#[test]
fn a_view_has_exactly_the_elements_of_its_layout() {
    let region = Region::from_vec((0..24).collect());
    let transposed = Strided::new(vec![3, 2], vec![2, 6], 2).unwrap();
    assert_eq!(bytes_of(&region.view(12, &transposed).unwrap()), [12, 13, 18, 19, 14, 15, 20, 21, 16, 17, 22, 23]);
    assert_eq!(region.view(13, &transposed).map(|view| view.len()), None, "one byte beyond the end");
    let backwards = Strided::new(vec![3], vec![-4], 2).unwrap();
    assert_eq!(bytes_of(&region.view(8, &backwards).unwrap()), [8, 9, 4, 5, 0, 1]);
    assert!(region.view(7, &backwards).is_none(), "one byte before the beginning");
    assert_eq!(region.view(24, &Strided::new(vec![0, 9], vec![1, 1], 8).unwrap()).unwrap().len(), 0);
    assert!(region.view(usize::MAX, &transposed).is_none());
}

#[test]
fn many_threads_fill_one_region() {
    const PART: usize = if cfg!(miri) { 101 } else { 70_001 };
    let target = RegionMut::from_vec(vec![0; 8 * PART]);
    thread::scope(|scope| {
        for part in 0..8 {
            let target = &target;
            scope.spawn(move || target.copy_from_slice(part * PART, &vec![part as u8 + 1; PART]));
        }
    });
    let bytes = bytes_of(&target.region());
    for (part, chunk) in bytes.chunks(PART).enumerate() {
        assert!(chunk.iter().all(|byte| *byte == part as u8 + 1));
    }
}

#[test]
fn only_a_whole_unshared_region_turns_back_into_a_buffer() {
    let buffer = Buffer::zeroed(8192).unwrap();
    let region = buffer.into_region();
    let reader = region.region();
    let region = region.into_buffer().unwrap_err();
    assert_eq!(region.len(), 8192, "a reader is alive");
    let part = reader.slice(0..1);
    drop(reader);
    let region = region.into_buffer().unwrap_err();
    drop(part);

    let (left, right) = region.split_at(4096);
    let left = left.into_buffer().unwrap_err();
    drop(right);
    let left = left.into_buffer().unwrap_err();
    assert_eq!(left.len(), 4096, "half a buffer never turns into a whole one");
    drop(left);

    let (whole, nothing) = Buffer::zeroed(100).unwrap().into_region().split_at(100);
    let whole = whole.into_buffer().unwrap_err();
    drop(nothing);
    assert_eq!(whole.into_buffer().unwrap().len(), 100);
}

#[test]
fn other_memory_is_no_buffer() {
    let region = RegionMut::from_vec(vec![1, 2, 3]).into_buffer().unwrap_err();
    assert_eq!(bytes_of(&region.region()), [1, 2, 3]);
    assert_eq!(on_gpu(5).into_buffer().unwrap_err().device(), Device::Cuda { index: 0 });
}

#[test]
#[cfg_attr(miri, ignore = "miri unmaps whole mappings only")]
fn lengths_beyond_four_gibibytes_work() {
    let len = (5 << 30) + 3;
    let target = Buffer::zeroed(len).unwrap().into_region();
    target.copy_from_slice(len - 3, &[1, 2, 3]);
    let tail = target.region().slice(len - 4..len);
    assert_eq!(bytes_of(&tail), [0, 1, 2, 3]);
    drop(tail);
    let (_, right) = target.split_at(len - 2);
    assert_eq!(bytes_of(&right.region()), [2, 3]);
}

#[test]
fn debug_output_names_address_and_length() {
    let region = Region::from_vec(vec![0; 12]);
    let said = format!("{region:?}");
    assert!(said.contains("12 bytes at 0x") && said.contains("Host"), "{said}");
    assert!(format!("{:?}", on_gpu(7)).contains("7 bytes at 0x40000000 on Cuda { index: 0 }"));
}

#[test]
#[should_panic(expected = "3 bytes at 8 are outside a region of 10 bytes")]
fn writing_past_the_end_is_refused() {
    RegionMut::from_vec(vec![0; 10]).copy_from_slice(8, &[0; 3]);
}

#[test]
#[should_panic(expected = "are outside a region of 10 bytes")]
fn a_position_beyond_all_numbers_is_refused() {
    Region::from_vec(vec![0; 10]).copy_to_slice(usize::MAX, &mut [0; 3]);
}

#[test]
#[should_panic(expected = "slice 4..11 is outside a region of 10 bytes")]
fn a_slice_past_the_end_is_refused() {
    let _ = Region::from_vec(vec![0; 10]).slice(4..11);
}

#[test]
#[should_panic(expected = "the CPU cannot copy memory of Cuda { index: 0 }")]
fn the_memory_of_a_gpu_is_not_copied() {
    on_gpu(16).copy_from_slice(0, &[1]);
}

#[test]
#[should_panic(expected = "only a contiguous region can be sliced")]
fn a_strided_region_is_not_sliced() {
    let layout = Strided::new(vec![2, 2], vec![4, 8], 4).unwrap();
    // SAFETY: no byte of it is read.
    let region = unsafe { Region::from_strided(ptr::null_mut(), layout, Device::Cuda { index: 0 }, Arc::new(())) };
    let _ = region.slice(0..8);
}

#[test]
#[should_panic(expected = "a layout must be checked")]
fn a_layout_that_was_not_checked_is_refused() {
    let layout = Strided { shape: vec![2], stride_bytes: vec![], item_bytes: 1 };
    // SAFETY: no byte of it is read.
    let _ = unsafe { Region::from_strided(ptr::null_mut(), layout, Device::Host, Arc::new(())) };
}

#[test]
fn a_region_is_copied_into_another() {
    for len in [0, 1, 4095, 4096, 70_001, 600_000] {
        let source: Vec<u8> = (0..len as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let target = Buffer::zeroed(len + 20).unwrap().into_region();
        target.copy_from_region(7, &Region::from_vec(source.clone()));
        let found = bytes_of(&target.region());
        assert!(found[7..7 + len] == source && found[..7] == [0; 7] && found[7 + len..] == [0; 13], "{len} bytes");
    }
}

#[test]
fn strided_regions_are_copied_in_their_order() {
    const ROWS: usize = 1000;
    let mut memory: Vec<u8> = (0..ROWS * 400).map(|index| (index * 7 % 251) as u8).collect();
    let layout = || Strided::new(vec![400, ROWS], vec![1, 400], 1).unwrap();
    // SAFETY: the layout covers the vector, which outlives the region.
    let columns = unsafe { Region::from_strided(memory.as_mut_ptr(), layout(), Device::Host, Arc::new(())) };
    let target = Buffer::zeroed(ROWS * 400).unwrap().into_region();
    target.copy_from_region(0, &columns);
    assert_eq!(bytes_of(&target.region()), bytes_of(&columns));
    let mut transposed = vec![0_u8; ROWS * 400];
    // SAFETY: the layout covers this vector, which outlives the region.
    let back = unsafe { Region::from_strided(transposed.as_mut_ptr(), layout(), Device::Host, Arc::new(())) };
    // SAFETY: the vector is writable, and each byte is in the layout once.
    unsafe { RegionMut::from_region(back) }.copy_from_region(0, &target.region());
    assert_eq!(transposed, memory);
    memory.clear();
}

#[test]
fn overlapping_parts_are_copied_as_by_memmove() {
    let buffer = Buffer::zeroed(10_000).unwrap().into_region();
    let before: Vec<u8> = (0..10_000_u32).map(|index| (index % 253) as u8).collect();
    buffer.copy_from_slice(0, &before);
    buffer.copy_from_region(100, &buffer.region().slice(0..9000));
    assert_eq!(bytes_of(&buffer.region())[100..9100], before[..9000]);
}

#[test]
#[should_panic(expected = "outside a region")]
fn a_region_that_does_not_fit_is_not_copied() {
    Buffer::zeroed(10).unwrap().into_region().copy_from_region(1, &Region::from_vec(vec![0; 10]));
}
