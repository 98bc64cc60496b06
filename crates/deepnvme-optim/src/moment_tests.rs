//! 8-bit codes against the module's documentation.

use super::*;

fn noise(random: &mut fastrand::Rng) -> [u32; TILE] {
    std::array::from_fn(|_| random.u32(..))
}

fn round_trip(sign: Sign, tile: &[f32; TILE], noise: &[u32; TILE], count: usize) -> ([f32; TILE], f32) {
    let (mut codes, mut out) = (vec![0xee; count], [7.0; TILE]);
    let scale = encode(sign, tile, noise, &mut codes);
    decode(sign, &codes, scale, &mut out);
    (out, scale)
}

#[test]
fn zeroed_memory_represents_zeros() {
    let mut random = fastrand::Rng::with_seed(1);
    for sign in [Sign::Signed, Sign::Unsigned] {
        let mut out = [7.0; TILE];
        decode(sign, &[0; TILE], 0.0, &mut out);
        assert_eq!(out, [0.0; TILE]);
        let mut codes = [0xee; TILE];
        assert_eq!(encode(sign, &[0.0; TILE], &noise(&mut random), &mut codes), 0.0);
        assert_eq!(codes, [0; TILE]);
    }
}

#[test]
fn rounds_to_a_neighbour_and_keeps_exact_values() {
    let mut random = fastrand::Rng::with_seed(2);
    for round in 0..20_000 {
        let sign = if round % 2 == 0 { Sign::Signed } else { Sign::Unsigned };
        let octaves = if sign == Sign::Signed { 14 } else { 30 };
        let exponent = random.u32(octaves..254);
        let count = if round % 7 == 0 { random.usize(1..=TILE) } else { TILE };
        let mut tile = [0.0; TILE];
        for value in &mut tile[..count] {
            let bits = (exponent - random.u32(0..octaves)) << 23 | random.u32(..1 << 23);
            let negative = sign == Sign::Signed && random.bool();
            *value = f32::from_bits(bits | u32::from(negative) << 31);
        }
        let noise = noise(&mut random);
        let (out, scale) = round_trip(sign, &tile, &noise, count);
        for (value, out) in tile.iter().zip(&out).take(count) {
            let (bits, got) = (value.to_bits(), out.to_bits());
            let low = bits & F32_MAGNITUDE & !((1 << DROPPED) - 1);
            assert!(
                [low, low + (1 << DROPPED)].contains(&(got & F32_MAGNITUDE)),
                "{value:e} became {out:e} ({scale:e})"
            );
            assert_eq!(bits >> 31, got >> 31);
            assert!(out.abs() <= scale);
        }
        assert!(out[count..].iter().all(|value| *value == 0.0));
        let (again, same) = round_trip(sign, &out, &noise, count);
        assert_eq!(again, out, "what needs no rounding stays");
        assert!(same <= scale);
    }
}

#[test]
fn rounding_is_unbiased_down_to_zero() {
    let mut random = fastrand::Rng::with_seed(3);
    let rounds = 4000;
    for sign in [Sign::Signed, Sign::Unsigned] {
        let mut tile: [f32; TILE] = std::array::from_fn(|place| 0.8_f32.powi(place as i32 / 2) * 1.03);
        tile[0] = 1.0;
        let mut sums = [0.0; TILE];
        for _ in 0..rounds {
            let (out, _) = round_trip(sign, &tile, &noise(&mut random), TILE);
            sums.iter_mut().zip(out).for_each(|(sum, out)| *sum += f64::from(out));
        }
        for (value, sum) in tile.iter().zip(sums) {
            let (value, mean) = (f64::from(*value), sum / f64::from(rounds));
            // A step is at most an eighth of the value, and the smallest value at the bottom of signed ones. Five
            // standard errors.
            let step = (value / 8.0).max(if sign == Sign::Signed { 2.0_f64.powi(-15) } else { 0.0 });
            assert!((mean - value).abs() < 2.5 * step / f64::from(rounds).sqrt(), "{sign:?}: {value:e}, {mean:e}");
        }
    }
}

#[test]
fn squares_do_not_become_zero() {
    let mut random = fastrand::Rng::with_seed(4);
    let mut tile = [1e-30; TILE];
    (tile[0], tile[1]) = (1.0, 0.0);
    let (out, _) = round_trip(Sign::Unsigned, &tile, &noise(&mut random), TILE);
    assert!(out.iter().all(|value| *value >= 1e-10), "{out:?}");
}

#[test]
fn infinities_and_nans_are_kept() {
    let mut random = fastrand::Rng::with_seed(5);
    for sign in [Sign::Signed, Sign::Unsigned] {
        for odd in [f32::INFINITY, f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0x7fff_ffff)] {
            let mut tile = [1.0; TILE];
            tile[5] = odd;
            let (out, _) = round_trip(sign, &tile, &noise(&mut random), TILE);
            assert!(out[5].is_nan() == odd.is_nan() && !out[5].is_finite(), "{sign:?} {odd}: {}", out[5]);
        }
        // The largest values do not become infinite.
        let (out, scale) = round_trip(sign, &[f32::MAX; TILE], &[u32::MAX; TILE], TILE);
        assert!(scale.is_finite() && out.iter().all(|value| value.is_finite()));
    }
}

#[test]
fn subnormals_are_rounded() {
    let mut random = fastrand::Rng::with_seed(6);
    for sign in [Sign::Signed, Sign::Unsigned] {
        let tile: [f32; TILE] = std::array::from_fn(|place| f32::from_bits((place as u32) << 16));
        let (out, _) = round_trip(sign, &tile, &noise(&mut random), TILE);
        for (value, out) in tile.iter().zip(out) {
            assert!(i64::from(value.to_bits()).abs_diff(i64::from(out.to_bits())) < 1 << DROPPED);
        }
    }
}
