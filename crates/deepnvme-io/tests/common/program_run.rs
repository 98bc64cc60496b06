//! Runs a program on one range of a file, and compares each step with the model.

use std::ops::Range;
use std::sync::Arc;

use deepnvme_io::{
    Durability, Engine, Error, ErrorKind, ReadItem, Result, TensorFile, Transfer, Transferred, WriteItem, WriteMode,
    WriteOptions,
};
use deepnvme_mem::{Region, RegionMut};
use deepnvme_testkit::data::{bytes_of, difference, random_bytes, region_at, region_holding};
use deepnvme_testkit::model::{Model, Program, Step, overlap};
use deepnvme_testkit::rng::Rng;

/// Maximum requests of one run in flight.
const IN_FLIGHT_MAX: usize = 6;
/// Maximum steps in one batch.
const BATCH_MAX: usize = 5;

/// A program that runs on its range of a file, and its requests in flight.
pub(crate) struct ProgramRun<'a> {
    engine: &'a Engine,
    file: Arc<TensorFile>,
    pub(crate) model: Model,
    /// The end of the range when the run began. Only the last range of a file may grow, and then its end is the file's.
    end: u64,
    label: String,
    in_flight: Vec<InFlight>,
}

struct InFlight {
    steps: Vec<Step>,
    waiting: Waiting,
}

enum Waiting {
    Read(Transfer<Vec<RegionMut>>, Vec<Vec<u8>>),
    ReadOne(Transfer<RegionMut>, Vec<u8>),
    Write(Transfer<Vec<Region>>),
    WriteOne(Transfer<Region>),
}

impl<'a> ProgramRun<'a> {
    /// Prepares to run programs on the model's range of the file. Failures start with `label`.
    pub(crate) fn new(engine: &'a Engine, file: Arc<TensorFile>, model: Model, label: String) -> Self {
        let end = model.range().end;
        Self { engine, file, model, end, label, in_flight: Vec::new() }
    }

    /// Runs the program with several requests in flight, some of them batches. Overlapping requests wait for each
    /// other.
    pub(crate) fn run(&mut self, program: &Program) {
        let mut rng = Rng::keyed(program.seed, &[5]);
        let mut steps = program.steps.as_slice();
        while let [first, ..] = steps {
            let count = if rng.chance(300) { self.batch_len(&steps[..steps.len().min(BATCH_MAX)]) } else { 1 };
            let (batch, rest) = steps.split_at(count);
            steps = rest;
            let conflicts =
                |request: &InFlight| request.steps.iter().any(|one| batch.iter().any(|b| self.clash(one, b)));
            if self.in_flight.iter().any(conflicts) {
                self.finish_all();
            } else if self.in_flight.len() >= IN_FLIGHT_MAX {
                let index = rng.below(self.in_flight.len() as u64) as usize;
                let request = self.in_flight.swap_remove(index);
                self.finish(request);
            }
            let waiting = if first.is_write() { self.write(batch, &mut rng) } else { self.read(batch, &mut rng) };
            self.in_flight.push(InFlight { steps: batch.to_vec(), waiting });
        }
        self.finish_all();
    }

    /// Returns how many of the steps can form one batch: of one kind, disjoint, and inside the file.
    fn batch_len(&self, steps: &[Step]) -> usize {
        let fits = |count: usize| {
            let (last, before) = steps[..count].split_last().expect("at least one step");
            last.is_write() == steps[0].is_write()
                && last.range().end <= self.end
                && before.iter().all(|step| !overlap(step.range(), last.range()))
        };
        (2..=steps.len()).take_while(|count| fits(1) && fits(*count)).last().unwrap_or(1)
    }

    /// Returns whether their order matters: they share bytes or the end of the file.
    fn clash(&self, one: &Step, other: &Step) -> bool {
        let share_end = one.range().end.min(other.range().end) > self.end;
        (one.is_write() || other.is_write()) && (share_end || overlap(one.range(), other.range()))
    }

    fn write(&mut self, steps: &[Step], rng: &mut Rng) -> Waiting {
        let durability = match rng.below(40) {
            0 => Durability::Full,
            1 => Durability::Data,
            _ => Durability::None,
        };
        let options = WriteOptions { mode: WriteMode::InPlace, durability };
        let mut items = Vec::new();
        for step in steps {
            let Step::Write { range, skew, data_seed } = step else { unreachable!("a batch has one kind") };
            let bytes = random_bytes(*data_seed, len_of(range));
            self.model.write(range.start, &bytes);
            let source = region_holding(*skew, &bytes).region();
            items.push(WriteItem { file: Arc::clone(&self.file), offset: range.start, source });
        }
        if items.len() == 1 {
            let WriteItem { file, offset, source } = items.swap_remove(0);
            // Small requests with a waiting caller take a different path through the engine.
            let pending = match rng.chance(300) {
                true => self.engine.write_now(&file, offset, source, options),
                false => self.engine.write(&file, offset, source, options),
            };
            Waiting::WriteOne(self.accepted(pending))
        } else {
            Waiting::Write(self.accepted(self.engine.write_batch(items, options)))
        }
    }

