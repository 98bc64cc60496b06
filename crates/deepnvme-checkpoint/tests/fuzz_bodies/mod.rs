//! Properties of a checkpoint manifest that hold for any bytes.
#![allow(dead_code, unreachable_pub, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, reason = "a panic is a finding")]

use std::path::{Component, Path};

use deepnvme_checkpoint::history::Manifest;

/// Parses `manifest.json`.
pub fn history(text: &[u8]) {
    let Ok(manifest) = Manifest::parse(text) else { return };
    for entry in manifest.checkpoints.iter().chain(&manifest.retired) {
        for name in entry.names() {
            // A file in the folder itself, with a checkpoint's name.
            let parts: Vec<Component<'_>> = Path::new(name).components().collect();
            assert!(matches!(parts[..], [Component::Normal(part)] if part == name) && !name.contains('\0'), "{name:?}");
            assert!(name.starts_with("step-") || name.starts_with(".step-"), "{name:?}");
            assert!(manifest.knows(name));
        }
    }
    assert_eq!(Manifest::parse(manifest.text().as_bytes()).unwrap(), manifest);
}
