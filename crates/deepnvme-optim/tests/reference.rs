//! Rules against plain arithmetic in fp64, and what is refused.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod common;

use common::{Moment, State, Vector, crew, kernel, rules, values};
use deepnvme_optim::{
    Crew, Error, Float, Kernel, Numbers, Root, Rounding, Rule, Step, THREADS_MAX, accumulate, measure,
};
use proptest::prelude::*;

/// One element in fp64, by the papers' formulas.
fn plain(rule: &Rule, step: i32, weight: &mut f64, mut grad: f64, moments: &mut [f64; 3]) {
    if rule.maximize() {
        grad = -grad;
    }
    match rule {
        Rule::Adam(rule) => {
            if rule.decoupled {
                *weight -= rule.lr * rule.weight_decay * *weight;
            } else {
                grad += rule.weight_decay * *weight;
            }
            moments[0] = rule.beta1 * moments[0] + (1.0 - rule.beta1) * grad;
            moments[1] = rule.beta2 * moments[1] + (1.0 - rule.beta2) * grad * grad;
            moments[2] = moments[2].max(moments[1]);
            let square = if rule.amsgrad { moments[2] } else { moments[1] };
            let root = (square / (1.0 - rule.beta2.powi(step))).sqrt();
            *weight -= rule.lr * (moments[0] / (1.0 - rule.beta1.powi(step))) / (root + rule.eps);
        }
        Rule::Lion(rule) => {
            let direction = rule.beta1 * moments[0] + (1.0 - rule.beta1) * grad;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *weight = *weight * (1.0 - rule.lr * rule.weight_decay) - rule.lr * sign;
            moments[0] = rule.beta2 * moments[0] + (1.0 - rule.beta2) * grad;
        }
        Rule::Sgd(rule) => {
            grad += rule.weight_decay * *weight;
            if rule.momentum != 0.0 {
                let added = if step == 1 { 1.0 } else { 1.0 - rule.dampening };
                moments[0] = rule.momentum * moments[0] + added * grad;
                grad = if rule.nesterov { grad + rule.momentum * moments[0] } else { moments[0] };
            }
            *weight -= rule.lr * grad;
        }
        Rule::Adagrad(rule) => {
            grad += rule.weight_decay * *weight;
            moments[0] += grad * grad;
            *weight -= rule.lr / (1.0 + f64::from(step - 1) * rule.lr_decay) * grad / (moments[0].sqrt() + rule.eps);
        }
    }
}

