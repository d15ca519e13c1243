//! The layer on projections of every kind: dense or any module, the input's in one piece or in a checkpoint's own.

use crate::layer::{config, weights_for};
use crate::random_layer::of_128;
use crate::support::{devices, refused, rel_rms, values, Rng};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_gdn::{
    Accepted, CuSeqlens, DenseWeight, GatedDeltaNet, GdnConfig, GdnParts, InProjection, Projection, Slots,
};
use std::collections::HashMap;

pub type Weights = HashMap<String, Tensor>;

pub fn dense(weight: &Tensor) -> Projection {
    DenseWeight::new(weight.clone()).unwrap().into()
}

/// `x wᵀ` by candle, with the gradients of `w`.
pub fn module(weight: &Tensor) -> Projection {
    Projection::module(candle_nn::Linear::new(weight.clone(), None))
}

/// The parts of a layer with other projections.
pub fn parts(w: &Weights, in_proj: InProjection, out_proj: Projection) -> GdnParts {
    GdnParts {
        in_proj,
        conv_weight: w["conv1d.weight"].clone().into(),
        a_log: w["A_log"].clone(),
        dt_bias: w["dt_bias"].clone(),
        norm_weight: w["norm.weight"].clone(),
        out_proj,
    }
}

fn layer(c: &GdnConfig, w: &Weights, in_proj: InProjection, out_proj: Projection) -> Result<GatedDeltaNet> {
    GatedDeltaNet::new(c, parts(w, in_proj, out_proj))
}

/// The rows of the four matrices of the split layout.
pub fn fused(w: &Weights) -> Tensor {
    let names = ["qkv", "z", "b", "a"].map(|name| w[&format!("in_proj_{name}.weight")].clone());
    Tensor::cat(&names, 0).unwrap()
}

/// Every form of the input projection, each projection made by `make`.
fn forms(split: &Weights, interleaved: &Weights, make: fn(&Tensor) -> Projection) -> [InProjection; 3] {
    let of = |w: &Weights, name: &str| make(&w[&format!("in_proj_{name}.weight")]);
    [
        InProjection::Fused(make(&fused(split))),
        InProjection::Interleaved { qkvz: of(interleaved, "qkvz"), ba: of(interleaved, "ba") },
        InProjection::Split { qkv: of(split, "qkv"), z: of(split, "z"), b: of(split, "b"), a: of(split, "a") },
    ]
}

/// What a layer gives and leaves in all the ways that tokens go through it.
fn everything(layer: &GatedDeltaNet, device: &Device, dtype: DType) -> Vec<f64> {
    let hidden = layer.config().hidden_size;
    let x = |shape: &[usize]| {
        let n = shape.iter().product::<usize>() * hidden;
        let numbers: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let shape = [shape, &[hidden]].concat();
        Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap().to_device(device).unwrap().to_dtype(dtype).unwrap()
    };
    let mut all = vec![];
    let mut state = layer.new_state(2).unwrap();
    for tokens in [1, 9, 40] {
        all.extend(values(&layer.forward(&x(&[2, tokens]), &mut state).unwrap()));
    }
    all.extend(values(state.recurrent()));
    // Packed: of one length, which goes as a batch, of several, and drafted.
    let mut pool = layer.new_pool(4).unwrap();
    let slots = Slots::new(&[2, 0], device).unwrap();
    for lengths in [[4, 4], [3, 20]] {
        let cu = CuSeqlens::from_lengths(&lengths, device).unwrap();
        all.extend(values(&layer.forward_slots(&x(&[cu.total_tokens()]), Some(&cu), &slots, &mut pool).unwrap()));
    }
    let (cu, moved) =
        (CuSeqlens::from_lengths(&[4, 4], device).unwrap(), Slots::from_to(&[2, 0], &[1, 3], device).unwrap());
    let (y, drafted) = layer.verify(&x(&[8]), &cu, &moved, &mut pool).unwrap();
    layer.commit(&drafted, &Accepted::new(&drafted, &[1, 3]).unwrap(), &mut pool).unwrap();
    all.extend(values(&y));
    let cu = CuSeqlens::from_lengths(&[70, 5], device).unwrap();
    let slots = Slots::new(&[1, 3], device).unwrap();
    let y = layer.forward_slots(&x(&[cu.total_tokens()]), Some(&cu), &slots, &mut pool).unwrap();
    for tensor in [&y, pool.conv(), pool.recurrent()] {
        all.extend(values(tensor));
    }
    all
}

#[test]
fn every_form_is_the_same_layer() {
    for device in devices() {
        for c in [config(), of_128()] {
            let (split, interleaved) = weights_for(&c, &device);
            let out = &split["out_proj.weight"];
            let want = layer(&c, &split, InProjection::Fused(dense(&fused(&split))), dense(out)).unwrap();
            let want = everything(&want, &device, DType::F32);
            for make in [dense, module] {
                for form in forms(&split, &interleaved, make) {
                    let what = format!("{form:?}");
                    let layer = layer(&c, &split, form, make(out)).unwrap();
                    let error = rel_rms(&everything(&layer, &device, DType::F32), &want);
                    assert!(error < 1e-5, "{}: {error:e}", &what[..what.len().min(60)]);
                }
            }
        }
    }
}

