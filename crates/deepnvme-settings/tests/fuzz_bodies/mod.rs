//! Parses any bytes as `deepnvme.toml`, and checks the invariants of accepted settings.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is a finding")]

use std::path::Path;

use deepnvme_settings::SettingsFile;

/// The body of the fuzz target `settings`.
pub(crate) fn settings(text: &[u8]) {
    let Ok(settings) = SettingsFile::parse(text, Path::new("deepnvme.toml")) else { return };
    settings.engine.validate().unwrap();
    let again = settings.to_toml().unwrap();
    assert_eq!(SettingsFile::parse(again.as_bytes(), Path::new("again")).unwrap(), settings);
    for folder in &settings.folders {
        settings.of(Some(&folder.path), None).validate().unwrap();
    }
}
