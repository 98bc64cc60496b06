//! Times a step and a plain loop over the same memory: `step_speed [elements] [threads] [rounds]`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for the terminal")]

use std::time::Instant;

use deepnvme_optim::{
    Adam, Algorithm, FloatSlice, FloatSliceMut, Kernel, MomentMut, Part, Rounding, SqrtMode, StepOptions, ThreadPool,
};
use fearless_simd::{Level, dispatch};

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().unwrap());
    let elements = arguments.next().unwrap_or(1 << 25);
    let threads = arguments.next().unwrap_or(1);
    let rounds = arguments.next().unwrap_or(5);
    let pool = ThreadPool::new(threads).unwrap();
    let kernel = |sqrt_mode| {
        Kernel::new(Algorithm::Adam(Adam { decoupled: true, weight_decay: 1e-2, ..Adam::default() }), sqrt_mode)
            .unwrap()
    };
    let random = || -> Vec<f32> {
        let mut random = fastrand::Rng::with_seed(1);
        (0..elements).map(|_| random.f32() - 0.5).collect()
    };
    let short = || -> Vec<u16> { random().iter().map(|value| (value.to_bits() >> 16) as u16).collect() };
    let (mut weights, grad, mut first, mut second) = (random(), random(), random(), vec![0.0; elements]);
    let (short_grad, mut out) = (short(), short());
    let (mut short_first, mut short_second) = (short(), vec![0; elements]);
    let mut codes = [vec![0; elements], vec![0; elements]];
    let mut scales = [vec![0.0; elements.div_ceil(128)], vec![0.0; elements.div_ceil(128)]];
    let mut rows: Vec<(&str, Vec<f64>)> = Vec::new();
    for round in 0..rounds {
        let mut row = 0;
        let mut time = |name: &'static str, work: &mut dyn FnMut()| {
            let began = Instant::now();
            work();
            let ms = began.elapsed().as_secs_f64() * 1e3;
            if round == 0 {
                rows.push((name, Vec::new()));
            } else {
                rows[row].1.push(ms);
            }
            row += 1;
        };
        let step = StepOptions { step: 5, ..StepOptions::default() };
        time("plain loop", &mut || {
            dispatch!(Level::new(), _ => plain(&mut weights, &grad, &mut first, &mut second));
        });
        for (name, sqrt_mode) in [
            ("fp32", SqrtMode::Exact),
            ("fp32, two-step root", SqrtMode::TwoStep),
            ("fp32, one-step root", SqrtMode::OneStep),
        ] {
            if !sqrt_mode.is_available() {
                continue;
            }
            time(name, &mut || {
                let moments = vec![MomentMut::F32(&mut first), MomentMut::F32(&mut second)];
                let (weights, grad) = (FloatSliceMut::F32(&mut weights), FloatSlice::F32(&grad));
                kernel(sqrt_mode)
                    .step(&pool, &step, vec![Part { index: 0, weights, grad, moments, out: None }])
                    .unwrap();
            });
        }
        for (name, rounding) in
            [("bf16 grad and copy", Rounding::Nearest), ("the same, stochastic", Rounding::Stochastic)]
        {
            time(name, &mut || {
                let moments = vec![MomentMut::F32(&mut first), MomentMut::F32(&mut second)];
                let (weights, grad) = (FloatSliceMut::F32(&mut weights), FloatSlice::Bf16(&short_grad));
                let part = Part { index: 0, weights, grad, moments, out: Some(FloatSliceMut::Bf16(&mut out)) };
                kernel(SqrtMode::Exact).step(&pool, &StepOptions { rounding, ..step }, vec![part]).unwrap();
            });
        }
        time("bf16 moments", &mut || {
            let moments = vec![MomentMut::Bf16(&mut short_first), MomentMut::Bf16(&mut short_second)];
            let (weights, grad) = (FloatSliceMut::F32(&mut weights), FloatSlice::F32(&grad));
            kernel(SqrtMode::Exact)
                .step(&pool, &step, vec![Part { index: 0, weights, grad, moments, out: None }])
                .unwrap();
        });
        time("8-bit moments", &mut || {
            let pairs = codes.iter_mut().zip(&mut scales);
            let moments = pairs.map(|(codes, scales)| MomentMut::Q8 { codes, scales }).collect();
            let (weights, grad) = (FloatSliceMut::F32(&mut weights), FloatSlice::F32(&grad));
            kernel(SqrtMode::Exact)
                .step(&pool, &step, vec![Part { index: 0, weights, grad, moments, out: None }])
                .unwrap();
        });
        time("accumulate", &mut || {
            deepnvme_optim::accumulate(&pool, FloatSliceMut::F32(&mut weights), FloatSlice::F32(&grad)).unwrap();
        });
        time("gradient_norm", &mut || {
            std::hint::black_box(deepnvme_optim::gradient_norm(&pool, 1.0, &[FloatSlice::F32(&grad)]));
        });
    }
    println!("{elements} elements, {threads} threads");
    for (name, mut times) in rows {
        times.sort_by(f64::total_cmp);
        let (least, median) = (times[0], times[times.len() / 2]);
        println!("{name:<24} {least:8.2} ms least {median:8.2} ms median");
    }
}

/// The arithmetic of AdamW, vectorised by the compiler.
#[inline(always)]
fn plain(weights: &mut [f32], grad: &[f32], first: &mut [f32], second: &mut [f32]) {
    let all = weights.as_chunks_mut::<16>().0.iter_mut().zip(grad.as_chunks::<16>().0);
    let all = all.zip(first.as_chunks_mut::<16>().0).zip(second.as_chunks_mut::<16>().0);
    for (((weights, grad), first), second) in all {
        for lane in 0..16 {
            let weight = weights[lane] * 0.99999;
            first[lane] = (grad[lane] - first[lane]).mul_add(0.1, first[lane]);
            second[lane] = (grad[lane] * 0.001).mul_add(grad[lane], second[lane] * 0.999);
            weights[lane] = weight + first[lane] * -1e-3 / (second[lane].sqrt() / 0.07 + 1e-8);
        }
    }
}
