//! The GPUs that requests name, opened when the first one does.

use std::collections::HashMap;
use std::sync::Arc;

use deepnvme_cuda as cuda;
use deepnvme_mem::{Device, Region, RegionMut, Slot};

use crate::backend::copies::{self, Fetcher, Slice};
use crate::error::{Error, ErrorKind, Result};
use crate::split::Direction;
use crate::sync::{Mutex, lock};

/// The GPUs of an engine.
#[derive(Debug, Default)]
pub(crate) struct Gpus {
    open: Mutex<HashMap<u32, Arc<cuda::Device>>>,
    /// What copies while somebody waits, and is not used now.
    resting: Mutex<Vec<(u32, Fetcher)>>,
}

/// What copies from and to the memory of GPUs while its caller waits, for what the processor has to see or make itself.
/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct GpuAccess {
    gpus: Arc<Gpus>,
}

/// Memory that the driver knows, until this is dropped.
#[derive(Debug)]
pub struct KnownMemory {
    _registration: cuda::Registration,
}

/// Points in the streams of GPUs.
#[derive(Debug, Default)]
pub struct StreamPoints {
    events: Vec<cuda::Event>,
}

impl StreamPoints {
    /// Waits until the streams have come so far.
    ///
    /// # Errors
    /// `Device` when something has failed there.
    pub fn wait(&self) -> Result<()> {
        self.events.iter().try_for_each(cuda::Event::wait).map_err(|error| refused(&error))
    }
}

impl GpuAccess {
    pub(crate) fn new(gpus: &Arc<Gpus>) -> Self {
        Self { gpus: Arc::clone(gpus) }
    }

    /// Points behind all that the streams of this memory have been given by now.
    ///
    /// # Errors
    /// `Unsupported` and `Device` where there is no such GPU, or its driver refuses.
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

    /// Has the driver know memory of the host, so that copies to it need no staging.
    ///
    /// # Errors
    /// As [`points`](Self::points); that memory cannot be locked, too.
    pub fn make_known(&self, index: u32, arena: &Region) -> Result<KnownMemory> {
        Ok(KnownMemory { _registration: copies::register(&self.gpus.get(index)?, arena)? })
    }

    /// Copies parts of memory, each with where in it they begin and how long they are, to places in a slot.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// When a part is outside its memory or the slot.
    pub fn gather(&self, slot: &mut Slot, parts: &[(usize, &Region, usize, usize)]) -> Result<()> {
        let mut by_gpu: Vec<(u32, Vec<Slice>)> = Vec::new();
        for (at, memory, from, len) in parts {
            let Device::Cuda { index } = memory.device() else {
                slot.gather(*at, memory, *from, *len);
                continue;
            };
            let slice = Slice { at: *at, memory: (*memory).clone(), from: *from, len: *len };
            match by_gpu.iter_mut().find(|(known, _)| *known == index) {
                Some((_, slices)) => slices.push(slice),
                None => by_gpu.push((index, vec![slice])),
            }
        }
        let host = slot.region();
        by_gpu.iter().try_for_each(|(index, slices)| self.gpus.copy(*index, Direction::Write, &host, slices))
    }

    /// Copies parts of memory, each with where it begins and how long it is, one behind the other to fill `out`.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// When a part is outside the memory, or `out` has another length than all of them.
    pub fn copy_parts(&self, memory: &Region, parts: &[(usize, usize)], out: &mut [u8]) -> Result<()> {
        assert_eq!(parts.iter().map(|(_, len)| len).sum::<usize>(), out.len(), "the parts fill the slice");
        let mut at = 0;
        let Device::Cuda { index } = memory.device() else {
            for (from, len) in parts {
                memory.copy_to_slice(*from, &mut out[at..at + len]);
                at += len;
            }
            return Ok(());
        };
        let host = RegionMut::from_vec(vec![0; out.len()]).region();
        let slice = |(from, len): &(usize, usize)| {
            at += len;
            Slice { at: at - len, memory: memory.clone(), from: *from, len: *len }
        };
        let slices: Vec<Slice> = parts.iter().map(slice).collect();
        self.gpus.copy(index, Direction::Write, &host, &slices)?;
        host.copy_to_slice(0, out);
        Ok(())
    }

