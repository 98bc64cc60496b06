//! Many ops in flight, in random order, against a model.

use std::collections::HashMap;
use std::ops::Range;

use deepnvme_io::op::{Completion, OpKind, Token};
use deepnvme_mem::Region;

use super::{Harness, Make};
use crate::data::{TestFile, bytes_of, difference, random_bytes, region_at, region_holding};
use crate::model::{Model, Program, Scope, Step, overlap};
use crate::rng::Rng;

const FILE_BYTES: u64 = 1 << 20;
const STEPS: usize = 300;

/// The expected completion of a token, and the range it occupies until then.
struct Expected {
    range: Range<u64>,
    write: bool,
    read: Option<Vec<u8>>,
}

impl Expected {
    /// Returns whether the result depends on the order of the two: they share a byte, or the end of the file.
    fn conflicts_with(&self, step: &Step) -> bool {
        let share_end = self.range.end.min(step.range().end) > FILE_BYTES;
        (self.write || step.is_write()) && (share_end || overlap(&self.range, step.range()))
    }
}

/// Random programs of plain and vectored reads and writes give the same bytes as a model in memory. An op that
/// conflicts with one in flight waits for all of them, since a backend does not order ops.
///
/// # Panics
/// If the backend breaks the contract, like every check.
pub fn random_ops_agree_with_a_model(make: Make<'_>) {
    for seed in 0..3 {
        let mut run = Run::new(make, seed);
        let scope = Scope { range: 0..FILE_BYTES + 5000, block_bytes: 16 << 10, step_bytes_max: 100 << 10 };
        for step in Program::new(seed, STEPS, &scope).steps {
            if step.range().is_empty() {
                continue;
            }
            if run.in_flight.values().any(|expected| expected.conflicts_with(&step)) {
                run.complete_all();
            } else if run.harness.backend.in_flight() == run.harness.backend.depth() {
                run.complete_some();
            }
            run.start(&step);
        }
        run.complete_all();
        assert_eq!(difference(&run.file.bytes(), run.model.bytes()), None, "seed {seed}: the file is not the model");
    }
}

/// A program that runs.
struct Run {
    seed: u64,
    harness: Harness,
    file: TestFile,
    model: Model,
    in_flight: HashMap<Token, Expected>,
    rng: Rng,
}

impl Run {
    fn new(make: Make<'_>, seed: u64) -> Self {
        let content = random_bytes(seed, FILE_BYTES as usize);
        Self {
            seed,
            file: TestFile::holding(&content),
            model: Model::new(0, content),
            harness: Harness::new(make, [1, 8, 64][seed as usize]),
            rng: Rng::keyed(seed, &[9]),
            in_flight: HashMap::new(),
        }
    }

    fn start(&mut self, step: &Step) {
        let range = step.range().clone();
        let len = (range.end - range.start) as usize;
        let (kind, memory, read) = match step {
            Step::Write { skew, data_seed, .. } => {
                let bytes = random_bytes(*data_seed, len);
                self.model.write(range.start, &bytes);
                (OpKind::Write, region_holding(*skew, &bytes).region(), None)
            }
            Step::Read { skew, .. } => {
                (OpKind::Read, region_at(*skew, len).region(), Some(self.model.read(&range).to_vec()))
            }
        };
        let op = self.harness.op(kind, &self.file.file, range.start, &cut(&mut self.rng, &memory));
        let token = self.harness.submit(op);
        self.in_flight.insert(token, Expected { range, write: step.is_write(), read });
    }

    fn complete_all(&mut self) {
        while !self.in_flight.is_empty() {
            self.complete_some();
        }
    }

    fn complete_some(&mut self) {
        for completion in self.harness.reap_some() {
            check_completion(self.seed, &mut self.in_flight, &completion);
        }
    }
}

/// Splits the memory into one or a few iovecs.
fn cut(rng: &mut Rng, memory: &Region) -> Vec<Region> {
    let mut cuts: Vec<usize> = (0..rng.below(4)).map(|_| rng.below(memory.len() as u64) as usize).collect();
    cuts.extend([0, memory.len()]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| memory.slice(pair[0]..pair[1])).collect()
}

fn check_completion(seed: u64, in_flight: &mut HashMap<Token, Expected>, completion: &Completion) {
    let token = completion.op.token;
    let expected = in_flight.remove(&token).unwrap_or_else(|| panic!("seed {seed}: {token:?} came back twice"));
    let len = (expected.range.end - expected.range.start) as usize;
    let moved = completion.result.unwrap_or_else(|errno| panic!("seed {seed}: {:?} gave {errno}", completion.op));
    let Some(bytes) = expected.read else {
        assert_eq!(moved, len, "seed {seed}: a write to {:?} was short", expected.range);
        return;
    };
    assert_eq!(moved, bytes.len(), "seed {seed}: a read of {:?}", expected.range);
    let found: Vec<u8> = completion.op.iovecs.iter().flat_map(bytes_of).collect();
    let wrong = difference(&found[..moved], &bytes);
    assert_eq!(wrong, None, "seed {seed}: a read of {:?}", expected.range);
}
