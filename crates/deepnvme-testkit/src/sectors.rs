//! Writes that a power cut tears: some of their sectors are on the disk, and others are not.

/// A power cut tears a write between sectors, never inside one.
pub const SECTOR_BYTES: usize = 512;

/// Writes the sectors for which `keep` returns true into the image, which grows if they are past its end. `keep` gets
/// the number of each sector in the file.
pub fn write_sectors(image: &mut Vec<u8>, offset: usize, bytes: &[u8], mut keep: impl FnMut(usize) -> bool) {
    let end = offset + bytes.len();
    let mut start = offset;
    while start < end {
        let sector_end = ((start / SECTOR_BYTES + 1) * SECTOR_BYTES).min(end);
        if keep(start / SECTOR_BYTES) {
            if image.len() < sector_end {
                image.resize(sector_end, 0);
            }
            image[start..sector_end].copy_from_slice(&bytes[start - offset..sector_end - offset]);
        }
        start = sector_end;
    }
}
