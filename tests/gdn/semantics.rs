//! What an op promises besides its numbers: who is written, who is not, what is refused, what repeats.

use crate::rule_case::{Case, Form};
use crate::support::{
    devices, dtype_for, f32_algos, gdn_decode, gdn_prefill, has, refused, rel_rms, values, APART, HALVES, TENSOR_CORES,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_gdn::ops::{gdn_decode_in_place, gdn_prefill_in_place, Gates, GdnDecode, GdnPrefill, RuleOptions};
use candle_gdn::reference::Dims;
use candle_gdn::{Algo, CuSeqlens};
use std::convert::identity;

#[derive(Clone)]
pub struct Args {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub gates: Gates,
    pub state: Tensor,
}

/// HK 2, HV 4, K = V = 128; `tokens` of `batch` sequences.
pub fn args(batch: usize, tokens: usize, device: &Device) -> Args {
    let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device).unwrap();
    let [q, k, v] = [2, 2, 4].map(|heads| randn(&[batch, tokens, heads, 128]));
    let [a, b] = [(); 2].map(|()| randn(&[batch, tokens, 4]));
    let gates = Gates { a, b, a_log: randn(&[4]), dt_bias: randn(&[4]) };
    Args { q, k, v, gates, state: randn(&[batch, 4, 128, 128]) }
}

impl Args {
    /// The same with `f` of what lies by token: q, k, v, a and b.
    pub fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        let gates = Gates { a: f(&self.gates.a), b: f(&self.gates.b), ..self.gates.clone() };
        Self { q: f(&self.q), k: f(&self.k), v: f(&self.v), gates, state: self.state.clone() }
    }

    /// q, k and v in `dtype`.
    pub fn in_dtype(mut self, dtype: DType) -> Self {
        for tensor in [&mut self.q, &mut self.k, &mut self.v] {
            *tensor = tensor.to_dtype(dtype).unwrap();
        }
        self
    }

    /// Tokens `start..start + len` of every sequence.
    pub fn tokens(&self, start: usize, len: usize) -> Self {
        self.map(|x| x.narrow(1, start, len).unwrap())
    }

    /// Token `t` of every sequence, as decode takes it.
    pub fn token(&self, t: usize) -> Self {
        self.map(|x| x.narrow(1, t, 1).unwrap().squeeze(1).unwrap())
    }

    /// Sequences `start..start + len`, with their states.
    pub fn sequences(&self, start: usize, len: usize) -> Self {
        let part = |x: &Tensor| x.narrow(0, start, len).unwrap();
        Self { state: part(&self.state), ..self.map(part) }
    }

    /// All tokens along one dimension.
    pub fn packed(&self) -> Self {
        self.map(|x| x.flatten(0, 1).unwrap())
    }

    /// o of a prefill that writes `state`; `with` completes the op.
    pub fn prefill(
        &self,
        state: &Tensor,
        cu: Option<&CuSeqlens>,
        options: RuleOptions,
        with: impl FnOnce(GdnPrefill) -> GdnPrefill,
    ) -> Tensor {
        let op = GdnPrefill::new(self.gates.clone(), state, cu, options).unwrap();
        with(op).forward(&self.q, &self.k, &self.v).unwrap()
    }

    /// The same of one token through decode.
    pub fn decode(&self, state: &Tensor, options: RuleOptions, with: impl FnOnce(GdnDecode) -> GdnDecode) -> Tensor {
        let op = GdnDecode::new(self.gates.clone(), state, options).unwrap();
        with(op).forward(&self.q, &self.k, &self.v).unwrap()
    }

    /// o and the new state of a prefill that leaves its state alone.
    pub fn prefilled(&self, cu: Option<&CuSeqlens>, options: RuleOptions) -> (Tensor, Tensor) {
        gdn_prefill(&self.q, &self.k, &self.v, &self.gates, &self.state, cu, options).unwrap()
    }

    pub fn decoded(&self, options: RuleOptions) -> (Tensor, Tensor) {
        gdn_decode(&self.q, &self.k, &self.v, &self.gates, &self.state, options).unwrap()
    }
}

