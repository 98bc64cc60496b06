//! Strided copies against a model that moves one byte at a time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod model;

use deepnvme_mem::Pool;
use proptest::prelude::*;

use crate::model::{Model, bytes_of, overlapping_layouts, views, with_range};

fn check_gather(model: &Model, from: usize, len: usize) {
    let (tensor, _) = model.region();
    let mut got = vec![0; len];
    tensor.region().copy_to_slice(from, &mut got);
    assert_eq!(got, model.flat()[from..from + len], "{:?}, {len} bytes from {from}", model.layout);
}

/// The rows reported for a GPU copy are the bytes that the host copies.
fn check_rows(model: &Model, from: usize, len: usize) {
    let (tensor, whole) = model.region();
    let mut positions = Vec::new();
    tensor.region().visit_rows(from, len, |rows| {
        for address in rows.addresses() {
            let start = address - whole.addr();
            positions.extend(start..start + rows.bytes);
        }
    });
    assert_eq!(positions, model.positions[from..from + len], "{:?}, {len} bytes from {from}", model.layout);
}

fn check_scatter(model: &Model, to: usize, len: usize) {
    let (tensor, whole) = model.region();
    let source: Vec<u8> = (0..len).map(|index| (index * 7 + 1) as u8).collect();
    tensor.copy_from_slice(to, &source);
    let mut expected = model.memory.clone();
    for (place, byte) in model.positions[to..].iter().zip(&source) {
        expected[*place] = *byte;
    }
    assert_eq!(bytes_of(&whole), expected, "{:?}, {len} bytes to {to}", model.layout);
}

#[test]
#[cfg_attr(miri, ignore = "takes miri hours")]
fn known_layouts_are_copied_in_every_range() {
    let cases: &[(&[usize], &[isize], usize)] = &[
        (&[], &[], 5),
        (&[7], &[3], 3),
        (&[7], &[9], 3),
        (&[7], &[-2], 2),
        (&[3, 4], &[4, 12], 4),
        (&[3, 4], &[-32, -8], 8),
        (&[2, 3, 4], &[48, 16, 4], 4),
        (&[2, 3, 4], &[4, 32, 8], 4),
        (&[5, 1, 2], &[16, 999, 8], 8),
        (&[2, 2, 2, 2], &[256, 64, 128, 16], 16),
        (&[0, 3], &[4, 4], 4),
    ];
    for (shape, stride_bytes, item_bytes) in cases {
        let model = Model::new(shape, stride_bytes, *item_bytes);
        let total = model.layout.total_bytes();
        for from in 0..=total {
            for len in 0..=total - from {
                check_gather(&model, from, len);
                check_scatter(&model, from, len);
                check_rows(&model, from, len);
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes miri hours")]
fn layouts_of_many_rows_are_copied_for_any_item_size() {
    for item_bytes in [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 33, 64, 100] {
        let item = item_bytes as isize;
        let cases: [(&[usize], &[isize]); 5] = [
            (&[600, 3], &[item, 600 * item]),
            (&[600, 3], &[-5 * item, item]),
            (&[20, 37], &[item, 20 * item]),
            (&[2, 41, 9], &[9 * 41 * item, item, -41 * item]),
            (&[30, 20], &[25 * item, item]),
        ];
        for (shape, stride_bytes) in cases {
            let model = Model::new(shape, stride_bytes, item_bytes);
            let total = model.layout.total_bytes();
            for (from, len) in [(0, total), (1, total - 2), (total / 3 + 1, total / 2), (total / 7, 5)] {
                check_gather(&model, from, len);
                check_scatter(&model, from, len);
            }
        }
    }
}

#[test]
fn expanded_tensors_repeat_their_items() {
    let model = Model::new(&[3, 2], &[0, 4], 4);
    check_gather(&model, 0, 24);
    check_gather(&model, 5, 14);
}

#[test]
fn contiguous_layouts_are_detected() {
    let is_contiguous =
        |shape: &[usize], strides: &[isize], item| Model::new(shape, strides, item).region().0.is_contiguous();
    assert!(is_contiguous(&[2, 3, 4], &[48, 16, 4], 4));
    assert!(is_contiguous(&[2, 1, 4], &[16, -7, 4], 4), "a single item's stride does not matter");
    assert!(is_contiguous(&[], &[], 4));
    assert!(is_contiguous(&[3, 0], &[1, 1], 4));
    assert!(!is_contiguous(&[4, 3], &[4, 16], 4));
    assert!(!is_contiguous(&[2, 3], &[16, 4], 4), "a gap between the rows");
}

proptest! {
    #[test]
    fn gathers_the_same_bytes_as_the_model((model, from, len) in with_range(views())) {
        check_gather(&model, from, len);
    }

    #[test]
    fn visits_the_rows_of_the_model((model, from, len) in with_range(overlapping_layouts())) {
        check_rows(&model, from, len);
    }

    #[test]
    fn scatters_where_the_model_scatters((model, to, len) in with_range(views())) {
        prop_assume!(!model.overlaps());
        check_scatter(&model, to, len);
    }

    #[test]
    fn gathers_from_overlapping_layouts((model, from, len) in with_range(overlapping_layouts())) {
        check_gather(&model, from, len);
    }

    #[test]
    fn overlap_of_views_is_exact(model in views()) {
        prop_assert_eq!(model.layout.may_overlap(), model.overlaps());
    }

    #[test]
    fn every_overlap_is_detected(model in overlapping_layouts()) {
        prop_assert!(model.layout.may_overlap() || !model.overlaps());
    }

    #[test]
    fn slots_copy_bytes_between_tensors((model, from, len) in with_range(views()), at in 0_usize..100) {
        prop_assume!(!model.overlaps());
        let pool = Pool::new(at + len + 1, 1, false).unwrap();
        let mut slot = pool.try_take().unwrap();
        slot.gather(at, &model.region().0.region(), from, len);
        prop_assert_eq!(&slot.as_slice()[at..at + len], &model.flat()[from..from + len]);
        let (target, _) = Model::new(&model.layout.shape, &model.layout.stride_bytes, model.layout.item_bytes).region();
        target.copy_from_slice(0, &vec![0; target.len()]);
        slot.scatter(at, &target, from, len);
        let mut expected = vec![0; target.len()];
        expected[from..from + len].copy_from_slice(&model.flat()[from..from + len]);
        prop_assert_eq!(bytes_of(&target.region()), expected);
    }
}
