//! What an op promises besides its numbers: who is written, who is not, what is refused, what repeats.

use crate::support::{devices, f32_algos, values};
use candle_core::{DType, Device, Tensor, Var};
use candle_gdn::{
    gdn_decode, gdn_decode_in_place, gdn_prefill, gdn_prefill_in_place, Algo, CuSeqlens, Gates, GdnDecode, GdnPrefill,
    RuleOptions,
};

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
    Args {
        q: randn(&[batch, tokens, 2, 128]),
        k: randn(&[batch, tokens, 2, 128]),
        v: randn(&[batch, tokens, 4, 128]),
        gates: Gates {
            a: randn(&[batch, tokens, 4]),
            b: randn(&[batch, tokens, 4]),
            a_log: randn(&[4]),
            dt_bias: randn(&[4]),
        },
        state: randn(&[batch, 4, 128, 128]),
    }
}

pub fn one_token(args: &Args, t: usize) -> Args {
    let at = |x: &Tensor| x.narrow(1, t, 1).unwrap().squeeze(1).unwrap();
    Args {
        q: at(&args.q),
        k: at(&args.k),
        v: at(&args.v),
        gates: Gates { a: at(&args.gates.a), b: at(&args.gates.b), ..args.gates.clone() },
        state: args.state.clone(),
    }
}

impl Args {
    /// q, k and v in `dtype`.
    pub fn in_dtype(mut self, dtype: DType) -> Self {
        for tensor in [&mut self.q, &mut self.k, &mut self.v] {
            *tensor = tensor.to_dtype(dtype).unwrap();
        }
        self
    }

    /// Tokens `start..start + len` of every sequence.
    pub fn tokens(&self, start: usize, len: usize) -> Args {
        self.narrow(1, start, len)
    }

    /// Sequences `start..start + len`, with their states.
    pub fn sequences(&self, start: usize, len: usize) -> Args {
        Args { state: self.state.narrow(0, start, len).unwrap(), ..self.narrow(0, start, len) }
    }

    fn narrow(&self, dim: usize, start: usize, len: usize) -> Args {
        let part = |x: &Tensor| x.narrow(dim, start, len).unwrap();
        Args {
            q: part(&self.q),
            k: part(&self.k),
            v: part(&self.v),
            gates: Gates { a: part(&self.gates.a), b: part(&self.gates.b), ..self.gates.clone() },
            state: self.state.clone(),
        }
    }

    /// All tokens along one dimension.
    pub fn packed(&self) -> Args {
        let flat = |x: &Tensor| x.flatten(0, 1).unwrap();
        Args {
            q: flat(&self.q),
            k: flat(&self.k),
            v: flat(&self.v),
            gates: Gates { a: flat(&self.gates.a), b: flat(&self.gates.b), ..self.gates.clone() },
            state: self.state.clone(),
        }
    }
}

pub fn options(algo: Algo) -> RuleOptions {
    RuleOptions { algo, ..RuleOptions::default() }
}

#[test]
fn functional_form_leaves_its_state_alone_and_agrees_with_in_place() {
    for device in devices() {
        let x = args(2, 70, &device);
        let before = values(&x.state);
        let (o, new) = gdn_prefill(&x.q, &x.k, &x.v, &x.gates, &x.state, None, options(Algo::Auto)).unwrap();
        assert_eq!(values(&x.state), before);
        let in_place = gdn_prefill_in_place(&x.q, &x.k, &x.v, &x.gates, &x.state, None, options(Algo::Auto)).unwrap();
        assert_eq!(values(&in_place), values(&o));
        assert_eq!(values(&x.state), values(&new));
        assert_ne!(values(&new), before);

        let x = one_token(&x, 3);
        let before = values(&x.state);
        let (o, new) = gdn_decode(&x.q, &x.k, &x.v, &x.gates, &x.state, options(Algo::Auto)).unwrap();
        assert_eq!(values(&x.state), before);
        let in_place = gdn_decode_in_place(&x.q, &x.k, &x.v, &x.gates, &x.state, options(Algo::Auto)).unwrap();
        assert_eq!(values(&in_place), values(&o));
        assert_eq!(values(&x.state), values(&new));
    }
}

