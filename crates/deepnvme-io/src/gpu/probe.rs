//! The GPUs of this machine, as reported by the CUDA driver.

use deepnvme_cuda::Driver;
use serde::Serialize;

/// A GPU that CUDA shows to this process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct GpuFacts {
    /// Its index: `cuda:0` is the first.
    pub index: u32,
    /// For instance "NVIDIA H100 80GB HBM3".
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// For instance "0000:65:00.0", as in `/sys/bus/pci/devices`.
    pub pci_bus_id: String,
}

/// The GPUs, and the reason if some or all are missing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GpuProbe {
    /// The CUDA version of the driver, for instance "13.0".
    pub cuda_version: Option<String>,
    /// The GPUs visible to this process, in CUDA's order.
    pub devices: Vec<GpuFacts>,
    /// Why GPUs are missing: the libraries searched for, and the message of the loader or driver.
    pub reason: Option<String>,
}

impl GpuProbe {
    /// Loads and initialises the driver, and asks it. Creates no context, so it takes no GPU resources.
    #[must_use]
    pub fn run() -> Self {
        let driver = match Driver::get() {
            Ok(driver) => driver,
            Err(absent) => return Self { reason: Some(absent.to_string()), ..Self::default() },
        };
        let version = driver.version();
        let mut probe = Self {
            cuda_version: (version > 0).then(|| format!("{}.{}", version / 1000, version % 1000 / 10)),
            ..Self::default()
        };
        let devices = driver.device_count().and_then(|count| {
            (0..count).try_for_each(|index| {
                let deepnvme_cuda::DeviceProperties { name, memory_bytes, pci_bus_id } =
                    driver.device_properties(index)?;
                probe.devices.push(GpuFacts { index, name, memory_bytes, pci_bus_id });
                Ok(())
            })
        });
        probe.reason = match devices {
            Err(error) => Some(error.to_string()),
            Ok(()) if probe.devices.is_empty() => {
                Some("the CUDA driver shows no GPU; is CUDA_VISIBLE_DEVICES empty?".into())
            }
            Ok(()) => None,
        };
        probe
    }
}
