//! Settings from the environment, read once at the first call.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `DEEPNVME_FAKE_DRIVER_DEVICES` | number of devices, at most 64 | 2 |
//! | `DEEPNVME_FAKE_DRIVER_MEMORY` | memory of a device in bytes | 8 GiB |
//! | `DEEPNVME_FAKE_DRIVER_DELAY_US` | maximum random delay of a queued op | 300 |
//! | `DEEPNVME_FAKE_DRIVER_SEED` | seed of delays, orders and the contents of new memory | 1 |
//! | `DEEPNVME_FAKE_DRIVER_FAIL` | faults: `symbol:after:code` or `symbol:always:code`, separated by commas | none |
//! | `DEEPNVME_FAKE_DRIVER_CUFILE_COMPAT` | `1`: no file has a direct path, and cuFile opens in compatibility mode only | no |

/// Settings of this process.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) devices: Devices,
    pub(crate) delay_us: u64,
    pub(crate) seed: u64,
    pub(crate) compat: bool,
    pub(crate) faults: Vec<Fault>,
}

/// The devices, all alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Devices {
    pub(crate) count: usize,
    pub(crate) memory_bytes: u64,
}

/// A fault: of one call after `after` others, or of every call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) symbol: String,
    pub(crate) after: Option<u64>,
    pub(crate) code: i32,
}

impl Config {
    /// Reads the environment. An invalid number counts as missing: there is no way to report it.
    pub(crate) fn from_environment() -> Self {
        let number = |name: &str, otherwise: u64| text(name).and_then(|text| text.parse().ok()).unwrap_or(otherwise);
        Self {
            devices: Devices {
                count: number("DEEPNVME_FAKE_DRIVER_DEVICES", 2).min(64) as usize,
                memory_bytes: number("DEEPNVME_FAKE_DRIVER_MEMORY", 8 << 30),
            },
            delay_us: number("DEEPNVME_FAKE_DRIVER_DELAY_US", 300),
            seed: number("DEEPNVME_FAKE_DRIVER_SEED", 1),
            compat: text("DEEPNVME_FAKE_DRIVER_CUFILE_COMPAT").is_some_and(|text| text == "1"),
            faults: text("DEEPNVME_FAKE_DRIVER_FAIL").map(|text| parse_faults(&text)).unwrap_or_default(),
        }
    }
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn parse_faults(text: &str) -> Vec<Fault> {
    text.split(',').filter_map(|part| parse_fault(part.trim())).collect()
}

fn parse_fault(text: &str) -> Option<Fault> {
    let mut parts = text.split(':');
    let (symbol, when, code) = (parts.next()?, parts.next()?, parts.next()?);
    let after = if when == "always" { None } else { Some(when.parse().ok()?) };
    Some(Fault { symbol: symbol.to_owned(), after, code: code.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_out_of_text() {
        let fault = |symbol: &str, after, code| Fault { symbol: symbol.to_owned(), after, code };
        let parsed = parse_faults("cuMemAlloc_v2:0:2, cuFileRead:always:5, nonsense, cuInit:x:1");
        assert_eq!(parsed, [fault("cuMemAlloc_v2", Some(0), 2), fault("cuFileRead", None, 5)]);
    }
}
