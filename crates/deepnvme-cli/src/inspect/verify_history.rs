//! Verifies the folder of a `Checkpointer`: its manifest, and the checkpoints that it lists.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use deepnvme_checkpoint::history::{self, Listed, ManifestEntry};
use deepnvme_file::{StripeSet, Target};
use deepnvme_io::op::Errno;
use deepnvme_io::{ErrorKind, display, fs};
use deepnvme_perf::{Error, Result};

use super::files::failed;
use super::names::{checkpoints_by_name, names_in};
use super::verify::{Coverage, REPLACEMENTS_MAX, Verdict, Verification, Verifier, compared, is_sound, unverified};

impl Verifier<'_> {
    /// Verifies the manifest, the checkpoints that it lists, and the others of the folder.
    pub(super) fn verify_history(&self, folder: &Path, listed: &Listed) -> Result<Vec<Verification>> {
        let mut found = Vec::with_capacity(listed.checkpoints.len() + 1);
        if listed.has_checksum {
            found.push(compared(&listed.path, Instant::now(), Ok((listed.bytes, Coverage::File)))?);
        }
        let mut entries = listed.checkpoints.clone();
        let mut verified = Vec::with_capacity(entries.len());
        for (entry, path) in &entries {
            verified.push(self.verify_entry(entry, path));
        }
        for _ in 0..REPLACEMENTS_MAX {
            if verified.iter().all(is_sound) {
                break;
            }
            self.progress.check().map_err(failed)?;
            // An unsound one may have been renamed or removed since the manifest was read.
            let now = history::listed(folder).map_err(failed)?;
            let now = now.into_iter().flat_map(|now| now.checkpoints);
            let now: HashMap<String, _> = now.map(|found| (found.0.file.clone(), found)).collect();
            let (mut is_changed, mut kept) = (false, Vec::with_capacity(entries.len()));
            for (before, files) in entries.into_iter().zip(verified) {
                match now.get(&before.0.file) {
                    _ if is_sound(&files) => kept.push((before, files)),
                    Some(after) if *after != before => {
                        is_changed = true;
                        kept.push((after.clone(), self.verify_entry(&after.0, &after.1)));
                    }
                    Some(_) => kept.push((before, files)),
                    None => {}
                }
            }
            (entries, verified) = kept.into_iter().unzip();
            if !is_changed {
                break;
            }
        }
        for files in verified {
            found.extend(files?);
        }
        let known: HashSet<PathBuf> =
            listed.checkpoints.iter().chain(&entries).flat_map(|(entry, path)| files_of(entry, path)).collect();
        let mut others = checkpoints_by_name(folder, &names_in(folder)?);
        others.retain(|other| !known.contains(&other.entry) && !known.contains(&other.path));
        self.verify_others(others, &mut found)?;
        Ok(found)
    }

    /// Verifies one checkpoint of a `Checkpointer` by the manifest and by its own checksums.
    fn verify_entry(&self, entry: &ManifestEntry, path: &Path) -> Result<Vec<Verification>> {
        self.progress.check().map_err(failed)?;
        let differs = |finding: String| {
            Ok(vec![unverified(path, Verdict::Damaged, format!("{}: {finding}", display::path(path)))])
        };
        if !fs::exists(path).unwrap_or(true) {
            return differs(format!("{} lists it, but it is missing", history::MANIFEST));
        }
        let checked = if entry.parts.is_empty() || entry.pending.is_empty() {
            match self.verify_path(path) {
                Ok(None) => return differs("all of its files are missing".into()),
                checked => checked.map(Option::unwrap_or_default),
            }
        } else {
            self.verify_pending_parts(entry, path)
        };
        match &checked {
            Err(Error::Engine(error)) if error.kind() == ErrorKind::NotFound => {
                differs(format!("some of its files are missing: {error}"))
            }
            Err(Error::Engine(error)) if is_no_file(error) => {
                differs(format!("{} lists it, but it is not a checkpoint: {error}", history::MANIFEST))
            }
            Ok(files) if files.iter().all(|file| file.verdict != Verdict::Damaged) => {
                if history::is_as_listed(path, &entry.file, entry).map_err(failed)? {
                    checked
                } else {
                    differs(format!("{} lists another checkpoint of that name", history::MANIFEST))
                }
            }
            _ => checked,
        }
    }

    /// Verifies a checkpoint in parts, some of which may still have private names, as may their list.
    fn verify_pending_parts(&self, entry: &ManifestEntry, list: &Path) -> Result<Vec<Verification>> {
        let began = Instant::now();
        let folder = list.parent().unwrap_or(Path::new("."));
        let set = StripeSet::from_manifest(list).and_then(|set| {
            let parts = entry.parts.iter().map(|part| history::find_file(folder, &part.file, entry)).collect();
            StripeSet::new(parts, set.stripe_bytes())
        });
        let verified = set.map_err(Into::into).and_then(|set| self.verify_target(Target::Stripes(set), |_, _| Ok(())));
        Ok(vec![compared(list, began, verified)?])
    }
}

/// The paths of a listed checkpoint's files, which may not have their final names yet.
fn files_of(entry: &ManifestEntry, path: &Path) -> Vec<PathBuf> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let parts = entry.parts.iter().map(|part| folder.join(&part.file));
    [path.to_path_buf(), folder.join(&entry.file)].into_iter().chain(parts).collect()
}

/// Returns whether the path is not a file: a pipe, a socket, or a loop of links.
fn is_no_file(error: &deepnvme_io::Error) -> bool {
    let errno = error.errno().map(Errno::from_raw_os_error);
    error.kind() == ErrorKind::InvalidInput || matches!(errno, Some(Errno::LOOP | Errno::NXIO))
}
