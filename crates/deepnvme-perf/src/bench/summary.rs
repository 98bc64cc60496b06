//! Metrics from samples. Pure.

use serde::Serialize;

use crate::measure::Sample;
use crate::measure::sample::{Latencies, quantile};

/// The metrics of one tool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Median of the rounds, 10^9 bytes per second.
    pub gb_per_s: f64,
    /// The slowest round.
    pub gb_per_s_min: f64,
    /// The fastest round.
    pub gb_per_s_max: f64,
    /// Median latency of the blocks. `None` if the tool reports none.
    pub latency_us_p50: Option<u64>,
    /// 99th percentile of the blocks' latency.
    pub latency_us_p99: Option<u64>,
    /// Processor time per 10^9 bytes: median of the rounds.
    pub cpu_s_per_gb: f64,
    /// Bytes of a round transferred with direct I/O, without a copy: median.
    pub bytes_direct: u64,
    /// Bytes of a round transferred with direct I/O through a bounce buffer: median.
    pub bytes_bounced: u64,
    /// Bytes of a round transferred through the page cache: median.
    pub bytes_buffered: u64,
}

/// The speed of the engine relative to a baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// Median of the ratios within the rounds.
    pub median: f64,
    /// The worst round.
    pub min: f64,
    /// The best round.
    pub max: f64,
}

/// Summarises the rounds of one tool.
#[must_use]
pub fn summarise(samples: &[Sample]) -> Summary {
    let speeds: Vec<_> = samples.iter().map(Sample::gb_per_s).collect();
    let costs: Vec<_> = samples.iter().map(|sample| sample.cpu_s / (sample.bytes as f64 / 1e9)).collect();
    let latencies = all_latencies(samples);
    let bytes =
        |field: fn(&Sample) -> u64| median(&samples.iter().map(|sample| field(sample) as f64).collect::<Vec<_>>());
    Summary {
        gb_per_s: median(&speeds),
        gb_per_s_min: speeds.iter().copied().fold(f64::INFINITY, f64::min),
        gb_per_s_max: speeds.iter().copied().fold(0.0, f64::max),
        latency_us_p50: quantile(&latencies, 0.5),
        latency_us_p99: quantile(&latencies, 0.99),
        cpu_s_per_gb: median(&costs),
        bytes_direct: bytes(|sample| sample.bytes_direct) as u64,
        bytes_bounced: bytes(|sample| sample.bytes_bounced) as u64,
        bytes_buffered: bytes(|sample| sample.bytes_buffered) as u64,
    }
}

/// Adds the histograms of all rounds.
#[must_use]
pub fn all_latencies(samples: &[Sample]) -> Latencies {
    let mut all = Latencies::new();
    for (us, count) in samples.iter().flat_map(|sample| &sample.latencies_us) {
        *all.entry(*us).or_default() += count;
    }
    all
}

/// Divides round by round: a disturbance of the disk affects both rounds of a pair.
#[must_use]
pub fn ratio(engine: &[Sample], baseline: &[Sample]) -> Ratio {
    let ratios: Vec<_> = engine.iter().zip(baseline).map(|(left, right)| left.gb_per_s() / right.gb_per_s()).collect();
    Ratio {
        median: median(&ratios),
        min: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        max: ratios.iter().copied().fold(0.0, f64::max),
    }
}

/// Returns the median; 0 for no values.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(wall_s: f64, us: u64) -> Sample {
        Sample {
            bytes: 2_000_000_000,
            wall_s,
            cpu_s: wall_s / 10.0,
            bytes_direct: 1_500_000_000,
            bytes_bounced: 500_000_000,
            latencies_us: [(us, 10)].into(),
            ..Sample::default()
        }
    }

    #[test]
    fn metrics_are_medians_and_extremes() {
        let summary = summarise(&[sample(1.0, 5), sample(0.5, 7), sample(4.0, 900)]);
        assert!((summary.gb_per_s - 2.0).abs() < 1e-9, "{summary:?}");
        assert!((summary.gb_per_s_min - 0.5).abs() < 1e-9 && (summary.gb_per_s_max - 4.0).abs() < 1e-9);
        assert!((summary.cpu_s_per_gb - 0.05).abs() < 1e-9);
        assert_eq!((summary.latency_us_p50, summary.latency_us_p99), (Some(7), Some(900)));
        assert_eq!(
            (summary.bytes_direct, summary.bytes_bounced, summary.bytes_buffered),
            (1_500_000_000, 500_000_000, 0)
        );
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        let ratio =
            ratio(&[sample(1.0, 1), sample(2.0, 1), sample(1.0, 1)], &[sample(2.0, 1), sample(2.0, 1), sample(1.5, 1)]);
        assert!((ratio.median - 1.5).abs() < 1e-9 && (ratio.min - 1.0).abs() < 1e-9 && (ratio.max - 2.0).abs() < 1e-9);
        assert!((median(&[3.0, 1.0, 2.0, 10.0]) - 2.5).abs() < 1e-9 && median(&[]).abs() < 1e-9);
    }
}
