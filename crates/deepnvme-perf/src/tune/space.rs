//! The settings that a search chooses from. This module does no I/O.

use deepnvme_io::config::limits::{BLOCK_BYTES_MAX, QUEUE_DEPTH_MAX, WORKERS_MAX};
use deepnvme_io::{BackendChoice, Config, DirectMode, SubmitMode, WindowMode};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The values of every setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchSpace {
    /// Largest single transfer.
    pub block_bytes: Vec<u64>,
    /// Transfers in flight per worker.
    pub queue_depth: Vec<u32>,
    /// Threads that submit.
    pub workers: Vec<u32>,
    /// One transfer per system call, or several.
    pub submit: Vec<SubmitMode>,
    /// A sliding window, or batches.
    pub window: Vec<WindowMode>,
    /// Backends.
    pub backend: Vec<BackendChoice>,
    /// Whether the bounce pool is registered with the ring.
    pub register_pool: Vec<bool>,
    /// Whether cuFile transfers the bytes of a GPU. Determined per folder, not searched.
    pub gds: DirectMode,
}

/// For each setting, the index of its value.
type Indices = [usize; 7];

/// The settings, in the order of [`Indices`].
#[derive(Clone, Copy)]
enum Setting {
    BlockBytes,
    QueueDepth,
    Workers,
    Submit,
    Window,
    Backend,
    RegisterPool,
}

impl SearchSpace {
    /// Returns the default settings to choose from, for this many CPUs and the backends that work here.
    /// Registering the pool matters only if transfers go through bounce buffers.
    #[must_use]
    pub fn of_machine(cpus: u32, backends: Vec<BackendChoice>, is_bounced: bool) -> Self {
        let workers = [1, 2, 4, 8].into_iter().filter(|workers| *workers == 1 || *workers <= 2 * cpus);
        Self {
            block_bytes: [256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20].to_vec(),
            queue_depth: vec![8, 16, 32, 64, 128],
            workers: workers.collect(),
            submit: vec![SubmitMode::Batch, SubmitMode::Single],
            window: vec![WindowMode::Sliding, WindowMode::Drain],
            backend: backends,
            register_pool: if is_bounced { vec![true, false] } else { vec![true] },
            gds: DirectMode::Disabled,
        }
    }

    /// Returns the settings for cuFile: only the size and the number of transfers matter, since it uses neither rings
    /// nor slots.
    #[must_use]
    pub fn of_cufile(cpus: u32) -> Self {
        Self {
            block_bytes: [512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20].to_vec(),
            submit: vec![SubmitMode::Batch],
            window: vec![WindowMode::Sliding],
            gds: DirectMode::Preferred,
            ..Self::of_machine(cpus, vec![BackendChoice::Auto], false)
        }
    }

