//! What is tried with any bytes, and what must hold of what is accepted: the list of a stripe set.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is a finding")]

use std::collections::HashSet;
use std::path::Path;

use deepnvme_format::set;
use deepnvme_io::StripeSet;
use deepnvme_io::stripe::{Layout, PARTS_MAX, STRIPE_BYTES_MAX, STRIPE_BYTES_MIN};

/// The list of a stripe set. One with a blank checksum gets the right one: others hardly come further than that.
pub(crate) fn stripes(text: &[u8]) {
    let path = Path::new("/folder/a.stripes.json");
    let sealed = std::str::from_utf8(text).ok().and_then(|text| set::seal(text).ok());
    let Ok(set) = StripeSet::parse(sealed.as_deref().map_or(text, str::as_bytes), path) else { return };
    assert_eq!(StripeSet::parse(set.to_list().unwrap().as_bytes(), path).unwrap(), set);
    let parts: HashSet<&Path> = set.parts().iter().map(AsRef::as_ref).collect();
    assert!(parts.len() == set.parts().len() && (1..=PARTS_MAX).contains(&parts.len()));
    assert!((STRIPE_BYTES_MIN..=STRIPE_BYTES_MAX).contains(&set.stripe_bytes()));
    let parts = set.parts().len() as u64;
    let stripe_bytes = if parts == 1 { u64::MAX } else { set.stripe_bytes() };
    let layout = Layout { parts, stripe_bytes };
    for offset in [0, 1, stripe_bytes - 1, 1 << 40, (1 << 62) - 1] {
        let (part, at) = layout.locate(offset);
        assert!(part < set.parts().len());
        assert_eq!(layout.logical_end(part, at + 1), offset + 1);
    }
}
