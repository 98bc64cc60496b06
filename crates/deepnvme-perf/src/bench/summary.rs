//! Metrics from samples. This module does no I/O.

use serde::Serialize;

use crate::measure::Sample;
use crate::measure::sample::{Latencies, RouteBytes, quantile};

/// The metrics of one tool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The speed of the rounds.
    #[serde(flatten)]
    pub speed: Speed,
    /// Median latency of the blocks. `None` if the tool reports none.
    pub latency_us_p50: Option<u64>,
    /// 99th percentile of the blocks' latency.
    pub latency_us_p99: Option<u64>,
    /// CPU time per 10^9 bytes: median of the rounds.
    pub cpu_s_per_gb: f64,
    /// The bytes of a round by their route: medians.
    #[serde(flatten)]
    pub by_route: RouteBytes,
}

/// Bandwidth in 10^9 bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// Median of the rounds.
    #[serde(rename = "gb_per_s")]
    pub median: f64,
    /// The slowest round.
    #[serde(rename = "gb_per_s_min")]
    pub min: f64,
    /// The fastest round.
    #[serde(rename = "gb_per_s_max")]
    pub max: f64,
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
    let bytes = |of: fn(&RouteBytes) -> u64| {
        median(&samples.iter().map(|sample| of(&sample.by_route) as f64).collect::<Vec<_>>()) as u64
    };
    Summary {
        speed: Speed {
            median: median(&speeds),
            min: speeds.iter().copied().fold(f64::INFINITY, f64::min),
            max: speeds.iter().copied().fold(0.0, f64::max),
        },
        latency_us_p50: quantile(&latencies, 0.5),
        latency_us_p99: quantile(&latencies, 0.99),
        cpu_s_per_gb: median(&costs),
        by_route: RouteBytes {
            direct: bytes(|routes| routes.direct),
            bounced: bytes(|routes| routes.bounced),
            buffered: bytes(|routes| routes.buffered),
        },
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
            by_route: RouteBytes { direct: 1_500_000_000, bounced: 500_000_000, buffered: 0 },
            latencies_us: [(us, 10)].into(),
            ..Sample::default()
        }
    }

    #[test]
    fn metrics_are_medians_and_extremes() {
        let summary = summarise(&[sample(1.0, 5), sample(0.5, 7), sample(4.0, 900)]);
        assert!((summary.speed.median - 2.0).abs() < 1e-9, "{summary:?}");
        assert!((summary.speed.min - 0.5).abs() < 1e-9 && (summary.speed.max - 4.0).abs() < 1e-9);
        assert!((summary.cpu_s_per_gb - 0.05).abs() < 1e-9);
        assert_eq!((summary.latency_us_p50, summary.latency_us_p99), (Some(7), Some(900)));
        assert_eq!(summary.by_route, RouteBytes { direct: 1_500_000_000, bounced: 500_000_000, buffered: 0 });
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        let ratio =
            ratio(&[sample(1.0, 1), sample(2.0, 1), sample(1.0, 1)], &[sample(2.0, 1), sample(2.0, 1), sample(1.5, 1)]);
        assert!((ratio.median - 1.5).abs() < 1e-9 && (ratio.min - 1.0).abs() < 1e-9 && (ratio.max - 2.0).abs() < 1e-9);
        assert!((median(&[3.0, 1.0, 2.0, 10.0]) - 2.5).abs() < 1e-9 && median(&[]).abs() < 1e-9);
    }
}
