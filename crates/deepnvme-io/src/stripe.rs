//! One logical file over several part files, as RAID-0 lays out disks: where each byte lies, and the manifest.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::fs;
use crate::op::Errno;
use crate::shown;
use crate::stream::{Temporary, resolve};

/// Most parts of a stripe set.
pub const PARTS_MAX: usize = 4096;
/// Smallest stripe, and what every stripe size is a multiple of: parts keep the alignment of the whole.
pub const STRIPE_BYTES_MIN: u64 = 4096;
/// Largest stripe: a set of one row has in each part what one process wrote.
pub const STRIPE_BYTES_MAX: u64 = 1 << 44;
/// Stripe size where none is given: large enough for one op, small enough that a tensor uses every disk.
pub const STRIPE_BYTES_DEFAULT: u64 = 1 << 20;
/// Largest manifest that is read.
pub const MANIFEST_BYTES_MAX: u64 = 16 << 20;
/// What the manifest's name ends with; it lies beside the first part.
pub const MANIFEST_SUFFIX: &str = ".stripes.json";

const FORMAT: &str = "deepnvme-stripes";
/// Of a manifest that a caller's own files are listed in.
const VERSION: u32 = 1;
/// Of one that records which files are its own, and may be removed with it.
const VERSION_OWNING: u32 = 2;
/// Where in a manifest that record is.
pub(crate) const RECORD_KEY: &str = "files";

/// The parts of one logical file, in order, and the size of a stripe.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StripeSet {
    parts: Vec<PathBuf>,
    stripe_bytes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: String,
    version: u32,
    stripe_bytes: u64,
    parts: Vec<PathBuf>,
    /// For whoever replaces the set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    files: Option<serde_json::Value>,
}

impl StripeSet {
    /// A set of part files, one per disk.
    ///
    /// # Errors
    /// `InvalidInput` when there is no part, more than [`PARTS_MAX`], one twice, or the stripe size is out of range.
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
        if let Some(twice) = parts.iter().find(|part| !seen.insert(part.as_path())) {
            return Err(invalid(format!("the part {} is named twice", shown::path(twice))));
        }
        if let Some(odd) = parts.iter().find(|part| part.as_os_str().as_encoded_bytes().contains(&0)) {
            return Err(invalid(format!("the part {} has a null byte in its name; no file has", shown::path(odd))));
        }
        Ok(Self { parts, stripe_bytes })
    }

    /// The part files, in order.
    #[must_use]
    pub fn parts(&self) -> &[PathBuf] {
        &self.parts
    }

    /// Bytes of one stripe.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// Where the manifest lies: beside the first part.
    #[must_use]
    pub fn manifest_path(&self) -> PathBuf {
        let mut name = self.parts[0].clone().into_os_string();
        name.push(MANIFEST_SUFFIX);
        name.into()
    }

    /// Reads the set that a manifest names.
    ///
    /// # Errors
    /// When the manifest is missing, larger than [`MANIFEST_BYTES_MAX`], or not one.
    pub fn from_manifest(path: &Path) -> Result<Self> {
        Self::parse(&fs::read_small(path, MANIFEST_BYTES_MAX)?, path)
    }

    /// The set that a manifest's text names; `path` is where it lies, and what its parts are named from.
    ///
    /// # Errors
    /// `InvalidInput` for text that is no manifest.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let manifest: Manifest = serde_json::from_slice(text)
            .map_err(|error| invalid(format!("not a stripe manifest: {error}")).at_path(path))?;
        if manifest.format != FORMAT || !(VERSION..=VERSION_OWNING).contains(&manifest.version) {
            return Err(invalid(format!(
                "format {:?} version {}; this build reads {FORMAT:?} up to version {VERSION_OWNING}",
                manifest.format, manifest.version
            ))
            .at_path(path));
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let parts = manifest.parts.into_iter().map(|part| folder.join(part)).collect();
        Self::new(parts, manifest.stripe_bytes).map_err(|error| error.at_path(path))
    }

    /// The manifest as JSON, ready for the record of the files that are its own.
    pub(crate) fn to_manifest(&self) -> Result<serde_json::Value> {
        self.manifest(VERSION_OWNING)
    }

    /// The same parts, by names that stay right when the process changes its folder.
    pub(crate) fn absolute(&self) -> Self {
        let parts = self.parts.iter().map(|part| std::path::absolute(part).unwrap_or_else(|_| part.clone()));
        Self { parts: parts.collect(), stripe_bytes: self.stripe_bytes }
    }

    fn manifest(&self, version: u32) -> Result<serde_json::Value> {
        let (stripe_bytes, parts) = (self.stripe_bytes, self.absolute().parts);
        let manifest = Manifest { format: FORMAT.into(), version, stripe_bytes, parts, files: None };
        serde_json::to_value(&manifest)
            .map_err(|error| invalid(format!("a part's name is not UTF-8: {error}")).at_path(self.manifest_path()))
    }

    /// Writes the manifest beside the first part, where there is none: privately first, then under its name at once.
    ///
    /// # Errors
    /// When the folder refuses it; `InvalidInput` where there is the manifest of another set.
    pub fn write_manifest(&self) -> Result<()> {
        let path = self.manifest_path();
        let mut file = self.private_manifest(&path)?;
        match file.rename_new(&path) {
            Ok(()) => Ok(()),
            // Somebody else was faster; that is well if both meant the same.
            Err(Errno::EXIST) => {
                let absolute =
                    |set: &Self| set.parts.iter().map(std::path::absolute).collect::<std::io::Result<Vec<_>>>();
                let there = Self::from_manifest(&path)?;
                let is_same = there.stripe_bytes == self.stripe_bytes
                    && matches!((absolute(&there), absolute(self)), (Ok(there), Ok(own)) if there == own);
                let differs = || invalid("another set of the same name was made meanwhile; open it again".into());
                if is_same { Ok(()) } else { Err(differs().at_path(path)) }
            }
            Err(errno) => Err(Error::os("write stripe manifest", errno).at_path(path)),
        }
    }

    /// Writes the manifest under that path, replacing what is there at once.
    ///
    /// # Errors
    /// When the folder refuses it.
    pub fn write_manifest_to(&self, path: &Path) -> Result<()> {
        let path = resolve(path)?;
        let renamed = self.private_manifest(&path)?.rename(&path);
        renamed.map_err(|errno| Error::os("write stripe manifest", errno).at_path(path))
    }

    fn private_manifest(&self, path: &Path) -> Result<Temporary> {
        let text = self.manifest(VERSION)?.to_string();
        let file = Temporary::new(path)?;
        file.fill(text.as_bytes()).map_err(|error| error.at_path(path))?;
        file.take_mode_of(path)?;
        Ok(file)
    }
}