    /// Returns the number of combinations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sizes().iter().product()
    }

    /// Returns whether there is no combination.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that no list is empty and all values are valid.
    ///
    /// # Errors
    /// `Usage`, with the setting and its range, or that a list is empty.
    pub fn check(&self) -> Result<()> {
        if self.is_empty() {
            return Err(Error::usage(
                "a list of the sweep is empty; give each setting at least one value, or remove it",
            ));
        }
        self.all().try_for_each(|config| config.validate().map_err(|error| Error::usage(error.to_string())))
    }

    /// Returns all combinations.
    pub fn all(&self) -> impl Iterator<Item = Config> + '_ {
        (0..self.len()).map(|index| self.config(self.indices(index)))
    }

    /// Returns the neighbours of `config`: one setting differs by a step, or two of block size, depth and workers
    /// differ in opposite directions, which keeps the bytes in flight. Empty if `config` is not in this space.
    #[must_use]
    pub fn neighbours(&self, config: &Config) -> Vec<Config> {
        let Some(index) = self.all().position(|one| one == *config) else { return Vec::new() };
        let indices = self.indices(index);
        let singles = (0..indices.len()).flat_map(|setting| [vec![(setting, -1)], vec![(setting, 1)]]);
        let trades = [
            (Setting::BlockBytes, Setting::QueueDepth),
            (Setting::BlockBytes, Setting::Workers),
            (Setting::QueueDepth, Setting::Workers),
        ]
        .into_iter()
        .flat_map(|(one, other)| [(one, other), (other, one)])
        .map(|(up, down)| vec![(up as usize, 1), (down as usize, -1)]);
        singles
            .chain(trades)
            .filter_map(|steps| self.shifted(indices, &steps))
            .map(|indices| self.config(indices))
            .collect()
    }

    fn shifted(&self, mut indices: Indices, steps: &[(usize, isize)]) -> Option<Indices> {
        for (setting, step) in steps {
            let value = indices[*setting].checked_add_signed(*step);
            indices[*setting] = value.filter(|value| *value < self.sizes()[*setting])?;
        }
        Some(indices)
    }

    /// Returns `count` combinations in steps of the golden ratio: any prefix of the list is spread evenly.
    #[must_use]
    pub fn sample(&self, count: usize) -> Vec<Config> {
        let len = self.len();
        // A step that shares no factor with the length reaches every combination once.
        let section = (len as f64 * 0.618_034) as usize;
        let step = (section.max(1)..=section + len).find(|step| gcd(*step, len) == 1).unwrap_or(1);
        (0..count.min(len)).map(|index| self.config(self.indices(index * step % len))).collect()
    }

    fn sizes(&self) -> Indices {
        [
            self.block_bytes.len(),
            self.queue_depth.len(),
            self.workers.len(),
            self.submit.len(),
            self.window.len(),
            self.backend.len(),
            self.register_pool.len(),
        ]
    }

    fn indices(&self, index: usize) -> Indices {
        let mut rest = index;
        self.sizes().map(|size| {
            let value = rest % size;
            rest /= size;
            value
        })
    }

    fn config(&self, indices: Indices) -> Config {
        let value = |setting: Setting| indices[setting as usize];
        Config {
            block_bytes: self.block_bytes[value(Setting::BlockBytes)],
            queue_depth: self.queue_depth[value(Setting::QueueDepth)],
            workers: self.workers[value(Setting::Workers)],
            submit: self.submit[value(Setting::Submit)],
            window: self.window[value(Setting::Window)],
            backend: self.backend[value(Setting::Backend)],
            register_pool: self.register_pool[value(Setting::RegisterPool)],
            gds: self.gds,
            ..Config::default()
        }
    }
}