/// 16 bits on a GPU: fused steps on columns that lie apart, and projections by the kernel for few rows.
#[test]
fn every_form_in_bf16() {
    for device in devices() {
        let c = of_128();
        let (split, interleaved) = weights_for(&c, &device);
        let narrow = |w: &Weights| -> Weights {
            w.iter().map(|(name, t)| (name.clone(), t.to_dtype(DType::BF16).unwrap())).collect()
        };
        let (split, interleaved) = (narrow(&split), narrow(&interleaved));
        let out = dense(&split["out_proj.weight"]);
        let mut all = forms(&split, &interleaved, dense)
            .map(|form| everything(&layer(&c, &split, form, out.clone()).unwrap(), &device, DType::BF16));
        let want = std::mem::take(&mut all[0]);
        for got in &all[1..] {
            // The same products, rounded alike but for the order of their sums.
            let error = rel_rms(got, &want);
            assert!(error < 1e-2, "{error:e}");
        }
    }
}

/// `x (W + B A)^T` with the low-rank part apart.
struct Lora {
    base: candle_nn::Linear,
    a: Tensor,
    b: Tensor,
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let low = x.broadcast_matmul(&self.a.t()?)?.broadcast_matmul(&self.b.t()?)?;
        self.base.forward(x)? + low
    }
}

#[test]
fn adapted_and_quantised_projections() {
    for device in devices() {
        // candle's product of few rows reads 256 values at a time: behind a last row of fewer it would read memory of nobody.
        let c = config().with(|c| c.hidden_size = 256);
        let (w, _) = weights_for(&c, &device);
        let (all, out) = (fused(&w), &w["out_proj.weight"]);
        let mut rng = Rng::new(2);
        let mut randn = |rows: usize, columns: usize| {
            let numbers: Vec<f32> = (0..rows * columns).map(|_| 0.3 * rng.normal() as f32).collect();
            Tensor::from_vec(numbers, (rows, columns), &device).unwrap()
        };
        let (a, b) = (randn(3, c.hidden_size), randn(all.dims()[0], 3));
        let adapted = (&all + b.matmul(&a).unwrap()).unwrap();
        let lora = Lora { base: candle_nn::Linear::new(all.clone(), None), a, b };
        let run = |in_proj: Projection| {
            let layer = layer(&c, &w, InProjection::Fused(in_proj), dense(out)).unwrap();
            everything(&layer, &device, DType::F32)
        };
        let error = rel_rms(&run(Projection::module(lora)), &run(dense(&adapted)));
        assert!(error < 1e-5, "LoRA: {error:e}");

        let quantised = QTensor::quantize(&all.to_device(&Device::Cpu).unwrap(), GgmlDType::Q8_0).unwrap();
        let rounded = quantised.dequantize(&Device::Cpu).unwrap().to_device(&device).unwrap();
        let quantised =
            QTensor::quantize_onto(&all.to_device(&Device::Cpu).unwrap(), GgmlDType::Q8_0, &device).unwrap();
        let quantised = Projection::module(QMatMul::from_qtensor(quantised).unwrap());
        // candle rounds the inputs of such products to 8 bits: 2^-8 of the largest of 32.
        let error = rel_rms(&run(quantised), &run(dense(&rounded)));
        assert!(error < 3e-2, "Q8_0: {error:e}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let c = config();
    let (w, _) = weights_for(&c, &Device::Cpu);
    let (all, out) = (fused(&w), dense(&w["out_proj.weight"]));
    let short = all.narrow(0, 0, 7).unwrap();
    let narrow = layer(&c, &w, InProjection::Fused(dense(&short)), out.clone());
    refused(narrow, &["in_proj: expected a weight of shape", "[7, 24]"]);
    let wrong = layer(&c, &w, InProjection::Fused(dense(&all)), dense(&all));
    refused(wrong, &["out_proj: expected a weight of shape"]);
    // What a module gives shows when it is called; the state stays as it was.
    let x = Tensor::ones((1, 2, 24), DType::F32, &Device::Cpu).unwrap();
    let call = |in_proj: Projection, parts: &[&str]| {
        let layer = layer(&c, &w, InProjection::Fused(in_proj), out.clone()).unwrap();
        let mut state = layer.new_state(1).unwrap();
        refused(layer.forward(&x, &mut state), parts);
        assert!(values(state.recurrent()).iter().all(|x| *x == 0.));
    };
    call(module(&short), &["in_proj: expected it to give shape", "got [1, 2, 7]"]);
    let wide = all.clone();
    let cast = candle_nn::func(move |x: &Tensor| x.broadcast_matmul(&wide.t()?)?.to_dtype(DType::F64));
    call(Projection::module(cast), &["in_proj: expected it to give dtype F32"]);
}

/// CUDA has no empty allocation.
#[test]
fn no_rows_are_no_error() {
    for device in &devices() {
        let (c, weights) = (config(), weights_for(&config(), device).0);
        let weight = DenseWeight::new(weights["out_proj.weight"].clone()).unwrap();
        let x = Tensor::zeros((1, 3, weight.inputs()), DType::F32, device).unwrap().narrow(1, 0, 0).unwrap();
        assert_eq!(weight.forward(&x).unwrap().dims(), [1, 0, weight.outputs()]);
        let layer = layer(&c, &weights, InProjection::Fused(dense(&fused(&weights))), weight.into()).unwrap();
        assert_eq!(layer.new_state(0).unwrap().batch(), 0);
    }
}
