//! Scales of q and epsilons of the L2 norm that are not Qwen's, in every kernel; and how the backward pass is cut.

use crate::grad_case::{Call, Look, NAMES, USUAL};
use crate::gradients::bound;
use crate::rule_case::Case;
use crate::support::{devices, dtype_for, has, on_tensor_cores, poison, rel_rms, values};
use candle_core::{DType, Device};
use candle_gdn::ops::RuleOptions;
use candle_gdn::reference::Dims;
use candle_gdn::Algo;

/// With and without a scale of its own, `1e-6` and an epsilon that is large enough to be missed.
const CONSTANTS: [(Option<f64>, f64); 3] = [(Some(0.3), 1e-6), (None, 0.02), (Some(0.3), 0.02)];

fn dims(key_dim: usize, value_dim: usize) -> Dims {
    Dims { key_heads: 1, value_heads: 2, key_dim, value_dim }
}

#[test]
fn every_kernel_reads_scale_and_l2_eps() {
    for device in devices() {
        for (scale, l2_eps) in CONSTANTS {
            for algo in Algo::RULE {
                // Unit keys, and such that the epsilon is most of what the norm divides by.
                for norm in [1.0, 0.1] {
                    let dtype = dtype_for(algo);
                    let case =
                        |dims, lengths: &[usize]| Case { scale, l2_eps, norm, algo, dtype, ..Case::new(dims, lengths) };
                    let long = if algo == Algo::Decode { [16, 9] } else { [130, 64] };
                    case(dims(128, 128), &long).check(&device);
                    Case { packed: false, ..case(dims(128, 128), &[1; 3]) }.check(&device);
                    match algo {
                        Algo::Recurrent128 => {}
                        Algo::Decode => Case { packed: false, ..case(dims(64, 64), &[1; 3]) }.check(&device),
                        _ => case(dims(96, 192), &long).check(&device),
                    }
                }
            }
        }
    }
}

/// What the reference, which knows neither kernels nor segments, or a run makes of a call.
struct Want {
    o: Vec<f64>,
    last: Vec<f64>,
    gradients: [Vec<f64>; 8],
    /// What arithmetic loses of gradients that cancel: what inputs with errors of a quarter of the bound say.
    lost: [f64; 8],
}

impl Want {
    fn new(call: &Call) -> Self {
        let (o, last, gradients) = call.reference();
        let (_, _, noisy) = call.noisy(bound(call.args[0].dtype()) / 4.0, 5).reference();
        let lost = std::array::from_fn(|i| rel_rms(&noisy[i], &gradients[i]));
        Self { o, last, gradients, lost }
    }

    fn of_run(call: &Call) -> Self {
        let out = call.run();
        let gradients = std::array::from_fn(|i| values(out.gradients[i].as_ref().expect(NAMES[i])));
        Self { o: values(&out.o), last: values(&out.last), gradients, lost: [0.0; 8] }
    }

    /// Fails unless outputs and gradients of the call are these.
    fn check(&self, call: &Call) {
        let (dtype, device) = (call.args[0].dtype(), call.device());
        let at = format!("{:?} {:?}, {dtype:?} on {:?}", call.lengths, call.options, device.location());
        poison(call.args[0].elem_count(), dtype, device).unwrap();
        let out = call.run();
        for (name, got, want) in [("o", &out.o, &self.o), ("the final state", &out.last, &self.last)] {
            let error = rel_rms(&values(got), want);
            assert!(error <= bound(dtype), "{name} is off by {error:e}, {at}");
        }
        for (i, name) in NAMES.iter().enumerate() {
            let error = rel_rms(&values(out.gradients[i].as_ref().expect(name)), &self.gradients[i]);
            assert!(error <= bound(dtype) + self.lost[i], "the gradient of {name} is off by {error:e}, {at}");
        }
    }
}

/// The kernels that train on `device` in `dtype`.
fn training(device: &Device, dtype: DType) -> impl Iterator<Item = Algo> + '_ {
    let algos = [Algo::Auto, Algo::Recurrent, Algo::ChunkedSm80, Algo::ChunkedSm90].into_iter();
    algos.filter(move |algo| has(device, *algo) && !(on_tensor_cores(*algo) && dtype == DType::F32))
}

#[test]
fn every_gradient_reads_scale_and_l2_eps() {
    for device in devices() {
        for (scale, l2_eps) in CONSTANTS {
            for (dtype, norm) in [(DType::F32, 1.0), (DType::F32, 0.02), (DType::BF16, 0.02)] {
                let look = Look { dtype, norm, ..USUAL };
                let mut call = Call::random(dims(128, 128), &[70, 1, 33], look, 17, &device);
                call.options = RuleOptions::with(|o| (o.scale, o.l2_eps) = (scale, l2_eps));
                let want = Want::new(&call);
                for algo in training(&device, dtype) {
                    call.options.algo = algo;
                    want.check(&call);
                }
            }
        }
    }
}

/// However many segments are walked side by side, and with the states of all chunks or of a section at a time: sequences of
/// many chunks, of less than one, of no token. Other tests compare what a kernel gives without either with the reference.
#[test]
fn segments_and_recompute() {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            for (sizes, packed, lengths) in [
                (dims(128, 128), true, &[700, 1, 130][..]),
                (dims(128, 128), true, &[0, 330, 64]),
                (dims(96, 192), true, &[450]),
                (dims(64, 64), false, &[200, 200]),
            ] {
                let mut call = Call::random(sizes, lengths, Look { dtype, ..USUAL }, 19, &device);
                call.packed = packed;
                for algo in training(&device, dtype) {
                    (call.options.algo, call.options.segments, call.options.recompute) = (algo, 1, false);
                    let want = Want::of_run(&call);
                    for (segments, recompute) in [(1, true), (3, false), (3, true)] {
                        (call.options.segments, call.options.recompute) = (segments, recompute);
                        want.check(&call);
                    }
                }
            }
        }
    }
}