/// Whole, split in two at every place, and token by token through decode.
#[test]
fn any_split_gives_the_same() {
    for device in devices() {
        for algo in [Algo::Auto, Algo::Recurrent] {
            let x = args(1, 67, &device);
            let run = |cuts: &[usize]| {
                let state = x.state.force_contiguous().unwrap();
                let mut outs = vec![];
                for pair in cuts.windows(2) {
                    let part = |t: &Tensor| t.narrow(1, pair[0], pair[1] - pair[0]).unwrap();
                    let gates = Gates { a: part(&x.gates.a), b: part(&x.gates.b), ..x.gates.clone() };
                    let (q, k, v) = (part(&x.q), part(&x.k), part(&x.v));
                    outs.push(gdn_prefill_in_place(&q, &k, &v, &gates, &state, None, options(algo)).unwrap());
                }
                (values(&Tensor::cat(&outs, 1).unwrap()), values(&state))
            };
            let whole = run(&[0, 67]);
            let close = |what: &str, got: (Vec<f64>, Vec<f64>)| {
                let o = crate::support::rel_rms(&got.0, &whole.0);
                let state = crate::support::rel_rms(&got.1, &whole.1);
                assert!(o < 1e-5 && state < 1e-5, "{algo:?} {what}: o {o:e}, state {state:e}");
            };
            for split in [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66, 67] {
                close(&format!("split at {split}"), run(&[0, split, 67]));
            }
            close("in single tokens", run(&(0..=67).collect::<Vec<_>>()));

            let state = x.state.force_contiguous().unwrap();
            let outs: Vec<_> = (0..67)
                .map(|t| {
                    let x = one_token(&x, t);
                    gdn_decode_in_place(&x.q, &x.k, &x.v, &x.gates, &state, RuleOptions::default()).unwrap()
                })
                .collect();
            close("decode", (values(&Tensor::cat(&outs, 0).unwrap()), values(&state)));
        }
    }
}

#[test]
fn padding_rows_touch_nothing_and_give_zeros() {
    for device in devices() {
        for algo in [Algo::Auto, Algo::Recurrent] {
            let x = args(3, 20, &device);
            let slots = Tensor::new(&[2u32, u32::MAX, 0], &device).unwrap();
            let before = x.state.slot_values();
            let op = GdnPrefill::new(x.gates.clone(), &x.state, None, options(algo)).unwrap().with_slots(&slots);
            let o = op.forward(&x.q, &x.k, &x.v).unwrap();
            let after = x.state.slot_values();
            assert_eq!(before[1], after[1]);
            assert_ne!(before[0], after[0]);
            assert_ne!(before[2], after[2]);
            assert!(values(&o.get(1).unwrap()).iter().all(|&o| o == 0.0));
            assert!(values(&o.get(0).unwrap()).iter().any(|&o| o != 0.0));
        }
        let x = one_token(&args(3, 1, &device), 0);
        let slots = Tensor::new(&[u32::MAX, 1, u32::MAX], &device).unwrap();
        let op = GdnDecode::new(x.gates.clone(), &x.state, RuleOptions::default()).unwrap().with_slots(&slots);
        let o = op.forward(&x.q, &x.k, &x.v).unwrap();
        assert!(values(&o.get(2).unwrap()).iter().all(|&o| o == 0.0));
        assert!(values(&o.get(1).unwrap()).iter().any(|&o| o != 0.0));
    }
}

trait Slots {
    fn slot_values(&self) -> Vec<Vec<f64>>;
}

impl Slots for Tensor {
    fn slot_values(&self) -> Vec<Vec<f64>> {
        (0..self.dims()[0]).map(|n| values(&self.get(n).unwrap())).collect()
    }
}

