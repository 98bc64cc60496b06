//! Every check can fail: a backend that breaks one part of the contract is caught by its check.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod broken;

use broken::{Broken, Defect};
use deepnvme_io::backend::{self, Backend, BackendKind, BackendSetup};
use deepnvme_testkit::conformance;
use deepnvme_testkit::data::random_bytes;

/// Returns the checks that a backend with this defect fails.
fn failures(defect: Defect, checks: &[&str]) -> Vec<String> {
    let make = |setup: &BackendSetup| -> Box<dyn Backend> {
        let doubled = BackendSetup { queue_depth: setup.queue_depth * 2, ..setup.clone() };
        let setup = if defect == Defect::TakesTooMany { &doubled } else { setup };
        let inner = backend::open(BackendKind::Threads, setup).expect("threads work everywhere");
        Box::new(Broken::new(defect, inner))
    };
    let listed = conformance::all();
    checks
        .iter()
        .filter(|name| {
            let (_, check) = listed.iter().find(|(listed, _)| listed == *name).expect("a listed check");
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&make))).is_err()
        })
        .map(|name| (*name).to_owned())
        .collect()
}

#[test]
fn each_defect_is_caught_by_the_check_of_its_promise() {
    let cases: &[(Defect, &[&str])] = &[
        (Defect::LosesOps, &["accepted_ops_come_back_exactly_once", "random_ops_agree_with_a_model"]),
        (Defect::ReturnsOpsTwice, &["accepted_ops_come_back_exactly_once", "a_window_slides_over_many_ops"]),
        (Defect::TakesTooMany, &["a_full_queue_returns_the_op", "depth_one_works"]),
        (Defect::SaysItIsDeeper, &["a_full_queue_returns_the_op"]),
        (Defect::ChangesTokens, &["a_completion_returns_the_submitted_op", "accepted_ops_come_back_exactly_once"]),
        (Defect::TruncatesTokens, &["a_completion_returns_the_submitted_op"]),
        (Defect::ChangesOffsets, &["a_completion_returns_the_submitted_op"]),
        (Defect::SwapsIovecs, &["iovecs_are_filled_in_order", "iovecs_are_written_in_order", "the_most_iovecs_work"]),
        (Defect::KeepsOneIovec, &["iovecs_are_filled_in_order", "registered_memory_works_like_any"]),
        (Defect::ReadsPastTheOp, &["reads_leave_the_memory_around_alone", "many_registrations_are_harmless"]),
        (Defect::MovesWritesByOne, &["writes_land_at_their_offset_and_nowhere_else", "writes_extend_the_file"]),
        (Defect::TruncatesOffsets, &["offsets_beyond_four_gibibytes_work"]),
        (Defect::ClaimsFullReads, &["reads_stop_at_the_end_of_the_file", "reads_past_the_end_are_empty"]),
        (
            Defect::HidesErrors,
            &[
                "a_write_to_a_read_only_file_is_refused",
                "a_read_of_a_write_only_file_is_refused",
                "a_read_of_a_folder_is_refused",
                "a_refusal_leaves_its_neighbours_alone",
                "a_sync_of_a_pipe_is_refused",
            ],
        ),
        (Defect::ClaimsSyncedBytes, &["syncs_complete_with_zero"]),
        (Defect::ClearsTheVector, &["reap_appends_at_least_min"]),
        (Defect::KeepsMemory, &["ops_in_flight_hold_their_memory", "drop_releases_unflushed_ops"]),
        (Defect::AbandonsOps, &["drop_waits_for_ops_in_flight", "drop_releases_unflushed_ops"]),
        (
            Defect::FailsAll,
            &[
                "large_ops_work",
                "both_submit_modes_complete",
                "reap_zero_does_not_wait",
                "two_backends_do_not_mix",
                "a_window_slides_over_many_ops",
            ],
        ),
    ];
    for (defect, checks) in cases {
        assert_eq!(failures(*defect, checks), *checks, "{defect:?} got past a check");
        assert!(failures(Defect::None, checks).is_empty(), "a sound backend fails a check of {defect:?}");
    }
}

#[test]
fn the_list_names_every_check_once() {
    let names: std::collections::BTreeSet<&str> = conformance::all().iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), conformance::all().len());
    assert!(names.len() > 30);
}

#[test]
fn random_bytes_depend_on_the_seed() {
    assert_ne!(random_bytes(1, 100), random_bytes(2, 100));
}
