//! Algorithms against plain fp64 arithmetic, and invalid arguments.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;

use common::{Moment, State, Vector, algorithms, kernel, thread_pool, values};
use deepnvme_optim::{
    Algorithm, Error, Float, FloatSlice, Kernel, Rounding, SqrtMode, StepOptions, THREADS_MAX, ThreadPool, accumulate,
    gradient_norm,
};
use proptest::prelude::*;

/// Updates one element in fp64 by the papers' formulas.
fn plain(algorithm: &Algorithm, step: i32, weight: &mut f64, mut grad: f64, moments: &mut [f64; 3]) {
    if algorithm.maximize() {
        grad = -grad;
    }
    match algorithm {
        Algorithm::Adam(algorithm) => {
            if algorithm.decoupled {
                *weight -= algorithm.lr * algorithm.weight_decay * *weight;
            } else {
                grad += algorithm.weight_decay * *weight;
            }
            moments[0] = algorithm.beta1 * moments[0] + (1.0 - algorithm.beta1) * grad;
            moments[1] = algorithm.beta2 * moments[1] + (1.0 - algorithm.beta2) * grad * grad;
            moments[2] = moments[2].max(moments[1]);
            let square = if algorithm.amsgrad { moments[2] } else { moments[1] };
            let root = (square / (1.0 - algorithm.beta2.powi(step))).sqrt();
            *weight -= algorithm.lr * (moments[0] / (1.0 - algorithm.beta1.powi(step))) / (root + algorithm.eps);
        }
        Algorithm::Lion(algorithm) => {
            let direction = algorithm.beta1 * moments[0] + (1.0 - algorithm.beta1) * grad;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *weight = *weight * (1.0 - algorithm.lr * algorithm.weight_decay) - algorithm.lr * sign;
            moments[0] = algorithm.beta2 * moments[0] + (1.0 - algorithm.beta2) * grad;
        }
        Algorithm::Sgd(algorithm) => {
            grad += algorithm.weight_decay * *weight;
            if algorithm.momentum != 0.0 {
                let added = if step == 1 { 1.0 } else { 1.0 - algorithm.dampening };
                moments[0] = algorithm.momentum * moments[0] + added * grad;
                grad = if algorithm.nesterov { grad + algorithm.momentum * moments[0] } else { moments[0] };
            }
            *weight -= algorithm.lr * grad;
        }
        Algorithm::Adagrad(algorithm) => {
            grad += algorithm.weight_decay * *weight;
            moments[0] += grad * grad;
            *weight -= algorithm.lr / (1.0 + f64::from(step - 1) * algorithm.lr_decay) * grad
                / (moments[0].sqrt() + algorithm.eps);
        }
    }
}

