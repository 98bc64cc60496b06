//! `manifest.json`: the current checkpoints, and retired ones whose files may still exist.

use std::collections::{BTreeMap, HashSet};

use deepnvme_format::file_list;
use serde::{Deserialize, Serialize};

use super::names;

/// The name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Maximum size of a manifest.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;
const VERSION: u32 = 2;
/// Supported versions. Version 1 lacks private names and retired checkpoints.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=VERSION;

/// One file of a checkpoint that several processes wrote, one file each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its name.
    pub file: String,
    /// Its size.
    pub nbytes: u64,
    /// The machine that wrote it.
    pub host: String,
    /// CRC-64/NVME of its first bytes, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_crc64: Option<String>,
    /// Its modification time after the save, in nanoseconds since 1970. A later one means that somebody wrote to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_ns: Option<i64>,
}

/// One checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestEntry {
    /// The file, the list of parts, or the folder.
    pub file: String,
    /// The step of the save.
    pub step: u64,
    /// Size of the file, or of all files.
    pub nbytes: u64,
    /// Time of the save.
    pub time: String,
    /// Offset of the index.
    pub index_offset: u64,
    /// Size of the index.
    pub index_nbytes: u64,
    /// CRC-64/NVME of the index, in hexadecimal.
    pub index_crc64: String,
    /// The version of torch that saved it.
    pub torch: String,
    /// The version of deepnvme that saved it.
    pub deepnvme: String,
    /// The latest modification time of its files after the save, in nanoseconds since 1970. Parts have their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_ns: Option<i64>,
    /// The part files, in order, if it consists of parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Final names, mapped to the private names until the files are renamed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pending: BTreeMap<String, String>,
}

impl ManifestEntry {
    /// Returns whether it is a folder.
    #[must_use]
    pub fn is_folder(&self) -> bool {
        // Only folders have names without a suffix.
        !self.file.contains('.')
    }

    /// Returns all current and future names: final ones, then private ones.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let parts = self.parts.iter().map(|part| part.file.as_str());
        std::iter::once(self.file.as_str()).chain(parts).chain(self.pending.values().map(String::as_str))
    }

    fn is_sound(&self) -> bool {
        let finals: HashSet<&str> =
            std::iter::once(&self.file).chain(self.parts.iter().map(|part| &part.file)).map(String::as_str).collect();
        finals.iter().all(|name| names::is_checkpoint(name))
            && self.pending.iter().all(|(name, private)| finals.contains(name.as_str()) && names::is_private(private))
    }
}

/// The content of a manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The checksum of the text. Set only while rendering.
    #[serde(rename = "deepnvme.checksum", default, skip_serializing_if = "String::is_empty")]
    pub(super) checksum: String,
    /// The version of the format.
    pub version: u32,
    /// The current checkpoints, in the order of their saves.
    pub checkpoints: Vec<ManifestEntry>,
    /// Retired checkpoints, until their removal is known to be complete.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<ManifestEntry>,
}

impl Manifest {
    /// Creates a manifest without checkpoints.
    #[must_use]
    pub fn empty() -> Self {
        Self { version: VERSION, ..Self::default() }
    }

    /// Parses a manifest. Refuses names that this library does not give to checkpoints: a manifest must never cause
    /// other files to be moved or removed.
    ///
    /// # Errors
    /// A description of the problem.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        if file_list::seal_state(text) == file_list::SealState::Damaged {
            return Err(format!(
                "its checksum does not match. Put back a copy of it; if you have edited it, remove {:?} from it",
                file_list::CHECKSUM_KEY
            ));
        }
        let Versioned { version } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if !VERSIONS.contains(&version) {
            return Err(format!("version {version} is of another deepnvme; this one reads up to {VERSION}"));
        }
        let mut manifest: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        manifest.version = VERSION;
        manifest.checksum.clear();
        if let Some(odd) = manifest.checkpoints.iter().chain(&manifest.retired).find(|entry| !entry.is_sound()) {
            return Err(format!("{:?} is not a checkpoint of this folder", odd.file));
        }
        Ok(manifest)
    }

    /// Renders the manifest.
    #[must_use]
    pub fn text(&self) -> String {
        let blank = Self { checksum: file_list::BLANK.into(), ..self.clone() };
        // Strings, numbers and lists of them always serialise, and the text contains a blank checksum.
        let text = serde_json::to_string_pretty(&blank).unwrap_or_default() + "\n";
        file_list::write_checksum(&text).unwrap_or(text)
    }

    /// Returns all names of current and retired checkpoints.
    #[must_use]
    pub fn names(&self) -> HashSet<&str> {
        self.checkpoints.iter().chain(&self.retired).flat_map(ManifestEntry::names).collect()
    }
}
