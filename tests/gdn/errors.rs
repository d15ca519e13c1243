//! Nonsense in, a sentence out: every refusal names the op, the argument, what was expected and what came.

use crate::support::devices;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::{
    causal_conv1d, gated_rms_norm, gdn_decode, gdn_prefill, gdn_step_in_place, Algo, CausalConv1d, CuSeqlens,
    GateActivation, Gates, GdnDecode, GdnPrefill, GdnStep, RuleOptions, StepAlgo, StepOptions,
};

fn zeros(shape: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(shape, DType::F32, device).unwrap()
}

#[track_caller]
pub fn refused<T>(result: Result<T>, parts: &[&str]) {
    let message = match result {
        Ok(_) => panic!("accepted, expected an error with {parts:?}"),
        Err(error) => error.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in: {message}");
    }
}

#[test]
fn rule_shapes() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let gates = |shape: &[usize], heads: usize| Gates {
            a: z(shape),
            b: z(shape),
            a_log: z(&[heads]),
            dt_bias: z(&[heads]),
        };
        let (k, v, state) = (z(&[3, 2, 16]), z(&[3, 4, 32]), z(&[3, 4, 32, 16]));
        let good = gates(&[3, 4], 4);
        let o = RuleOptions::default();
        let decode =
            |q: &Tensor, k: &Tensor, v: &Tensor, g: &Gates, s: &Tensor| gdn_decode(q, k, v, g, s, o).map(|_| ());
        decode(&k, &k, &v, &good, &state).unwrap();

        refused(decode(&z(&[3, 2, 2, 16]), &k, &v, &good, &state), &["gdn_decode: q:", "[3, 2, 2, 16]"]);
        refused(decode(&z(&[3, 2, 17]), &k, &v, &good, &state), &["gdn_decode: q:", "key_heads, 16", "[3, 2, 17]"]);
        refused(
            decode(&z(&[3, 3, 16]), &z(&[3, 3, 16]), &v, &good, &state),
            &["q:", "divides the 4 value heads", "got 3"],
        );
        refused(decode(&z(&[3, 0, 16]), &z(&[3, 0, 16]), &v, &good, &state), &["q:", "divides", "got 0"]);
        refused(decode(&k, &z(&[2, 2, 16]), &v, &good, &state), &["k:", "[3, 2, 16]", "[2, 2, 16]"]);
        refused(decode(&k, &z(&[3, 4, 16]), &v, &good, &state), &["k:", "[3, 2, 16]", "[3, 4, 16]"]);
        refused(decode(&k, &k, &z(&[3, 4, 16]), &good, &state), &["v:", "[3, 4, 32]", "[3, 4, 16]"]);
        refused(decode(&k, &k, &v, &gates(&[3, 2], 4), &state), &["a:", "[3, 4]", "[3, 2]"]);
        refused(decode(&k, &k, &v, &gates(&[3, 4], 2), &state), &["a_log:", "[4]", "[2]"]);
        refused(decode(&k, &k, &v, &good, &z(&[2, 4, 32, 16])), &["state:", "expected 3 slots", "got 2"]);
        refused(decode(&k, &k, &v, &good, &z(&[3, 4, 16, 32])), &["gdn_decode: q:", "key_heads, 32"]);
        refused(decode(&k, &k, &v, &good, &z(&[3, 4, 32])), &["state:", "[3, 4, 32]"]);
        let wide = z(&[3, 4, 32, 300]);
        refused(decode(&z(&[3, 2, 300]), &z(&[3, 2, 300]), &v, &good, &wide), &["state:", "1 to 256"]);
        let transposed = z(&[3, 4, 16, 32]).transpose(2, 3).unwrap();
        let op = GdnDecode::new(good.clone(), &transposed, o);
        refused(op, &["state:", "contiguous", "strides"]);
        let broadcast = z(&[1, 4, 32, 16]).broadcast_as((3, 4, 32, 16)).unwrap();
        refused(GdnDecode::new(good.clone(), &broadcast, o), &["state:", "overlap"]);

        let options = |f: fn(&mut RuleOptions)| {
            let mut o = RuleOptions::default();
            f(&mut o);
            gdn_decode(&k, &k, &v, &good, &state, o).map(|_| ())
        };
        refused(options(|o| o.l2_eps = -1.0), &["l2_eps", "got -1"]);
        refused(options(|o| o.scale = Some(f64::NAN)), &["scale", "NaN"]);
        refused(options(|o| o.beta_scale = 3.0), &["beta_scale", "got 3"]);
        refused(options(|o| o.algo = Algo::Recurrent128), &["algo", "Recurrent128", "16"]);
        refused(
            options(|o| o.algo = Algo::Decode128),
            &["gdn_decode: algo: Decode128 takes heads of size 128, got 16"],
        );

        let (k, v, state) = (z(&[1, 17, 1, 128]), z(&[1, 17, 1, 128]), z(&[1, 1, 128, 128]));
        let decode_128 = RuleOptions { algo: Algo::Decode128, ..o };
        let prefill = |n: usize| {
            let part = |t: &Tensor| t.narrow(1, 0, n).unwrap();
            gdn_prefill(&part(&k), &part(&k), &part(&v), &gates(&[1, n, 1], 1), &state, None, decode_128)
        };
        refused(prefill(17), &["gdn_prefill: algo: Decode128 takes up to 16 tokens a sequence, got 17"]);
        if device.is_cpu() {
            prefill(16).unwrap(); // on CUDA the kernel's own tests say so
        }
    }
}