/// Returns the cost of settings, to choose among equals: bytes in flight, then threads, then unusual modes.
#[must_use]
pub fn cost(config: &Config) -> (u64, u32, bool, bool) {
    let bytes = u64::from(config.workers) * u64::from(config.queue_depth) * config.block_bytes;
    (bytes, config.workers, config.window == WindowMode::Drain, config.submit == SubmitMode::Single)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Parses DeepSpeed's `--sweep_config`: lists by the names of `ds_io`'s long options. Missing settings keep the values
/// of `base`.
///
/// # Errors
/// `Usage`, with the setting that is invalid.
pub fn from_deepspeed(text: &str, base: SearchSpace) -> Result<SearchSpace> {
    use serde_json::Value;
    let wrong = |name: &str, value: &Value, range: &str| {
        Error::usage(format!("sweep config: {name} has the invalid value {value}; it must be {range}"))
    };
    let lists: std::collections::BTreeMap<String, Vec<Value>> = serde_json::from_str(text)
        .map_err(|error| Error::usage(format!("the sweep config must be a JSON object of lists: {error}")))?;
    let mut space = base;
    for (name, values) in &lists {
        let numbers = |max: u64| {
            let one = |value: &Value| {
                let number = number(value).filter(|number| (1..=max).contains(number));
                number.ok_or_else(|| wrong(name, value, &format!("from 1 to {max}")))
            };
            values.iter().map(one).collect::<Result<Vec<u64>>>()
        };
        let flags = || values.iter().map(|value| value.as_bool().ok_or_else(|| wrong(name, value, "true or false")));
        match name.as_str() {
            "block_size" => space.block_bytes = numbers(BLOCK_BYTES_MAX)?,
            "queue_depth" => {
                space.queue_depth = numbers(u64::from(QUEUE_DEPTH_MAX))?.iter().map(|n| *n as u32).collect();
            }
            "io_parallel" => space.workers = numbers(u64::from(WORKERS_MAX))?.iter().map(|n| *n as u32).collect(),
            "single_submit" => {
                let mode =
                    |flag: Result<bool>| flag.map(|flag| if flag { SubmitMode::Single } else { SubmitMode::Batch });
                space.submit = flags().map(mode).collect::<Result<_>>()?;
            }
            "sequential_requests" => {
                let mode =
                    |flag: Result<bool>| flag.map(|flag| if flag { WindowMode::Drain } else { WindowMode::Sliding });
                space.window = flags().map(mode).collect::<Result<_>>()?;
            }
            other => {
                let known = "block_size, queue_depth, io_parallel, single_submit, sequential_requests";
                return Err(Error::usage(format!("sweep config: unknown setting {other}; known are {known}")));
            }
        }
    }
    Ok(space)
}

/// Parses a number, or a size such as `"1M"`. DeepSpeed knows only bare letters, which are binary in both.
fn number(value: &serde_json::Value) -> Option<u64> {
    value.as_u64().or_else(|| crate::units::parse_bytes(value.as_str()?).ok())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn space() -> SearchSpace {
        SearchSpace::of_machine(2, vec![BackendChoice::Uring, BackendChoice::Threads], true)
    }

    fn key(config: &Config) -> String {
        format!("{config:?}")
    }

    #[test]
    fn every_setting_is_sampled_once_and_early() {
        let space = space();
        assert_eq!(space.len(), 6 * 5 * 3 * 2 * 2 * 2 * 2);
        let all: HashSet<_> = space.all().map(|config| key(&config)).collect();
        let sample: HashSet<_> = space.sample(usize::MAX).iter().map(key).collect();
        assert_eq!(all.len(), space.len());
        assert!(all == sample);
        let early = space.sample(40);
        for block in &space.block_bytes {
            assert!(early.iter().filter(|config| config.block_bytes == *block).count() >= 4, "{block}");
        }
        for depth in &space.queue_depth {
            assert!(early.iter().any(|config| config.queue_depth == *depth), "{depth}");
        }
        space.check().unwrap();
    }

    #[test]
    fn neighbours_differ_in_one_step() {
        let space = space();
        let config = space.config([2, 0, 1, 0, 0, 1, 0]);
        let neighbours = space.neighbours(&config);
        assert_eq!(neighbours.len(), (2 + 1 + 2 + 1 + 1 + 1 + 1) + 4, "the depth cannot be less");
        assert!(!neighbours.contains(&config));
        assert_eq!(space.neighbours(&Config { workers: 64, ..config }), []);
    }

    #[test]
    fn the_smaller_of_equals_costs_less() {
        let base = Config { workers: 1, queue_depth: 8, block_bytes: 1 << 20, ..Config::default() };
        let than = |change: fn(&mut Config)| {
            let mut other = base.clone();
            change(&mut other);
            cost(&base) < cost(&other)
        };
        assert!(than(|other| other.window = WindowMode::Drain) && than(|other| other.queue_depth = 16));
        assert!(than(|other| (other.workers, other.queue_depth) = (2, 4)));
    }

    #[test]
    fn sweeps_of_deepspeed_are_parsed() {
        let text = r#"{"block_size": ["1M", 8388608], "queue_depth": [32], "io_parallel": [1, 8],
                       "single_submit": [true, false], "sequential_requests": [true]}"#;
        let read = from_deepspeed(text, space()).unwrap();
        assert_eq!((read.block_bytes, read.queue_depth, read.workers), (vec![1 << 20, 8 << 20], vec![32], vec![1, 8]));
        assert_eq!(read.submit, [SubmitMode::Single, SubmitMode::Batch]);
        assert_eq!((read.window, read.backend.len()), (vec![WindowMode::Drain], 2));
        for (text, part) in
            [("[]", "JSON object"), (r#"{"threads": [1]}"#, "threads"), (r#"{"queue_depth": [0]}"#, "queue_depth")]
        {
            assert!(from_deepspeed(text, space()).unwrap_err().to_string().contains(part), "{text}");
        }
    }
}
