//! The state in bf16: rounded once a call, and what those roundings add up to.

use crate::semantics::{args, options, tensor_cores, Args};
use crate::support::{assert_rounded, devices, dtype_for, f32_algos, on_tensor_cores, rel_rms, rounded, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::{gdn_decode_in_place, Gates, RuleOptions};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs};
use candle_gdn::{Algo, CuSeqlens};
use std::convert::identity;

/// From a start that bf16 holds, the same call on an f32 state gives the same o, and rounded the same state: arithmetic
/// does not depend on how the state is stored, and the rounding is to nearest even. The decode kernels on CUDA add up a row
/// in another order where its elements are half as wide.
#[test]
fn it_is_the_f32_state_rounded() {
    for device in devices() {
        for algo in f32_algos().chain(tensor_cores(&device)) {
            let reordered = device.is_cuda() && matches!(algo, Algo::Auto | Algo::Decode);
            let same = |what: &str, [(o, state), (o_bf16, state_bf16)]: [(Tensor, Tensor); 2]| {
                assert_eq!(state_bf16.dtype(), DType::BF16);
                let state = state.to_device(&Device::Cpu).unwrap();
                assert_ne!(values(&state), values(&state_bf16), "{what}: a state that bf16 holds shows nothing");
                if reordered {
                    let error = rel_rms(&values(&o_bf16), &values(&o));
                    assert!(error < 1e-6, "{what}: o: {error:e}");
                    assert_rounded(what, &values(&state_bf16), &values(&state));
                } else {
                    assert_eq!(values(&o), values(&o_bf16), "{what}: o");
                    assert_eq!(values(&state.to_dtype(DType::BF16).unwrap()), values(&state_bf16), "{what}: state");
                }
            };
            // Above and below the lengths from which a kernel goes another way.
            let (lengths, segments) = match algo {
                Algo::Decode => ([1, 5, 16], &[0][..]),
                algo if on_tensor_cores(algo) => ([1, 64, 300], &[1, 3][..]),
                _ => ([1, 5, 70], &[0][..]),
            };
            for tokens in lengths {
                let x = args(2, tokens, &device).in_dtype(dtype_for(algo));
                let both = |run: &dyn Fn(Args) -> (Tensor, Tensor)| {
                    let start = x.state.to_dtype(DType::BF16).unwrap();
                    [start.to_dtype(DType::F32).unwrap(), start].map(|state| run(Args { state, ..x.clone() }))
                };
                for &segments in segments {
                    let options = RuleOptions::with(|o| (o.segments, o.algo) = (segments, algo));
                    let what = format!("{algo:?}, {tokens} tokens, {segments} segments");
                    same(&what, both(&|x| x.prefilled(None, options)));
                }
                if on_tensor_cores(algo) {
                    continue;
                }
                same(&format!("{algo:?}, decode"), both(&|x| x.token(0).decoded(options(algo))));
                let cu = CuSeqlens::from_lengths(&[tokens - 1, tokens + 1], &device).unwrap();
                if algo != Algo::Decode || tokens < 16 {
                    same(&format!("{algo:?}, packed"), both(&|x| x.packed().prefilled(Some(&cu), options(algo))));
                }
            }
        }
    }
}

/// Zero, infinite and not a number, stored and read back.
#[test]
fn odd_values_stay_what_they_are() {
    for device in devices() {
        let x = args(1, 1, &device).token(0);
        // No decay and nothing written (beta is zero): a finite row stays bit for bit.
        let shut = x.gates.a.affine(0.0, -200.0).unwrap();
        let x = Args { gates: Gates { a: shut.clone(), b: shut, ..x.gates.clone() }, ..x };
        for (value, finite) in
            [(0f32, true), (3.140625, true), (1e-39, true), (f32::INFINITY, false), (f32::NAN, false)]
        {
            let state = x.state.affine(0.0, 0.0).unwrap().affine(1.0, f64::from(value)).unwrap();
            let state = state.to_dtype(DType::BF16).unwrap();
            let before = values(&state);
            x.decode(&state, options(Algo::Auto), identity);
            if finite {
                assert_eq!(values(&state), before, "{value}");
            } else {
                assert!(values(&state).iter().all(|x| !x.is_finite()), "{value}");
            }
        }
    }
}

