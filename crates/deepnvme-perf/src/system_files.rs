//! Small files of `/proc` and `/sys`, below a root that tests can replace.

use std::fs;
use std::path::{Path, PathBuf};

/// The files of `/proc` and `/sys`.
#[derive(Clone, Debug)]
pub(crate) struct SystemFiles {
    root: PathBuf,
}

impl SystemFiles {
    /// Returns the files of this machine.
    pub(crate) fn of_this_machine() -> Self {
        Self { root: PathBuf::from("/") }
    }

    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    /// Returns an absolute path below the root. A path that is below it already stays as it is.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        if path.starts_with(&self.root) && self.root != Path::new("/") {
            return path.to_path_buf();
        }
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Reads a file without surrounding white space. `None` if it is missing, unreadable or empty.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    pub(crate) fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Returns the sorted names in a folder; none if it is missing.
    pub(crate) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = deepnvme_io::fs::entries(&self.path(path)).unwrap_or_default();
        let mut names: Vec<_> = entries.into_iter().filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        names
    }

    /// Reads the value of a line `name: value` (or `name:   value kB`).
    pub(crate) fn field(&self, path: impl AsRef<Path>, name: &str) -> Option<String> {
        let text = self.text(path)?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?;
        Some(value.trim().to_owned())
    }
}

/// Returns the word in brackets of a text such as `always [madvise] never`.
pub(crate) fn bracketed(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_numbers_and_choices() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("proc")).unwrap();
        fs::write(folder.path().join("proc/meminfo"), "MemTotal:       24105 kB\nMemFree: 3 kB\n").unwrap();
        fs::write(folder.path().join("proc/empty"), " \n").unwrap();
        fs::write(folder.path().join("proc/seven"), "7\n").unwrap();
        let files = SystemFiles::at(folder.path());
        assert_eq!(files.field("/proc/meminfo", "MemTotal").as_deref(), Some("24105 kB"));
        assert_eq!(files.field("/proc/meminfo", "Mem"), None);
        assert_eq!((files.text("/proc/empty"), files.number("/proc/seven")), (None, Some(7)));
        assert_eq!(files.names("/proc"), ["empty", "meminfo", "seven"]);
        assert_eq!((bracketed("always [madvise] never"), bracketed("none")), (Some("madvise"), None));
    }
}
