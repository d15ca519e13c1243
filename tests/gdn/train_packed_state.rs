//! The layer in training on packed sequences that begin at states, and states without gradients.

use crate::grad_case::bits;
use crate::layer::{config, weights_for};
use crate::support::{devices, rel_rms, values};
use crate::train_layer::{load, variables};
use candle_core::{DType, Device, Tensor, Var};
use candle_gdn::{CuSeqlens, TrainableGatedDeltaNet, TrainingState};

/// What a call gets or gives, and likewise their gradients: x or y, the convolution's state, the recurrent state.
type Three = [Tensor; 3];

/// y and the states, and the gradients of x and of the states before, of the loss `<d, outputs>`.
fn run(layer: &TrainableGatedDeltaNet, inputs: &Three, d: &Three, cu: Option<&CuSeqlens>) -> (Three, Three) {
    let vars = inputs.each_ref().map(|input| Var::from_tensor(input).unwrap());
    let [x, conv, recurrent] = vars.each_ref().map(|var| var.as_tensor().clone());
    let (y, state) = layer.forward_with_state(&x, cu, Some(&TrainingState { conv, recurrent })).unwrap();
    let outputs = [y, state.conv, state.recurrent];
    let parts = outputs.iter().zip(d).map(|(output, d)| (output * d).unwrap().sum_all().unwrap());
    let store = parts.reduce(|sum, part| (sum + part).unwrap()).unwrap().backward().unwrap();
    (outputs, vars.map(|var| store.get(&var).unwrap().clone()))
}

fn normal(shapes: [&[usize]; 3], device: &Device) -> Three {
    shapes.map(|shape| Tensor::randn(0f32, 0.5, shape, device).unwrap())
}

/// Longer than the convolution's window, shorter, and empty.
#[test]
fn packed_sequences_with_states_are_as_alone() {
    for device in &devices() {
        let (_, weights) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        let (lengths, c) = ([6, 2, 0], config());
        assert!(lengths[1] < c.conv_kernel - 1);
        let conv = [3, c.conv_kernel - 1, c.conv_channels()];
        let recurrent = [3, c.num_value_heads, c.value_head_dim, c.key_head_dim];
        let shapes: [&[usize]; 3] = [&[8, c.hidden_size], &conv, &recurrent];
        let (inputs, d) = (normal(shapes, device), normal(shapes, device));
        let cu = CuSeqlens::from_lengths(&lengths, device).unwrap();
        for recompute in [false, true] {
            let layer = load(&c, &map, DType::F32, device).with_recompute(recompute);
            let (outputs, gradients) = run(&layer, &inputs, &d, Some(&cu));
            let mut first = 0;
            for (n, len) in lengths.into_iter().enumerate() {
                let own = |all: &Three| {
                    let x = all[0].narrow(0, first, len).unwrap().unsqueeze(0).unwrap();
                    let [conv, recurrent] = [&all[1], &all[2]].map(|state| state.narrow(0, n, 1).unwrap());
                    [x, conv, recurrent]
                };
                // Without tokens a state is handed on, and its gradient back.
                let (want, want_gradients) = match len {
                    0 => (own(&inputs), own(&d)),
                    _ => run(&layer, &own(&inputs), &own(&d), None),
                };
                let all = [("result", own(&outputs), want), ("gradient", own(&gradients), want_gradients)];
                for (what, got, want) in all {
                    for (i, name) in ["x or y", "conv", "recurrent"].into_iter().enumerate().skip(usize::from(len == 0))
                    {
                        let error = rel_rms(&values(&got[i]), &values(&want[i]));
                        assert!(error < 1e-5, "{len} tokens, recompute {recompute}: {what} {name} is off by {error:e}");
                    }
                }
                first += len;
            }
        }
    }
}

#[test]
fn a_detached_state_has_the_values_and_no_gradients() {
    for device in &devices() {
        let (_, weights) = weights_for(&config(), device);
        let map = variables(&weights, DType::F32);
        for recompute in [false, true] {
            let layer = load(&config(), &map, DType::F32, device).with_recompute(recompute);
            let [first, second] = [(); 2].map(|()| Var::randn(0f32, 1., (2, 5, 24), device).unwrap());
            let (_, state) = layer.forward_with_state(&first, None, None).unwrap();
            let detached = state.detach();
            assert_eq!(bits(&detached.conv), bits(&state.conv));
            assert_eq!(bits(&detached.recurrent), bits(&state.recurrent));
            let [kept, cut] = [&state, &detached].map(|state| {
                let (y, next) = layer.forward_with_state(&second, None, Some(state)).unwrap();
                let parts = [&y, &next.conv, &next.recurrent].map(|part| part.sqr().unwrap().sum_all().unwrap());
                parts.into_iter().reduce(|sum, part| (sum + part).unwrap()).unwrap().backward().unwrap()
            });
            assert!(values(kept.get(&first).unwrap()).iter().any(|x| *x != 0.0));
            assert!(cut.get(&first).is_none(), "recompute {recompute}");
            assert_eq!(bits(cut.get(&second).unwrap()), bits(kept.get(&second).unwrap()));
        }
    }
}
