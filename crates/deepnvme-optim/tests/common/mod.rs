//! Weights and state of random types, and all SIMD levels of this CPU.
#![allow(dead_code, reason = "every test uses its own")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail like tests")]

use deepnvme_optim::{
    Adagrad, Adam, Algorithm, Float, FloatSlice, FloatSliceMut, Kernel, Level, Lion, MomentMut, Part, Sgd, SqrtMode,
    StepOptions, ThreadPool,
};

/// Returns every level, from the lowest to the widest.
pub(crate) fn levels() -> Vec<(&'static str, Level)> {
    let mut levels = vec![("baseline", Level::baseline())];
    #[cfg(target_arch = "x86_64")]
    {
        let widest = Level::new();
        levels.extend(widest.as_sse4_2().map(|token| ("SSE4.2", Level::Sse4_2(token))));
        levels.extend(widest.as_avx2().map(|token| ("AVX2", Level::Avx2(token))));
        levels.extend(widest.as_avx512().map(|token| ("AVX-512", Level::Avx512(token))));
    }
    levels
}

/// Returns algorithms with all of their settings.
pub(crate) fn algorithms() -> Vec<Algorithm> {
    let adam = Adam { lr: 3e-3, weight_decay: 0.1, ..Adam::default() };
    let sgd = Sgd { lr: 1e-2, momentum: 0.9, weight_decay: 0.01, ..Sgd::default() };
    vec![
        Algorithm::Adam(Adam { decoupled: true, ..adam }),
        Algorithm::Adam(adam),
        Algorithm::Adam(Adam { amsgrad: true, maximize: true, beta1: 0.3, ..adam }),
        Algorithm::Adam(Adam { weight_decay: 0.0, ..adam }),
        Algorithm::Lion(Lion { weight_decay: 0.1, ..Lion::default() }),
        Algorithm::Sgd(Sgd { momentum: 0.0, ..sgd }),
        Algorithm::Sgd(Sgd { dampening: 0.3, maximize: true, ..sgd }),
        Algorithm::Sgd(Sgd { nesterov: true, ..sgd }),
        Algorithm::Adagrad(Adagrad { lr_decay: 0.1, weight_decay: 0.01, ..Adagrad::default() }),
    ]
}

/// A vector of any float type.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Vector {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    F16(Vec<u16>),
}

impl Vector {
    pub(crate) fn new(float: Float, values: &[f32]) -> Self {
        let short = |bytes: fn(f32) -> u16| values.iter().map(|value| bytes(*value)).collect();
        match float {
            Float::F32 => Self::F32(values.to_vec()),
            Float::Bf16 => Self::Bf16(short(|value| (value.to_bits() >> 16) as u16)),
            Float::F16 => Self::F16(short(f16)),
        }
    }

    pub(crate) fn read(&self) -> FloatSlice<'_> {
        match self {
            Self::F32(values) => FloatSlice::F32(values),
            Self::Bf16(values) => FloatSlice::Bf16(values),
            Self::F16(values) => FloatSlice::F16(values),
        }
    }

    pub(crate) fn change(&mut self) -> FloatSliceMut<'_> {
        match self {
            Self::F32(values) => FloatSliceMut::F32(values),
            Self::Bf16(values) => FloatSliceMut::Bf16(values),
            Self::F16(values) => FloatSliceMut::F16(values),
        }
    }

    /// Returns all bits for comparison. All NaNs are equal.
    pub(crate) fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(values) => values.iter().map(|value| bits(*value)).collect(),
            Self::Bf16(values) => values.iter().map(|value| bits(f32::from_bits(u32::from(*value) << 16))).collect(),
            Self::F16(values) => {
                let one = |value: u16| if value & 0x7fff > 0x7c00 { 0x7e00 } else { u32::from(value) };
                values.iter().map(|value| one(*value)).collect()
            }
        }
    }
}

fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