#[test]
fn token_states() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        // As large as the state, so that any of them can be a view of it.
        let pool = z(&[4 * 4 * 32 * 16]);
        let part = |n: usize, shape: &[usize]| pool.narrow(0, 0, n).unwrap().reshape(shape).unwrap();
        let (k, v, state) = (z(&[2, 3, 2, 16]), z(&[2, 3, 4, 32]), z(&[2, 4, 32, 16]));
        let good = Gates { a: z(&[2, 3, 4]), b: z(&[2, 3, 4]), a_log: z(&[4]), dt_bias: z(&[4]) };
        let o = RuleOptions::default();
        let run = |q: &Tensor, gates: &Gates, state: &Tensor, o, to: &Tensor| {
            GdnPrefill::new(gates.clone(), state, None, o)?.with_token_states(to).forward(q, &k, &v)
        };
        let to = z(&[2, 3, 4, 32, 16]);
        run(&k, &good, &state, o, &to).unwrap();
        let with = |to: &Tensor| run(&k, &good, &state, o, to);
        refused(
            with(&z(&[2, 2, 4, 32, 16])),
            &["gdn_prefill: token_states: expected shape [2, 3, 4, 32, 16], got [2, 2, 4, 32, 16]"],
        );
        refused(with(&z(&[6, 4, 32, 16])), &["token_states: expected shape [2, 3, 4, 32, 16], got [6, 4, 32, 16]"]);
        refused(with(&to.to_dtype(DType::BF16).unwrap()), &["gdn_prefill: token_states: expected dtype F32, got BF16"]);
        let half = state.to_dtype(DType::BF16).unwrap();
        refused(run(&k, &good, &half, o, &to), &["token_states: expected dtype BF16, got F32"]);
        let strided = z(&[2, 3, 4, 16, 32]).transpose(3, 4).unwrap();
        refused(with(&strided), &["gdn_prefill: token_states: expected a contiguous tensor, got strides"]);
        let chunked = RuleOptions { algo: Algo::ChunkedSm80, ..o };
        refused(
            run(&k, &good, &state, chunked, &to),
            &["gdn_prefill: token_states: expected an algo that goes token by token, got ChunkedSm80"],
        );

        // Its storage is its own: an input inside it would be overwritten, or deadlock on candle's lock.
        let shared = |what: &str, result: Result<Tensor>| {
            refused(result, &[&format!("token_states: shares its storage with {what}; it is written in place")])
        };
        let to = part(3 * 4 * 32 * 16, &[1, 3, 4, 32, 16]);
        let run = |q: &Tensor, k: &Tensor, v: &Tensor, gates: &Gates, state: &Tensor| {
            GdnPrefill::new(gates.clone(), state, None, o)?.with_token_states(&to).forward(q, k, v)
        };
        let (k, v, state) = (z(&[1, 3, 2, 16]), z(&[1, 3, 4, 32]), z(&[1, 4, 32, 16]));
        let good = Gates { a: z(&[1, 3, 4]), b: z(&[1, 3, 4]), a_log: z(&[4]), dt_bias: z(&[4]) };
        run(&k, &k, &v, &good, &state).unwrap();
        shared("q", run(&part(96, &[1, 3, 2, 16]), &k, &v, &good, &state));
        shared("k", run(&k, &part(96, &[1, 3, 2, 16]), &v, &good, &state));
        shared("v", run(&k, &k, &part(384, &[1, 3, 4, 32]), &good, &state));
        shared("state", run(&k, &k, &v, &good, &part(4 * 32 * 16, &[1, 4, 32, 16])));
        let (ab, heads) = (part(12, &[1, 3, 4]), part(4, &[4]));
        shared("a", run(&k, &k, &v, &Gates { a: ab.clone(), ..good.clone() }, &state));
        shared("b", run(&k, &k, &v, &Gates { b: ab, ..good.clone() }, &state));
        shared("a_log", run(&k, &k, &v, &Gates { a_log: heads.clone(), ..good.clone() }, &state));
        shared("dt_bias", run(&k, &k, &v, &Gates { dt_bias: heads, ..good.clone() }, &state));
        // The same through the bare CustomOp, which sees storages only.
        let op = GdnPrefill::new(good, &state, None, o).unwrap().with_token_states(&to);
        shared("q", part(96, &[1, 3, 2, 16]).apply_op3_no_bwd(&k, &v, &op));
    }
}