/// What the direction of a step is the sign of.
fn decides(rule: &Rule, weight: f64, grad: f64, moments: &[f64; 3]) -> f64 {
    let grad = if rule.maximize() { -grad } else { grad };
    match rule {
        Rule::Adam(rule) => {
            let grad = if rule.decoupled { grad } else { grad + rule.weight_decay * weight };
            rule.beta1 * moments[0] + (1.0 - rule.beta1) * grad
        }
        Rule::Lion(rule) => rule.beta1 * moments[0] + (1.0 - rule.beta1) * grad,
        Rule::Sgd(_) => f64::INFINITY,
        Rule::Adagrad(rule) => grad + rule.weight_decay * weight,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn rules_are_their_formulas(seed in any::<u64>(), elements in 1_usize..400, rule in 0_usize..9, root in 0_usize..3) {
        let (rule, root) = (rules()[rule], Root::ALL[root]);
        prop_assume!(root.is_available());
        let mut random = fastrand::Rng::with_seed(seed);
        let begin = values(&mut random, elements, false);
        let mut state = State::new(&rule, Vector::F32(begin.clone()), 0, Some(Float::F32));
        let mut expected: Vec<f64> = begin.iter().map(|value| f64::from(*value)).collect();
        let mut moments = vec![[0.0; 3]; elements];
        // What a sum has been made of stays in its last bits, also where little is left of it.
        let mut largest: Vec<f64> = expected.iter().map(|weight| 0.1 * weight.abs() + 0.01).collect();
        // Steps have a size of their own, so that a sign counts, which the last bit of a difference may decide.
        let mut ever = vec![false; elements];
        let (crew, kernel) = (crew(1), kernel(rule, root));
        for step in 1..8 {
            let grads = values(&mut random, elements, false);
            let with = Step { step, unscale: 0.25, clip: 0.5, ..Step::default() };
            state.step(&kernel, &crew, &with, &Vector::F32(grads.clone()));
            let mut cancelled = Vec::new();
            let all = expected.iter_mut().zip(grads).zip(&mut moments).zip(&mut largest);
            for (((weight, grad), moments), largest) in all {
                let grad = f64::from(grad) * 0.125;
                *largest = largest.max(grad.abs() + 0.1 * weight.abs());
                let left = decides(&rule, *weight, grad, moments);
                cancelled.push(left.abs() < 1e-3 * *largest);
                plain(&rule, step as i32, weight, grad, moments);
            }
            ever.iter_mut().zip(cancelled).for_each(|(ever, now)| *ever |= now);
        }
        let Vector::F32(got) = &state.weights else { unreachable!() };
        for (place, (got, expected)) in got.iter().zip(&expected).enumerate() {
            // Seven steps, a few roundings each.
            let most = if ever[place] { 0.05 } else { 3e-6 * expected.abs().max(1e-2) };
            prop_assert!((f64::from(*got) - expected).abs() < most, "{place}: {got:e}, {expected:e}, {rule:?}");
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
    fn norms_are_those_of_fp64(seed in any::<u64>(), elements in 0_usize..3000) {
        let grads = values(&mut fastrand::Rng::with_seed(seed), elements, false);
        let expected: f64 = grads.iter().map(|grad| f64::from(grad * 0.3).powi(2)).sum();
        let measured = measure(&crew(1), 0.3, &[Numbers::F32(&grads)]);
        prop_assert!((measured.squares - expected).abs() <= 1e-12 * expected);
        prop_assert!(measured.is_finite);
    }
}

#[test]
fn what_is_not_finite_is_found_wherever_it_is() {
    let crew = crew(2);
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [0, 1, 127, 128, 70_000, 99_999] {
            let mut grads = vec![f32::MAX; 100_000];
            assert!(measure(&crew, 1.0, &[Numbers::F32(&grads)]).is_finite);
            grads[place] = odd;
            assert!(!measure(&crew, 1.0, &[Numbers::F32(&grads)]).is_finite, "{odd} at {place}");
        }
    }
}

#[test]
fn short_weights_are_rounded_at_random_without_a_bias() {
    // Steps of a hundredth of what bf16 can tell: to the nearest, nothing would ever happen.
    let rule = Rule::Sgd(deepnvme_optim::Sgd { lr: 1.0, ..deepnvme_optim::Sgd::default() });
    let (crew, kernel, elements) = (crew(1), kernel(rule, Root::Exact), 10_000);
    let grad = Vector::F32(vec![-2.0_f32.powi(-7) / 100.0; elements]);
    let mean = |rounding| {
        let mut state = State::new(&rule, Vector::new(Float::Bf16, &vec![1.0; elements]), 0, None);
        for step in 1..=50 {
            state.step(&kernel, &crew, &Step { step, rounding, seed: 5, ..Step::default() }, &grad);
        }
        let Vector::Bf16(weights) = state.weights else { unreachable!() };
        let sum: f64 = weights.iter().map(|weight| f64::from(f32::from_bits(u32::from(*weight) << 16))).sum();
        (sum / elements as f64 - 1.0) / 2.0_f64.powi(-7)
    };
    assert_eq!(mean(Rounding::Nearest), 0.0);
    let moved = mean(Rounding::Stochastic);
    // Half a unit, with a standard error of 0.7 of a unit by the root of the number of elements.
    assert!((moved - 0.5).abs() < 0.035, "{moved}");
}

#[test]
fn sums_are_torchs() {
    let crew = crew(1);
    let mut sum = Vector::Bf16(vec![0x3f80, 0x3f80, 0x3f81, 0x7f7f]);
    // Halves of the last bit go to the even neighbour; what is too large becomes infinite.
    let new = Vector::F32(vec![2.0_f32.powi(-8), 2.0_f32.powi(-8) * 1.001, 2.0_f32.powi(-8), f32::MAX]);
    accumulate(&crew, sum.change(), new.read()).unwrap();
    assert_eq!(sum, Vector::Bf16(vec![0x3f80, 0x3f81, 0x3f82, 0x7f80]));
    let short = Vector::F32(vec![0.0; 3]);
    let refused = accumulate(&crew, sum.change(), short.read()).unwrap_err();
    assert!(refused.to_string().contains("3 elements; the sum has 4"), "{refused}");
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_changed() {
    let crew = crew(1);
    let rule = rules()[0];
    let kernel = kernel(rule, Root::Exact);
    let grad = Vector::F32(vec![1.0; 300]);
    let state = || State::new(&rule, Vector::F32(vec![1.0; 300]), 2, Some(Float::Bf16));
    let refusal = |step: u64, grad: &Vector, change: &dyn Fn(&mut State)| {
        let (mut good, mut bad) = (state(), state());
        change(&mut bad);
        let other = Vector::F32(vec![1.0; 300]);
        let parts = vec![good.part(&other), bad.part(grad)];
        let step = Step { step, ..Step::default() };
        let Error::Invalid(text) = kernel.step(&crew, &step, parts).unwrap_err() else { unreachable!() };
        assert_eq!(good.bits(), state().bits());
        text
    };
    let nothing = |_: &mut State| ();
    assert!(refusal(0, &grad, &nothing).contains("the first one is 1"));
    assert!(refusal(1, &Vector::F32(vec![1.0; 299]), &nothing).contains("grad has 299"));
    assert!(refusal(1, &grad, &|state| drop(state.moments.pop())).contains("has 1 moments; the rule has 2"));
    let scales = |state: &mut State| state.moments[1] = Moment::Q8(vec![0; 300], vec![0.0; 2]);
    assert!(refusal(1, &grad, &scales).contains("2 scales; 300 elements need 3"));
    let codes = |state: &mut State| state.moments[0] = Moment::Bf16(vec![0; 301]);
    assert!(refusal(1, &grad, &codes).contains("301 elements"));
    assert!(refusal(1, &grad, &|state| state.out = Some(Vector::F32(vec![]))).contains("out has 0"));
}

#[test]
fn settings_out_of_range_are_refused() {
    use deepnvme_optim::{Adagrad, Adam, Lion, Sgd};
    for (rule, name) in [
        (Rule::Adam(Adam { lr: -1.0, ..Adam::default() }), "lr is -1"),
        (Rule::Adam(Adam { beta2: 1.0, ..Adam::default() }), "beta2 is 1"),
        (Rule::Adam(Adam { eps: f64::NAN, ..Adam::default() }), "eps is NaN"),
        (Rule::Lion(Lion { beta1: -0.1, ..Lion::default() }), "beta1 is -0.1"),
        (Rule::Sgd(Sgd { nesterov: true, ..Sgd::default() }), "nesterov needs"),
        (Rule::Adagrad(Adagrad { lr_decay: -1.0, ..Adagrad::default() }), "lr_decay is -1"),
    ] {
        let refused = Kernel::new(rule, Root::Exact).unwrap_err();
        assert!(refused.to_string().contains(name), "{refused}");
    }
    assert!(Crew::new(THREADS_MAX + 1).unwrap_err().to_string().contains("at most 256"));
}
