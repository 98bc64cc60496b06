//! The same bits on every SIMD level, with any number of threads and any slicing.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;

use common::{State, Vector, algorithms, kernel, levels, thread_pool, values};
use deepnvme_optim::{
    Float, FloatSlice, Rounding, SCALE_ELEMENTS, SqrtMode, StepOptions, accumulate_with_level, gradient_norm,
    gradient_norm_with_level,
};
use proptest::prelude::*;

const FLOATS: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

/// Runs a few steps of random types, or of fp32 only. Returns the memory.
fn run(
    seed: u64,
    elements: usize,
    (is_wild, is_plain): (bool, bool),
    each: &dyn Fn(usize, &mut State, &Vector, &StepOptions),
) -> Vec<Vec<u32>> {
    let mut random = fastrand::Rng::with_seed(seed);
    let algorithm = algorithms()[seed as usize % algorithms().len()];
    let out = random.choice([None, Some(Float::F32), Some(Float::Bf16), Some(Float::F16)]).unwrap();
    let [float, grad_float] = [(); 2].map(|()| if is_plain { Float::F32 } else { FLOATS[random.usize(..3)] });
    let weights = Vector::new(float, &values(&mut random, elements, is_wild));
    let form = if is_plain { 0 } else { random.usize(..3) };
    let mut state = State::new(&algorithm, weights, form, out.filter(|_| !is_plain));
    let rounding = if random.bool() { Rounding::Nearest } else { Rounding::Stochastic };
    for step in 1..4 {
        let grad = Vector::new(grad_float, &values(&mut random, elements, is_wild));
        let step = StepOptions { step, unscale: 0.37, clip: 0.71, rounding, seed };
        each(seed as usize % algorithms().len(), &mut state, &grad, &step);
    }
    state.bits()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn on_every_level(
        seed in any::<u64>(), elements in prop_oneof![3 => 0_usize..600, 1 => 600_usize..3000],
        kind in any::<(bool, bool)>(), sqrt_mode in 0..SqrtMode::ALL.len(),
    ) {
        let sqrt_mode = SqrtMode::ALL[sqrt_mode];
        prop_assume!(sqrt_mode.is_available());
        let pool = thread_pool(1);
        let mut all = levels().into_iter().map(|(name, level)| {
            let step = |algorithm: usize, state: &mut State, grad: &Vector, step: &StepOptions| {
                state.step(&kernel(algorithms()[algorithm], sqrt_mode).with_level(level), &pool, step, grad);
            };
            (name, run(seed, elements, kind, &step))
        });
        let (_, expected) = all.next().unwrap();
        for (name, got) in all {
            prop_assert_eq!(&got, &expected, "{} and the baseline", name);
        }
    }

    #[test]
    fn with_any_slicing(
        seed in any::<u64>(), elements in 1_usize..4000, cuts in prop::collection::vec(0_usize..32, 0..6),
        is_plain in any::<bool>(), sqrt_mode in 0..SqrtMode::ALL.len(),
    ) {
        let sqrt_mode = SqrtMode::ALL[sqrt_mode];
        prop_assume!(sqrt_mode.is_available());
        let whole = |algorithm: usize, state: &mut State, grad: &Vector, step: &StepOptions| {
            state.step(&kernel(algorithms()[algorithm], sqrt_mode), &thread_pool(1), step, grad);
        };
        let pool = thread_pool(3);
        let cut = |algorithm: usize, state: &mut State, grad: &Vector, step: &StepOptions| {
            let mut places: Vec<usize> = cuts.iter().map(|cut| (cut * SCALE_ELEMENTS).min(elements)).collect();
            places.sort_unstable();
            let (mut parts, mut rest, mut done) = (Vec::new(), state.part(grad), 0);
            for place in places {
                let (head, tail) = rest.split_at(place - done);
                parts.push(head);
                (rest, done) = (tail, place);
            }
            parts.push(rest);
            parts.reverse();
            kernel(algorithms()[algorithm], sqrt_mode).step(&pool, step, parts).unwrap();
        };
        let kind = (true, is_plain);
        prop_assert_eq!(run(seed, elements, kind, &cut), run(seed, elements, kind, &whole));
    }
}