#[test]
fn rule_dtypes() {
    for device in &devices() {
        let (k, v, state) = (zeros(&[1, 2, 16], device), zeros(&[1, 4, 32], device), zeros(&[1, 4, 32, 16], device));
        let gate = zeros(&[1, 4], device);
        let bias = zeros(&[4], device);
        let good = Gates { a: gate.clone(), b: gate.clone(), a_log: bias.clone(), dt_bias: bias.clone() };
        let to = |t: &Tensor, dtype| t.to_dtype(dtype).unwrap();
        let o = RuleOptions::default();
        let decode = |q: &Tensor, k: &Tensor, v: &Tensor, g: &Gates| gdn_decode(q, k, v, g, &state, o).map(|_| ());
        refused(decode(&to(&k, DType::F64), &k, &v, &good), &["q:", "f32, bf16 or f16", "F64"]);
        refused(decode(&k, &to(&k, DType::BF16), &v, &good), &["k:", "expected dtype F32, got BF16"]);
        refused(decode(&k, &k, &to(&v, DType::F16), &good), &["v:", "expected dtype F32, got F16"]);
        let gates = Gates { a: to(&gate, DType::U32), ..good.clone() };
        refused(decode(&k, &k, &v, &gates), &["a:", "U32"]);
        let gates = Gates { b: to(&gate, DType::BF16), ..good.clone() };
        refused(decode(&k, &k, &v, &gates), &["b:", "expected dtype F32, got BF16"]);
        let gates = Gates { dt_bias: to(&bias, DType::BF16), ..good.clone() };
        refused(decode(&k, &k, &v, &gates), &["dt_bias:", "expected dtype F32, got BF16"]);
        for dtype in [DType::F16, DType::F64, DType::U32] {
            let state = to(&state, dtype);
            let message = format!("state: expected dtype f32 or bf16, got {dtype:?}");
            refused(gdn_decode(&k, &k, &v, &good, &state, o), &["gdn_decode: ", &message]);
            refused(GdnPrefill::new(good.clone(), &state, None, o), &["gdn_prefill: ", &message]);
        }
        // The bare CustomOp checks too.
        let op = GdnDecode::new(good.clone(), &state, o).unwrap();
        refused(to(&k, DType::F64).apply_op3_no_bwd(&to(&k, DType::F64), &to(&v, DType::F64), &op), &["F64"]);
        refused(k.apply_op3_no_bwd(&to(&k, DType::BF16), &v, &op), &["k:", "BF16"]);
    }
}

