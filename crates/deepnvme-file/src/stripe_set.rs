//! One logical file over several part files, striped as in RAID-0. A manifest lists the parts. `replace` writes it.
//!
//! A manifest contains a checksum of itself ([`deepnvme_format::file_list`]). Version 1 may omit it: such manifests are
//! written by hand, or edited after a disk was mounted elsewhere.

use std::path::{Path, PathBuf};

use deepnvme_format::file_list::{self, SealState};
use serde::{Deserialize, Serialize};

use deepnvme_io::display;
use deepnvme_io::fs;
use deepnvme_io::{Error, ErrorKind, Result, StripeLayout};

/// Maximum number of parts of a stripe set.
pub const PARTS_MAX: usize = 4096;
/// Smallest stripe. Every stripe size is a multiple of it, so that parts keep the alignment of the whole.
pub const STRIPE_BYTES_MIN: u64 = 4096;
/// Largest stripe. It is this large because each part may be one stripe that contains all data of one process.
pub const STRIPE_BYTES_MAX: u64 = 1 << 44;
/// Default stripe size: large enough for one op, small enough that a tensor uses every disk.
pub const STRIPE_BYTES_DEFAULT: u64 = 1 << 20;
/// Maximum size of a manifest.
pub const MANIFEST_BYTES_MAX: u64 = 16 << 20;
/// Suffix of a manifest's name. The manifest lies next to the first part.
pub const MANIFEST_SUFFIX: &str = ".stripes.json";

const FORMAT: &str = "deepnvme-stripes";
/// Version of a manifest that may omit its checksum.
const VERSION_WITHOUT_CHECKSUM: u32 = 1;
/// Version of a manifest that requires a checksum.
const VERSION: u32 = 2;
/// Key of the ownership record in a manifest.
pub(crate) const RECORD_KEY: &str = "files";

/// The parts of one logical file, in order, and the stripe size.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StripeSet {
    parts: Vec<PathBuf>,
    stripe_bytes: u64,
    /// The manifest that lists the parts, if its path is not that of the first part plus the suffix. Parts that replace
    /// others have new names, but their manifest keeps its name.
    manifest: Option<PathBuf>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: String,
    version: u32,
    stripe_bytes: u64,
    parts: Vec<PathBuf>,
    /// The ownership record, for replacing the set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    files: Option<serde_json::Value>,
    #[serde(rename = "deepnvme.checksum", default, skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
}

impl StripeSet {
    /// Creates a set of part files, one per disk.
    ///
    /// # Errors
    /// `InvalidInput` for no parts, more than [`PARTS_MAX`], a duplicate part, a null byte in a name, or a stripe size
    /// that is out of range or no multiple of [`STRIPE_BYTES_MIN`].
    pub fn new(parts: Vec<PathBuf>, stripe_bytes: u64) -> Result<Self> {
        if parts.is_empty() || parts.len() > PARTS_MAX {
            return Err(invalid(format!("a stripe set has 1 to {PARTS_MAX} parts, not {}", parts.len())));
        }
        let in_range = (STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&stripe_bytes);
        if !in_range || !stripe_bytes.is_multiple_of(STRIPE_BYTES_MIN) {
            return Err(invalid(format!(
                "stripe_bytes is {stripe_bytes}; it must be a multiple of {STRIPE_BYTES_MIN}, up to {STRIPE_BYTES_MAX}"
            )));
        }
        let mut seen = std::collections::HashSet::new();
        // Links are found when the parts are opened.
        let absolute = |part: &PathBuf| std::path::absolute(part).unwrap_or_else(|_| part.clone());
        if let Some(twice) = parts.iter().find(|part| !seen.insert(absolute(part))) {
            return Err(invalid(format!(
                "the part {} is named twice; name one file on each drive",
                display::path(twice)
            )));
        }
        if let Some(odd) = parts.iter().find(|part| part.as_os_str().as_encoded_bytes().contains(&0)) {
            return Err(invalid(format!("the part {} has a null byte in its name; no file has", display::path(odd))));
        }
        Ok(Self { parts, stripe_bytes, manifest: None })
    }

    /// Returns the part files, in order.
    #[must_use]
    pub fn parts(&self) -> &[PathBuf] {
        &self.parts
    }

    /// Returns the stripe size.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// Returns the mapping from bytes to parts.
    #[must_use]
    pub fn layout(&self) -> StripeLayout {
        match self.parts.len() {
            1 => StripeLayout::SINGLE,
            count => StripeLayout { parts: count as u64, stripe_bytes: self.stripe_bytes },
        }
    }

