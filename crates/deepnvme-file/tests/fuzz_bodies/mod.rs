//! Properties that hold for any bytes: of a stripe set's manifest, and of the lists that a killed save leaves.
#![allow(dead_code, reason = "every target uses its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is a finding")]

mod leftovers;

use std::collections::HashSet;
use std::path::Path;

use deepnvme_file::StripeSet;
use deepnvme_file::stripe_set::{PARTS_MAX, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN};
use deepnvme_format::file_list;

#[allow(unused_imports, reason = "every target uses its own")]
pub(crate) use leftovers::{contents, intent, record};

/// Parses a stripe manifest. A blank checksum is filled in, since other checksums are rejected early.
pub(crate) fn stripes(text: &[u8]) {
    let path = Path::new("/folder/a.stripes.json");
    let with_checksum = std::str::from_utf8(text).ok().and_then(|text| file_list::write_checksum(text).ok());
    let Ok(set) = StripeSet::parse(with_checksum.as_deref().map_or(text, str::as_bytes), path) else { return };
    assert_eq!(StripeSet::parse(set.to_list().unwrap().as_bytes(), path).unwrap(), set);
    let parts: HashSet<&Path> = set.parts().iter().map(AsRef::as_ref).collect();
    assert!(parts.len() == set.parts().len() && (1..=PARTS_MAX).contains(&parts.len()));
    assert!((STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&set.stripe_bytes()));
    let layout = set.layout();
    for offset in [0, 1, layout.stripe_bytes - 1, 1 << 40, (1 << 62) - 1] {
        let (part, at) = layout.locate(offset);
        assert!(part < set.parts().len());
        assert_eq!(layout.logical_end(part, at + 1), offset + 1);
    }
}