#[test]
fn rule_sequences_and_slots() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let (k, v, state) = (z(&[7, 2, 16]), z(&[7, 4, 32]), z(&[2, 4, 32, 16]));
        let gates = Gates { a: z(&[7, 4]), b: z(&[7, 4]), a_log: z(&[4]), dt_bias: z(&[4]) };
        let o = RuleOptions::default();
        let run = |cu: &CuSeqlens| gdn_prefill(&k, &k, &v, &gates, &state, Some(cu), o);
        let cu = |cu: &[u32]| CuSeqlens::new(cu, device);
        run(&cu(&[0, 3, 7]).unwrap()).unwrap();
        refused(cu(&[0, 4, 3]), &["cu_seqlens", "non-decreasing", "3 after 4"]);
        refused(cu(&[1, 7]), &["cu_seqlens", "first value"]);
        refused(run(&cu(&[0, 3, 6]).unwrap()), &["cu_seqlens", "expected 7 tokens", "got 6"]);
        refused(run(&cu(&[0, 3, 5, 7]).unwrap()), &["state", "expected 3 slots", "got 2"]);
        // Without cu_seqlens the same tensor is a batch of 7 with 2 tokens of one merged head.
        refused(
            gdn_prefill(&k, &k, &v, &gates, &state, None, o),
            &["gdn_prefill: state:", "expected 7 slots", "got 2"],
        );

        let good = cu(&[0, 3, 7]).unwrap();
        let with = |slots: &Tensor| {
            GdnPrefill::new(gates.clone(), &state, Some(&good), o)?.with_slots(slots).forward(&k, &k, &v)
        };
        refused(with(&Tensor::new(&[0u32, 1, 1], device).unwrap()), &["slots", "[2]", "[3]"]);
        refused(with(&Tensor::new(&[0f32, 1.], device).unwrap()), &["slots", "U32", "F32"]);
        if device.is_cpu() {
            refused(with(&Tensor::new(&[0u32, 2], device).unwrap()), &["slots", "below 2", "got 2 at 1"]);
            refused(with(&Tensor::new(&[1u32, 1], device).unwrap()), &["slots", "distinct", "1 a second time"]);
        }
    }
}

/// Arguments on another device than the state, where there are two.
#[test]
fn devices_must_agree() {
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let z = |shape: &[usize], d: &Device| zeros(shape, d);
    let cpu = &Device::Cpu;
    let gates = |d: &Device| Gates { a: z(&[1, 4], d), b: z(&[1, 4], d), a_log: z(&[4], d), dt_bias: z(&[4], d) };
    let o = RuleOptions::default();
    let (k, v, state) = (z(&[1, 2, 16], &gpu), z(&[1, 4, 32], &gpu), z(&[1, 4, 32, 16], &gpu));
    gdn_decode(&k, &k, &v, &gates(&gpu), &state, o).unwrap();
    refused(gdn_decode(&k, &k, &v, &gates(cpu), &state, o), &["a:", "Cpu"]);
    refused(gdn_decode(&z(&[1, 2, 16], cpu), &k, &v, &gates(&gpu), &state, o), &["q:", "Cpu"]);
    refused(gdn_decode(&k, &k, &v, &gates(&gpu), &z(&[1, 4, 32, 16], cpu), o), &["a:", "Cuda"]);
    let op = GdnDecode::new(gates(&gpu), &state, o).unwrap().with_token_states(&z(&[1, 4, 32, 16], cpu));
    refused(op.forward(&k, &k, &v), &["token_states:", "Cpu"]);
}

#[test]
fn conv_arguments() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let (x, w, state) = (z(&[2, 5, 6]), z(&[6, 4]), z(&[2, 3, 6]));
        causal_conv1d(&x, &w, &state, None, true).unwrap();
        refused(causal_conv1d(&z(&[2, 5, 7]), &w, &state, None, true), &["causal_conv1d: x:", "[2, 5, 7]"]);
        refused(causal_conv1d(&z(&[5, 6]), &w, &state, None, true), &["x:", "[5, 6]"]);
        refused(causal_conv1d(&x, &z(&[6, 3]), &state, None, true), &["weight:", "[6, 4]", "[6, 3]"]);
        refused(causal_conv1d(&x, &w, &z(&[1, 3, 6]), None, true), &["state:", "expected 2 slots", "got 1"]);
        refused(causal_conv1d(&x, &w, &z(&[2, 9, 6]), None, true), &["state:", "width of 2 to 8"]);
        refused(causal_conv1d(&x, &w, &z(&[2, 6]), None, true), &["state:", "[2, 6]"]);
        let half = x.to_dtype(DType::F16).unwrap();
        refused(causal_conv1d(&half, &w, &state, None, true), &["x:", "expected dtype F32, got F16"]);
        refused(causal_conv1d(&x, &w.to_dtype(DType::F16).unwrap(), &state, None, true), &["weight:", "F16"]);
        let alias = z(&[16, 6]);
        let (x, state) = (alias.narrow(0, 0, 10).unwrap(), alias.narrow(0, 10, 6).unwrap());
        let (x, state) = (x.reshape((2, 5, 6)).unwrap(), state.reshape((2, 3, 6)).unwrap());
        refused(causal_conv1d(&x, &w, &state, None, true), &["x:", "shares its storage"]);
        let op = CausalConv1d::new(&state, None, true).unwrap();
        refused(x.apply_op2_no_bwd(&w, &op), &["x:", "shares its storage"]);
    }
}

