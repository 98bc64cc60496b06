//! `manifest.json`: the checkpoints that count, and the files that stopped counting but may not be gone yet.

use std::collections::BTreeMap;

use deepnvme_format::set;
use serde::{Deserialize, Serialize};

use super::names;

/// The file's name.
pub const MANIFEST: &str = "manifest.json";
/// The largest manifest that is read.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;
const VERSION: u32 = 2;
/// Versions that are read. The first one had neither private names nor retired checkpoints.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=VERSION;

/// One of the files of a checkpoint that several processes wrote, each one of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its name.
    pub file: String,
    /// Bytes of it.
    pub nbytes: u64,
    /// The machine that wrote it.
    pub host: String,
    /// CRC-64/NVME of its first bytes, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_crc64: Option<String>,
}

/// One checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its file, the list of its parts, or its folder.
    pub file: String,
    /// The step that it was saved at.
    pub step: u64,
    /// Bytes of the file, or of all.
    pub nbytes: u64,
    /// When it was saved.
    pub time: String,
    /// Where its index begins.
    pub index_offset: u64,
    /// Bytes of the index.
    pub index_nbytes: u64,
    /// CRC-64/NVME of the index, in hexadecimal.
    pub index_crc64: String,
    /// The version of torch that saved it.
    pub torch: String,
    /// The version of deepnvme that saved it.
    pub deepnvme: String,
    /// The files of one in parts, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Final names, and the private names that the files have until they get them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pending: BTreeMap<String, String>,
}

impl Entry {
    /// Whether it is a folder.
    #[must_use]
    pub fn is_folder(&self) -> bool {
        !self.file.contains('.')
    }

    /// All names that it has or will have: final ones, then private ones.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let parts = self.parts.iter().map(|part| part.file.as_str());
        std::iter::once(self.file.as_str()).chain(parts).chain(self.pending.values().map(String::as_str))
    }

    fn is_sound(&self) -> bool {
        let finals = std::iter::once(&self.file).chain(self.parts.iter().map(|part| &part.file));
        names::is_checkpoint(&self.file)
            && finals.clone().all(|name| names::is_checkpoint(name))
            && self.pending.iter().all(|(name, private)| {
                finals.clone().any(|listed| listed == name) && names::is_private_of(private, name)
            })
    }
}

/// What a manifest says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The sum of the text, in the text only.
    #[serde(rename = "deepnvme.checksum", default, skip_serializing_if = "String::is_empty")]
    pub(super) checksum: String,
    /// The version of the format.
    pub version: u32,
    /// The checkpoints that count, the oldest step first.
    pub checkpoints: Vec<Entry>,
    /// Checkpoints that stopped counting, as long as their removal is not known to be complete.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<Entry>,
}

impl Manifest {
    /// One that lists nothing.
    #[must_use]
    pub fn empty() -> Self {
        Self { version: VERSION, ..Self::default() }
    }

    /// Understands its text. Names that no checkpoint of this library has are refused: nothing else may be moved or
    /// removed because a manifest says so.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        if set::state(text) == set::State::Damaged {
            return Err(format!(
                "some of it is not as it was written: its checksum does not match. Put back a copy of it; if you \
                 have edited it, remove {:?} from it",
                set::CHECKSUM_KEY
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
            return Err(format!("{:?} is no checkpoint of this folder", odd.file));
        }
        manifest.checkpoints.sort_by_key(|entry| entry.step);
        Ok(manifest)
    }

    /// Its text.
    #[must_use]
    pub fn text(&self) -> String {
        let sealed = Self { checksum: set::BLANK.into(), ..self.clone() };
        // Strings, numbers and lists of them cannot fail to be written, and the text has a blank.
        let text = serde_json::to_string_pretty(&sealed).unwrap_or_default() + "\n";
        set::seal(&text).unwrap_or(text)
    }

    /// Whether any checkpoint has that name, or had it and may have it still.
    #[must_use]
    pub fn knows(&self, name: &str) -> bool {
        self.checkpoints.iter().chain(&self.retired).any(|entry| entry.names().any(|known| known == name))
    }
}
