//! Encodes and decodes a sample of the tensors, to learn their encoded sizes and the decoding speed.

use std::collections::HashMap;
use std::time::Duration;

use deepnvme_checkpoint::Result;
use deepnvme_io::Engine;

use super::encoding::{Encoding, dtype, float};
use super::model::{Model, SourceTensor};
use crate::decode::{Workspace, convert};
use crate::layer_group::Conversion;
use crate::sync::{Instant, thread};
use deepnvme_io::start_thread;

/// Tensors sampled of each kind. Names that differ only in numbers are one kind.
const SAMPLED: usize = 2;
/// Parts sampled of each tensor. Together they exceed the CPU caches.
const PARTS: u64 = 16;
/// Encoded bytes used to time decoding.
const TIMED_BYTES_MAX: usize = 16 << 20;
const TIMED: Duration = Duration::from_millis(if cfg!(simulated) { 0 } else { 60 });

/// A sample of the tensors.
#[derive(Default)]
pub(super) struct Sample {
    /// By kind: tensors sampled, the bytes of their sampled parts, and the encoded bytes of these.
    kinds: HashMap<String, (usize, u64, u64)>,
    encoded: Vec<(Conversion, Vec<u8>)>,
    speed: Option<f64>,
}

impl Sample {
    /// Takes a sample, and times decoding with this many threads.
    pub(super) fn take(engine: &Engine, model: &Model, wanted: &[Encoding], threads: usize) -> Result<Self> {
        let (mut sample, mut timed) = (Self::default(), 0);
        for (index, encoding) in wanted.iter().enumerate() {
            let tensor = &model.tensors[index];
            if !encoding.is_encoded() || sample.kinds.get(&kind(tensor)).is_some_and(|kind| kind.0 == SAMPLED) {
                continue;
            }
            let part = encoding.part_bytes(tensor.dtype.bytes() as usize) as u64;
            // Parts spread over the tensor.
            let step = (tensor.bytes / part / PARTS).max(1) * part;
            let begins = (0..tensor.bytes).step_by(step as usize).take(PARTS as usize);
            sample.kinds.entry(kind(tensor)).or_default().0 += 1;
            for begin in begins {
                let bytes = model.read(engine, index, &(begin..tensor.bytes.min(begin + part)))?;
                // An encoding error is reported when the tensor is written.
                let Ok(encoded) = encoding.encode(&bytes) else { continue };
                let kind = sample.kinds.entry(kind(tensor)).or_default();
                *kind = (kind.0, kind.1 + bytes.len() as u64, kind.2 + encoded.len() as u64);
                if let Some(decoding) = encoding.decoding().filter(|_| timed < TIMED_BYTES_MAX) {
                    timed += encoded.len();
                    let (stored, target_bytes) = (encoded.len(), bytes.len());
                    let conversion = Conversion {
                        source: 0,
                        offset: 0,
                        bytes: stored,
                        at: 0,
                        target_bytes,
                        decoding,
                        trim: (0, 0),
                        final_cast: None,
                    };
                    sample.encoded.push((conversion, encoded));
                }
            }
        }
        sample.speed = sample.timed(threads);
        Ok(sample)
    }

    /// The decoding speed of all threads together, in bytes per second. Each thread decodes the whole sample; the best
    /// round counts, since other processes may be busy.
    fn timed(&self, threads: usize) -> Option<f64> {
        let bytes: usize = self.encoded.iter().map(|(conversion, _)| conversion.target_bytes).sum();
        if bytes == 0 {
            return None;
        }
        // A target as large as the whole sample, so that decoding writes to memory and not only to a cache.
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
            // If the process may not start all threads, the others are timed. Without any thread there is no result.
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

    /// The ratio of encoded to plain bytes.
    pub(super) fn ratio(&self, tensor: &SourceTensor, encoding: &Encoding) -> f64 {
        match encoding {
            Encoding::Pack { .. } => match self.kinds.get(&kind(tensor)) {
                Some((_, bytes, encoded)) if *bytes > 0 => *encoded as f64 / *bytes as f64,
                _ => 1.0,
            },
            _ if tensor.bytes == 0 => 1.0,
            exact => exact.stored_bytes_max(tensor.bytes as usize) as f64 / tensor.bytes as f64,
        }
    }
}

/// The name without its numbers, and the type.
fn kind(tensor: &SourceTensor) -> String {
    let part =
        |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() };
    let name: Vec<String> = tensor.name.split('.').map(part).collect();
    format!("{} {}", name.join("."), dtype_name(tensor))
}

fn dtype_name(tensor: &SourceTensor) -> &'static str {
    float(tensor.dtype).map_or("", |float| dtype(float).torch_name())
}