#[test]
fn norm_arguments() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let (x, w) = (z(&[2, 5, 3, 8]), z(&[8]));
        let norm = |x: &Tensor, g: &Tensor, w: &Tensor, eps| gated_rms_norm(x, g, w, eps, GateActivation::Silu);
        norm(&x, &x, &w, 1e-6).unwrap();
        refused(norm(&x, &z(&[2, 5, 25]), &w, 1e-6), &["gated_rms_norm: z:", "[2, 5, 3, 8]", "[2, 5, 25]"]);
        refused(norm(&x, &x, &z(&[3]), 1e-6), &["weight:", "[8]", "[3]"]);
        refused(norm(&x, &x, &w, -1.0), &["eps", "-1"]);
        refused(norm(&z(&[8]), &z(&[8]), &w, 1e-6), &["x:", "[8]"]);
        refused(norm(&z(&[2, 300]), &z(&[2, 300]), &z(&[300]), 1e-6), &["x:", "1 to 256"]);
        refused(norm(&x, &x.to_dtype(DType::BF16).unwrap(), &w, 1e-6), &["z:", "BF16"]);
    }
}

/// What a step takes, to be changed one at a time: HK 2, HV 4, K 16, V 32, batch 3.
#[derive(Clone)]
struct Step {
    qkv: Tensor,
    z: Tensor,
    conv_weight: Tensor,
    gates: Gates,
    norm_weight: Tensor,
    conv: Tensor,
    state: Tensor,
    options: StepOptions,
}

impl Step {
    fn new(device: &Device) -> Self {
        let z = |shape: &[usize]| zeros(shape, device);
        Self {
            qkv: z(&[3, 192]),
            z: z(&[3, 128]),
            conv_weight: z(&[192, 4]),
            gates: Gates { a: z(&[3, 4]), b: z(&[3, 4]), a_log: z(&[4]), dt_bias: z(&[4]) },
            norm_weight: z(&[32]),
            conv: z(&[3, 3, 192]),
            state: z(&[3, 4, 32, 16]),
            options: StepOptions::default(),
        }
    }

    /// K = V = 128, for the kernels that want it; `tokens` a sequence.
    fn of_128(tokens: usize, algo: StepAlgo, device: &Device) -> Self {
        let z = |shape: &[usize]| zeros(shape, device);
        Self {
            qkv: z(&[3, tokens, 1024]),
            z: z(&[3, tokens, 512]),
            conv_weight: z(&[1024, 4]),
            gates: Gates { a: z(&[3, tokens, 4]), b: z(&[3, tokens, 4]), a_log: z(&[4]), dt_bias: z(&[4]) },
            norm_weight: z(&[128]),
            conv: z(&[3, 3, 1024]),
            state: z(&[3, 4, 128, 128]),
            options: StepOptions { algo, ..StepOptions::default() },
        }
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut step = self.clone();
        change(&mut step);
        step
    }

    fn op(&self) -> Result<GdnStep> {
        GdnStep::new(self.gates.clone(), &self.norm_weight, &self.conv, &self.state, self.options)
    }

    fn run(&self) -> Result<Tensor> {
        let Self { qkv, z, conv_weight, gates, norm_weight, conv, state, options } = self;
        gdn_step_in_place(qkv, z, conv_weight, gates, norm_weight, conv, state, *options)
    }
}

