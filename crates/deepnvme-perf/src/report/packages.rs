//! The Python packages that deepnvme integrates with.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;

/// Prints versions without importing the packages: importing torch takes seconds.
const SCRIPT: &str = "
import importlib.util, platform
from importlib import metadata
print('Python', platform.python_version())
for name in ('torch', 'deepspeed', 'numpy', 'safetensors', 'transformers'):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
nvidia = importlib.util.find_spec('nvidia')
for place in list(nvidia.submodule_search_locations)[:1] if nvidia and nvidia.submodule_search_locations else []:
    print('*', place)
";

/// Python itself, or an installed package.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Package {
    /// `Python`, `torch`.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// Lists the packages of this Python, and finds the folder of NVIDIA's packages. Empty if the program cannot be run.
#[must_use]
pub fn of_interpreter(program: &Path) -> (Vec<Package>, Option<PathBuf>) {
    let output = Command::new(program).args(["-c", SCRIPT]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let package = |line: &str| {
        let (name, version) = line.split_once(' ')?;
        Some(Package { name: name.into(), version: version.into() })
    };
    let (places, packages): (Vec<_>, Vec<_>) =
        text.lines().filter_map(package).partition(|package| package.name == "*");
    (packages, places.into_iter().next().map(|place| place.version.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_reports_its_version_and_a_missing_one_nothing() {
        assert_eq!(of_interpreter("/no/such/python".as_ref()), (vec![], None));
        let (found, _) = of_interpreter("python3".as_ref());
        assert!(found.is_empty() || found[0].name == "Python", "{found:?}");
    }
}
