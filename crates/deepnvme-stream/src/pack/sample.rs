//! A sample of the tensors, encoded and decoded again: what they become, and how fast.

use std::collections::HashMap;
use std::time::Duration;

use deepnvme_checkpoint::Result;
use deepnvme_io::Engine;

use super::encoding::{Recipe, dtype, float};
use super::model::{Entry, Model};
use crate::decode::{Workspace, convert};
use crate::layer_group::Conversion;
use crate::sync::{Instant, thread};
use deepnvme_io::start_thread;

/// Tensors whose names differ in numbers only are alike; so many of them are looked at.
const SAMPLED: usize = 2;
/// And so many parts of each: together they are more than a processor's cache has room for.
const PARTS: u64 = 16;
/// Encoded bytes that decoding is timed with.
const TIMED_BYTES_MAX: usize = 16 << 20;
const TIMED: Duration = Duration::from_millis(if cfg!(simulated) { 0 } else { 60 });

/// Parts of tensors, as they are and encoded.
#[derive(Default)]
pub(super) struct Sample {
    /// By what tensors are alike in: how many of them, their bytes, and what those became.
    kinds: HashMap<String, (usize, u64, u64)>,
    encoded: Vec<(Conversion, Vec<u8>)>,
    speed: Option<f64>,
}

impl Sample {
    /// Speed is that of so many threads together.
    pub(super) fn take(engine: &Engine, model: &Model, wanted: &[Recipe], threads: usize) -> Result<Self> {
        let (mut sample, mut timed) = (Self::default(), 0);
        for (index, recipe) in wanted.iter().enumerate() {
            let entry = &model.tensors[index];
            if !recipe.is_encoded() || sample.kinds.get(&kind(entry)).is_some_and(|kind| kind.0 == SAMPLED) {
                continue;
            }
            let part = recipe.part_bytes(entry.dtype.bytes() as usize) as u64;
            // Parts all over it.
            let step = (entry.bytes / part / PARTS).max(1) * part;
            let begins = (0..entry.bytes).step_by(step as usize).take(PARTS as usize);
            sample.kinds.entry(kind(entry)).or_default().0 += 1;
            for begin in begins {
                let bytes = model.read(engine, index, &(begin..entry.bytes.min(begin + part)))?;
                // What cannot be encoded is found out, and said, when it is written.
                let Ok(made) = recipe.encode(&bytes) else { continue };
                let kind = sample.kinds.entry(kind(entry)).or_default();
                *kind = (kind.0, kind.1 + bytes.len() as u64, kind.2 + made.len() as u64);
                if let Some(arrival) = recipe.arrival().filter(|_| timed < TIMED_BYTES_MAX) {
                    timed += made.len();
                    let (stored, target_bytes) = (made.len(), bytes.len());
                    let conversion = Conversion {
                        source: 0,
                        offset: 0,
                        bytes: stored,
                        at: 0,
                        target_bytes,
                        arrival,
                        trim: (0, 0),
                        then: None,
                    };
                    sample.encoded.push((conversion, made));
                }
            }
        }
        sample.speed = sample.timed(threads);
        Ok(sample)
    }

    /// Bytes that so many threads make in a second, each of them of all that there is: the best of some rounds, as others
    /// may be at work.
    fn timed(&self, threads: usize) -> Option<f64> {
        let bytes: usize = self.encoded.iter().map(|(conversion, _)| conversion.target_bytes).sum();
        if bytes == 0 {
            return None;
        }
        // As large as all of them: memory is written to, not only a cache.
        let mut targets = vec![vec![0; bytes]; threads];
        let (mut best, began, mut rounds) = (f64::MAX, Instant::now(), 0);
        while rounds < 3 || began.elapsed() < TIMED {
            let round = Instant::now();
            let mut started = 0;
            let is_decoded = thread::scope(|scope| {
                let running: Vec<_> = targets
                    .iter_mut()
                    .map_while(|target| {
                        let thread = thread::Builder::new().name("deepnvme-sample".into());
                        start_thread(|| thread.spawn_scoped(scope, move || self.decode(target).is_some())).ok()
                    })
                    .collect();
                started = running.len();
                running.into_iter().all(|thread| thread.join().unwrap_or(false))
            });
            // A process may have as many threads as it is allowed: fewer tell what those would do. None tells nothing.
            if !is_decoded || started == 0 {
                return None;
            }
            best = best.min(round.elapsed().as_secs_f64() / started as f64);
            rounds += 1;
        }
        Some(bytes as f64 / best.max(1e-9))
    }

    fn decode(&self, target: &mut [u8]) -> Option<()> {
        let (mut workspace, mut begin) = (Workspace::default(), 0);
        for (conversion, stored) in &self.encoded {
            let put = |at: usize, step: &[u8]| {
                target[begin + at..begin + at + step.len()].copy_from_slice(step);
                Ok::<(), deepnvme_codec::Error>(())
            };
            convert(conversion, stored, &mut workspace, put).ok()?;
            begin += conversion.target_bytes;
        }
        Some(())
    }

    pub(super) fn decoded_bytes_s(&self) -> Option<f64> {
        self.speed
    }

    /// What a tensor becomes, as a part of its bytes.
    pub(super) fn ratio(&self, entry: &Entry, recipe: &Recipe) -> f64 {
        match recipe {
            Recipe::Pack { .. } => match self.kinds.get(&kind(entry)) {
                Some((_, bytes, made)) if *bytes > 0 => *made as f64 / *bytes as f64,
                _ => 1.0,
            },
            _ if entry.bytes == 0 => 1.0,
            exact => exact.stored_bytes_max(entry.bytes as usize) as f64 / entry.bytes as f64,
        }
    }
}

/// The name without its numbers, and the type.
fn kind(entry: &Entry) -> String {
    let part =
        |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() };
    let name: Vec<String> = entry.name.split('.').map(part).collect();
    format!("{} {}", name.join("."), dtype_name(entry))
}

fn dtype_name(entry: &Entry) -> &'static str {
    float(entry.dtype).map_or("", |float| dtype(float).torch_name())
}