#[test]
fn step_shapes() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let good = Step::new(device);
        assert_eq!(good.run().unwrap().dims(), [3, 128]);
        let with = |change: &dyn Fn(&mut Step)| good.with(change).run();

        let shapes = "gdn_step: qkv: expected shape [batch, 192] or [batch, tokens, 192], got";
        refused(with(&|s| s.qkv = z(&[3, 191])), &[shapes, "[3, 191]"]);
        refused(with(&|s| s.qkv = z(&[192])), &[shapes, "[192]"]);
        refused(with(&|s| s.qkv = z(&[3, 1, 1, 192])), &[shapes, "[3, 1, 1, 192]"]);
        let tokens = |n: usize| {
            let gates = Gates { a: z(&[3, n, 4]), b: z(&[3, n, 4]), ..good.gates.clone() };
            good.with(|s| (s.qkv, s.z, s.gates) = (z(&[3, n, 192]), z(&[3, n, 128]), gates)).run()
        };
        assert_eq!(tokens(16).unwrap().dims(), [3, 16, 128]);
        refused(
            tokens(17),
            &["gdn_step: qkv: expected at most 16 tokens a sequence, got 17; gdn_prefill_in_place takes any number"],
        );
        refused(with(&|s| s.z = z(&[3, 127])), &["gdn_step: z: expected shape [3, 4, 32] or [3, 128], got [3, 127]"]);
        refused(with(&|s| s.z = z(&[3, 1, 128])), &["gdn_step: z:", "[3, 1, 128]"]);
        refused(with(&|s| s.z = z(&[2, 128])), &["gdn_step: z:", "[2, 128]"]);
        refused(
            with(&|s| s.conv_weight = z(&[192, 3])),
            &["gdn_step: conv_weight: expected a contiguous tensor of shape [192, 4], got [192, 3]"],
        );
        refused(with(&|s| s.norm_weight = z(&[16])), &["gdn_step: norm_weight: expected shape [32], got [16]"]);
        refused(with(&|s| s.gates.a = z(&[3, 1, 4])), &["gdn_step: a: expected shape [3, 4], got [3, 1, 4]"]);
        refused(with(&|s| s.gates.b = z(&[3, 2])), &["gdn_step: b: expected shape [3, 4], got [3, 2]"]);
        refused(with(&|s| s.gates.a_log = z(&[2])), &["gdn_step: a_log: expected shape [4], got [2]"]);

        refused(
            with(&|s| s.conv = z(&[3, 192])),
            &["gdn_step: conv_state: expected shape [slots, width - 1, channels], got [3, 192]"],
        );
        refused(with(&|s| s.conv = z(&[3, 8, 192])), &["gdn_step: conv_state:", "width of 2 to 8", "[3, 8, 192]"]);
        refused(with(&|s| s.conv = z(&[3, 3, 0])), &["gdn_step: conv_state:", "width of 2 to 8", "[3, 3, 0]"]);
        refused(with(&|s| s.conv = z(&[4, 3, 192])), &["conv_state: expected 3 slots (the state's), got 4"]);
        let channels =
            "gdn_step: conv_state: expected 2 * key_heads * 16 + 128 channels (q, k and v of the state's heads)";
        refused(with(&|s| s.conv = z(&[3, 3, 200])), &[channels, "got 200"]);
        refused(with(&|s| s.conv = z(&[3, 3, 128])), &[channels, "got 128"]);
        refused(with(&|s| s.conv = z(&[3, 3, 64])), &[channels, "got 64"]);
        refused(
            with(&|s| s.conv = z(&[3, 3, 224])),
            &["gdn_step: conv_state:", "divides the 4 value heads, got 224, which is 3 key heads"],
        );
        let transposed = z(&[3, 192, 3]).transpose(1, 2).unwrap();
        refused(with(&|s| s.conv = transposed.clone()), &["gdn_step: conv_state:", "slot to be contiguous", "strides"]);
        let broadcast = z(&[1, 3, 192]).broadcast_as((3, 3, 192)).unwrap();
        refused(with(&|s| s.conv = broadcast.clone()), &["gdn_step: conv_state:", "overlap"]);
        refused(
            with(&|s| (s.conv, s.state) = (z(&[2, 3, 192]), z(&[2, 4, 32, 16]))),
            &["gdn_step: state: expected 3 slots (one for each sequence), got 2"],
        );
        refused(with(&|s| s.state = z(&[3, 4, 32])), &["gdn_step: state: expected shape", "[3, 4, 32]"]);
        let wide = z(&[3, 4, 32, 300]);
        refused(
            with(&|s| (s.conv, s.qkv, s.state) = (z(&[3, 3, 728]), z(&[3, 728]), wide.clone())),
            &["gdn_step: conv_weight:"],
        );
        let weight = z(&[728, 4]);
        refused(
            with(&|s| {
                (s.conv, s.qkv) = (z(&[3, 3, 728]), z(&[3, 728]));
                (s.state, s.conv_weight) = (wide.clone(), weight.clone());
            }),
            &["gdn_step: state:", "1 to 256", "[3, 4, 32, 300]"],
        );
    }
}

