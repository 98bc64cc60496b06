//! The backend contract, as functions that take a constructor and panic if the contract is broken.
//!
//! - [`queue`]: accepting, refusing and returning ops, and counting them.
//! - [`flow`]: many ops, both submit modes, two queues.
//! - [`waking`]: waiting in `reap`, and waking it.
//! - [`transfer`]: the right bytes at the right offset, up to the end of the file.
//! - [`vectored`]: ops with several iovecs.
//! - [`refusal`]: errors and syncs.
//! - [`memory`]: registered memory, and ownership of an op's memory.
//! - [`random`]: many ops against a model.
//!
//! [`all`] lists them; [`conformance_tests!`](crate::conformance_tests) generates a test for each. Files are in
//! [`base_dir`](crate::data::base_dir).

pub mod flow;
mod harness;
pub mod memory;
pub mod queue;
pub mod random;
pub mod refusal;
pub mod transfer;
pub mod vectored;
pub mod waking;

use deepnvme_io::backend::{Backend, BackendSetup};
pub use harness::Harness;

/// Creates the backend under test.
pub type Make<'a> = &'a dyn Fn(&BackendSetup) -> Box<dyn Backend>;

/// One check of the contract.
pub type Check = fn(Make<'_>);

/// Expands the list of checks in one of two ways. The only list of all checks.
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_check {
    ($way:ident { $($argument:tt)* }) => {
        $crate::expand_checks! {
            $way { $($argument)* }
            queue accepted_ops_come_back_exactly_once,
            queue a_full_queue_returns_the_op,
            queue a_completion_returns_the_submitted_op,
            queue reap_appends_at_least_min,
            queue depth_one_works,
            flow a_window_slides_over_many_ops,
            flow both_submit_modes_complete,
            flow two_backends_do_not_mix,
            waking reap_zero_does_not_wait,
            waking a_wake_ends_a_reap,
            waking a_wake_before_the_reap_counts,
            waking a_wake_loses_no_completion,
            waking a_wake_after_the_end_is_harmless,
            transfer reads_stop_at_the_end_of_the_file,
            transfer reads_past_the_end_are_empty,
            transfer reads_leave_the_memory_around_alone,
            transfer writes_land_at_their_offset_and_nowhere_else,
            transfer writes_extend_the_file,
            vectored iovecs_are_filled_in_order,
            vectored iovecs_are_written_in_order,
            vectored the_most_iovecs_work,
            transfer offsets_beyond_four_gibibytes_work,
            transfer large_ops_work,
            transfer direct_files_work_and_are_not_realigned,
            refusal a_write_to_a_read_only_file_is_refused,
            refusal a_read_of_a_write_only_file_is_refused,
            refusal a_read_of_a_folder_is_refused,
            refusal a_refusal_leaves_its_neighbours_alone,
            refusal syncs_complete_with_zero,
            refusal a_sync_of_a_pipe_is_refused,
            memory registered_memory_works_like_any,
            memory memory_can_be_registered_again,
            memory many_registrations_are_harmless,
            memory ops_in_flight_hold_their_memory,
            memory drop_waits_for_ops_in_flight,
            memory drop_releases_unflushed_ops,
            random random_ops_agree_with_a_model,
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! expand_checks {
    (list {} $($module:ident $name:ident,)*) => {
        &[$((stringify!($name), $crate::conformance::$module::$name as $crate::conformance::Check)),*]
    };
    (tests { $make:expr } $($module:ident $name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                if let Some(make) = $make {
                    let check = || $crate::conformance::$module::$name(&make);
                    $crate::watchdog::with_time_limit(stringify!($name), $crate::conformance::CHECK_TIME_MAX, check);
                }
            }
        )*
    };
}

/// Generates a `#[test]` for each check. The argument is an expression for the constructor: `Some(closure)`, or
/// `None` after printing why the backend cannot be tested here.
#[macro_export]
macro_rules! conformance_tests {
    ($make:expr) => {
        $crate::for_each_check!(tests { $make });
    };
}

/// A check that takes longer counts as a hang.
pub const CHECK_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(60);

/// Returns all checks by name.
#[must_use]
pub fn all() -> &'static [(&'static str, Check)] {
    crate::for_each_check!(list {})
}
