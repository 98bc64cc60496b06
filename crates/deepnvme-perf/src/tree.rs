//! Small files of `/proc` and `/sys`, below a root that tests choose.

use std::fs;
use std::path::{Path, PathBuf};

/// The file system that facts are read from.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The machine's own.
    pub(crate) fn of_this_machine() -> Self {
        Self { root: PathBuf::from("/") }
    }

    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    /// An absolute path, below the root.
    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        if path.starts_with(&self.root) && self.root != Path::new("/") {
            return path.to_path_buf();
        }
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// What a file says, without the blanks around it. `None` where it is missing, unreadable or empty.
    pub(crate) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = fs::read_to_string(self.path(path)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    pub(crate) fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The names in a folder, in order; none where it is missing.
    pub(crate) fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = deepnvme_io::fs::entries(&self.path(path)).unwrap_or_default();
        let mut names: Vec<_> = entries.into_iter().filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        names
    }

    /// What a line `name: value` (or `name:   value kB`) of a file says.
    pub(crate) fn field(&self, path: impl AsRef<Path>, name: &str) -> Option<String> {
        let text = self.text(path)?;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?;
        Some(value.trim().to_owned())
    }
}

/// The word in brackets of a file like `always [madvise] never`.
pub(crate) fn chosen(text: &str) -> Option<&str> {
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
        let tree = Tree::at(folder.path());
        assert_eq!(tree.field("/proc/meminfo", "MemTotal").as_deref(), Some("24105 kB"));
        assert_eq!(tree.field("/proc/meminfo", "Mem"), None);
        assert_eq!((tree.text("/proc/empty"), tree.number("/proc/seven")), (None, Some(7)));
        assert_eq!(tree.names("/proc"), ["empty", "meminfo", "seven"]);
        assert_eq!((chosen("always [madvise] never"), chosen("none")), (Some("madvise"), None));
    }
}
