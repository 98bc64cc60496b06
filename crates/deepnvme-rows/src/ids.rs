//! The numbers of the rows that a caller asks for.

use crate::error::{Error, Result};

/// The type of ids.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IdType {
    /// Unsigned, of this many bytes: 1, 2, 4 or 8.
    Unsigned(usize),
    /// Signed, of this many bytes: 1, 2, 4 or 8.
    Signed(usize),
}

impl IdType {
    /// Returns the bytes of an id.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Unsigned(bytes) | Self::Signed(bytes) => bytes,
        }
    }
}

/// Decodes ids, in the byte order of this machine.
///
/// # Errors
/// `NoSuchRow` for the first id that is negative, or not below `rows`. `Invalid` if the bytes end within an id.
pub fn decode(bytes: &[u8], kind: IdType, rows: u64) -> Result<Vec<u64>> {
    if !matches!(kind.bytes(), 1 | 2 | 4 | 8) || !bytes.len().is_multiple_of(kind.bytes()) {
        return Err(Error::Invalid(format!("{} bytes are no ids of {} bytes", bytes.len(), kind.bytes())));
    }
    match kind {
        IdType::Unsigned(1) => collect(bytes, rows, |id: [u8; 1]| i128::from(u8::from_ne_bytes(id))),
        IdType::Unsigned(2) => collect(bytes, rows, |id| u16::from_ne_bytes(id).into()),
        IdType::Unsigned(4) => collect(bytes, rows, |id| u32::from_ne_bytes(id).into()),
        IdType::Unsigned(_) => collect(bytes, rows, |id| u64::from_ne_bytes(id).into()),
        IdType::Signed(1) => collect(bytes, rows, |id: [u8; 1]| i128::from(i8::from_ne_bytes(id))),
        IdType::Signed(2) => collect(bytes, rows, |id| i16::from_ne_bytes(id).into()),
        IdType::Signed(4) => collect(bytes, rows, |id| i32::from_ne_bytes(id).into()),
        IdType::Signed(_) => collect(bytes, rows, |id| i64::from_ne_bytes(id).into()),
    }
}

fn collect<const N: usize>(bytes: &[u8], rows: u64, widen: impl Fn([u8; N]) -> i128) -> Result<Vec<u64>> {
    let ids = bytes.as_chunks::<N>().0;
    let check = |(position, id): (usize, &[u8; N])| {
        let id = widen(*id);
        let row = u64::try_from(id).ok().filter(|row| *row < rows);
        row.ok_or(Error::NoSuchRow { id, position, rows })
    };
    ids.iter().enumerate().map(check).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of<const N: usize>(ids: &[[u8; N]]) -> Vec<u8> {
        ids.concat()
    }

    #[test]
    fn every_type() {
        let unsigned = |bytes: Vec<u8>, size| decode(&bytes, IdType::Unsigned(size), 200).unwrap();
        let signed = |bytes: Vec<u8>, size| decode(&bytes, IdType::Signed(size), 200).unwrap();
        assert_eq!(unsigned(vec![0, 199], 1), [0, 199]);
        assert_eq!(unsigned(bytes_of(&[5_u16.to_ne_bytes()]), 2), [5]);
        assert_eq!(unsigned(bytes_of(&[5_u32.to_ne_bytes()]), 4), [5]);
        assert_eq!(unsigned(bytes_of(&[5_u64.to_ne_bytes()]), 8), [5]);
        assert_eq!(signed(vec![0, 127], 1), [0, 127]);
        assert_eq!(signed(bytes_of(&[199_i16.to_ne_bytes()]), 2), [199]);
        assert_eq!(signed(bytes_of(&[7_i32.to_ne_bytes()]), 4), [7]);
        assert_eq!(signed(bytes_of(&[7_i64.to_ne_bytes(), 8_i64.to_ne_bytes()]), 8), [7, 8]);
    }

    #[test]
    fn the_first_id_that_is_no_row_is_named() {
        let ids = bytes_of(&[3_i64, -1, 500].map(i64::to_ne_bytes));
        let error = decode(&ids, IdType::Signed(8), 200).unwrap_err();
        assert!(matches!(error, Error::NoSuchRow { id: -1, position: 1, rows: 200 }), "{error:?}");
        let error = decode(&u64::MAX.to_ne_bytes(), IdType::Unsigned(8), 200).unwrap_err();
        assert!(matches!(error, Error::NoSuchRow { id, .. } if id == u64::MAX.into()), "{error:?}");
        assert!(decode(&[1, 2, 3], IdType::Signed(2), 9).is_err());
        assert!(decode(&[], IdType::Signed(8), 0).unwrap().is_empty());
    }
}
