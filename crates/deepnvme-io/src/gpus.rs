//! The GPUs of requests: points in their streams, their memory, and synchronous copies.

use std::sync::Arc;

use deepnvme_mem::{Device, Region, RegionMut, Slot, StreamHandle};

use crate::backend::copies::{Fetcher, Slice};
use crate::backend::device::{Gpu, GpuEvent, OpenedGpus, Registration};
use crate::error::Result;
use crate::split::Direction;
use crate::sync::{Mutex, lock};
use crate::trace::{Copied, Tape, now_ns};

/// The GPUs of an engine.
#[derive(Debug)]
pub(crate) struct Gpus {
    opened: Arc<OpenedGpus>,
    tape: Tape,
    /// Fetchers that are not in use.
    resting: Mutex<Vec<(Device, Fetcher)>>,
}

/// Synchronous copies from and to GPU memory, for data that the CPU reads or creates. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GpuAccess {
    gpus: Arc<Gpus>,
}

/// Memory registered with the driver until this is dropped.
#[derive(Debug)]
pub struct KnownMemory {
    _registration: Box<dyn Registration>,
}

/// Points in GPU streams.
#[derive(Debug, Default)]
pub struct StreamPoints {
    events: Vec<Box<dyn GpuEvent>>,
}

impl StreamPoints {
    /// Waits until the streams have reached the points.
    ///
    /// # Errors
    /// `Device` if work on a stream failed.
    pub fn wait(&self) -> Result<()> {
        self.events.iter().try_for_each(|event| event.wait())
    }
}

impl GpuAccess {
    pub(crate) fn new(gpus: &Arc<Gpus>) -> Self {
        Self { gpus: Arc::clone(gpus) }
    }

    /// Records the current ends of the streams of this memory.
    ///
    /// # Errors
    /// `Unsupported` and `Device` if there is no such GPU, or its driver refuses.
    pub fn points<'a>(&self, memory: impl IntoIterator<Item = &'a Region>) -> Result<StreamPoints> {
        let mut streams = Vec::new();
        for region in memory {
            let place = (region.device(), region.stream());
            if region.device() != Device::Host && !streams.contains(&place) {
                streams.push(place);
            }
        }
        Ok(StreamPoints { events: self.gpus.points(&streams)? })
    }

    /// Registers host memory with the driver, so that copies to it need no staging.
    ///
    /// # Errors
    /// As [`points`](Self::points), and `Device` if the memory cannot be locked.
    pub fn make_known(&self, index: u32, arena: &Region) -> Result<KnownMemory> {
        Ok(KnownMemory { _registration: self.gpus.get(Device::Cuda { index })?.register(arena)? })
    }

    /// Copies parts into a slot. Each part is `(offset in the slot, memory, offset in the memory, length)`.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// If a part is outside its memory or the slot.
    pub fn gather(&self, slot: &mut Slot, parts: &[(usize, &Region, usize, usize)]) -> Result<()> {
        let mut by_gpu: Vec<(Device, Vec<Slice>)> = Vec::new();
        for (at, memory, from, len) in parts {
            let device = memory.device();
            if device == Device::Host {
                slot.gather(*at, memory, *from, *len);
                continue;
            }
            let slice = Slice { at: *at, memory: (*memory).clone(), from: *from, len: *len };
            match by_gpu.iter_mut().find(|(known, _)| *known == device) {
                Some((_, slices)) => slices.push(slice),
                None => by_gpu.push((device, vec![slice])),
            }
        }
        let host = slot.region();
        by_gpu.iter().try_for_each(|(device, slices)| self.gpus.copy(*device, Direction::Write, &host, slices))
    }

    /// Copies parts of memory, each `(offset, length)`, contiguously to fill `out`.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// If a part is outside the memory, or the parts do not fill `out` exactly.
    pub fn copy_parts(&self, memory: &Region, parts: &[(usize, usize)], out: &mut [u8]) -> Result<()> {
        assert_eq!(parts.iter().map(|(_, len)| len).sum::<usize>(), out.len(), "the parts fill the slice");
        let mut at = 0;
        if memory.device() == Device::Host {
            for (from, len) in parts {
                memory.copy_to_slice(*from, &mut out[at..at + len]);
                at += len;
            }
            return Ok(());
        }
        let host = RegionMut::from_vec(vec![0; out.len()]).region();
        let slice = |(from, len): &(usize, usize)| {
            at += len;
            Slice { at: at - len, memory: memory.clone(), from: *from, len: *len }
        };
        let slices: Vec<Slice> = parts.iter().map(slice).collect();
        self.gpus.copy(memory.device(), Direction::Write, &host, &slices)?;
        host.copy_to_slice(0, out);
        Ok(())
    }

    /// Copies bytes of memory, from `from` on, to fill `out`.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub fn copy_to_slice(&self, memory: &Region, from: usize, out: &mut [u8]) -> Result<()> {
        self.copy_parts(memory, &[(from, out.len())], out)
    }

    /// Copies bytes over the memory, from `from` on.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub fn copy_from_slice(&self, memory: &RegionMut, from: usize, source: &[u8]) -> Result<()> {
        if memory.device() == Device::Host {
            memory.copy_from_slice(from, source);
            return Ok(());
        }
        let host = Region::from_vec(source.to_vec());
        let slice = Slice { at: 0, memory: memory.region(), from, len: source.len() };
        self.gpus.copy(memory.device(), Direction::Read, &host, &[slice])
    }

    /// Allocates uninitialised GPU memory.
    ///
    /// # Errors
    /// As [`points`](Self::points), usually because too little memory is left.
    pub fn allocate(&self, index: u32, bytes: usize) -> Result<RegionMut> {
        self.gpus.get(Device::Cuda { index })?.allocate(bytes)
    }
}