/// An argument inside the state's own storage would be read while it is written, and deadlock on candle's lock.
#[test]
fn aliasing_is_an_error_and_not_a_deadlock() {
    for device in devices() {
        let pool = Tensor::randn(0f32, 1., 4 * 128 * 128 + 4096, &device).unwrap();
        let state = pool.narrow(0, 0, 4 * 128 * 128).unwrap().reshape((1, 4, 128, 128)).unwrap();
        let tail = |n: usize, shape: &[usize]| pool.narrow(0, 4 * 128 * 128, n).unwrap().reshape(shape).unwrap();
        let x = one_token(&args(1, 1, &device), 0);
        let refused = |what: &str, result: candle_core::Result<Tensor>| {
            let message = result.expect_err(what).to_string();
            assert!(message.contains(&format!("gdn_decode: {what}: shares its storage")), "{message}");
        };
        let o = RuleOptions::default();
        refused("q", gdn_decode_in_place(&tail(256, &[1, 2, 128]), &x.k, &x.v, &x.gates, &state, o));
        refused("k", gdn_decode_in_place(&x.q, &tail(256, &[1, 2, 128]), &x.v, &x.gates, &state, o));
        refused("v", gdn_decode_in_place(&x.q, &x.k, &tail(512, &[1, 4, 128]), &x.gates, &state, o));
        let a = Gates { a: tail(4, &[1, 4]), ..x.gates.clone() };
        refused("a", gdn_decode_in_place(&x.q, &x.k, &x.v, &a, &state, o));
        let a_log = Gates { a_log: tail(4, &[4]), ..x.gates.clone() };
        refused("a_log", gdn_decode_in_place(&x.q, &x.k, &x.v, &a_log, &state, o));
        // The same through the bare CustomOp.
        let op = GdnDecode::new(x.gates.clone(), &state, o).unwrap();
        refused("q", tail(256, &[1, 2, 128]).apply_op3_no_bwd(&x.k, &x.v, &op));
        // Views of one projection may share among themselves.
        let shared = Tensor::randn(0f32, 1., (1, 1024), &device).unwrap();
        let part = |start, n| shared.narrow(1, start, n).unwrap();
        gdn_decode_in_place(&part(0, 256), &part(256, 256), &part(512, 512), &x.gates, &state, o).unwrap();
    }
}

#[test]
fn backward_is_a_clear_error() {
    for device in devices() {
        let x = one_token(&args(1, 1, &device), 0);
        let q = Var::from_tensor(&x.q).unwrap();
        let op = GdnDecode::new(x.gates.clone(), &x.state, RuleOptions::default()).unwrap();
        let o = q.as_tensor().apply_op3(&x.k, &x.v, op).unwrap();
        let message = o.sum_all().unwrap().backward().unwrap_err().to_string();
        assert!(message.contains("gdn_decode"), "{message}");
    }
}

#[test]
fn runs_repeat_bit_for_bit() {
    for device in devices() {
        for algo in f32_algos() {
            let x = args(2, if algo == Algo::Decode128 { 16 } else { 300 }, &device);
            let run = || {
                let (o, s) = gdn_prefill(&x.q, &x.k, &x.v, &x.gates, &x.state, None, options(algo)).unwrap();
                (values(&o), values(&s))
            };
            assert_eq!(run(), run(), "{algo:?}");
        }
    }
}

/// Broadcast inputs (stride zero) and transposed ones are read as what they are.
#[test]
fn odd_strides() {
    for device in devices() {
        let x = args(3, 9, &device);
        let o = options(Algo::Auto);
        let q = x.q.narrow(0, 0, 1).unwrap().broadcast_as((3, 9, 2, 128)).unwrap();
        let a = x.gates.a.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap();
        let gates = Gates { a, ..x.gates.clone() };
        // The last dimension strided: copied before the kernel.
        let v = x.v.transpose(2, 3).unwrap().contiguous().unwrap().transpose(2, 3).unwrap();
        let (got, _) = gdn_prefill(&q, &x.k, &v, &gates, &x.state, None, o).unwrap();
        let (want, _) = gdn_prefill(&q.contiguous().unwrap(), &x.k, &x.v, &x.gates, &x.state, None, o).unwrap();
        assert_eq!(values(&got), values(&want));

        // Heads further apart than their size.
        let spread = |t: &Tensor| {
            let pad = t.narrow(3, 0, 16).unwrap();
            Tensor::cat(&[&pad, t, &pad], 3).unwrap().narrow(3, 16, 128).unwrap()
        };
        let (want, _) = gdn_prefill(&x.q, &x.k, &x.v, &x.gates, &x.state, None, o).unwrap();
        let (got, _) = gdn_prefill(&spread(&x.q), &spread(&x.k), &spread(&x.v), &x.gates, &x.state, None, o).unwrap();
        assert_eq!(values(&got), values(&want));
    }
}

