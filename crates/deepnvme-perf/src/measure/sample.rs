//! The measurements of one round.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A histogram: microseconds, and the number of blocks that took that long.
pub type Latencies = BTreeMap<u64, u64>;

/// One round of one tool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Bytes transferred.
    pub bytes: u64,
    /// Seconds from opening the files to the last byte, including the sync of a durable write.
    pub wall_s: f64,
    /// Seconds of the transfers without opening the files. Includes a sync only if each file is one request.
    pub transfer_s: f64,
    /// CPU time of all threads, user and system, in seconds.
    pub cpu_s: f64,
    /// The bytes by their route.
    #[serde(flatten)]
    pub by_route: RouteBytes,
    /// Latencies of the blocks, from submission to completion.
    pub latencies_us: Latencies,
    /// Seconds since the round began, and bytes transferred by then.
    pub timeline: Vec<(f64, u64)>,
}

/// The bytes of a round, by the route that they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteBytes {
    /// Bytes transferred with direct I/O or cuFile, without a copy.
    #[serde(rename = "bytes_direct")]
    pub direct: u64,
    /// Bytes transferred with direct I/O through a bounce buffer.
    #[serde(rename = "bytes_bounced")]
    pub bounced: u64,
    /// Bytes transferred through the page cache.
    #[serde(rename = "bytes_buffered")]
    pub buffered: u64,
}

impl Sample {
    /// Returns the bandwidth in 10^9 bytes per second.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.wall_s.max(1e-9) / 1e9
    }

    /// Combines the samples of processes that ran at the same time: the slowest ends the round.
    #[must_use]
    pub fn combine(samples: &[Self]) -> Self {
        let mut all = Self::default();
        for sample in samples {
            all.bytes += sample.bytes;
            all.wall_s = all.wall_s.max(sample.wall_s);
            all.transfer_s = all.transfer_s.max(sample.transfer_s);
            all.cpu_s += sample.cpu_s;
            all.by_route.direct += sample.by_route.direct;
            all.by_route.bounced += sample.by_route.bounced;
            all.by_route.buffered += sample.by_route.buffered;
            for (us, count) in &sample.latencies_us {
                *all.latencies_us.entry(*us).or_default() += count;
            }
        }
        all.timeline = merged(samples);
        all
    }
}

/// Adds several timelines, at every time that one of them has.
fn merged(samples: &[Sample]) -> Vec<(f64, u64)> {
    let mut points: Vec<_> = samples
        .iter()
        .enumerate()
        .flat_map(|(index, sample)| sample.timeline.iter().map(move |(seconds, bytes)| (*seconds, index, *bytes)))
        .collect();
    points.sort_by(|left, right| left.0.total_cmp(&right.0));
    let mut transferred = vec![0; samples.len()];
    let steps = points.into_iter().map(|(seconds, index, bytes)| {
        transferred[index] = bytes;
        (seconds, transferred.iter().sum())
    });
    steps.collect()
}

/// Returns the quantile of a histogram, for a `part` of 0 to 1; `None` without blocks.
#[must_use]
pub fn quantile(latencies: &Latencies, part: f64) -> Option<u64> {
    let total: u64 = latencies.values().sum();
    let rank = ((total as f64 * part).ceil() as u64).max(1);
    let mut seen = 0;
    latencies.iter().find_map(|(us, count)| {
        seen += count;
        (seen >= rank).then_some(*us)
    })
}

/// Returns the counts added since `before`.
pub(super) fn added_since(before: &Latencies, now: &Latencies) -> Latencies {
    let added = now.iter().map(|(us, count)| (*us, count - before.get(us).copied().unwrap_or(0).min(*count)));
    added.filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_add_up_and_the_slowest_ends_the_round() {
        let one = |wall_s, us: u64, timeline: &[(f64, u64)]| Sample {
            bytes: 10,
            wall_s,
            cpu_s: 1.0,
            latencies_us: [(us, 2), (9, 1)].into(),
            timeline: timeline.to_vec(),
            ..Sample::default()
        };
        let all = Sample::combine(&[one(2.0, 5, &[(0.5, 4), (2.0, 10)]), one(1.0, 7, &[(0.7, 3), (1.0, 10)])]);
        assert_eq!((all.bytes, all.wall_s, all.cpu_s), (20, 2.0, 2.0));
        assert_eq!(all.latencies_us, [(5, 2), (7, 2), (9, 2)].into());
        assert_eq!(all.timeline, [(0.5, 4), (0.7, 7), (1.0, 14), (2.0, 20)]);
        assert!((all.gb_per_s() - 1e-8).abs() < 1e-12);
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_list() {
        let latencies: Latencies = [(10, 98), (20, 1), (500, 1)].into();
        assert_eq!(
            [0.5, 0.98, 0.99, 1.0].map(|part| quantile(&latencies, part)),
            [Some(10), Some(10), Some(20), Some(500)]
        );
        assert_eq!(quantile(&Latencies::new(), 0.5), None);
        assert_eq!(added_since(&[(10, 90)].into(), &latencies), [(10, 8), (20, 1), (500, 1)].into());
    }
}