#[test]
fn step_options_and_dtypes() {
    for device in &devices() {
        let good = Step::new(device);
        let with = |change: &dyn Fn(&mut Step)| good.with(change).run();
        refused(with(&|s| s.options.rule.l2_eps = -1.0), &["gdn_step: l2_eps", "got -1"]);
        refused(with(&|s| s.options.rule.scale = Some(f64::INFINITY)), &["gdn_step: scale", "inf"]);
        refused(with(&|s| s.options.rule.beta_scale = 0.0), &["gdn_step: beta_scale", "got 0"]);
        refused(
            with(&|s| s.options.norm_eps = -1.0),
            &["gdn_step: norm_eps: expected a finite value of at least 0, got -1"],
        );
        refused(with(&|s| s.options.norm_eps = f64::NAN), &["gdn_step: norm_eps", "NaN"]);

        let to = |t: &mut Tensor, dtype| *t = t.to_dtype(dtype).unwrap();
        refused(with(&|s| to(&mut s.qkv, DType::F16)), &["gdn_step: qkv: expected dtype F32, got F16"]);
        refused(with(&|s| to(&mut s.z, DType::BF16)), &["gdn_step: z: expected dtype F32, got BF16"]);
        let weight = "gdn_step: conv_weight: expected dtype F32 or f32, got BF16";
        refused(with(&|s| to(&mut s.conv_weight, DType::BF16)), &[weight]);
        refused(with(&|s| to(&mut s.norm_weight, DType::F16)), &["gdn_step: norm_weight:", "got F16"]);
        refused(with(&|s| to(&mut s.conv, DType::F64)), &["gdn_step: conv_state: expected dtype f32, bf16 or f16"]);
        refused(with(&|s| to(&mut s.state, DType::F16)), &["gdn_step: state: expected dtype f32 or bf16, got F16"]);
        refused(with(&|s| to(&mut s.gates.a, DType::U32)), &["gdn_step: a: expected dtype f32, bf16 or f16, got U32"]);
        refused(with(&|s| to(&mut s.gates.b, DType::F16)), &["gdn_step: b: expected dtype F32, got F16"]);
        // The bare CustomOp checks too.
        let (op, mut half) = (good.op().unwrap(), good.z.clone());
        to(&mut half, DType::F16);
        refused(good.qkv.apply_op3_no_bwd(&half, &good.conv_weight, &op), &["gdn_step: z:", "F16"]);
        refused(good.qkv.apply_op3_no_bwd(&good.z, &good.qkv, &op), &["gdn_step: conv_weight:", "[3, 192]"]);

        for algo in [StepAlgo::Whole, StepAlgo::Split, StepAlgo::Heads] {
            let sentence = format!("gdn_step: algo: {algo:?} takes heads of size 128 and a convolution of width 4");
            refused(with(&|s| s.options.algo = algo), &[&sentence, "got 16 (K), 32 (V) and 4"]);
            let narrow = Step::of_128(1, algo, device)
                .with(|s| (s.conv, s.conv_weight) = (zeros(&[3, 2, 1024], device), zeros(&[1024, 3], device)));
            refused(narrow.run(), &[&sentence, "got 128 (K), 128 (V) and 3"]);
        }
        let several = Step::of_128(2, StepAlgo::Split, device);
        refused(several.run(), &["gdn_step: algo: Split takes one token a sequence, got 2"]);
        // What only a device refuses: rows that begin anywhere.
        let good = Step::of_128(1, StepAlgo::Whole, device);
        let off = zeros(&[3, 1, 1025], device).narrow(2, 1, 1024).unwrap();
        let off = good.with(|s| s.qkv = off);
        if device.is_cuda() {
            let sentence = "gdn_step: algo: Whole does not take these tensors on this device: expected rows of qkv, z";
            refused(off.run(), &[sentence, "Auto takes any"]);
            refused(off.op().unwrap().algo(&off.qkv, &off.z, &off.conv_weight), &[sentence]);
        } else {
            off.run().unwrap();
        }
        let auto = off.with(|s| s.options.algo = StepAlgo::Auto);
        assert_eq!(auto.op().unwrap().algo(&auto.qkv, &auto.z, &auto.conv_weight).unwrap(), StepAlgo::Composed);
        good.run().unwrap();
    }
}

#[test]
fn step_slots_and_token_states() {
    for device in &devices() {
        let good = Step::new(device);
        let slots = |slots: &Tensor| good.op()?.with_slots(slots).forward(&good.qkv, &good.z, &good.conv_weight);
        slots(&Tensor::new(&[2u32, 0, u32::MAX], device).unwrap()).unwrap();
        refused(slots(&Tensor::new(&[0u32, 1], device).unwrap()), &["gdn_step: slots:", "[3]", "[2]"]);
        refused(slots(&zeros(&[3], device)), &["gdn_step: slots:", "U32", "F32"]);
        if device.is_cpu() {
            refused(slots(&Tensor::new(&[0u32, 1, 3], device).unwrap()), &["gdn_step: slots:", "got 3 at 2"]);
            refused(slots(&Tensor::new(&[1u32, 0, 1], device).unwrap()), &["gdn_step: slots:", "distinct"]);
        }
        let to = |to: &Tensor| good.op()?.with_token_states(to).forward(&good.qkv, &good.z, &good.conv_weight);
        to(&zeros(&[3, 4, 32, 16], device)).unwrap();
        refused(
            to(&zeros(&[3, 1, 4, 32, 16], device)),
            &["gdn_step: token_states: expected shape [3, 4, 32, 16], got [3, 1, 4, 32, 16]"],
        );
        let half = zeros(&[3, 4, 32, 16], device).to_dtype(DType::BF16).unwrap();
        refused(to(&half), &["gdn_step: token_states: expected dtype F32, got BF16"]);
    }
}

