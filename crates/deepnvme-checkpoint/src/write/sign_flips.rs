//! The sign bits that torch flips lazily: complex conjugates and negatives.

use deepnvme_format::{Dtype, Signs};

/// The sign bits of a tensor that are flipped relative to its storage. Numbers are little-endian floats, so a sign is
/// the highest bit of a number's last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SignFlips {
    /// Size of one number: for a complex element, of its real part.
    number_bytes: u64,
    is_complex: bool,
    signs: Signs,
}

impl SignFlips {
    /// Returns the flips of a tensor's elements, or `None` if there are none.
    ///
    /// # Errors
    /// The reason, for types whose sign is not a single bit.
    pub(crate) fn of(dtype: Dtype, signs: Signs) -> Result<Option<Self>, String> {
        let is_complex = match dtype {
            _ if signs.are_plain() => return Ok(None),
            _ if dtype.is_complex() => true,
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64 => false,
            _ => {
                return Err(format!(
                    "it is a lazy negative or conjugate of {}, whose sign is not a single bit; load it and save it again",
                    dtype.torch_name()
                ));
            }
        };
        let number_bytes = dtype.bytes() / if is_complex { 2 } else { 1 };
        Ok(Some(Self { number_bytes, is_complex, signs }))
    }

    /// Flips the signs in a part of a record. `bytes` begins at offset `start` of the record.
    pub(crate) fn apply(self, start: u64, bytes: &mut [u8]) {
        let last = self.number_bytes - 1;
        let first = (last + self.number_bytes - start % self.number_bytes) % self.number_bytes;
        for at in (first..bytes.len() as u64).step_by(self.number_bytes as usize) {
            let is_imaginary = self.is_complex && (start + at) / self.number_bytes % 2 == 1;
            if self.signs.is_neg != (self.signs.is_conj && is_imaginary) {
                bytes[at as usize] ^= 0x80;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flipped(dtype: Dtype, is_conj: bool, is_neg: bool, numbers: &[f32]) -> Vec<f32> {
        let flips = SignFlips::of(dtype, Signs { is_conj, is_neg }).unwrap().unwrap();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        // In pieces of odd sizes and offsets.
        let mut out = Vec::new();
        for start in (0..bytes.len()).step_by(3) {
            let mut piece = bytes[start..(start + 3).min(bytes.len())].to_vec();
            flips.apply(start as u64, &mut piece);
            out.extend(piece);
        }
        out.chunks_exact(4).map(|number| f32::from_le_bytes(number.try_into().unwrap())).collect()
    }

    #[test]
    fn signs_of_parts_are_flipped() {
        let numbers = [1.0, 2.0, -3.0, 0.0];
        assert_eq!(flipped(Dtype::Complex64, true, false, &numbers), [1.0, -2.0, -3.0, -0.0]);
        assert_eq!(flipped(Dtype::Complex64, false, true, &numbers), [-1.0, -2.0, 3.0, -0.0]);
        assert_eq!(flipped(Dtype::Complex64, true, true, &numbers), [-1.0, 2.0, 3.0, 0.0]);
        assert_eq!(flipped(Dtype::F32, false, true, &numbers), [-1.0, -2.0, 3.0, -0.0]);
        assert_eq!(SignFlips::of(Dtype::I32, Signs::default()), Ok(None));
        assert!(SignFlips::of(Dtype::I32, Signs { is_conj: false, is_neg: true }).is_err());
    }
}
