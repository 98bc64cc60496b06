//! The GPUs of an engine, for callers that wait: events in their streams, registrations, allocations, and blocking
//! copies.

use std::sync::Arc;

use deepnvme_mem::{Device, Region, RegionMut, RegistrableRange, Slot, StreamHandle};

use super::copies::{BlockingCopier, CopyInFlight, GpuSlice};
use super::device::{CALLER_STREAM_TIMEOUT, Gpu, GpuEvent, Registration};
use super::registry::GpuRegistry;
use crate::backend::gds::CudaDevices;
use crate::error::Result;
use crate::op::Direction;
use crate::sync::{Mutex, lock};
use crate::trace::{GpuCopy, Tracer, now_ns};

/// The GPUs of an engine.
#[derive(Debug)]
pub(crate) struct EngineGpus {
    registry: Arc<GpuRegistry>,
    tracer: Tracer,
    /// Copiers that are not in use.
    idle: Mutex<Vec<(Device, BlockingCopier)>>,
}

/// The GPUs of an engine, for callers that wait: stream events, registrations, allocations, and blocking copies. Cheap
/// to clone.
#[derive(Clone, Debug)]
pub struct GpuAccess {
    gpus: Arc<EngineGpus>,
}

/// Memory registered with the driver until this is dropped.
#[derive(Debug)]
pub struct HostRegistration {
    _registration: Box<dyn Registration>,
}

/// A copy in flight. Dropping it waits until the copy is done.
#[derive(Debug)]
pub struct StartedCopy {
    gpus: Arc<EngineGpus>,
    device: Device,
    bytes: u64,
    start_ns: Option<u64>,
    copy: CopyInFlight,
}

impl StartedCopy {
    /// Waits until the copy is done.
    ///
    /// # Errors
    /// `Device` if the GPU has failed.
    pub fn wait(self) -> Result<()> {
        let Self { gpus, device, bytes, start_ns, copy } = self;
        let ended = copy.wait();
        gpus.trace(device, Direction::Read, bytes, start_ns, ended.is_err());
        if let Some(copier) = ended? {
            gpus.put_back(device, copier);
        }
        Ok(())
    }
}

/// Events recorded in GPU streams.
#[derive(Debug, Default)]
pub struct StreamEvents {
    events: Vec<Box<dyn GpuEvent>>,
}

impl StreamEvents {
    /// Waits until the streams have reached the events.
    ///
    /// # Errors
    /// `Device` if work on a stream failed, or is not complete after half an hour.
    pub fn wait(&self) -> Result<()> {
        self.events.iter().try_for_each(|event| event.wait(CALLER_STREAM_TIMEOUT))
    }
}

impl GpuAccess {
    pub(crate) fn new(gpus: &Arc<EngineGpus>) -> Self {
        Self { gpus: Arc::clone(gpus) }
    }

    /// Records an event at the current end of each stream of this memory that is not idle.
    ///
    /// # Errors
    /// `Unsupported` and `Device` if there is no such GPU, or its driver refuses.
    pub fn record_events<'a>(&self, memory: impl IntoIterator<Item = &'a Region>) -> Result<StreamEvents> {
        let mut streams = Vec::new();
        for region in memory {
            let place = (region.device(), region.stream());
            if region.device() != Device::Host && !streams.contains(&place) {
                streams.push(place);
            }
        }
        Ok(StreamEvents { events: self.gpus.record_events(&streams)? })
    }

    /// Registers host memory with the driver, so that copies between it and the GPU with this index need no staging.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events), and `Device` if the memory cannot be locked.
    pub fn register_host(&self, index: u32, arena: &RegistrableRange) -> Result<HostRegistration> {
        Ok(HostRegistration { _registration: self.gpus.get(Device::Cuda { index })?.register(arena)? })
    }

    /// Copies parts into a slot. Each part is `(offset in the slot, memory, offset in the memory, length)`.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events).
    ///
    /// # Panics
    /// If a part is outside its memory or the slot.
    pub fn gather(&self, slot: &mut Slot, parts: &[(usize, &Region, usize, usize)]) -> Result<()> {
        let mut by_gpu: Vec<(Device, Vec<GpuSlice>)> = Vec::new();
        for (at, memory, from, len) in parts {
            let device = memory.device();
            if device == Device::Host {
                slot.gather(*at, memory, *from, *len);
                continue;
            }
            let slice = GpuSlice { at: *at, memory: (*memory).clone(), from: *from, len: *len };
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
    /// As [`record_events`](Self::record_events).
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
            GpuSlice { at: at - len, memory: memory.clone(), from: *from, len: *len }
        };
        let slices: Vec<GpuSlice> = parts.iter().map(slice).collect();
        self.gpus.copy(memory.device(), Direction::Write, &host, &slices)?;
        host.copy_to_slice(0, out);
        Ok(())
    }

    /// Fills `out` with bytes of the memory, from `from` on.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events).
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub fn copy_to_slice(&self, memory: &Region, from: usize, out: &mut [u8]) -> Result<()> {
        self.copy_parts(memory, &[(from, out.len())], out)
    }

    /// Copies bytes over the memory, from `from` on.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events).
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub fn copy_from_slice(&self, memory: &RegionMut, from: usize, source: &[u8]) -> Result<()> {
        if memory.device() == Device::Host {
            memory.copy_from_slice(from, source);
            return Ok(());
        }
        self.copy_to_gpu(memory, from, &Region::from_vec(source.to_vec()))
    }

    /// Copies all bytes of host memory over GPU memory, from `from` on.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events).
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub fn copy_to_gpu(&self, memory: &RegionMut, from: usize, host: &Region) -> Result<()> {
        let slice = GpuSlice { at: 0, memory: memory.region(), from, len: host.len() };
        self.gpus.copy(memory.device(), Direction::Read, host, &[slice])
    }

    /// Starts to copy all bytes of host memory over GPU memory, from `from` on. Nothing else may change the host memory,
    /// or use those bytes on the GPU, until the copy is done.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events).
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub fn start_copy_to_gpu(&self, memory: &RegionMut, from: usize, host: Region) -> Result<StartedCopy> {
        let device = memory.device();
        let start_ns = self.gpus.tracer.now();
        let slice = GpuSlice { at: 0, memory: memory.region(), from, len: host.len() };
        let bytes = slice.len as u64;
        let copy = self.gpus.copier(device)?.start(Direction::Read, host, slice)?;
        Ok(StartedCopy { gpus: Arc::clone(&self.gpus), device, bytes, start_ns, copy })
    }

    /// Allocates uninitialised GPU memory.
    ///
    /// # Errors
    /// As [`record_events`](Self::record_events), usually because too little memory is left.
    pub fn allocate(&self, index: u32, bytes: usize) -> Result<RegionMut> {
        self.gpus.get(Device::Cuda { index })?.allocate(bytes)
    }
}

