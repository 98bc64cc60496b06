//! The mount of a folder, from `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use deepnvme_io::display;
use serde::Serialize;

use crate::system_files::SystemFiles;

/// One mount.
#[derive(Clone, Debug, Default, Serialize, PartialEq, Eq)]
pub struct Mount {
    /// `ext4`, `xfs`, `tmpfs`, `nfs4`.
    pub file_system: String,
    /// The device, the server, or a plain word.
    pub source: String,
    /// The mount point.
    #[serde(rename = "mount_point", serialize_with = "display::serialize")]
    pub point: PathBuf,
    /// The options of the mount and of the file system.
    #[serde(rename = "mount_options")]
    pub options: Vec<String>,
    /// The device number: `8:1`. Anonymous file systems have major number 0.
    #[serde(skip)]
    pub device: String,
}

/// Finds the mount of an absolute path without links: the deepest mount point above it. Of several mounts on one point
/// the last covers the others.
pub(super) fn of(files: &SystemFiles, path: &Path) -> Option<Mount> {
    let text = files.text("/proc/self/mountinfo")?;
    let above = text.lines().filter_map(parse).filter(|mount| path.starts_with(&mount.point));
    above.max_by_key(|mount| mount.point.components().count())
}

fn parse(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(2);
    let (device, _root, point, options) = (left.next()?, left.next()?, left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (file_system, source, super_options) = (right.next()?, right.next()?, right.next().unwrap_or_default());
    let mut all: Vec<String> = Vec::new();
    for option in options.split(',').chain(super_options.split(',')).filter(|option| !option.is_empty()) {
        if !all.iter().any(|known| known == option) {
            all.push(unescape(option));
        }
    }
    Some(Mount {
        point: PathBuf::from(OsString::from_vec(unescaped(point))),
        device: device.into(),
        file_system: file_system.into(),
        source: unescape(source),
        options: all,
    })
}

/// Decodes the kernel's octal escapes of white space and backslashes: `\040`.
fn unescape(text: &str) -> String {
    String::from_utf8_lossy(&unescaped(text)).into_owned()
}

fn unescaped(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let value = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        out.push(value.unwrap_or(bytes[at]));
        at += if value.is_some() { 4 } else { 1 };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:30 / /data rw - tmpfs none rw,size=1g
31 22 259:1 / /data rw,noatime - xfs /dev/nvme0n1p1 rw,attr2
32 22 0:40 /sub /with\\040blank rw - nfs4 server:/export rw,vers=4.2
";

    fn at(path: &str) -> Mount {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("proc/self")).unwrap();
        std::fs::write(folder.path().join("proc/self/mountinfo"), LINES).unwrap();
        of(&SystemFiles::at(folder.path()), Path::new(path)).unwrap()
    }

    #[test]
    fn the_deepest_and_last_mount_wins() {
        assert_eq!(at("/elsewhere/x").source, "/dev/vda");
        assert_eq!(at("/data/models").file_system, "xfs");
        assert_eq!(at("/database").file_system, "ext4", "a common prefix is not a parent folder");
        assert_eq!(at("/with blank/x").source, "server:/export");
        assert_eq!(at("/data").options, ["rw", "noatime", "attr2"]);
        assert_eq!(at("/data").device, "259:1");
    }

    #[test]
    fn only_octal_escapes_are_decoded() {
        assert_eq!(unescape(r"a\040b\134c"), r"a b\c");
        assert_eq!(unescape(r"a\09\"), r"a\09\");
    }
}
