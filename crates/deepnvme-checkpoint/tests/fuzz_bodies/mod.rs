//! What is tried with any bytes, and what must hold of what is accepted: the manifest of a folder of checkpoints.
#![allow(dead_code, unreachable_pub, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use std::path::{Component, Path};

use deepnvme_checkpoint::history::Manifest;

/// `manifest.json`.
pub fn history(text: &[u8]) {
    let Ok(manifest) = Manifest::parse(text) else { return };
    assert!(manifest.checkpoints.is_sorted_by_key(|entry| entry.step));
    for entry in manifest.checkpoints.iter().chain(&manifest.retired) {
        for name in entry.names() {
            // A file of the folder itself, and one that only checkpoints are called.
            let parts: Vec<Component<'_>> = Path::new(name).components().collect();
            assert!(matches!(parts[..], [Component::Normal(part)] if part == name) && !name.contains('\0'), "{name:?}");
            assert!(name.starts_with("step-") || name.starts_with(".step-"), "{name:?}");
            assert!(manifest.knows(name));
        }
    }
    assert_eq!(Manifest::parse(manifest.text().as_bytes()).unwrap(), manifest);
}
