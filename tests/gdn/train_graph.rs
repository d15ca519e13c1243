//! A step of training as a CUDA graph: forward pass, backward pass and the update of every weight, as candle records them.

use crate::grad_case::bits;
use crate::layer::weights_for;
use crate::support::{gpus, single_stream_devices};
use crate::train_layer::{load, names, var, variables};
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{DType, Device, Error, Result, Tensor};
use candle_gdn::{GdnConfig, TrainableGatedDeltaNet};
use candle_nn::VarMap;

const STEPS: usize = 4;

/// Gradient descent towards `target`. All that it allocates is freed when it returns.
fn step(layer: &TrainableGatedDeltaNet, map: &VarMap, x: &Tensor, target: &Tensor) -> Result<()> {
    let error = (layer.forward(x, None)? - target)?;
    let gradients = error.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
    for name in names(map) {
        let var = var(map, &name);
        let moved = gradients.get(&var).expect("a gradient").affine(-1e-4, 0.0)?;
        var.set(&(var.as_detached_tensor() + moved)?)?;
    }
    Ok(())
}

/// The same weights to the bit after several steps, launched by candle or replayed.
#[test]
fn a_graph_of_a_training_step_is_the_step() {
    for device in gpus(single_stream_devices()) {
        let sizes =
            [(GdnConfig::new(64, (2, 128), (4, 128)), DType::BF16), (GdnConfig::new(48, (2, 64), (4, 64)), DType::F32)];
        for (c, dtype) in sizes {
            for recompute in [false, true] {
                replayed(&c, dtype, recompute, &device).unwrap();
            }
        }
    }
}

fn replayed(c: &GdnConfig, dtype: DType, recompute: bool, device: &Device) -> Result<()> {
    let (weights, _) = weights_for(c, device);
    let map = variables(&weights, dtype);
    let layer = load(c, &map, dtype, device).with_recompute(recompute);
    let draw = || Tensor::randn(0f32, 1., (2, 150, c.hidden_size), device)?.to_dtype(dtype);
    let (x, target) = (draw()?, draw()?);
    let now = || names(&map).iter().map(|name| bits(var(&map, name).as_tensor())).collect::<Vec<_>>();
    let begin_again = || {
        for name in names(&map) {
            let var = var(&map, &name);
            var.set(&weights[&name].to_dtype(var.dtype()).unwrap()).unwrap();
        }
    };
    let begun = now();
    for _ in 0..STEPS {
        step(&layer, &map, &x, &target)?;
    }
    let want = now();
    assert!(want.iter().zip(&begun).all(|(now, begun)| now != begun), "a weight did not move");

    let cuda = device.as_cuda_device()?;
    let stream = cuda.cuda_stream();
    let graph = {
        // candle's kernels read shapes from the device: a first run uploads them, and they stay there.
        let _shapes = cuda.enable_cuda_graph_htod_cache();
        step(&layer, &map, &x, &target)?;
        device.synchronize()?;
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(Error::wrap)?;
        let recorded = step(&layer, &map, &x, &target);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).map_err(Error::wrap)?;
        recorded?;
        graph.expect("launches")
    };
    begin_again();
    assert!(now() == begun);
    for _ in 0..STEPS {
        graph.launch().map_err(Error::wrap)?;
    }
    assert!(now() == want, "{dtype:?}, recompute {recompute}: a replayed step differs");
    Ok(())
}
