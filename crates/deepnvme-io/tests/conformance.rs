//! Checks the contract with every backend, real, simulated or decorated. Only the constructors differ.

mod common;

use std::time::Duration;

use common::{real, simulated_by};
use deepnvme_io::backend::BackendKind;
use deepnvme_testkit::faults::{FaultPlan, Faults};

/// Returns delays and reordering without errors, which the contract allows.
fn dawdling() -> FaultPlan {
    FaultPlan { seed: 7, slow: 200, slow_max: Duration::from_millis(2), reorder: true, ..FaultPlan::default() }
}

/// Creates a real backend behind the decorator.
fn decorated(kind: BackendKind, plan: FaultPlan) -> Option<common::MakeBackend> {
    common::decorated(kind, &Faults::new(plan))
}

/// Defines a test module per constructor.
macro_rules! backends {
    ($($name:ident: $make:expr;)*) => {
        $(
            mod $name {
                use super::*;

                deepnvme_testkit::conformance_tests!($make);
            }
        )*
    };
}

backends! {
    uring: real(BackendKind::Uring);
    aio: real(BackendKind::Aio);
    threads: real(BackendKind::Threads);
    simulated_one: simulated_by(1);
    simulated_two: simulated_by(2);
    decorated_without_faults: decorated(BackendKind::Threads, FaultPlan::default());
    dawdling_uring: decorated(BackendKind::Uring, dawdling());
    dawdling_aio: decorated(BackendKind::Aio, dawdling());
}

#[test]
fn the_real_backends_say_what_they_are() {
    for (kind, make) in common::all_real() {
        let setup = deepnvme_io::backend::BackendSetup {
            queue_depth: 3,
            submit: deepnvme_io::SubmitMode::Single,
            worker_index: 2,
        };
        let backend = make(&setup);
        assert_eq!((backend.kind(), backend.depth(), backend.in_flight()), (kind, 3, 0));
    }
}
