//! Conversion of moments from and to fp32, to save and load them.

use crate::error::Result;
use crate::moment::{MomentMut, Sign};
use crate::{SCALE_ELEMENTS, TILE};

/// Noise with which stochastic rounding rounds to nearest. Each number has the noise of both signs of moments.
const NEAREST: [u32; TILE] = [0x7fff_7fff; TILE];

/// Decodes a moment to fp32.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if lengths differ.
pub fn decode_moment(moment: &mut MomentMut<'_>, sign: Sign, out: &mut [f32]) -> Result<()> {
    moment.check("the moment", out.len())?;
    let mut buffer = [0.0; TILE];
    for (index, out) in out.chunks_mut(TILE).enumerate() {
        let tile = moment.tile(sign, index * TILE, &mut buffer);
        out.copy_from_slice(&tile[..out.len()]);
    }
    Ok(())
}

/// Encodes fp32 values as a moment, rounded to nearest. Values from [`decode_moment`] are encoded exactly.
///
/// # Errors
///
/// [`Error::Invalid`](crate::Error::Invalid) if lengths differ.
pub fn encode_moment(values: &[f32], sign: Sign, moment: &mut MomentMut<'_>) -> Result<()> {
    const { assert!(TILE == SCALE_ELEMENTS, "a tile has one scale") };
    moment.check("the moment", values.len())?;
    for (index, values) in values.chunks(TILE).enumerate() {
        let mut tile = [0.0; TILE];
        tile[..values.len()].copy_from_slice(values);
        moment.store(sign, index * TILE, &tile, &NEAREST);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Error;

    fn values(sign: Sign) -> impl Strategy<Value = Vec<f32>> {
        let number = prop_oneof![
            4 => (-30.0..10.0_f32).prop_map(f32::exp2),
            1 => Just(0.0),
            1 => -1e-3..1e-3_f32,
        ];
        proptest::collection::vec(number, 1..600).prop_map(move |values| match sign {
            Sign::Signed => values.iter().enumerate().map(|(at, one)| if at % 3 == 0 { -one } else { *one }).collect(),
            Sign::Unsigned => values.iter().map(|one| one.abs()).collect(),
        })
    }

    fn through(values: &[f32], sign: Sign, codes: &mut [u8], scales: &mut [f32]) -> Vec<f32> {
        let mut moment = MomentMut::Q8 { codes, scales };
        encode_moment(values, sign, &mut moment).unwrap();
        let mut out = vec![f32::NAN; values.len()];
        decode_moment(&mut moment, sign, &mut out).unwrap();
        out
    }

    proptest! {
        #[test]
        fn a_byte_that_was_a_number_is_the_same_number_again(
            (sign, values) in prop_oneof![Just(Sign::Signed), Just(Sign::Unsigned)]
                .prop_flat_map(|sign| (Just(sign), values(sign)))
        ) {
            let (mut codes, mut scales) = (vec![0; values.len()], vec![0.0; values.len().div_ceil(SCALE_ELEMENTS)]);
            let once = through(&values, sign, &mut codes, &mut scales);
            prop_assert_eq!(&through(&once, sign, &mut codes, &mut scales), &once);
            for (block, (values, once)) in values.chunks(SCALE_ELEMENTS).zip(once.chunks(SCALE_ELEMENTS)).enumerate() {
                for (value, once) in values.iter().zip(once) {
                    // A sixteenth of the value, or of the smallest value of the block.
                    let floor = scales[block] * f32::exp2(-15.0);
                    prop_assert!((value - once).abs() <= value.abs() / 15.9 + floor, "{} became {}", value, once);
                }
            }
        }

        #[test]
        fn bf16_is_the_nearest(values in values(Sign::Signed)) {
            let mut halves = vec![0; values.len()];
            let mut moment = MomentMut::Bf16(&mut halves);
            encode_moment(&values, Sign::Signed, &mut moment).unwrap();
            let mut out = vec![f32::NAN; values.len()];
            decode_moment(&mut moment, Sign::Signed, &mut out).unwrap();
            for (value, out) in values.iter().zip(&out) {
                prop_assert!((value - out).abs() <= value.abs() / 255.0, "{} became {}", value, out);
            }
            let again = out.clone();
            encode_moment(&again, Sign::Signed, &mut moment).unwrap();
            decode_moment(&mut moment, Sign::Signed, &mut out).unwrap();
            prop_assert_eq!(again, out);
        }
    }

    #[test]
    fn other_lengths_are_refused() {
        let error = decode_moment(&mut MomentMut::F32(&mut [0.0; 3]), Sign::Signed, &mut [0.0; 4]).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        encode_moment(&[0.0; 5], Sign::Signed, &mut MomentMut::Q8 { codes: &mut [0; 5], scales: &mut [] }).unwrap_err();
    }
}
