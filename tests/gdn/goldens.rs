//! The golden files: ops from a float64 recurrence, layers from transformers in float32.

use crate::sixteen_bits;
use crate::support::{devices, gdn_decode, golden, has, on_tensor_cores, rel_rms, values, TENSOR_CORES};
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::{Gates, GdnPrefill, RuleOptions};
use candle_gdn::reference::{Constants, Dims, Inputs};
use candle_gdn::{Algo, CuSeqlens, GatedDeltaNet, GdnConfig};
use candle_nn::VarBuilder;
use safetensors::SafeTensors;
use serde::Deserialize;
use std::collections::HashMap;

#[derive(Deserialize)]
struct OpCase {
    l2norm: bool,
    seqs: Vec<usize>,
}

fn metadata(bytes: &[u8]) -> HashMap<String, String> {
    let (_, metadata) = SafeTensors::read_metadata(bytes).unwrap();
    metadata.metadata().clone().unwrap()
}

#[test]
fn ops() {
    let bytes = std::fs::read(golden("ops.safetensors")).unwrap();
    let cases: Vec<OpCase> = serde_json::from_str(&metadata(&bytes)["cases"]).unwrap();
    assert_eq!(cases.len(), 10);
    for device in devices() {
        let tensors = candle_core::safetensors::load_buffer(&bytes, &device).unwrap();
        for (i, case) in cases.iter().enumerate() {
            for dtype in [DType::F32, DType::BF16] {
                let get = |name: &str| tensors[&format!("{i}.{name}")].clone();
                let io = |name: &str| get(name).to_dtype(dtype).unwrap();
                let gates = Gates { a: get("a"), b: get("b"), a_log: get("A_log"), dt_bias: get("dt_bias") };
                let options = |algo| RuleOptions::with(|o| (o.l2norm, o.algo) = (case.l2norm, algo));
                let (q, k, v, state) = (io("q"), io("k"), io("v"), get("state"));
                let cu = CuSeqlens::from_lengths(&case.seqs, &device).unwrap();
                let check = |what: &str, ran: Algo, o: &Tensor, new_state: &Tensor| {
                    let (bound, state_bound) = match dtype {
                        DType::F32 => (1e-5, 1e-5),
                        _ if on_tensor_cores(ran) => (5e-3, 5e-3),
                        _ => (4e-3, 1e-5),
                    };
                    let o = rel_rms(&values(o), &values(&get("out")));
                    let s = rel_rms(&values(new_state), &values(&get("new_state")));
                    let (bound, state_bound) = if on_tensor_cores(ran) && (o > bound || s > state_bound) {
                        let (o, s) = cost_of_sixteen_bits(case, dtype, get);
                        (sixteen_bits::bound(bound, o), sixteen_bits::bound(state_bound, s))
                    } else {
                        (bound, state_bound)
                    };
                    let case = format!("case {i} {what} {ran:?} {dtype:?} on {:?}", device.location());
                    assert!(o <= bound, "{case}: o off by {o:e}");
                    assert!(s <= state_bound, "{case}: state off by {s:e}");
                };
                let algos = [Algo::Auto, Algo::Recurrent].into_iter();
                let half = TENSOR_CORES.into_iter().filter(|algo| dtype == DType::BF16 && has(&device, *algo));
                for algo in algos.chain(half) {
                    let new_state = state.force_contiguous().unwrap();
                    let op = GdnPrefill::new(gates.clone(), &new_state, Some(&cu), options(algo)).unwrap();
                    let o = op.forward(&q, &k, &v).unwrap();
                    check("prefill", op.algo(&q, &k, &v).unwrap(), &o, &new_state);
                }
                if case.seqs.iter().all(|&n| n == 1) {
                    let (o, new_state) = gdn_decode(&q, &k, &v, &gates, &state, options(Algo::Auto)).unwrap();
                    check("decode", Algo::Auto, &o, &new_state);
                }
            }
        }
    }
}

