//! `deepnvme.toml`: engine settings for every folder, or for some. `deepnvme tune` writes it.
//!
//! ```toml
//! [engine]                     # the default engine, and folders that are not listed below
//! workers = 2
//! queue_depth = 8
//!
//! [[folder]]
//! path = "/mnt/nvme"           # and all folders below it
//! engine = { workers = 1 }     # both directions
//! read = { workers = 4 }       # only for reading
//! ```
//!
//! One table decides for a folder and a direction. A setting that this table omits has its built-in default.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use deepnvme_io::op::Direction;
use deepnvme_io::{Config, Error, ErrorKind, Result, fs};

/// Maximum bytes of a settings file.
pub const FILE_BYTES_MAX: u64 = 1 << 20;
/// Maximum folders in a settings file.
pub const FOLDERS_MAX: usize = 256;

/// The contents of a settings file.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SettingsFile {
    /// For the default engine, and for folders and directions without settings of their own.
    pub engine: Config,
    /// The settings of single folders.
    #[serde(rename = "folder", skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<FolderSettings>,
}

/// The settings of one folder and all folders below it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FolderSettings {
    /// The folder.
    pub path: PathBuf,
    /// For both directions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Config>,
    /// For reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Config>,
    /// For writing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write: Option<Config>,
}

impl SettingsFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file is missing, too large, not TOML, or has invalid settings; with the path, the line and the valid range.
    pub fn load(path: &Path) -> Result<Self> {
        let text = fs::read_small(path, FILE_BYTES_MAX).map_err(|error| match error.kind() {
            ErrorKind::NotFound => error.because(
                "there is no such file of settings; check the path, which DEEPNVME_CONFIG may name, or make the file with \
                 `deepnvme tune`",
            ),
            _ => error,
        })?;
        Self::parse(&text, path)
    }

    /// Parses and checks the text of a file; `path` is for errors.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let text = std::str::from_utf8(text).map_err(|_| invalid(path, "it is not UTF-8"))?;
        let file: Self = toml::from_str(text).map_err(|error| invalid(path, error.to_string().trim()))?;
        file.check().map_err(|error| invalid(path, error.detail()))?;
        Ok(file)
    }

    /// Returns the text of a file that [`load`](Self::load) reads.
    ///
    /// # Errors
    /// A path is not UTF-8, or a number is too large for TOML.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|error| Error::invalid(format!("settings cannot be written: {error}")))
    }

    /// Returns the settings for a folder and a direction: those of the deepest entry that contains the folder. In an
    /// entry, the settings of the direction come before those for both directions. If neither exists, returns those of
    /// `[engine]`.
    #[must_use]
    pub fn of(&self, folder: Option<&Path>, direction: Option<Direction>) -> &Config {
        let contains = |entry: &&FolderSettings| folder.is_some_and(|folder| folder.starts_with(&entry.path));
        let Some(entry) = self.folders.iter().filter(contains).max_by_key(|entry| entry.path.components().count())
        else {
            return &self.engine;
        };
        let by_direction = match direction {
            Some(Direction::Read) => entry.read.as_ref(),
            Some(Direction::Write) => entry.write.as_ref(),
            None => None,
        };
        by_direction.or(entry.engine.as_ref()).unwrap_or(&self.engine)
    }

    fn check(&self) -> Result<()> {
        if self.folders.len() > FOLDERS_MAX {
            return Err(Error::invalid(format!("{} folders, of at most {FOLDERS_MAX}", self.folders.len())));
        }
        let of_folders = self.folders.iter().flat_map(|entry| [&entry.engine, &entry.read, &entry.write]).flatten();
        std::iter::once(&self.engine).chain(of_folders).try_for_each(Config::validate)
    }
}

fn invalid(path: &Path, detail: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, "read settings", detail).at_path(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<SettingsFile> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deepnvme.toml");
        std::fs::write(&path, text).unwrap();
        SettingsFile::load(&path)
    }

    #[test]
    fn the_deepest_entry_wins() {
        let file = load(
            "[engine]\nworkers = 2\n\
             [[folder]]\npath = '/mnt'\nengine = { workers = 3 }\n\
             [[folder]]\npath = '/mnt/fast'\nread = { workers = 4, backend = 'aio' }\n",
        )
        .unwrap();
        let workers = |folder: &str, direction| file.of(Some(Path::new(folder)), direction).workers;
        assert_eq!(file.of(None, Some(Direction::Read)).workers, 2);
        assert_eq!(workers("/elsewhere", None), 2);
        assert_eq!(workers("/mnt/slow", Some(Direction::Read)), 3);
        assert_eq!(workers("/mnt/fast/models", Some(Direction::Read)), 4);
        assert_eq!(workers("/mnt/fast", Some(Direction::Write)), 2, "a direction without an entry uses the default");
        assert_eq!(workers("/mnt/faster", None), 3, "a common prefix is not a parent folder");
        assert_eq!(file.engine.queue_depth, Config::default().queue_depth, "a missing setting has its default");
    }

    #[test]
    fn written_settings_load_to_the_same_value() {
        let config = Config { workers: 7, pool_bytes: Some(1 << 30), ..Config::default() };
        let entry = FolderSettings { path: "/a b".into(), engine: None, read: Some(config.clone()), write: None };
        let file = SettingsFile { engine: config, folders: vec![entry] };
        assert_eq!(load(&file.to_toml().unwrap()).unwrap(), file);
        assert_eq!(load("").unwrap(), SettingsFile::default());
    }

    #[test]
    fn errors_name_the_setting() {
        for (text, part) in [
            ("[engine]\nworker = 2\n", "worker"),
            ("[engine]\nworkers = 0\n", "between 1 and 64"),
            ("[engine]\nbackend = 'best'\n", "io_uring"),
            ("[[folder]]\nengine = {}\n", "path"),
            ("[[folder]]\npath = '/x'\nwrite = { block_bytes = 5000 }\n", "multiple of 4096"),
            ("not toml", "TOML"),
        ] {
            let error = load(text).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("deepnvme.toml"), "{text}: {error}");
        }
        let missing = SettingsFile::load(Path::new("/no/deepnvme.toml")).unwrap_err();
        assert_eq!((missing.kind(), missing.path()), (ErrorKind::NotFound, Some(Path::new("/no/deepnvme.toml"))));
    }
}
