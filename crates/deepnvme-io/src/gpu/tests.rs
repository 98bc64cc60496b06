//! Copies with a simulated GPU behind the traits. The GPU relies on the guarantees that the traits demand.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use deepnvme_mem::{Device, Region, RegionMut, RegistrableRange, Rows, StreamHandle};
use deepnvme_testkit::data::random_bytes;

use super::copies::BlockingCopier;
use super::device::{Gpu, GpuEvent, GpuStream, Registration};
use super::registry::GpuRegistry;
use super::{AsyncCopier, CompletedCopy, EngineGpus, GpuSlice};
use crate::error::{Error, ErrorKind, Result};
use crate::op::Direction;
use crate::sync::{Mutex, lock};
use crate::trace::{Recorder, Tracer};

// SAFETY: no driver uses this handle.
const SEVENTH: StreamHandle = unsafe { StreamHandle::from_raw(7) };

const ON: Device = Device::Cuda { index: 3 };
/// Number of checks that report a copy as incomplete.
const PATIENCE: usize = 3;

/// A GPU with one stream, which copies after a wait or enough checks.
#[derive(Clone, Debug, Default)]
struct Slow(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Copies that are submitted and not yet performed: target, source, bytes.
    given: Mutex<Vec<(usize, usize, usize)>>,
    asked: AtomicUsize,
    /// Launches that are still accepted. All by default.
    refuses_after: Option<AtomicUsize>,
    known: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Known(Arc<AtomicUsize>);

impl Slow {
    fn refusing_after(launches: usize) -> Self {
        Self(Arc::new(State { refuses_after: Some(AtomicUsize::new(launches)), ..State::default() }))
    }

    fn give(&self, target: usize, source: usize, rows: Rows) -> Result<()> {
        assert_eq!(rows.count, 1, "contiguous memory is one row");
        let one_less = |left: usize| left.checked_sub(1);
        if let Some(left) = &self.0.refuses_after
            && left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
        {
            return Err(Error::new(ErrorKind::Device, "use GPU memory", "refused"));
        }
        lock(&self.0.given).push((target, source, rows.bytes));
        Ok(())
    }

    fn make_all(&self) {
        for (target, source, bytes) in lock(&self.0.given).drain(..) {
            let (target, source) =
                (std::ptr::with_exposed_provenance_mut::<u8>(target), std::ptr::with_exposed_provenance(source));
            // SAFETY: the copy's caller keeps both ends valid until it is performed.
            unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
        }
    }
}

impl Gpu for Slow {
    fn index(&self) -> u32 {
        3
    }

    fn pci_bus_id(&self) -> Option<String> {
        None
    }

    fn new_stream(&self) -> Result<Box<dyn GpuStream>> {
        Ok(Box::new(self.clone()))
    }

    fn new_event(&self) -> Result<Box<dyn GpuEvent>> {
        Ok(Box::new(self.clone()))
    }

    fn is_idle(&self, _stream: StreamHandle) -> Result<bool> {
        Ok(lock(&self.0.given).is_empty())
    }

    fn allocate(&self, bytes: usize) -> Result<RegionMut> {
        Ok(on_gpu(&RegionMut::from_vec(vec![0; bytes]).region()))
    }

    fn register(&self, _arena: &RegistrableRange) -> Result<Box<dyn Registration>> {
        self.0.known.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Known(Arc::clone(&self.0.known))))
    }
}

impl GpuStream for Slow {
    fn raw(&self) -> StreamHandle {
        SEVENTH
    }

    // SAFETY: the copy is performed later, and both ends stay valid until then, as the trait requires of the caller.
    unsafe fn copy_to_gpu(&self, target: Rows, source: *const u8) -> Result<()> {
        self.give(target.address, source.expose_provenance(), target)
    }

    // SAFETY: the copy is performed later, and both ends stay valid until then, as the trait requires of the caller.
    unsafe fn copy_to_host(&self, target: *mut u8, source: Rows) -> Result<()> {
        self.give(target.expose_provenance(), source.address, source)
    }

    fn synchronise(&self) -> Result<()> {
        self.make_all();
        Ok(())
    }
}