pub fn options(algo: Algo) -> RuleOptions {
    RuleOptions::with(|o| o.algo = algo)
}

/// The kernels on tensor cores that the device has.
pub fn tensor_cores(device: &Device) -> impl Iterator<Item = Algo> + '_ {
    TENSOR_CORES.into_iter().filter(|algo| has(device, *algo))
}

#[test]
fn functional_form_leaves_its_state_alone_and_agrees_with_in_place() {
    for device in devices() {
        let o = options(Algo::Auto);
        let check = |x: &Args, (out, new): (Tensor, Tensor), before: Vec<f64>, in_place: &dyn Fn() -> Tensor| {
            assert_eq!(values(&x.state), before);
            assert_eq!(values(&in_place()), values(&out));
            assert_eq!(values(&x.state), values(&new));
            assert_ne!(values(&new), before);
        };
        let x = args(2, 70, &device);
        let in_place = || gdn_prefill_in_place(&x.q, &x.k, &x.v, &x.gates, &x.state, None, o).unwrap();
        let before = values(&x.state);
        check(&x, x.prefilled(None, o), before, &in_place);
        let x = x.token(3);
        let in_place = || gdn_decode_in_place(&x.q, &x.k, &x.v, &x.gates, &x.state, o).unwrap();
        let before = values(&x.state);
        check(&x, x.decoded(o), before, &in_place);
    }
}

/// Whole, cut at places in and between chunks, token by token, and token by token through decode.
#[test]
fn any_split_gives_the_same() {
    let splits = [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 67].map(|at| vec![0, at, 67]);
    let splits = [&splits[..], &[(0..=67).collect()]].concat();
    let chunks = vec![vec![0, 0, 200], vec![0, 1, 200], vec![0, 63, 64, 200], vec![0, 65, 128, 199, 200]];
    for device in devices() {
        let f32 = [Algo::Auto, Algo::Recurrent].map(|algo| (algo, args(1, 67, &device), &splits, 1e-5));
        let halves = tensor_cores(&device).flat_map(|algo| HALVES.map(|dtype| (algo, dtype)));
        let halves = halves.map(|(algo, dtype)| (algo, args(2, 200, &device).in_dtype(dtype), &chunks, APART));
        for (algo, x, all_cuts, bound) in f32.into_iter().chain(halves) {
            let run = |cuts: &[usize]| {
                let state = x.state.force_contiguous().unwrap();
                let part =
                    |cut: &[usize]| x.tokens(cut[0], cut[1] - cut[0]).prefill(&state, None, options(algo), identity);
                let outs: Vec<_> = cuts.windows(2).map(part).collect();
                [values(&Tensor::cat(&outs, 1).unwrap()), values(&state)]
            };
            let whole = run(&[0, x.q.dims()[1]]);
            let close = |what: &str, got: [Vec<f64>; 2]| {
                let [o, state] = [0, 1].map(|i| rel_rms(&got[i], &whole[i]));
                assert!(o < bound && state < bound, "{algo:?} {:?} {what}: o {o:e}, state {state:e}", x.q.dtype());
            };
            for cuts in all_cuts {
                close(&format!("{cuts:?}"), run(cuts));
            }
            if !TENSOR_CORES.contains(&algo) {
                let state = x.state.force_contiguous().unwrap();
                let outs: Vec<_> =
                    (0..67).map(|t| x.token(t).decode(&state, RuleOptions::default(), identity)).collect();
                close("decode", [values(&Tensor::cat(&outs, 0).unwrap()), values(&state)]);
            }
        }
    }
}

/// In a batch and in decode: o of padding is zero, what is nobody's is not touched, and the others are right.
#[test]
fn padding_rows_touch_nothing_and_give_zeros() {
    let dims = Dims { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128 };
    for device in devices() {
        for (algo, tokens) in [(Algo::Auto, 20), (Algo::Recurrent, 20), (Algo::Auto, 1)] {
            for form in [Form::Dense, Form::Projection] {
                let case = Case { packed: false, slots: true, padding: true, ..Case::new(dims, &[tokens; 5]) };
                Case { algo, form, ..case }.check(&device);
            }
        }
    }
}

