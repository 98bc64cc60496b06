//! The files and folders that a durable write syncs after its last block.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Durability, Request};
use crate::error::{Error, Result};
use crate::op::OpKind;
use crate::split::IoMode;

/// A file or folder to sync.
#[derive(Debug)]
pub(crate) struct SyncTarget {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) kind: OpKind,
    pub(crate) path: PathBuf,
}

/// Returns the descriptors to sync after a write: each part, and for full durability each folder that contains the name
/// of a part.
pub(super) fn sync_targets(request: &Request) -> Result<Vec<SyncTarget>> {
    let kind = match request.options.durability {
        Durability::None => return Ok(Vec::new()),
        Durability::Data => OpKind::SyncData,
        Durability::Full => OpKind::SyncAll,
    };
    let mut targets = Vec::new();
    let mut folders = BTreeSet::new();
    for file in request.files().iter() {
        for part in file.parts() {
            let (descriptor, path) = (part.descriptor(IoMode::Direct)?, part.path().to_path_buf());
            if request.options.durability == Durability::Full && part.has_name() {
                folders.extend(part.folder().map(Path::to_path_buf));
            }
            targets.push(SyncTarget { file: descriptor, kind, path });
        }
    }
    for folder in folders {
        let fd = crate::fs::open_folder(&folder)
            .map_err(|errno| Error::os("open folder to sync", errno).at_path(&folder))?;
        targets.push(SyncTarget { file: Arc::new(fd), kind: OpKind::SyncAll, path: folder });
    }
    Ok(targets)
}
