//! The GPUs of this machine, as their driver says them.

use deepnvme_cuda::Driver;
use serde::Serialize;

/// A GPU that CUDA shows to this process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct GpuFacts {
    /// Its number: `cuda:0` is the first.
    pub index: u32,
    /// Such as "NVIDIA H100 80GB HBM3".
    pub name: String,
    /// Bytes of memory that it has.
    pub memory_bytes: u64,
    /// Such as "0000:65:00.0", as in `/sys/bus/pci/devices`.
    pub pci_bus_id: String,
}

/// Which GPUs there are, and if none, why.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GpuProbe {
    /// The version of CUDA that the driver is for, such as "13.0".
    pub cuda_version: Option<String>,
    /// Those that this process may see, in CUDA's order.
    pub devices: Vec<GpuFacts>,
    /// Why there are none, or not all: what was looked for, and what the loader or the driver said.
    pub reason: Option<String>,
}

impl GpuProbe {
    /// Asks the driver, which is loaded and initialised for that. No context is made, so that nothing of a GPU is taken.
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