/// Returns the value whose sign is the direction of a step.
fn decides(algorithm: &Algorithm, weight: f64, grad: f64, moments: &[f64; 3]) -> f64 {
    let grad = if algorithm.maximize() { -grad } else { grad };
    match algorithm {
        Algorithm::Adam(algorithm) => {
            let grad = if algorithm.decoupled { grad } else { grad + algorithm.weight_decay * weight };
            algorithm.beta1 * moments[0] + (1.0 - algorithm.beta1) * grad
        }
        Algorithm::Lion(algorithm) => algorithm.beta1 * moments[0] + (1.0 - algorithm.beta1) * grad,
        Algorithm::Sgd(_) => f64::INFINITY,
        Algorithm::Adagrad(algorithm) => grad + algorithm.weight_decay * weight,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn algorithms_match_their_formulas(seed in any::<u64>(), elements in 1_usize..400, algorithm in 0_usize..9, sqrt_mode in 0..SqrtMode::ALL.len()) {
        let (algorithm, sqrt_mode) = (algorithms()[algorithm], SqrtMode::ALL[sqrt_mode]);
        prop_assume!(sqrt_mode.is_available());
        let mut random = fastrand::Rng::with_seed(seed);
        let begin = values(&mut random, elements, false);
        let mut state = State::new(&algorithm, Vector::F32(begin.clone()), 0, Some(Float::F32));
        let mut expected: Vec<f64> = begin.iter().map(|value| f64::from(*value)).collect();
        let mut moments = vec![[0.0; 3]; elements];
        // Cancellation: the summands determine the error of a sum, even if the sum is small.
        let mut largest: Vec<f64> = expected.iter().map(|weight| 0.1 * weight.abs() + 0.01).collect();
        // Steps have constant size, so a sign matters, which the last bit of a difference may decide.
        let mut ever = vec![false; elements];
        let (pool, kernel) = (thread_pool(1), kernel(algorithm, sqrt_mode));
        for step in 1..8 {
            let grads = values(&mut random, elements, false);
            let with = StepOptions { step, unscale: 0.25, clip: 0.5, ..StepOptions::default() };
            state.step(&kernel, &pool, &with, &Vector::F32(grads.clone()));
            let mut cancelled = Vec::new();
            let all = expected.iter_mut().zip(grads).zip(&mut moments).zip(&mut largest);
            for (((weight, grad), moments), largest) in all {
                let grad = f64::from(grad) * 0.125;
                *largest = largest.max(grad.abs() + 0.1 * weight.abs());
                let left = decides(&algorithm, *weight, grad, moments);
                cancelled.push(left.abs() < 1e-3 * *largest);
                plain(&algorithm, step as i32, weight, grad, moments);
            }
            ever.iter_mut().zip(cancelled).for_each(|(ever, now)| *ever |= now);
        }
        let Vector::F32(got) = &state.weights else { unreachable!() };
        for (place, (got, expected)) in got.iter().zip(&expected).enumerate() {
            // Seven steps, a few roundings each.
            let most = if ever[place] { 0.05 } else { 3e-6 * expected.abs().max(1e-2) };
            prop_assert!((f64::from(*got) - expected).abs() < most, "{place}: {got:e}, {expected:e}, {algorithm:?}");
        }
        prop_assert_eq!(state.out.as_ref(), Some(&state.weights));
        for (index, moment) in state.moments.iter().enumerate() {
            let Moment::F32(got) = moment else { unreachable!() };
            for ((got, expected), largest) in got.iter().zip(&moments).zip(&largest) {
                let expected = expected[index];
                let most = 3e-6 * expected.abs().max(*largest);
                prop_assert!((f64::from(*got) - expected).abs() <= most, "{got:e}, {expected:e}");
            }
        }
    }

    #[test]
    fn norms_match_fp64(seed in any::<u64>(), elements in 0_usize..3000) {
        let grads = values(&mut fastrand::Rng::with_seed(seed), elements, false);
        let expected: f64 = grads.iter().map(|grad| f64::from(grad * 0.3).powi(2)).sum();
        let measured = gradient_norm(&thread_pool(1), 0.3, &[FloatSlice::F32(&grads)]);
        prop_assert!((measured.squares - expected).abs() <= 1e-12 * expected);
        prop_assert!(measured.is_finite);
    }
}

#[test]
fn non_finite_elements_are_found_anywhere() {
    let pool = thread_pool(2);
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [0, 1, 127, 128, 70_000, 99_999] {
            let mut grads = vec![f32::MAX; 100_000];
            assert!(gradient_norm(&pool, 1.0, &[FloatSlice::F32(&grads)]).is_finite);
            grads[place] = odd;
            assert!(!gradient_norm(&pool, 1.0, &[FloatSlice::F32(&grads)]).is_finite, "{odd} at {place}");
        }
    }
}

#[test]
fn stochastic_rounding_of_weights_is_unbiased() {
    // Steps of a hundredth of a bf16 unit: rounded to nearest, nothing would change.
    let algorithm = Algorithm::Sgd(deepnvme_optim::Sgd { lr: 1.0, ..deepnvme_optim::Sgd::default() });
    let (pool, kernel, elements) = (thread_pool(1), kernel(algorithm, SqrtMode::Exact), 10_000);
    let grad = Vector::F32(vec![-2.0_f32.powi(-7) / 100.0; elements]);
    let mean = |rounding| {
        let mut state = State::new(&algorithm, Vector::new(Float::Bf16, &vec![1.0; elements]), 0, None);
        for step in 1..=50 {
            state.step(&kernel, &pool, &StepOptions { step, rounding, seed: 5, ..StepOptions::default() }, &grad);
        }
        let Vector::Bf16(weights) = state.weights else { unreachable!() };
        let sum: f64 = weights.iter().map(|weight| f64::from(f32::from_bits(u32::from(*weight) << 16))).sum();
        (sum / elements as f64 - 1.0) / 2.0_f64.powi(-7)
    };
    assert_eq!(mean(Rounding::Nearest), 0.0);
    let moved = mean(Rounding::Stochastic);
    // Half a unit; the standard error is 0.7 units by the root of the number of elements.
    assert!((moved - 0.5).abs() < 0.035, "{moved}");
}

