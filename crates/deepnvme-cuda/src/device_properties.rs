//! Properties of a GPU that need no context.

use std::ffi::{CStr, c_char, c_int};

use crate::driver::Driver;
use crate::error::Result;

/// Properties of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceProperties {
    /// Name, such as "NVIDIA H100 80GB HBM3".
    pub name: String,
    /// Total memory in bytes.
    pub memory_bytes: u64,
    /// PCI bus id, such as "0000:65:00.0", in lower case as in `/sys/bus/pci/devices`.
    pub pci_bus_id: String,
}

impl Driver {
    /// Queries the properties of a GPU, by CUDA's index of visible devices. Creates no context, which would take some
    /// of its memory.
    ///
    /// # Errors
    /// The driver's error, for example that the device does not exist.
    pub fn device_properties(&self, index: u32) -> Result<DeviceProperties> {
        let functions = &self.functions;
        let (mut device, mut memory_bytes) = (0, 0);
        let (mut name, mut pci_bus_id) = ([0; 256], [0; 32]);
        let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: all pointers are to local values, and the driver writes at most the given length of a text,
        // including its zero byte.
        unsafe {
            self.check("cuDeviceGet", (functions.device_get)(&raw mut device, ordinal))?;
            let code = (functions.device_name)(name.as_mut_ptr(), name.len() as c_int, device);
            self.check("cuDeviceGetName", code)?;
            self.check("cuDeviceTotalMem", (functions.device_total_memory)(&raw mut memory_bytes, device))?;
            let code = (functions.device_pci_bus_id)(pci_bus_id.as_mut_ptr(), pci_bus_id.len() as c_int, device);
            self.check("cuDeviceGetPCIBusId", code)?;
        }
        let pci_bus_id = until_zero(&pci_bus_id).to_lowercase();
        Ok(DeviceProperties { name: until_zero(&name), memory_bytes: memory_bytes as u64, pci_bus_id })
    }
}

fn until_zero(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|byte| *byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}
