//! Decays after which nothing is left of the tokens before.

use crate::grad_case::{bits, Call, Look, NAMES, USUAL};
use crate::support::devices;
use candle_core::{DType, Tensor};
use candle_gdn::reference::Dims;

/// Once a decay is zero its size changes no gradient: neither the largest number nor infinity is lost in a sum, or hides what
/// other tokens add.
#[test]
fn gradients_beyond_a_decay_of_zero() {
    for device in devices() {
        for (dtype, dim) in [(DType::F32, 24), (DType::BF16, 64)] {
            let dims = Dims { key_heads: 1, value_heads: 2, key_dim: dim, value_dim: dim };
            let call = Call::random(dims, &[90], Look { dtype, ..USUAL }, 17, &device);
            let gradients = |a: f32| {
                // In the middle of a chunk; its log decay is -a times at least 0.2.
                let row = Tensor::full(a, (1, 2), &device).unwrap().to_dtype(dtype).unwrap();
                let mut call = call.clone();
                call.args[3] = call.args[3].slice_scatter(&row, 0, 21).unwrap();
                call.run().gradients.map(|gradient| bits(&gradient.unwrap()))
            };
            let want = gradients(1500.0);
            for a in [1e30, f32::INFINITY] {
                for ((name, got), want) in NAMES.iter().zip(gradients(a)).zip(&want) {
                    assert!(want.iter().all(|x| f32::from_bits(*x).is_finite()));
                    assert_eq!(&got, want, "{name} with {a} in {dtype:?} on {:?}", device.location());
                }
            }
        }
    }
}