impl EngineGpus {
    pub(crate) fn new(registry: Arc<GpuRegistry>, tracer: Tracer) -> Self {
        Self { registry, tracer, idle: Mutex::default() }
    }

    /// Returns the opened GPUs, for asynchronous copies.
    pub(crate) fn registry(&self) -> &Arc<GpuRegistry> {
        &self.registry
    }

    /// Returns the opened GPUs, for cuFile.
    pub(crate) fn cuda_devices(&self) -> Arc<dyn CudaDevices> {
        Arc::<GpuRegistry>::clone(&self.registry)
    }

    fn get(&self, device: Device) -> Result<Arc<dyn Gpu>> {
        self.registry.get(device)
    }

    /// Returns the NUMA node that a GPU is attached to, if the kernel knows it.
    pub(crate) fn node(&self, device: Device) -> Option<u32> {
        let id = self.get(device).ok()?.pci_bus_id()?;
        let text = crate::fs::system_text(format!("/sys/bus/pci/devices/{id}/numa_node"))?;
        // The kernel reports -1 if the GPU has no NUMA node.
        text.trim().parse().ok()
    }

    /// Copies between host and GPU. `direction` is as in a transfer: `Write` copies from the GPU, `Read` to it.
    fn copy(&self, device: Device, direction: Direction, host: &Region, slices: &[GpuSlice]) -> Result<()> {
        let copier = self.copier(device)?;
        let start_ns = self.tracer.now();
        let copied = copier.copy(direction, host, slices);
        let bytes = slices.iter().map(|slice| slice.len as u64).sum();
        self.trace(device, direction, bytes, start_ns, copied.is_err());
        copied?;
        self.put_back(device, copier);
        Ok(())
    }

    /// Returns a copier that is not in use.
    fn copier(&self, device: Device) -> Result<BlockingCopier> {
        let idle = {
            let mut idle = lock(&self.idle);
            let place = idle.iter().position(|(known, _)| *known == device);
            place.map(|place| idle.swap_remove(place).1)
        };
        idle.map_or_else(|| BlockingCopier::new(&self.get(device)?), Ok)
    }

    fn put_back(&self, device: Device, copier: BlockingCopier) {
        lock(&self.idle).push((device, copier));
    }

    /// Records a copy that has ended.
    fn trace(&self, device: Device, direction: Direction, bytes: u64, start_ns: Option<u64>, is_failed: bool) {
        if let (Some(start_ns), Device::Cuda { index }) = (start_ns, device) {
            self.tracer.gpu_copy((start_ns, now_ns()), GpuCopy { gpu: index, direction, bytes }, is_failed);
        }
    }

    /// Records an event at the current end of each of these streams that is on a GPU and not idle.
    pub(crate) fn record_events(&self, streams: &[(Device, StreamHandle)]) -> Result<Vec<Box<dyn GpuEvent>>> {
        let mut events = Vec::new();
        for (device, stream) in streams {
            if *device == Device::Host {
                continue;
            }
            let (gpu, stream) = (self.get(*device)?, *stream);
            // Most streams are idle, and even then a new event is not complete immediately.
            if !gpu.is_idle(stream)? {
                let event = gpu.new_event()?;
                event.record(stream)?;
                events.push(event);
            }
        }
        Ok(events)
    }
}