#[test]
fn sums_match_torch() {
    let pool = thread_pool(1);
    let mut sum = Vector::Bf16(vec![0x3f80, 0x3f80, 0x3f81, 0x7f7f]);
    // Ties round to even; numbers that are too large become infinite.
    let new = Vector::F32(vec![2.0_f32.powi(-8), 2.0_f32.powi(-8) * 1.001, 2.0_f32.powi(-8), f32::MAX]);
    accumulate(&pool, sum.change(), new.read()).unwrap();
    assert_eq!(sum, Vector::Bf16(vec![0x3f80, 0x3f81, 0x3f82, 0x7f80]));
    let short = Vector::F32(vec![0.0; 3]);
    let refused = accumulate(&pool, sum.change(), short.read()).unwrap_err();
    assert!(refused.to_string().contains("3 elements; the sum has 4"), "{refused}");
}

#[test]
fn mismatched_slices_are_refused_without_changes() {
    let pool = thread_pool(1);
    let algorithm = algorithms()[0];
    let kernel = kernel(algorithm, SqrtMode::Exact);
    let grad = Vector::F32(vec![1.0; 300]);
    let state = || State::new(&algorithm, Vector::F32(vec![1.0; 300]), 2, Some(Float::Bf16));
    let refusal = |step: u64, grad: &Vector, change: &dyn Fn(&mut State)| {
        let (mut good, mut bad) = (state(), state());
        change(&mut bad);
        let other = Vector::F32(vec![1.0; 300]);
        let parts = vec![good.part(&other), bad.part(grad)];
        let step = StepOptions { step, ..StepOptions::default() };
        let Error::Invalid(text) = kernel.step(&pool, &step, parts).unwrap_err() else { unreachable!() };
        assert_eq!(good.bits(), state().bits());
        text
    };
    let nothing = |_: &mut State| ();
    assert!(refusal(0, &grad, &nothing).contains("the first one is 1"));
    assert!(refusal(1, &Vector::F32(vec![1.0; 299]), &nothing).contains("grad has 299"));
    assert!(refusal(1, &grad, &|state| drop(state.moments.pop())).contains("has 1 moments; the algorithm has 2"));
    let scales = |state: &mut State| state.moments[1] = Moment::Q8(vec![0; 300], vec![0.0; 2]);
    assert!(refusal(1, &grad, &scales).contains("2 scales; 300 elements need 3"));
    let codes = |state: &mut State| state.moments[0] = Moment::Bf16(vec![0; 301]);
    assert!(refusal(1, &grad, &codes).contains("301 elements"));
    assert!(refusal(1, &grad, &|state| state.out = Some(Vector::F32(vec![]))).contains("out has 0"));
}

#[test]
fn settings_out_of_range_are_refused() {
    use deepnvme_optim::{Adagrad, Adam, Lion, Sgd};
    for (algorithm, name) in [
        (Algorithm::Adam(Adam { lr: -1.0, ..Adam::default() }), "lr is -1"),
        (Algorithm::Adam(Adam { beta2: 1.0, ..Adam::default() }), "beta2 is 1"),
        (Algorithm::Adam(Adam { eps: f64::NAN, ..Adam::default() }), "eps is NaN"),
        (Algorithm::Lion(Lion { beta1: -0.1, ..Lion::default() }), "beta1 is -0.1"),
        (Algorithm::Sgd(Sgd { nesterov: true, ..Sgd::default() }), "nesterov needs"),
        (Algorithm::Adagrad(Adagrad { lr_decay: -1.0, ..Adagrad::default() }), "lr_decay is -1"),
    ] {
        let refused = Kernel::new(algorithm, SqrtMode::Exact).unwrap_err();
        assert!(refused.to_string().contains(name), "{refused}");
    }
    assert!(ThreadPool::new(THREADS_MAX + 1).unwrap_err().to_string().contains("at most 256"));
}
