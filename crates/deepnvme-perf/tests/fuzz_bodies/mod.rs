//! Properties of DeepSpeed's configuration of a sweep that hold for any bytes.
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use deepnvme_io::DirectMode;
use deepnvme_io::config::limits::{BLOCK_BYTES_MAX, QUEUE_DEPTH_MAX, WORKERS_MAX};
use deepnvme_perf::tune::SearchSpace;
use deepnvme_perf::tune::space::from_deepspeed;

/// Parses `--sweep_config`.
pub(crate) fn sweep(text: &[u8]) {
    let base = SearchSpace {
        block_bytes: vec![1 << 20],
        queue_depth: vec![8],
        workers: vec![1],
        submit: Vec::new(),
        window: Vec::new(),
        backend: Vec::new(),
        register_pool: vec![true],
        gds: DirectMode::Disabled,
    };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Ok(space) = from_deepspeed(text, base) else { return };
    assert!(space.block_bytes.iter().all(|bytes| (1..=BLOCK_BYTES_MAX).contains(bytes)));
    assert!(space.queue_depth.iter().all(|depth| (1..=QUEUE_DEPTH_MAX).contains(depth)));
    assert!(space.workers.iter().all(|workers| (1..=WORKERS_MAX).contains(workers)));
}