/// The errors of o and of the new state that operands of 16 bits cost on the inputs of a case.
fn cost_of_sixteen_bits(case: &OpCase, dtype: DType, get: impl Fn(&str) -> Tensor) -> (f64, f64) {
    let x = |name: &str| values(&get(name));
    let size = |name: &str, dim| get(name).dims()[dim];
    let (key_heads, value_heads, key_dim, value_dim) = (size("k", 1), size("v", 1), size("k", 2), size("v", 2));
    let dims = Dims { key_heads, value_heads, key_dim, value_dim };
    let scale = (key_dim as f64).powf(-0.5);
    let constants = Constants { l2norm: case.l2norm, l2_eps: 1e-6, scale, beta_scale: 1.0 };
    let mut cu_seqlens = vec![0];
    cu_seqlens.extend(case.seqs.iter().scan(0, |end, n| {
        *end += n;
        Some(*end)
    }));
    let [q, k, v, a, b, a_log, dt_bias] = ["q", "k", "v", "a", "b", "A_log", "dt_bias"].map(x);
    let inputs = Inputs { q: &q, k: &k, v: &v, a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
    let [o, state] = sixteen_bits::cost(|draw| {
        let mut state = x("state");
        let o = sixteen_bits::gated_delta_rule(dtype, draw, dims, constants, &cu_seqlens, inputs, &mut state);
        [rel_rms(&o, &x("out")), rel_rms(&state, &x("new_state"))]
    });
    (o, state)
}

pub struct LayerGolden {
    pub layer: GatedDeltaNet,
    pub tensors: HashMap<String, Tensor>,
    /// For every run the lengths of its steps; runs that were thinned out are empty.
    pub plan: Vec<Vec<usize>>,
}

pub fn layer_golden(name: &str, dtype: DType, device: &Device) -> LayerGolden {
    let bytes = std::fs::read(golden(&format!("{name}.safetensors"))).unwrap();
    let metadata = metadata(&bytes);
    let config: GdnConfig = serde_json::from_str(&metadata["config"]).unwrap();
    let tensors = candle_core::safetensors::load_buffer(&bytes, device).unwrap();
    let vb = VarBuilder::from_tensors(tensors.clone(), dtype, device);
    let layer = GatedDeltaNet::load(&config, vb.pp("w")).unwrap();
    LayerGolden { layer, tensors, plan: serde_json::from_str(&metadata["plan"]).unwrap() }
}

#[test]
fn layers() {
    for device in devices() {
        for name in ["layer_qwen3_next", "layer_qwen3_5"] {
            let LayerGolden { layer, tensors, plan } = layer_golden(name, DType::F32, &device);
            let mut runs = 0;
            for (run, steps) in plan.iter().enumerate().filter(|(_, steps)| !steps.is_empty()) {
                runs += 1;
                let mut state = layer.new_state(2).unwrap();
                for (step, &tokens) in steps.iter().enumerate() {
                    let x = &tensors[&format!("{run}.{step}.x")];
                    assert_eq!(x.dims()[1], tokens);
                    let y = layer.forward(x, &mut state).unwrap();
                    let error = rel_rms(&values(&y), &values(&tensors[&format!("{run}.{step}.y")]));
                    // Their float32 chunks and sums, ours, and two GEMMs.
                    assert!(error <= 1e-5, "{name} run {run} step {step} on {:?}: {error:e}", device.location());
                }
                check_state(&format!("{name} run {run}"), &state, run, &tensors);
            }
            assert!(runs >= 3);
        }
    }
}

/// transformers keeps `[B, channels, width]` inputs (one more than is needed) and a `[B, HV, K, V]` state, of which the
/// thinned files hold every 8th column.
fn check_state(what: &str, state: &candle_gdn::GdnState, run: usize, tensors: &HashMap<String, Tensor>) {
    let conv = &tensors[&format!("{run}.conv_state")];
    let width = conv.dims()[2];
    let want = conv.narrow(2, 1, width - 1).unwrap().transpose(1, 2).unwrap();
    let error = rel_rms(&values(state.conv()), &values(&want));
    assert!(error <= 1e-5, "{what}: conv state off by {error:e}");

    let want = &tensors[&format!("{run}.recurrent_state")];
    let (kept, all) = (want.dims()[3], state.recurrent().dims()[2]);
    let rows: Vec<u32> = (0..kept).map(|i| (i * (all / kept)) as u32).collect();
    let rows = Tensor::new(rows, want.device()).unwrap();
    let got = state.recurrent().index_select(&rows, 2).unwrap().transpose(2, 3).unwrap().contiguous().unwrap();
    let error = rel_rms(&values(&got), &values(want));
    assert!(error <= 1e-5, "{what}: recurrent state off by {error:e}");
}