/// Decode steps of one sequence in f32 with a bf16 state against the reference, whose state is never rounded.
///
/// A rounding to nearest is off by at most `u = 2^-8` of an element, and the errors of different roundings are
/// independent and lie evenly on both sides, so that their mean square is at most `u^2 / 3` of the element's. A step
/// takes the error of the state before it times a matrix of norm `decay` at most (beta up to 1, k of length 1). Hence
/// for the error `e` of the state, and for that of o, which is read along a direction q that knows nothing of the
/// error,
///
/// ```text
/// e_t^2 <= decay^2 e_(t-1)^2 + u^2 / 3 ||S_t||^2        (error of o_t)^2 <= scale^2 decay^2 e_(t-1)^2 / K
/// ```
///
/// Errors that lean to one side, as those of a truncation do, or a second rounding in a step break the bound.
#[test]
fn roundings_add_up_as_a_random_walk() {
    const STEPS: usize = 256;
    for device in devices() {
        for decay in [1.0f64, 0.99, 0.9] {
            let walk = Walk::new(STEPS, decay);
            let rows = walk.run(&device);
            for row in &rows {
                println!("decay {decay}, {:3} steps: {row:?}", row.steps);
                assert!(row.state <= row.state_bound + 1e-5, "decay {decay}: {row:?}");
                assert!(row.o <= row.o_bound + 1e-5, "decay {decay}: {row:?}");
                // Where the state lost nothing the bound would say nothing.
                assert!(row.state >= 0.2 * row.state_bound, "decay {decay}: {row:?}");
            }
        }
    }
}

/// Relative RMS errors after some steps: of the state, of all o up to there, and their bounds.
#[derive(Debug)]
struct Row {
    steps: usize,
    state: f64,
    state_bound: f64,
    o: f64,
    o_bound: f64,
}

struct Walk {
    steps: usize,
    decay: f64,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
}

const WALK: Dims = Dims { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128 };

impl Walk {
    fn new(steps: usize, decay: f64) -> Self {
        let rng = &mut Rng::new(9);
        let mut draw = |n: usize| rounded(&rng.normals(steps * n), &[steps * n], DType::F32).unwrap().1;
        // softplus(a) = -ln(decay)
        let a = if decay == 1.0 { -200.0 } else { (1.0 / decay).ln().exp_m1().ln() };
        let a = rounded(&[a], &[1], DType::F32).unwrap().1[0];
        Self { steps, decay, q: draw(128), k: draw(128), v: draw(256), a: vec![a; 2 * steps], b: draw(2) }
    }

    fn run(&self, device: &Device) -> Vec<Row> {
        let tensor = |x: &[f64], shape: &[usize]| rounded(x, shape, DType::F32).unwrap().0.to_device(device).unwrap();
        let state = Tensor::zeros((1, 2, 128, 128), DType::BF16, device).unwrap();
        let heads = Tensor::zeros(2, DType::F32, device).unwrap();
        let mut want_state = vec![0.0; 2 * 128 * 128];
        let (mut o, mut want_o, mut o_bound, mut rows) = (vec![], vec![], 0.0, vec![]);
        let (scale, unit) = (128f64.powf(-0.5), 2f64.powi(-8));
        let (mut square, mut decay) = (0.0, self.decay);
        decay *= decay;
        for t in 0..self.steps {
            let (q, k, v) = (&self.q[t * 128..][..128], &self.k[t * 128..][..128], &self.v[t * 256..][..256]);
            let (a, b) = (&self.a[t * 2..][..2], &self.b[t * 2..][..2]);
            let gates =
                Gates { a: tensor(a, &[1, 2]), b: tensor(b, &[1, 2]), a_log: heads.clone(), dt_bias: heads.clone() };
            let (tq, tk, tv) = (tensor(q, &[1, 1, 128]), tensor(k, &[1, 1, 128]), tensor(v, &[1, 2, 128]));
            o.extend(values(&gdn_decode_in_place(&tq, &tk, &tv, &gates, &state, RuleOptions::default()).unwrap()));
            let constants = Constants { l2norm: true, l2_eps: 1e-6, scale, beta_scale: 1.0 };
            let inputs = Inputs { q, k, v, a, b, a_log: &[0.0; 2], dt_bias: &[0.0; 2] };
            want_o.extend(gated_delta_rule(WALK, constants, &[0, 1], inputs, &mut want_state));

            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            o_bound += scale * scale * decay * square / 128.0;
            square = decay * square + unit * unit / 3.0 * norm(&want_state);
            if [1, 16, 64, 256].contains(&(t + 1)) {
                rows.push(Row {
                    steps: t + 1,
                    state: rel_rms(&values(&state), &want_state),
                    state_bound: (square / norm(&want_state)).sqrt(),
                    o: rel_rms(&o, &want_o),
                    o_bound: (o_bound / norm(&want_o)).sqrt(),
                });
            }
        }
        rows
    }
}