    /// Returns the path of the manifest: the one that the set was read from, or next to the first part.
    #[must_use]
    pub fn manifest_path(&self) -> PathBuf {
        self.manifest.clone().unwrap_or_else(|| self.default_manifest())
    }

    /// Returns the same parts as listed by that manifest.
    #[must_use]
    pub fn listed_by(mut self, manifest: PathBuf) -> Self {
        self.manifest = (manifest != self.default_manifest()).then_some(manifest);
        self
    }

    /// Returns whether the parts have the names that the caller gave, and not those of a replacement.
    pub(crate) fn is_named_by_caller(&self) -> bool {
        self.manifest.is_none()
    }

    fn default_manifest(&self) -> PathBuf {
        let mut name = self.parts[0].clone().into_os_string();
        name.push(MANIFEST_SUFFIX);
        name.into()
    }

    /// Reads a stripe set from its manifest.
    ///
    /// # Errors
    /// If the manifest is missing, larger than [`MANIFEST_BYTES_MAX`], or invalid.
    pub fn from_manifest(path: &Path) -> Result<Self> {
        Self::parse(&fs::read_small(path, MANIFEST_BYTES_MAX)?, path)
    }

    /// Like [`from_manifest`](Self::from_manifest). Returns `None` if the manifest does not exist.
    ///
    /// # Errors
    /// As [`from_manifest`](Self::from_manifest).
    pub(crate) fn find(path: &Path) -> Result<Option<Self>> {
        fs::read_small_if_there(path, MANIFEST_BYTES_MAX)?.map(|text| Self::parse(&text, path)).transpose()
    }

    /// Parses a manifest. `path` is the manifest's path: relative part names start in its folder.
    ///
    /// # Errors
    /// `Corrupt` if the text is not a manifest, or differs from its checksum.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self> {
        Self::parsed(text, path).map_err(|detail| Error::new(ErrorKind::Corrupt, "stripe set", detail).at_path(path))
    }

    fn parsed(text: &[u8], path: &Path) -> Result<Self, String> {
        let edited = || {
            format!(
                "if you have edited it, remove {:?} from it, and make its \"version\" {VERSION_WITHOUT_CHECKSUM}",
                file_list::CHECKSUM_KEY
            )
        };
        let state = file_list::seal_state(text);
        if state == SealState::Damaged {
            let damaged = "some of it is not as it was written: its checksum does not match. Put back a copy of it";
            return Err(format!("{damaged}; {}", edited()));
        }
        let manifest: Manifest =
            serde_json::from_slice(text).map_err(|error| format!("not a stripe manifest: {error}"))?;
        if manifest.format != FORMAT || !(VERSION_WITHOUT_CHECKSUM..=VERSION).contains(&manifest.version) {
            let Manifest { format, version, .. } = manifest;
            return Err(format!("format {format:?} version {version}; this build reads {FORMAT:?} up to {VERSION}"));
        }
        if state == SealState::Unsealed && manifest.version != VERSION_WITHOUT_CHECKSUM {
            return Err(format!("it has no checksum. Put back a copy of it; {}", edited()));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let parts = manifest.parts.into_iter().map(|part| folder.join(part)).collect();
        let set = Self::new(parts, manifest.stripe_bytes).map_err(|error| error.detail().to_owned())?;
        Ok(set.listed_by(path.to_path_buf()))
    }

    /// Returns the manifest for that path as JSON, ready for the ownership record and for [`file_list::write_checksum`].
    pub(crate) fn to_manifest(&self, manifest: &Path) -> Result<serde_json::Value> {
        self.recorded(manifest).manifest()
    }

    /// Returns the text of a manifest that names the parts as this set does. Relative names start in the manifest's
    /// folder.
    ///
    /// # Errors
    /// `InvalidInput` if a name is not UTF-8.
    pub fn to_list(&self) -> Result<String> {
        let refused = |error: serde_json::Error| invalid(format!("cannot be written: {error}"));
        let text = serde_json::to_string_pretty(&self.manifest()?).map_err(refused)? + "\n";
        file_list::write_checksum(&text).map_err(|error| invalid(error.to_string()))
    }

    /// Returns the same parts by absolute paths, which stay valid when the process changes its folder.
    pub(crate) fn absolute(&self) -> Self {
        let parts = self.parts.iter().map(|part| std::path::absolute(part).unwrap_or_else(|_| part.clone()));
        let manifest = self.manifest.as_deref().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.into()));
        Self { parts: parts.collect(), stripe_bytes: self.stripe_bytes, manifest }
    }

    /// Returns the same parts as a manifest names them: by file name in its folder, else by absolute paths. So a folder
    /// that is copied or moved with its manifest does not lead back to the parts of the original.
    pub(crate) fn recorded(&self, manifest: &Path) -> Self {
        let Self { mut parts, stripe_bytes, .. } = self.absolute();
        let manifest = std::path::absolute(manifest).unwrap_or_else(|_| manifest.to_path_buf());
        let folder = fs::folder_of(&manifest);
        for part in &mut parts {
            if fs::folder_of(part) == folder
                && let Some(name) = part.file_name()
            {
                *part = name.into();
            }
        }
        Self { parts, stripe_bytes, manifest: None }
    }

    fn manifest(&self) -> Result<serde_json::Value> {
        let (stripe_bytes, parts) = (self.stripe_bytes, self.parts.clone());
        let (format, checksum) = (FORMAT.into(), Some(file_list::BLANK.into()));
        let manifest = Manifest { format, version: VERSION, stripe_bytes, parts, files: None, checksum };
        serde_json::to_value(&manifest)
            .map_err(|error| invalid(format!("a part's name is not UTF-8: {error}")).at_path(self.manifest_path()))
    }
}