/// An argument inside the state's own storage would be read while it is written, and deadlock on candle's lock.
#[test]
fn aliasing_is_an_error_and_not_a_deadlock() {
    for device in devices() {
        let pool = Tensor::randn(0f32, 1., 4 * 128 * 128 + 4096, &device).unwrap();
        let state = pool.narrow(0, 0, 4 * 128 * 128).unwrap().reshape((1, 4, 128, 128)).unwrap();
        let good = args(1, 1, &device).token(0);
        let o = RuleOptions::default();
        let tail = |x: &Tensor| pool.narrow(0, 4 * 128 * 128, x.elem_count()).unwrap().reshape(x.dims()).unwrap();
        let sentence = |name: &str| format!("gdn_decode: {name}: shares its storage");
        for (name, argument) in ARGUMENTS {
            let mut x = good.clone();
            *argument(&mut x) = tail(argument(&mut x));
            refused(gdn_decode_in_place(&x.q, &x.k, &x.v, &x.gates, &state, o), &[&sentence(name)]);
        }
        // The same through the bare CustomOp.
        let op = GdnDecode::new(good.gates.clone(), &state, o).unwrap();
        refused(tail(&good.q).apply_op3_no_bwd(&good.k, &good.v, &op), &[&sentence("q")]);
        // Views of one projection may share among themselves.
        let shared = Tensor::randn(0f32, 1., (1, 1024), &device).unwrap();
        let part = |start, n| shared.narrow(1, start, n).unwrap();
        gdn_decode_in_place(&part(0, 256), &part(256, 256), &part(512, 512), &good.gates, &state, o).unwrap();
    }
}

pub type Argument = fn(&mut Args) -> &mut Tensor;

/// What a call only reads.
pub const ARGUMENTS: [(&str, Argument); 7] = [
    ("q", |x| &mut x.q),
    ("k", |x| &mut x.k),
    ("v", |x| &mut x.v),
    ("a", |x| &mut x.gates.a),
    ("b", |x| &mut x.gates.b),
    ("a_log", |x| &mut x.gates.a_log),
    ("dt_bias", |x| &mut x.gates.dt_bias),
];

#[test]
fn backward_is_a_clear_error() {
    for device in devices() {
        let x = args(1, 1, &device).token(0);
        let q = Var::from_tensor(&x.q).unwrap();
        let op = GdnDecode::new(x.gates.clone(), &x.state, RuleOptions::default()).unwrap();
        let o = q.as_tensor().apply_op3(&x.k, &x.v, op).unwrap();
        refused(o.sum_all().unwrap().backward(), &["gdn_decode"]);
    }
}

#[test]
fn runs_repeat_bit_for_bit() {
    for device in devices() {
        let f32 = f32_algos().map(|algo| (algo, DType::F32, if algo == Algo::Decode { 16 } else { 300 }, 0..1));
        let halves = tensor_cores(&device).flat_map(|algo| HALVES.map(|dtype| (algo, dtype, 500, 0..4)));
        for (algo, dtype, tokens, segments) in f32.chain(halves) {
            for segments in segments {
                let x = args(2, tokens, &device).in_dtype(dtype);
                let run = || {
                    let (o, state) = x.prefilled(None, RuleOptions::with(|o| (o.segments, o.algo) = (segments, algo)));
                    (values(&o), values(&state))
                };
                let first = run();
                assert!((0..3).all(|_| run() == first), "{algo:?} {dtype:?}, {segments} segments");
            }
        }
    }
}

