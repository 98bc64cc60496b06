//! The same bits on every level, with any number of threads, and however elements are cut.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;

use common::{State, Vector, crew, kernel, levels, rules, values};
use deepnvme_optim::{BLOCK, Float, Numbers, Root, Rounding, Step, accumulate_at, measure_at};
use proptest::prelude::*;

const FLOATS: [Float; 3] = [Float::F32, Float::Bf16, Float::F16];

/// A few steps of a random kind, or of fp32 alone; what is then in memory.
fn run(
    seed: u64,
    elements: usize,
    (is_wild, is_plain): (bool, bool),
    each: &dyn Fn(usize, &mut State, &Vector, &Step),
) -> Vec<Vec<u32>> {
    let mut random = fastrand::Rng::with_seed(seed);
    let rule = rules()[seed as usize % rules().len()];
    let out = random.choice([None, Some(Float::F32), Some(Float::Bf16), Some(Float::F16)]).unwrap();
    let [float, grad_float] = [(); 2].map(|()| if is_plain { Float::F32 } else { FLOATS[random.usize(..3)] });
    let weights = Vector::new(float, &values(&mut random, elements, is_wild));
    let form = if is_plain { 0 } else { random.usize(..3) };
    let mut state = State::new(&rule, weights, form, out.filter(|_| !is_plain));
    let rounding = if random.bool() { Rounding::Nearest } else { Rounding::Stochastic };
    for step in 1..4 {
        let grad = Vector::new(grad_float, &values(&mut random, elements, is_wild));
        let step = Step { step, unscale: 0.37, clip: 0.71, rounding, seed };
        each(seed as usize % rules().len(), &mut state, &grad, &step);
    }
    state.bits()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn on_every_level(
        seed in any::<u64>(), elements in prop_oneof![3 => 0_usize..600, 1 => 600_usize..3000],
        kind in any::<(bool, bool)>(), root in 0_usize..3,
    ) {
        let root = Root::ALL[root];
        prop_assume!(root.is_available());
        let crew = crew(1);
        let mut all = levels().into_iter().map(|(name, level)| {
            let step = |rule: usize, state: &mut State, grad: &Vector, step: &Step| {
                state.step(&kernel(rules()[rule], root).with_level(level), &crew, step, grad);
            };
            (name, run(seed, elements, kind, &step))
        });
        let (_, expected) = all.next().unwrap();
        for (name, got) in all {
            prop_assert_eq!(&got, &expected, "{} beside the baseline", name);
        }
    }

    #[test]
    fn however_it_is_cut(
        seed in any::<u64>(), elements in 1_usize..4000, cuts in prop::collection::vec(0_usize..32, 0..6),
        is_plain in any::<bool>(), root in 0_usize..3,
    ) {
        let root = Root::ALL[root];
        prop_assume!(root.is_available());
        let whole = |rule: usize, state: &mut State, grad: &Vector, step: &Step| {
            state.step(&kernel(rules()[rule], root), &crew(1), step, grad);
        };
        let crew = crew(3);
        let cut = |rule: usize, state: &mut State, grad: &Vector, step: &Step| {
            let mut places: Vec<usize> = cuts.iter().map(|cut| (cut * BLOCK).min(elements)).collect();
            places.sort_unstable();
            let (mut parts, mut rest, mut done) = (Vec::new(), state.part(grad), 0);
            for place in places {
                let (head, tail) = rest.split_at(place - done);
                parts.push(head);
                (rest, done) = (tail, place);
            }
            parts.push(rest);
            parts.reverse();
            kernel(rules()[rule], root).step(&crew, step, parts).unwrap();
        };
        let kind = (true, is_plain);
        prop_assert_eq!(run(seed, elements, kind, &cut), run(seed, elements, kind, &whole));
    }
}

#[test]
fn with_any_number_of_threads() {
    for seed in 0..18 {
        let with = |threads| {
            let crew = crew(threads);
            run(seed, 200_003, (false, seed % 2 == 0), &|rule, state, grad, step| {
                state.step(&kernel(rules()[rule], Root::Exact), &crew, step, grad);
            })
        };
        let expected = with(1);
        for threads in [2, 5] {
            assert_eq!(with(threads), expected, "{threads} threads, seed {seed}");
        }
    }
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
                    let (mut sum, crew) = (before.clone(), crew(threads));
                    accumulate_at(level, &crew, sum.change(), new.read()).unwrap();
                    let grads: [Numbers<'_>; 2] = [tame.read(), tame.read()];
                    let measured = measure_at(level, &crew, 0.3, &grads);
                    all.push((sum.bits(), measured.squares.to_bits(), measured.is_finite));
                }
            }
            assert!(all.iter().all(|one| *one == all[0]), "{sum:?}, {elements} elements");
        }
    }
}