pub(crate) fn invalid(detail: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "stripe set", detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn the_manifest_comes_back_and_hostile_ones_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let parts = vec![folder.path().join("a"), folder.path().join("b")];
        let set = StripeSet::new(parts.clone(), 8192).unwrap();
        set.write_manifest().unwrap();
        assert_eq!(StripeSet::from_manifest(&set.manifest_path()).unwrap(), set);
        assert_eq!(StripeSet::new(parts, 5000).unwrap_err().kind(), ErrorKind::InvalidInput);
        for text in [
            "",
            "[]",
            r#"{"format":"deepnvme-stripes","version":1,"stripe_bytes":0,"parts":["a"]}"#,
            r#"{"format":"deepnvme-stripes","version":1,"stripe_bytes":4096,"parts":[]}"#,
            r#"{"format":"deepnvme-stripes","version":9,"stripe_bytes":4096,"parts":["a"]}"#,
        ] {
            std::fs::write(set.manifest_path(), text).unwrap();
            let error = StripeSet::from_manifest(&set.manifest_path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}");
            assert_eq!(error.path(), Some(set.manifest_path().as_path()));
        }
    }

    #[test]
    fn every_byte_of_a_list_that_was_changed_put_in_or_taken_out_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let set = StripeSet::new(["a", "b"].map(|name| folder.path().join(name)).to_vec(), 8192).unwrap();
        set.write_manifest().unwrap();
        let text = std::fs::read(set.manifest_path()).unwrap();
        let refused = |text: &[u8]| match StripeSet::parse(text, Path::new("/a.stripes.json")) {
            Err(error) => error.kind() == ErrorKind::Corrupt,
            Ok(_) => false,
        };
        assert!(!refused(&text));
        for at in 0..=text.len() {
            let (before, after) = text.split_at(at);
            for value in 0..=u8::MAX {
                assert!(refused(&[before, &[value], after].concat()), "{value} put in at {at}");
                if let Some((byte, after)) = after.split_first()
                    && *byte != value
                {
                    assert!(refused(&[before, &[value], after].concat()), "byte {at} as {value}");
                }
            }
            for count in 1..=after.len() {
                assert!(refused(&[before, &after[count..]].concat()), "{count} bytes less at {at}");
            }
        }
    }

    #[test]
    fn a_list_without_a_checksum_is_one_that_says_so() {
        let path = Path::new("/folder/a.stripes.json");
        let list = |version: u32, more: &str| {
            let text = format!(
                r#"{{"format": "deepnvme-stripes", "version": {version}, "stripe_bytes": 4096, "parts": ["a", "/b"]{more}}}"#
            );
            StripeSet::parse(text.as_bytes(), path)
        };
        assert_eq!(list(1, "").unwrap().parts(), [Path::new("/folder/a"), Path::new("/b")]);
        assert!(list(1, r#", "files": {}"#).is_ok());
        let told = list(2, "").unwrap_err().to_string();
        assert!(told.contains("no checksum") && told.contains("\"version\" 1"), "{told}");
        let blank = list(1, &format!(r#", "deepnvme.checksum": "{}""#, file_list::BLANK)).unwrap_err();
        assert!(blank.to_string().contains("does not match"), "{blank}");
    }
}
