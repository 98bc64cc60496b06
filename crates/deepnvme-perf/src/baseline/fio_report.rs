//! fio's JSON report, as a sample.

use serde::Deserialize;

use crate::measure::{Direction, Sample};

/// The parts of the report that a sample needs.
#[derive(Deserialize)]
pub(super) struct FioReport {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Side,
    write: Side,
    usr_cpu: f64,
    sys_cpu: f64,
    job_runtime: u64,
}

#[derive(Deserialize)]
struct Side {
    io_bytes: u64,
    runtime: u64,
    #[serde(default)]
    clat_ns: Option<Clat>,
}

#[derive(Deserialize)]
struct Clat {
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, u64>,
    #[serde(default, rename = "N")]
    count: u64,
}

/// Parses fio's JSON. Warnings may precede it on the same stream.
pub(super) fn parse(text: &str) -> std::result::Result<FioReport, String> {
    let start = text.find('{').ok_or("it printed no JSON")?;
    let mut documents = serde_json::Deserializer::from_str(&text[start..]).into_iter::<FioReport>();
    let report =
        documents.next().ok_or("it printed no JSON")?.map_err(|error| format!("its JSON has another form: {error}"))?;
    match report.jobs.iter().find(|job| job.error != 0) {
        Some(job) => Err(std::io::Error::from_raw_os_error(job.error).to_string()),
        None => Ok(report),
    }
}

impl FioReport {
    /// Adds up the jobs.
    pub(super) fn sample(&self, direction: Direction, is_direct: bool) -> Sample {
        let side = |job: &'_ Job| match direction {
            Direction::Read => (job.read.io_bytes, job.read.runtime, percentiles(&job.read)),
            Direction::Write => (job.write.io_bytes, job.write.runtime, percentiles(&job.write)),
        };
        let mut sample = Sample::default();
        for job in &self.jobs {
            let (bytes, runtime_ms, latencies) = side(job);
            sample.bytes += bytes;
            // fio reports whole milliseconds; a shorter job counts as one.
            sample.wall_s = sample.wall_s.max(runtime_ms.max(1) as f64 / 1e3);
            sample.cpu_s += (job.usr_cpu + job.sys_cpu) / 100.0 * job.job_runtime as f64 / 1e3;
            for (us, count) in latencies {
                *sample.latencies_us.entry(us).or_default() += count;
            }
        }
        sample.transfer_s = sample.wall_s;
        *(if is_direct { &mut sample.by_route.direct } else { &mut sample.by_route.buffered }) = sample.bytes;
        sample
    }
}

/// Turns fio's percentiles into a histogram: the blocks between two percentiles count at the upper one.
fn percentiles(side: &Side) -> Vec<(u64, u64)> {
    let Some(clat) = &side.clat_ns else { return Vec::new() };
    let mut known: Vec<_> =
        clat.percentile.iter().filter_map(|(part, ns)| Some((part.parse::<f64>().ok()?, *ns))).collect();
    known.sort_by(|left, right| left.0.total_cmp(&right.0));
    let mut counted = 0;
    let steps = known.into_iter().map(|(part, ns)| {
        let upto = (clat.count as f64 * part / 100.0).round() as u64;
        let count = upto.saturating_sub(counted);
        counted = counted.max(upto);
        (ns / 1000, count)
    });
    steps.filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::sample::quantile;

    const JSON: &str = r#"fio: a warning
{"fio version": "fio-3.33", "jobs": [
 {"error": 0, "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": 1000,
  "read": {"io_bytes": 4000000000, "runtime": 500, "clat_ns": {"N": 100, "percentile": {"50.000000": 2000000, "99.000000": 9000000, "99.900000": 12000000}}},
  "write": {"io_bytes": 0, "runtime": 0}}]}
trailing words"#;

    #[test]
    fn the_report_becomes_a_sample() {
        let sample = parse(JSON).unwrap_or_else(|text| panic!("{text}")).sample(Direction::Read, true);
        assert_eq!((sample.bytes, sample.wall_s, sample.by_route.direct), (4_000_000_000, 0.5, 4_000_000_000));
        assert!((sample.gb_per_s() - 8.0).abs() < 1e-9 && (sample.cpu_s - 0.2).abs() < 1e-9);
        assert_eq!([0.5, 0.99].map(|part| quantile(&sample.latencies_us, part)), [Some(2000), Some(9000)]);
        let failed = JSON.replace(r#""error": 0"#, r#""error": 28"#);
        assert!(parse(&failed).err().is_some_and(|text| text.contains("space")));
        assert!(parse("fio: command not understood").is_err());
    }
}