/// Three tensors are written, and no argument may lie in one of them, nor they in each other.
#[test]
fn step_storages() {
    for device in &devices() {
        let good = Step::new(device);
        // Each argument in turn is a view of one storage, and so is what is written.
        let pool = zeros(&[3 * 4 * 32 * 16], device);
        let inside = |t: &Tensor| pool.narrow(0, 0, t.elem_count()).unwrap().reshape(t.dims()).unwrap();
        type Argument = fn(&mut Step) -> &mut Tensor;
        let arguments: [(&str, Argument); 8] = [
            ("qkv", |s| &mut s.qkv),
            ("z", |s| &mut s.z),
            ("conv_weight", |s| &mut s.conv_weight),
            ("norm_weight", |s| &mut s.norm_weight),
            ("a", |s| &mut s.gates.a),
            ("b", |s| &mut s.gates.b),
            ("a_log", |s| &mut s.gates.a_log),
            ("dt_bias", |s| &mut s.gates.dt_bias),
        ];
        let moved = |step: &Step, argument: Argument| {
            step.with(|s| {
                let tensor = argument(s);
                *tensor = inside(tensor);
            })
        };
        let state_inside = moved(&good, |s| &mut s.state);
        let conv_inside = moved(&good, |s| &mut s.conv);
        state_inside.run().unwrap();
        conv_inside.run().unwrap();
        let shares =
            |arg: &str, with: &str| format!("gdn_step: {arg}: shares its storage with {with}, which is written");
        for (name, argument) in arguments {
            refused(moved(&state_inside, argument).run(), &[&shares(name, "the state")]);
            refused(moved(&conv_inside, argument).run(), &[&shares(name, "conv_state")]);
        }
        refused(moved(&state_inside, |s| &mut s.conv).run(), &[&shares("conv_state", "the state")]);

        let to = inside(&good.state);
        let run = |s: &Step| s.op()?.with_token_states(&to).forward(&s.qkv, &s.z, &s.conv_weight);
        run(&good).unwrap();
        let both: [(&str, Argument); 2] = [("state", |s| &mut s.state), ("conv_state", |s| &mut s.conv)];
        for (name, argument) in arguments.into_iter().chain(both) {
            let sentence = format!("gdn_step: token_states: shares its storage with {name}; it is written in place");
            refused(run(&moved(&good, argument)), &[&sentence]);
        }
        // The same through the bare CustomOp, which sees storages only.
        let op = state_inside.op().unwrap();
        let z = inside(&good.z);
        refused(good.qkv.apply_op3_no_bwd(&z, &good.conv_weight, &op), &[&shares("z", "the state")]);
        let op = conv_inside.op().unwrap();
        refused(good.qkv.apply_op3_no_bwd(&z, &good.conv_weight, &op), &[&shares("z", "conv_state")]);
    }
}

#[test]
fn step_devices_must_agree() {
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let (good, cpu) = (Step::new(&gpu), Step::new(&Device::Cpu));
    good.run().unwrap();
    refused(good.with(|s| s.qkv = cpu.qkv.clone()).run(), &["gdn_step: qkv:", "Cpu"]);
    refused(good.with(|s| s.z = cpu.z.clone()).run(), &["gdn_step: z:", "Cpu"]);
    refused(good.with(|s| s.conv_weight = cpu.conv_weight.clone()).run(), &["gdn_step: conv_weight:", "Cpu"]);
    refused(good.with(|s| s.norm_weight = cpu.norm_weight.clone()).run(), &["gdn_step: norm_weight:", "Cpu"]);
    refused(good.with(|s| s.conv = cpu.conv.clone()).run(), &["gdn_step: conv_state:", "Cpu"]);
    refused(good.with(|s| s.gates = cpu.gates.clone()).run(), &["gdn_step: a:", "Cpu"]);
}
