//! The encoding of one writer's checksums for the writers of the other shards.

use deepnvme_format::checksums::PartChecksums;
use deepnvme_format::{Error, Result};

/// Size of an entry: five little-endian 64-bit numbers.
const ENTRY_BYTES: usize = 40;

/// The checksums of a part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangedChecksums {
    pub(super) record: usize,
    pub(super) offset: u64,
    pub(super) part: PartChecksums,
}

pub(super) fn encode(entries: impl Iterator<Item = ExchangedChecksums>) -> Vec<u8> {
    let numbers = |ExchangedChecksums { record, offset, part }: ExchangedChecksums| {
        [record as u64, offset, part.bytes, u64::from(part.crc32), part.crc64]
    };
    entries.flat_map(numbers).flat_map(u64::to_le_bytes).collect()
}

pub(super) fn decode(bytes: &[u8]) -> Result<Vec<ExchangedChecksums>> {
    if !bytes.len().is_multiple_of(ENTRY_BYTES) {
        return Err(Error::Invalid(format!("the checksums of another writer have {} bytes", bytes.len())));
    }
    let entry = |bytes: &[u8]| {
        let number = |index: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[index * 8..][..8]);
            u64::from_le_bytes(number)
        };
        let too_long = |_| Error::Invalid(format!("the checksums of another writer have a CRC-32 of {:#x}", number(3)));
        let crc32 = u32::try_from(number(3)).map_err(too_long)?;
        let part = PartChecksums { bytes: number(2), crc32, crc64: number(4) };
        Ok(ExchangedChecksums { record: number(0) as usize, offset: number(1), part })
    };
    bytes.chunks_exact(ENTRY_BYTES).map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_and_damaged_ones_are_refused() {
        let part = PartChecksums { bytes: 1 << 20, crc32: u32::MAX, crc64: 7 };
        let entries = vec![
            ExchangedChecksums { record: 3, offset: 5 << 40, part },
            ExchangedChecksums { record: 0, offset: 0, part },
        ];
        let mut bytes = encode(entries.iter().copied());
        assert_eq!(decode(&bytes).unwrap(), entries);
        assert!(decode(&bytes[1..]).is_err());
        // Bit 32 of a CRC-32.
        bytes[3 * 8 + 4] = 1;
        assert!(decode(&bytes).is_err());
    }
}