#[test]
fn with_any_number_of_threads() {
    for seed in 0..18 {
        let with = |threads| {
            let pool = thread_pool(threads);
            run(seed, 200_003, (false, seed % 2 == 0), &|algorithm, state, grad, step| {
                state.step(&kernel(algorithms()[algorithm], SqrtMode::Exact), &pool, step, grad);
            })
        };
        let expected = with(1);
        for threads in [2, 5] {
            assert_eq!(with(threads), expected, "{threads} threads, seed {seed}");
        }
    }
}

/// Many small parameters in one call, some with another step count.
#[test]
fn together_as_one_by_one() {
    let mut random = fastrand::Rng::with_seed(5);
    for (index, algorithm) in algorithms().into_iter().enumerate() {
        let lengths: Vec<usize> = (0..60).map(|_| random.usize(1..3000)).collect();
        let mut together: Vec<State> = lengths
            .iter()
            .map(|length| {
                let weights = Vector::new(Float::F32, &values(&mut random, *length, false));
                State::new(&algorithm, weights, index % 3, None)
            })
            .collect();
        let mut apart = together.clone();
        let grads: Vec<Vector> =
            lengths.iter().map(|length| Vector::new(Float::F32, &values(&mut random, *length, false))).collect();
        let kernel = kernel(algorithm, SqrtMode::Exact);
        let options = [3, 7].map(|step| StepOptions { step, seed: 4, ..StepOptions::default() });
        for (place, (state, grad)) in apart.iter_mut().zip(&grads).enumerate() {
            state.step(&kernel, &thread_pool(1), &options[place % 2], grad);
        }
        let mut lists = options.map(|options| (options, Vec::new()));
        for (place, (state, grad)) in together.iter_mut().zip(&grads).enumerate() {
            lists[place % 2].1.push(state.part(grad));
        }
        kernel.step_all(&thread_pool(3), lists.into()).unwrap();
        for (one, other) in together.iter().zip(&apart) {
            assert_eq!(one.bits(), other.bits());
        }
    }
}

/// The sum is that of each gradient's own sum, in order.
#[test]
fn the_norm_of_many_small_gradients() {
    let mut random = fastrand::Rng::with_seed(6);
    let grads: Vec<Vector> = (0..300)
        .map(|_| {
            let length = random.usize(0..900);
            Vector::new(Float::F32, &values(&mut random, length, false))
        })
        .collect();
    let norm = |threads, grads: &[FloatSlice<'_>]| gradient_norm(&thread_pool(threads), 1.0, grads).squares;
    let each: f64 = grads.iter().map(|grad| norm(1, &[grad.read()])).sum();
    let all: Vec<FloatSlice<'_>> = grads.iter().map(Vector::read).collect();
    assert_eq!(norm(1, &all).to_bits(), each.to_bits());
    assert_eq!(norm(3, &all).to_bits(), each.to_bits());
}

#[test]
fn sums_and_norms() {
    let mut random = fastrand::Rng::with_seed(11);
    for elements in [0, 1, 127, 128, 1000, 200_003] {
        for (sum, new) in FLOATS.iter().flat_map(|sum| FLOATS.iter().map(move |new| (*sum, *new))) {
            let before = Vector::new(sum, &values(&mut random, elements, true));
            let new = Vector::new(new, &values(&mut random, elements, true));
            let tame = Vector::new(sum, &values(&mut random, elements, false));
            let mut all = Vec::new();
            for (_, level) in levels() {
                for threads in [1, 3] {
                    let (mut sum, pool) = (before.clone(), thread_pool(threads));
                    accumulate_with_level(level, &pool, sum.change(), new.read()).unwrap();
                    let grads: [FloatSlice<'_>; 2] = [tame.read(), tame.read()];
                    let measured = gradient_norm_with_level(level, &pool, 0.3, &grads);
                    all.push((sum.bits(), measured.squares.to_bits(), measured.is_finite));
                }
            }
            assert!(all.iter().all(|one| *one == all[0]), "{sum:?}, {elements} elements");
        }
    }
}
