//! Measures the speed of packing, casts and quantisation on one core, and their sizes: `cargo run --release -p
//! deepnvme-codec --example codec_speed [model.safetensors]`, a file of fp32 tensors. Without one, Gaussian weights only.
//!
//! Every row runs once in each of nine rounds, over more memory than the caches hold. The result is the median of this
//! thread's CPU time, which other processes disturb less. GB are 10^9 bytes of the wider side.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used, reason = "a program for developers")]

use std::fs;
use std::num::NonZeroUsize;

use deepnvme_codec::quant::{CodeType, Scheme, dequantise, quantise};
use deepnvme_codec::{Float, cast, pack};
use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 9;
/// Elements of the Gaussian weights, and the fewest that are measured.
const ELEMENTS: usize = 32 << 20;

/// A measurement: name, bytes and work.
type Row<'a> = (String, usize, Box<dyn FnMut() + 'a>);

fn main() {
    println!("{:?}", fearless_simd::Level::new());
    if let Some(path) = std::env::args().nth(1) {
        let file = fs::read(&path).expect("the file can be read");
        let begin = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let weights: Vec<f32> =
            file[begin..].as_chunks().0.iter().map(|element| f32::from_le_bytes(*element)).collect();
        measure("model", &weights);
    }
    measure("gauss", &gaussian(ELEMENTS));
}

fn measure(name: &str, weights: &[f32]) {
    let f32s: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
    for float in Float::ALL {
        let mut bytes = vec![0; weights.len() * float.bytes()];
        cast::convert(Float::F32, float, &f32s, &mut bytes).unwrap();
        packing(&format!("{name} {float:?}"), float, &bytes);
    }
    casts(&f32s);
    for code in [CodeType::Int8, CodeType::F8E4m3] {
        for (group, scale) in [(0, Float::F32), (128, Float::Bf16), (128, Float::F16), (64, Float::F16)] {
            quants(name, Scheme { code, group: NonZeroUsize::new(group), scale }, &f32s);
        }
    }
}

/// Measures casts between all pairs of types.
fn casts(f32s: &[u8]) {
    let elements = f32s.len() / 4;
    for from in Float::ALL {
        let mut source = vec![0; elements * from.bytes()];
        cast::convert(Float::F32, from, f32s, &mut source).unwrap();
        let mut targets = Float::ALL.map(|to| (to, vec![0; elements * to.bytes()]));
        let rows = targets.iter_mut().filter(|(to, _)| *to != from).map(|(to, target)| -> Row<'_> {
            let to = *to;
            let source = &source;
            let work = move || cast::convert(from, to, source, target).unwrap();
            (format!("{from:?} to {to:?}"), elements * from.bytes().max(to.bytes()), Box::new(work))
        });
        rounds(rows.collect());
    }
}

/// Columns of the matrix of weights, as in MiniLM.
const COLUMNS: usize = 384;

/// Measures quantisation and dequantisation, and the relative RMS error.
fn quants(name: &str, scheme: Scheme, f32s: &[u8]) {
    let rows = f32s.len() / 4 / COLUMNS;
    let f32s = &f32s[..rows * COLUMNS * 4];
    let mut codes = vec![0; rows * COLUMNS];
    let mut scales = vec![0; scheme.scales(rows, COLUMNS).unwrap() * scheme.scale.bytes()];
    quantise(scheme, COLUMNS, (Float::F32, f32s), &mut codes, &mut scales).unwrap();
    let mut targets = Float::ALL.map(|to| (to, vec![0; rows * COLUMNS * to.bytes()]));
    let label = format!("{name} {:?}/{}", scheme.code, scheme.group.map_or(COLUMNS, NonZeroUsize::get));
    let mut again = Vec::new();
    let measured = targets.iter_mut().map(|(to, target)| -> Row<'_> {
        let (to, bytes) = (*to, target.len());
        let (codes, scales) = (&codes, &scales);
        let work = move || dequantise(scheme, COLUMNS, codes, scales, (to, target)).unwrap();
        (format!("{label} to {to:?}"), bytes, Box::new(work))
    });
    rounds(measured.collect());
    for (to, target) in &targets {
        let mut wide = vec![0; f32s.len()];
        cast::convert(*to, Float::F32, target, &mut wide).unwrap();
        let (mut lost, mut all) = (0.0, 0.0);
        for (was, is) in f32s.as_chunks().0.iter().zip(wide.as_chunks().0) {
            let (was, is) = (f64::from(f32::from_le_bytes(*was)), f64::from(f32::from_le_bytes(*is)));
            lost += (was - is).powi(2);
            all += was * was;
        }
        again.push(format!("{to:?} {:.5}", (lost / all).sqrt()));
    }
    let part = (codes.len() + scales.len()) as f64 / (2 * codes.len()) as f64;
    println!("{label}, {:?} scales: {part:.4} of bf16's bytes, error {}", scheme.scale, again.join(", "));
    let mut back = (codes.clone(), scales.clone());
    let work = || quantise(scheme, COLUMNS, (Float::F32, f32s), &mut back.0, &mut back.1).unwrap();
    rounds(vec![(format!("{label} from F32"), f32s.len(), Box::new(work))]);
}

/// Measures encoding and decoding, in blocks of the default size.
fn packing(name: &str, float: Float, bytes: &[u8]) {
    let step = pack::BLOCK_ELEMENTS * float.bytes();
    let (mut packed, mut repacked) = (Vec::new(), Vec::with_capacity(2 * bytes.len()));
    for block in bytes.chunks(step) {
        pack::encode(float, block, &mut packed).unwrap();
    }
    let (mut out, mut scratch) = (vec![0; bytes.len()], pack::Scratch::default());
    let decode = || {
        let mut rest = packed.as_slice();
        for out in out.chunks_mut(step) {
            let block = pack::PackedBlock::parse(rest).unwrap();
            block.decode_with(&mut scratch, out).unwrap();
            rest = &rest[block.header().encoded_bytes()..];
        }
    };
    let encode = || {
        repacked.clear();
        for block in bytes.chunks(step) {
            pack::encode(float, block, &mut repacked).unwrap();
        }
    };
    let rows: Vec<Row<'_>> = vec![
        (format!("{name} unpack"), bytes.len(), Box::new(decode)),
        (format!("{name} pack"), bytes.len(), Box::new(encode)),
    ];
    rounds(rows);
    println!("{name:<28} {:.4} of the bytes", packed.len() as f64 / bytes.len() as f64);
    assert!(out == bytes, "{name}: not the same bytes");
}

/// Runs the rows in turns and prints the median of each.
fn rounds(mut rows: Vec<Row<'_>>) {
    let mut samples = vec![Vec::new(); rows.len()];
    for _ in 0..ROUNDS {
        for ((_, _, work), samples) in rows.iter_mut().zip(&mut samples) {
            let begin = seconds();
            work();
            samples.push(seconds() - begin);
        }
    }
    for ((name, bytes, _), mut samples) in rows.into_iter().zip(samples) {
        samples.sort_by(f64::total_cmp);
        let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
        let (least, most) = (rate(samples[ROUNDS - 1]), rate(samples[0]));
        println!("{name:<28} {:6.2} GB/s ({least:.2} to {most:.2})", rate(samples[ROUNDS / 2]));
    }
}

/// Returns the CPU time of this thread.
fn seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns normally distributed weights (Box-Muller).
fn gaussian(elements: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut one = || {
        let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
        (0.02 * radius * (std::f64::consts::TAU * random.f64()).cos()) as f32
    };
    (0..elements).map(|_| one()).collect()
}