/// A NaN in a gate shows in its head from that token on, in every kernel, and nowhere else.
#[test]
fn nan_is_not_hidden() {
    for device in devices() {
        for algo in [Algo::Auto, Algo::Recurrent] {
            for tokens in [6, 40] {
                let x = args(1, tokens, &device);
                let head = |t: usize| {
                    let row = (0..4).map(|h| if h == 1 && t == 5 { f32::NAN } else { 0.0 });
                    row.collect::<Vec<_>>()
                };
                let spot: Vec<f32> = (0..tokens).flat_map(head).collect();
                let spot = Tensor::from_vec(spot, (1, tokens, 4), &device).unwrap();
                let gates = Gates { a: (&x.gates.a + &spot).unwrap(), ..x.gates.clone() };
                let (o, state) = gdn_prefill(&x.q, &x.k, &x.v, &gates, &x.state, None, options(algo)).unwrap();
                for h in 0..4 {
                    let o = values(&o.narrow(2, h, 1).unwrap().narrow(1, 5, tokens - 5).unwrap());
                    let state = values(&state.narrow(1, h, 1).unwrap());
                    let all = o.iter().chain(&state);
                    let right =
                        if h == 1 { all.clone().all(|x| x.is_nan()) } else { all.clone().all(|x| x.is_finite()) };
                    assert!(right, "{algo:?}, {tokens} tokens, head {h}");
                }
            }
        }
    }
}

#[test]
fn nothing_to_do() {
    for device in devices() {
        let x = args(2, 5, &device);
        let before = values(&x.state);
        let none = |t: &Tensor| t.narrow(1, 0, 0).unwrap();
        let gates = Gates { a: none(&x.gates.a), b: none(&x.gates.b), ..x.gates.clone() };
        let o = options(Algo::Auto);
        let out = gdn_prefill_in_place(&none(&x.q), &none(&x.k), &none(&x.v), &gates, &x.state, None, o).unwrap();
        assert_eq!(out.dims(), [2, 0, 4, 128]);
        assert_eq!(values(&x.state), before);
        // All sequences empty, packed.
        let cu = CuSeqlens::from_lengths(&[0, 0], &device).unwrap();
        let flat = |t: &Tensor| t.narrow(1, 0, 0).unwrap().narrow(0, 0, 1).unwrap().squeeze(0).unwrap();
        let gates = Gates { a: flat(&x.gates.a), b: flat(&x.gates.b), ..x.gates.clone() };
        let out = gdn_prefill_in_place(&flat(&x.q), &flat(&x.k), &flat(&x.v), &gates, &x.state, Some(&cu), o).unwrap();
        assert_eq!(out.dims(), [0, 4, 128]);
        assert_eq!(values(&x.state), before);
    }
}

/// Several host threads, each with a state of its own.
#[test]
fn threads() {
    for device in devices() {
        let x = args(1, 40, &device);
        let (want, _) = gdn_prefill(&x.q, &x.k, &x.v, &x.gates, &x.state, None, RuleOptions::default()).unwrap();
        device.synchronize().unwrap();
        let want = values(&want);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        let (got, _) =
                            gdn_prefill(&x.q, &x.k, &x.v, &x.gates, &x.state, None, RuleOptions::default()).unwrap();
                        assert_eq!(values(&got), want);
                    }
                });
            }
        });
    }
}