/// Rounds towards zero without subnormals, which is enough for gradients.
fn f16(value: f32) -> u16 {
    let (sign, size) = ((value.to_bits() >> 16 & 0x8000) as u16, value.abs());
    match size {
        _ if value.is_nan() => 0x7e00,
        65504.0.. => sign | 0x7c00,
        6.2e-5.. => sign | ((size.to_bits() >> 13) - (112 << 10)) as u16,
        _ => sign,
    }
}

/// A moment that owns its memory.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Moment {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Q8(Vec<u8>, Vec<f32>),
}

impl Moment {
    pub(crate) fn zeros(kind: usize, elements: usize) -> Self {
        match kind {
            0 => Self::F32(vec![0.0; elements]),
            1 => Self::Bf16(vec![0; elements]),
            _ => Self::Q8(vec![0; elements], vec![0.0; elements.div_ceil(deepnvme_optim::SCALE_ELEMENTS)]),
        }
    }

    pub(crate) fn change(&mut self) -> MomentMut<'_> {
        match self {
            Self::F32(values) => MomentMut::F32(values),
            Self::Bf16(values) => MomentMut::Bf16(values),
            Self::Q8(codes, scales) => MomentMut::Q8 { codes, scales },
        }
    }

    fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(values) => values.iter().map(|value| bits(*value)).collect(),
            Self::Bf16(values) => values.iter().map(|value| bits(f32::from_bits(u32::from(*value) << 16))).collect(),
            Self::Q8(codes, scales) => {
                let codes = codes.iter().map(|code| u32::from(*code));
                codes.chain(scales.iter().map(|scale| bits(*scale))).collect()
            }
        }
    }
}

/// Everything that a step changes.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) weights: Vector,
    pub(crate) moments: Vec<Moment>,
    pub(crate) out: Option<Vector>,
}

impl State {
    pub(crate) fn new(algorithm: &Algorithm, weights: Vector, kind: usize, out: Option<Float>) -> Self {
        let elements = weights.read().len();
        let moments = algorithm.moments().iter().map(|_| Moment::zeros(kind, elements)).collect();
        let out = out.map(|float| Vector::new(float, &vec![0.0; elements]));
        Self { weights, moments, out }
    }

    pub(crate) fn part<'a>(&'a mut self, grad: &'a Vector) -> Part<'a> {
        let moments = self.moments.iter_mut().map(Moment::change).collect();
        let out = self.out.as_mut().map(Vector::change);
        Part { index: 1000, weights: self.weights.change(), grad: grad.read(), moments, out }
    }

    pub(crate) fn step(&mut self, kernel: &Kernel, pool: &ThreadPool, step: &StepOptions, grad: &Vector) {
        kernel.step(pool, step, vec![self.part(grad)]).unwrap();
    }

    pub(crate) fn bits(&self) -> Vec<Vec<u32>> {
        let mut all = vec![self.weights.bits()];
        all.extend(self.moments.iter().map(Moment::bits));
        all.extend(self.out.iter().map(Vector::bits));
        all
    }
}

/// Returns numbers of many magnitudes. With `is_wild` also NaNs, infinities and subnormals.
pub(crate) fn values(random: &mut fastrand::Rng, elements: usize, is_wild: bool) -> Vec<f32> {
    let one = |random: &mut fastrand::Rng| {
        let value = (random.f32() - 0.5) * 2.0_f32.powi(random.i32(-12..3));
        match random.u32(..60) {
            _ if !is_wild => value,
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3..6 => f32::from_bits(random.u32(..0x0080_0000)),
            6 => f32::MAX,
            7..10 => f32::from_bits(random.u32(..)),
            10..13 => -0.0,
            _ => value,
        }
    };
    (0..elements).map(|_| one(random)).collect()
}

pub(crate) fn thread_pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads).unwrap()
}

pub(crate) fn kernel(algorithm: Algorithm, sqrt_mode: SqrtMode) -> Kernel {
    Kernel::new(algorithm, sqrt_mode).unwrap()
}
