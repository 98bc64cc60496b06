//! DeepSpeed's `"aio"` block for a ds_config.

use deepnvme_io::{Config, SubmitMode, WindowMode};
use serde::Serialize;

/// The keys of DeepSpeed's configuration. Its own tool writes `num_threads`, which the configuration ignores, and
/// booleans as strings, which it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Aio {
    /// True: one system call for each request.
    pub single_submit: bool,
    /// True: the window slides.
    pub overlap_events: bool,
    /// Workers.
    pub intra_op_parallelism: u32,
    /// Requests in flight per worker.
    pub queue_depth: u32,
    /// Bytes of one request.
    pub block_size: u64,
}

/// The object with the key `"aio"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AioBlock {
    /// The settings.
    pub aio: Aio,
}

impl AioBlock {
    /// Converts settings to DeepSpeed's names.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            aio: Aio {
                single_submit: config.submit == SubmitMode::Single,
                overlap_events: config.window == WindowMode::Sliding,
                intra_op_parallelism: config.workers,
                queue_depth: config.queue_depth,
                block_size: config.block_bytes,
            },
        }
    }

    /// Returns JSON indented by three spaces, as DeepSpeed's tool prints it.
    #[must_use]
    pub fn text(&self) -> String {
        let Aio { single_submit, overlap_events, intra_op_parallelism, queue_depth, block_size } = self.aio;
        format!(
            "{{\n   \"aio\": {{\n      \"single_submit\": {single_submit},\n      \"overlap_events\": {overlap_events},\n      \
             \"intra_op_parallelism\": {intra_op_parallelism},\n      \"queue_depth\": {queue_depth},\n      \
             \"block_size\": {block_size}\n   }}\n}}\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_parses_to_the_value_and_has_real_booleans() {
        let config = Config {
            submit: SubmitMode::Single,
            workers: 3,
            queue_depth: 9,
            block_bytes: 1 << 20,
            ..Config::default()
        };
        let block = AioBlock::of(&config);
        let text: serde_json::Value = serde_json::from_str(&block.text()).unwrap();
        assert_eq!(text, serde_json::to_value(block).unwrap());
        assert_eq!(text["aio"]["single_submit"], true);
        assert_eq!(text["aio"]["overlap_events"], true);
        assert_eq!(text["aio"]["intra_op_parallelism"], 3);
        assert_eq!(text["aio"]["block_size"], 1 << 20);
    }
}