fn invalid(detail: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "stripe set", detail)
}

/// The arithmetic of a layout: which part holds a logical byte. One part is the identity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Part files, at least 1.
    pub parts: u64,
    /// Bytes of one stripe; `u64::MAX` where there is one part.
    pub stripe_bytes: u64,
}

impl Layout {
    /// A plain file.
    pub const SINGLE: Self = Self { parts: 1, stripe_bytes: u64::MAX };

    /// The part of the byte at `offset`, and its offset there.
    #[must_use]
    pub fn locate(self, offset: u64) -> (usize, u64) {
        if self.parts == 1 {
            return (0, offset);
        }
        let stripe = offset / self.stripe_bytes;
        let within = offset % self.stripe_bytes;
        ((stripe % self.parts) as usize, stripe / self.parts * self.stripe_bytes + within)
    }

    /// Bytes of part `part` when the logical file has `bytes`.
    #[must_use]
    pub fn part_bytes(self, bytes: u64, part: usize) -> u64 {
        if self.parts == 1 {
            return bytes;
        }
        let row = self.stripe_bytes * self.parts;
        let rest = bytes % row;
        let before = self.stripe_bytes * part as u64;
        bytes / row * self.stripe_bytes + rest.saturating_sub(before).min(self.stripe_bytes)
    }

    /// Logical bytes of a file whose part `part` has `part_bytes`: where that part's last byte ends.
    #[must_use]
    pub fn logical_end(self, part: usize, part_bytes: u64) -> u64 {
        if self.parts == 1 || part_bytes == 0 {
            return part_bytes;
        }
        let last = part_bytes - 1;
        let stripe = last / self.stripe_bytes * self.parts + part as u64;
        stripe * self.stripe_bytes + last % self.stripe_bytes + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_has_one_place_and_sizes_add_up(parts in 1u64..9, stripes in 1u64..5, bytes in 0u64..400_000) {
            let layout = if parts == 1 { Layout::SINGLE } else { Layout { parts, stripe_bytes: stripes * 4096 } };
            let sizes: Vec<u64> = (0..parts as usize).map(|part| layout.part_bytes(bytes, part)).collect();
            prop_assert_eq!(sizes.iter().sum::<u64>(), bytes);
            let logical = sizes.iter().enumerate().map(|(part, size)| layout.logical_end(part, *size)).max();
            prop_assert_eq!(logical, Some(bytes));
            for offset in (0..bytes).step_by(1733) {
                let (part, at) = layout.locate(offset);
                prop_assert!(at < sizes[part]);
                prop_assert_eq!(layout.logical_end(part, at + 1), offset + 1);
            }
        }
    }

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
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text}");
            assert_eq!(error.path(), Some(set.manifest_path().as_path()));
        }
    }
}
