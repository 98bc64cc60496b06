//! The Python packages that deepnvme works with.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Serialize;

/// Asks for versions without importing anything: importing torch takes seconds.
const QUESTION: &str = "
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

/// Python itself, or a package that it finds.
#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
pub struct Package {
    /// `Python`, `torch`.
    pub name: String,
    /// As it says itself.
    pub version: String,
}

/// What this Python has, and the folder of NVIDIA's packages; nothing where there is no such program.
#[must_use]
pub fn of_interpreter(program: &Path) -> (Vec<Package>, Option<PathBuf>) {
    let answer = Command::new(program).args(["-c", QUESTION]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = answer.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
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
    fn a_python_tells_its_version_and_none_tells_nothing() {
        assert_eq!(of_interpreter("/no/such/python".as_ref()), (vec![], None));
        let (found, _) = of_interpreter("python3".as_ref());
        assert!(found.is_empty() || found[0].name == "Python", "{found:?}");
    }
}