    fn read(&self, steps: &[Step], rng: &mut Rng) -> Waiting {
        let mut expected: Vec<Vec<u8>> = steps.iter().map(|step| self.model.read(step.range()).to_vec()).collect();
        if let [Step::Read { range, skew }] = steps {
            let target = region_at(*skew, len_of(range));
            let pending = match rng.chance(300) {
                true => self.engine.read_now(&self.file, range.start, target),
                false => self.engine.read(&self.file, range.start, target),
            };
            return Waiting::ReadOne(self.accepted(pending), expected.swap_remove(0));
        }
        let item = |step: &Step| {
            let Step::Read { range, skew } = step else { unreachable!("a batch has one kind") };
            ReadItem { file: Arc::clone(&self.file), offset: range.start, target: region_at(*skew, len_of(range)) }
        };
        let items = steps.iter().map(item).collect();
        Waiting::Read(self.accepted(self.engine.read_batch(items)), expected)
    }

    fn accepted<T>(&self, pending: Result<T>) -> T {
        pending.unwrap_or_else(|error| panic!("{}: a request was refused: {error}", self.label))
    }

    fn finish_all(&mut self) {
        while let Some(request) = self.in_flight.pop() {
            self.finish(request);
        }
    }

    fn finish(&self, request: InFlight) {
        let bytes: usize = request.steps.iter().map(|step| len_of(step.range())).sum();
        match request.waiting {
            Waiting::WriteOne(pending) => {
                let (returned, result) = pending.wait();
                self.check_write(&request.steps, returned.as_slice(), bytes, result);
            }
            Waiting::Write(pending) => {
                let (returned, result) = pending.wait();
                self.check_write(&request.steps, &returned.unwrap_or_default(), bytes, result);
            }
            Waiting::Read(pending, expected) => {
                let (returned, result) = pending.wait();
                self.check_read(&request.steps, &returned.unwrap_or_default(), &expected, result);
            }
            Waiting::ReadOne(pending, expected) => {
                let (returned, result) = pending.wait();
                let returned: Vec<RegionMut> = returned.into_iter().collect();
                if expected.len() < bytes {
                    assert_eq!(returned.len(), 1, "{}: the memory was not returned", self.label);
                    self.check_end_of_file(&request.steps[0], &expected, result);
                } else {
                    self.check_read(&request.steps, &returned, &[expected], result);
                }
            }
        }
    }

    fn check_write(&self, steps: &[Step], returned: &[Region], bytes: usize, result: Result<Transferred>) {
        match result {
            Ok(transfer) => assert_eq!(transfer.bytes, bytes as u64, "{}: {steps:?}", self.label),
            Err(error) => panic!("{}: {steps:?} failed: {error}", self.label),
        }
        let came: Vec<usize> = returned.iter().map(Region::len).collect();
        let went: Vec<usize> = steps.iter().map(|step| len_of(step.range())).collect();
        assert_eq!(came, went, "{}: other memory was returned", self.label);
    }

    fn check_read(&self, steps: &[Step], returned: &[RegionMut], expected: &[Vec<u8>], result: Result<Transferred>) {
        if let Err(error) = result {
            panic!("{}: {steps:?} failed: {error}", self.label);
        }
        assert_eq!(returned.len(), steps.len(), "{}: the memory was not returned", self.label);
        for ((step, target), expected) in steps.iter().zip(returned).zip(expected) {
            let wrong = difference(&bytes_of(&target.region()), expected);
            assert_eq!(wrong, None, "{}: {step:?} read other bytes", self.label);
        }
    }

    fn check_end_of_file(&self, step: &Step, there: &[u8], result: Result<Transferred>) {
        let error: Error = match result {
            Ok(_) => panic!("{}: {step:?} read beyond the end of the file", self.label),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{}: {step:?}: {error}", self.label);
        assert_eq!(error.path(), Some(self.file.path()), "{}: {error}", self.label);
        let says = format!("{} are there", there.len());
        assert!(error.to_string().contains(&says), "{}: {step:?}: `{says}` is not in: {error}", self.label);
    }
}

fn len_of(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}