impl GpuEvent for Slow {
    fn record(&self, stream: StreamHandle) -> Result<()> {
        assert_eq!(stream, SEVENTH, "the stream that has the copies");
        self.0.asked.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn is_complete(&self) -> Result<bool> {
        let is_complete = self.0.asked.fetch_add(1, Ordering::Relaxed) >= PATIENCE;
        if is_complete {
            self.make_all();
        }
        Ok(is_complete)
    }

    fn wait(&self, _: Duration) -> Result<()> {
        self.make_all();
        Ok(())
    }
}

impl Registration for Known {}

impl Drop for Known {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the same memory, as if it were on that GPU.
fn on_gpu(host: &Region) -> RegionMut {
    let start = std::ptr::with_exposed_provenance_mut(host.addr());
    // SAFETY: the region keeps its bytes, all of them initialised, alive for as long as it lives.
    unsafe { RegionMut::from_raw(start, host.len(), ON, Arc::new(host.clone())) }
}

fn copies_with(gpu: &Slow) -> AsyncCopier {
    AsyncCopier::new(&Arc::new(GpuRegistry::with(ON, Arc::new(gpu.clone()))), Box::new(|| None))
}

fn memory(bytes: Vec<u8>) -> Region {
    RegionMut::from_vec(bytes).region()
}

fn content(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.copy_to_slice(0, &mut bytes);
    bytes
}

/// Returns the slices that swap the two halves of GPU memory in a bounce buffer.
fn crossed(gpu: &Region) -> Vec<GpuSlice> {
    let half = gpu.len() / 2;
    let slice = |at, from| GpuSlice { at, memory: gpu.clone(), from, len: half };
    vec![slice(0, half), slice(half, 0)]
}

#[test]
fn a_copy_is_over_when_its_event_is_in_both_directions() {
    for direction in [Direction::Read, Direction::Write] {
        let (buffer_bytes, gpu_bytes) = (random_bytes(1, 8192), random_bytes(2, 8192));
        let (buffer, mirror) = (memory(buffer_bytes.clone()), memory(gpu_bytes.clone()));
        let mut copies = copies_with(&Slow::default());
        let number = copies.start(direction, &buffer, crossed(&on_gpu(&mirror).region())).unwrap();
        for _ in 0..PATIENCE {
            assert!(copies.take_completed().is_empty(), "its event is not over");
            assert_eq!((content(&buffer), content(&mirror)), (buffer_bytes.clone(), gpu_bytes.clone()));
        }
        let finished = copies.take_completed();
        assert!(
            matches!(finished[..], [CompletedCopy { number: known, outcome: Ok(()), .. }] if known == number),
            "{finished:?}"
        );
        let (target, source) = match direction {
            Direction::Read => (&mirror, &buffer_bytes),
            Direction::Write => (&buffer, &gpu_bytes),
        };
        assert_eq!(content(target), [&source[4096..], &source[..4096]].concat(), "{direction:?}");
    }
}

#[test]
fn a_launch_that_is_refused_leaves_nothing_behind() {
    let gpu = Slow::refusing_after(1);
    let (buffer, mirror) = (memory(random_bytes(3, 8192)), memory(random_bytes(4, 8192)));
    let mut copies = copies_with(&gpu);
    let error = copies.start(Direction::Write, &buffer, crossed(&on_gpu(&mirror).region())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(lock(&gpu.0.given).is_empty(), "the half that was launched has been waited for");
    assert_eq!(content(&buffer)[..4096], content(&mirror)[4096..]);
    assert!(copies.take_completed().is_empty(), "who was told of the failure is not told again");
}

#[test]
fn whoever_drops_copies_waits_for_them_and_forgets_the_arena() {
    let gpu = Slow::default();
    let (buffer, mirror) = (memory(random_bytes(5, 8192)), memory(random_bytes(6, 8192)));
    let mut copies = copies_with(&gpu);
    copies.register(ON, &RegistrableRange::from(&buffer)).unwrap();
    assert_eq!(gpu.0.known.load(Ordering::Relaxed), 1);
    copies.start(Direction::Read, &buffer, crossed(&on_gpu(&mirror).region())).unwrap();
    drop(copies);
    assert_eq!(content(&mirror)[..4096], content(&buffer)[4096..], "copied before the memory was let go of");
    assert_eq!(gpu.0.known.load(Ordering::Relaxed), 0);
}

#[test]
fn a_wait_brings_the_bytes_and_events_follow_earlier_work() {
    let gpu = Slow::default();
    let (buffer, mirror) = (memory(random_bytes(7, 8192)), memory(random_bytes(8, 8192)));
    BlockingCopier::new(&(Arc::new(gpu.clone()) as Arc<dyn Gpu>))
        .unwrap()
        .copy(Direction::Write, &buffer, &crossed(&on_gpu(&mirror).region()))
        .unwrap();
    assert_eq!(content(&buffer)[4096..], content(&mirror)[..4096]);
    let tracer = Tracer::new(&Arc::new(Recorder::new()), None);
    let gpus = EngineGpus::new(Arc::new(GpuRegistry::with(ON, Arc::new(gpu.clone()))), tracer);
    let streams = [(Device::Host, StreamHandle::DEFAULT), (ON, SEVENTH)];
    assert!(gpus.record_events(&streams).unwrap().is_empty(), "nothing runs there");
    gpu.give(buffer.addr(), mirror.addr(), Rows { address: mirror.addr(), bytes: 1, count: 1, pitch: 0 }).unwrap();
    assert_eq!(gpus.record_events(&streams).unwrap().len(), 1);
    gpu.make_all();
}