impl Gpus {
    pub(crate) fn new(opened: Arc<OpenedGpus>, tape: Tape) -> Self {
        Self { opened, tape, resting: Mutex::default() }
    }

    /// Returns the opened GPUs, for asynchronous copies.
    pub(crate) fn opened(&self) -> &Arc<OpenedGpus> {
        &self.opened
    }

    fn get(&self, device: Device) -> Result<Arc<dyn Gpu>> {
        self.opened.get(device)
    }

    /// Returns the NUMA node that a GPU is attached to, if the machine has several.
    pub(crate) fn node(&self, device: Device) -> Option<u32> {
        let id = self.get(device).ok()?.pci_bus_id()?;
        let text = crate::fs::system_text(format!("/sys/bus/pci/devices/{id}/numa_node"))?;
        // The kernel reports -1 if the GPU has no NUMA node.
        text.trim().parse().ok()
    }

    fn copy(&self, device: Device, direction: Direction, host: &Region, slices: &[Slice]) -> Result<()> {
        let resting = {
            let mut resting = lock(&self.resting);
            let place = resting.iter().position(|(known, _)| *known == device);
            place.map(|place| resting.swap_remove(place).1)
        };
        let fetcher = match resting {
            Some(fetcher) => fetcher,
            None => Fetcher::new(self.get(device)?)?,
        };
        let start = self.tape.now();
        let copied = fetcher.copy(direction, host, slices);
        if let Some(start_ns) = start {
            let bytes = slices.iter().map(|slice| slice.len as u64).sum();
            let (gpu, end_ns, failed) = (fetcher.index(), now_ns(), copied.is_err());
            self.tape.copy(Copied { gpu, direction, bytes, start_ns, end_ns, failed });
        }
        copied?;
        lock(&self.resting).push((device, fetcher));
        Ok(())
    }

    /// Records the current ends of these streams. Idle streams need no point.
    pub(crate) fn points(&self, streams: &[(Device, StreamHandle)]) -> Result<Vec<Box<dyn GpuEvent>>> {
        let mut points = Vec::new();
        for (device, stream) in streams {
            if *device == Device::Host {
                continue;
            }
            let (gpu, stream) = (self.get(*device)?, *stream);
            // Most streams are idle, and even then a new event is not complete immediately.
            if !gpu.is_idle(stream)? {
                let event = gpu.new_event()?;
                event.record(stream)?;
                points.push(event);
            }
        }
        Ok(points)
    }
}
