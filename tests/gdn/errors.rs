//! Nonsense in, a sentence out: every refusal names the op, the argument, what was expected and what came.

use crate::support::devices;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::{
    causal_conv1d, gated_rms_norm, gdn_decode, gdn_prefill, Algo, CausalConv1d, CuSeqlens, GateActivation, Gates,
    GdnDecode, GdnPrefill, RuleOptions,
};

fn zeros(shape: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(shape, DType::F32, device).unwrap()
}

#[track_caller]
fn refused<T>(result: Result<T>, parts: &[&str]) {
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