/// Broadcast inputs (stride zero) and transposed ones are read as what they are.
#[test]
fn odd_strides() {
    for device in devices() {
        let x = args(3, 9, &device);
        let o = |x: &Args| values(&x.prefilled(None, options(Algo::Auto)).0);
        // In another order in memory; of v the last dimension, which is copied before the kernel.
        let swapped = |t: &Tensor, from: usize| {
            t.transpose(from, from + 1).unwrap().contiguous().unwrap().transpose(from, from + 1).unwrap()
        };
        let q = x.q.narrow(0, 0, 1).unwrap().broadcast_as((3, 9, 2, 128)).unwrap();
        let gates = Gates { a: swapped(&x.gates.a, 1), ..x.gates.clone() };
        let got = o(&Args { q: q.clone(), v: swapped(&x.v, 2), gates, ..x.clone() });
        assert_eq!(got, o(&Args { q: q.contiguous().unwrap(), ..x.clone() }));

        // Heads further apart than their size.
        let spread = |t: &Tensor| {
            let pad = t.narrow(3, 0, 16).unwrap();
            Tensor::cat(&[&pad, t, &pad], 3).unwrap().narrow(3, 16, 128).unwrap()
        };
        assert_eq!(o(&Args { q: spread(&x.q), k: spread(&x.k), v: spread(&x.v), ..x.clone() }), o(&x));
    }
}

/// A NaN in a gate shows in its head from that token on, in every kernel, and nowhere else.
#[test]
fn nan_is_not_hidden() {
    for device in devices() {
        let f32 = [Algo::Auto, Algo::Recurrent].into_iter();
        let f32 = f32.flat_map(|algo| [(6, 5), (40, 5)].map(|at| (algo, 0, DType::F32, at)));
        let halves = tensor_cores(&device).flat_map(|algo| [(algo, 1), (algo, 2)]);
        let halves = halves.flat_map(|(a, segments)| [(200, 5), (200, 100)].map(|at| (a, segments, DType::BF16, at)));
        for (algo, segments, dtype, (tokens, at)) in f32.chain(halves) {
            let mut x = args(1, tokens, &device).in_dtype(dtype);
            let spot = (0..tokens * 4).map(|i| if i == at * 4 + 1 { f32::NAN } else { 0.0 });
            let spot = Tensor::from_vec(spot.collect::<Vec<_>>(), (1, tokens, 4), &device).unwrap();
            x.gates.a = (&x.gates.a + &spot).unwrap();
            let (o, state) = x.prefilled(None, RuleOptions::with(|o| (o.segments, o.algo) = (segments, algo)));
            for h in 0..4 {
                let mut all = values(&o.narrow(2, h, 1).unwrap().narrow(1, at, tokens - at).unwrap());
                all.extend(values(&state.narrow(1, h, 1).unwrap()));
                let right = if h == 1 { all.iter().all(|x| x.is_nan()) } else { all.iter().all(|x| x.is_finite()) };
                assert!(right, "{algo:?}, {segments} segments, {tokens} tokens, NaN at {at}, head {h}");
            }
        }
    }
}

/// No tokens in a batch, and packed sequences that are all empty.
#[test]
fn nothing_to_do() {
    for device in devices() {
        for algo in [Algo::Auto].into_iter().chain(tensor_cores(&device)) {
            let x = args(2, 5, &device).in_dtype(dtype_for(algo));
            let before = values(&x.state);
            let cu = CuSeqlens::from_lengths(&[0, 0], &device).unwrap();
            let none = x.tokens(0, 0);
            let packed =
                Args { state: x.state.clone(), ..x.sequences(0, 1).packed() }.map(|t| t.narrow(0, 0, 0).unwrap());
            for (none, cu, dims) in [(none, None, &[2, 0, 4, 128][..]), (packed, Some(&cu), &[0, 4, 128])] {
                let (o, state) = none.prefilled(cu, options(algo));
                assert_eq!((o.dims(), values(&state)), (dims, before.clone()), "{algo:?}");
                let o = none.prefill(&x.state, cu, options(algo), identity);
                assert_eq!((o.dims(), values(&x.state)), (dims, before.clone()), "{algo:?}, in place");
            }
        }
    }
}

/// Several host threads, each with a state of its own.
#[test]
fn threads() {
    for device in devices() {
        let x = args(1, 40, &device);
        let o = || x.prefilled(None, RuleOptions::default()).0;
        let want = o();
        device.synchronize().unwrap();
        let want = values(&want);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        assert_eq!(values(&o()), want);
                    }
                });
            }
        });
    }
}