    /// Copies bytes of memory, from `from` on, to fill `out`.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// When the range is outside the memory.
    pub fn copy_to_slice(&self, memory: &Region, from: usize, out: &mut [u8]) -> Result<()> {
        self.copy_parts(memory, &[(from, out.len())], out)
    }

    /// Copies bytes over those of memory from `from` on.
    ///
    /// # Errors
    /// As [`points`](Self::points).
    ///
    /// # Panics
    /// When the range is outside the memory.
    pub fn copy_from_slice(&self, memory: &RegionMut, from: usize, source: &[u8]) -> Result<()> {
        let Device::Cuda { index } = memory.device() else {
            memory.copy_from_slice(from, source);
            return Ok(());
        };
        let host = Region::from_vec(source.to_vec());
        let slice = Slice { at: 0, memory: memory.region(), from, len: source.len() };
        self.gpus.copy(index, Direction::Read, &host, &[slice])
    }

    /// So many bytes of a GPU, which hold whatever was there before.
    ///
    /// # Errors
    /// As [`points`](Self::points), above all that there is not so much left.
    pub fn allocate(&self, index: u32, bytes: usize) -> Result<RegionMut> {
        copies::allocate(&self.gpus.get(index)?, bytes).map_err(|error| {
            if !error.is_out_of_memory() {
                return refused(&error);
            }
            let detail = format!("{error}: cuda:{index} has no {bytes} bytes left; ask for fewer, or free some there");
            Error::new(ErrorKind::Device, "allocate GPU memory", detail)
        })
    }
}

impl Gpus {
    /// The GPU of that number.
    pub(crate) fn get(&self, index: u32) -> Result<Arc<cuda::Device>> {
        let mut open = lock(&self.open);
        if let Some(device) = open.get(&index) {
            return Ok(Arc::clone(device));
        }
        let driver = cuda::Driver::get().map_err(|absent| {
            let detail = format!("the memory is on cuda:{index}, and {absent}");
            Error::new(ErrorKind::Unsupported, "use GPU memory", detail)
        })?;
        let device = Arc::new(cuda::Device::new(driver, index).map_err(|error| refused(&error))?);
        open.insert(index, Arc::clone(&device));
        Ok(device)
    }

    /// The NUMA node that a GPU is attached to, where the machine has several.
    pub(crate) fn node(&self, index: u32) -> Option<u32> {
        let id = cuda::Driver::get().ok()?.facts(index).ok()?.pci_bus_id;
        let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{id}/numa_node")).ok()?;
        // Minus one where it does not matter.
        text.trim().parse().ok()
    }

    fn copy(&self, index: u32, direction: Direction, host: &Region, slices: &[Slice]) -> Result<()> {
        let resting = {
            let mut resting = lock(&self.resting);
            let place = resting.iter().position(|(known, _)| *known == index);
            place.map(|place| resting.swap_remove(place).1)
        };
        let fetcher = match resting {
            Some(fetcher) => fetcher,
            None => Fetcher::new(&self.get(index)?)?,
        };
        fetcher.copy(direction, host, slices)?;
        lock(&self.resting).push((index, fetcher));
        Ok(())
    }

    /// Points behind all that those streams have been given by now; of what is over already, none.
    pub(crate) fn points(&self, streams: &[(Device, usize)]) -> Result<Vec<cuda::Event>> {
        let mut points = Vec::new();
        for (device, stream) in streams {
            let Device::Cuda { index } = device else { continue };
            let (device, stream) = (self.get(*index)?, cuda::RawStream(*stream));
            // As a rule nothing runs there, and an event that has just been recorded is not over at once even then.
            if !stream.is_idle(&device).map_err(|error| refused(&error))? {
                let event = cuda::Event::new(&device).map_err(|error| refused(&error))?;
                event.record(stream).map_err(|error| refused(&error))?;
                points.push(event);
            }
        }
        Ok(points)
    }
}

/// What the driver refused.
pub(crate) fn refused(error: &cuda::Error) -> Error {
    let remedy = if error.is_out_of_memory() {
        "there is no memory that it could lock; lower the engine's pool (`workers`, `block_bytes`), or free some"
    } else {
        "if earlier work on the GPU has failed, this is how it shows: run with CUDA_LAUNCH_BLOCKING=1 to find it"
    };
    Error::new(ErrorKind::Device, "use GPU memory", format!("{error}; {remedy}"))
}
