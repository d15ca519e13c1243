//! Sizes and dtypes that nothing can hold or multiply: an error, neither a panic nor an end of the process. States out of tensors.

use crate::random_layer::{layer, of_128, packed, parts, rows, small};
use crate::support::{devices, refused, rel_rms, values, Rng};
use candle_core::{safetensors, DType, Device, Module, Tensor, D};
use candle_gdn::ops::{multiply, Launch};
use candle_gdn::{
    CuSeqlens, DenseWeight, GatedDeltaNet, GdnConfig, GdnParts, GdnState, InProjection, PoolOptions, Projection,
    RingSpans, Slots, StatePool,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

#[test]
fn more_than_memory_is_an_error() {
    for device in &devices() {
        let layer = layer(&small(), DType::F32, device, 3);
        let sentence = "expected a size that memory can hold, got shape";
        for batch in [1 << 60, usize::MAX, usize::MAX / 4096, 1 << 48] {
            refused(layer.new_state(batch), &["GdnState: recurrent: ", sentence]);
            refused(layer.new_pool(batch), &["GdnState: recurrent: ", sentence]);
            refused(layer.new_state_as(batch, DType::BF16), &["GdnState: recurrent: ", sentence]);
            let mut pool = layer.new_pool(2).unwrap();
            refused(pool.grow(batch), &["GdnState: ", sentence]);
            assert_eq!(pool.capacity(), 2);
            pool.zero(1).unwrap();
        }
        for slots in [usize::MAX, 1 << 60] {
            refused(RingSpans::new(slots, device), &["RingSpans: slots: ", sentence]);
        }
        let layer = crate::random_layer::layer(&of_128(), DType::F32, device, 3);
        refused(layer.new_pool_with(1 << 60, &PoolOptions::default().ring()), &["GdnState: recurrent: ", sentence]);
        let spans = RingSpans::new(2, device).unwrap();
        let (slots, cu) = (Slots::new(&[0, 1], device).unwrap(), CuSeqlens::from_lengths(&[1], device).unwrap());
        refused(spans.draft(&slots, &cu), &["ring: cu_seqlens: expected 2 sequences (the slots'), got 1"]);
        let cu = CuSeqlens::from_lengths(&[1, 1], device).unwrap();
        let accept = |counts: &Tensor| spans.accept(&slots, &cu, counts);
        refused(accept(&Tensor::new(&[1u32], device).unwrap()), &["ring: accepted: expected shape [2], got [1]"]);
        refused(accept(&Tensor::new(&[1f32, 0.], device).unwrap()), &["ring: accepted: expected dtype U32, got F32"]);
        let shared = PoolOptions::default().shared_ring(&spans);
        layer.new_pool_with(2, &shared).unwrap();
        refused(layer.new_pool_with(3, &shared), &["RingSpans: spans: expected at least 3 slots (the pool's), got 2"]);
    }
}

#[test]
fn a_product_names_what_it_does_not_support() {
    for device in &devices() {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
        let weight = DenseWeight::new(zeros(&[3, 8], DType::F32)).unwrap();
        for dtype in [DType::U8, DType::U32, DType::I64, DType::F64] {
            let sentence = format!("expected dtype f32, bf16 or f16, got {dtype:?}");
            refused(weight.forward(&zeros(&[2, 8], dtype)), &["DenseWeight: x: ", &sentence]);
            refused(DenseWeight::new(zeros(&[3, 8], dtype)), &["DenseWeight: weight: ", &sentence]);
            let x = zeros(&[2, 8], dtype);
            refused(multiply(&x, &x, &Launch::default()), &["multiply: x: ", &sentence]);
        }
        let (x, half) = (zeros(&[2, 8], DType::F32), zeros(&[3, 8], DType::BF16));
        let of_half = DenseWeight::new(half.clone()).unwrap();
        refused(of_half.forward(&x), &["DenseWeight: x: expected dtype BF16, got F32"]);
        assert_eq!((of_half.dtype(), of_half.device().is_cpu()), (DType::BF16, device.is_cpu()));
        let (none, wide) = (zeros(&[0, 7], DType::F32), zeros(&[5, 64], DType::F32));
        refused(multiply(&none, &wide, &Launch::default()), &["multiply: x: expected 64 columns"]);
        refused(multiply(&x, &half, &Launch::default()), &["multiply: weight: expected dtype F32, got BF16"]);
        for shape in [[3, 0], [0, 8], [0, 0]] {
            let sentence = format!("weight: expected shape [out, in], both at least 1, got {shape:?}");
            // CUDA has no empty allocation.
            let empty = Tensor::zeros((3, 8), DType::F32, device).unwrap();
            let empty = empty.narrow(0, 0, shape[0]).unwrap().narrow(1, 0, shape[1]).unwrap();
            refused(DenseWeight::new(empty), &[&sentence]);
        }
        refused(
            weight.forward(&Tensor::new(1f32, device).unwrap()),
            &["DenseWeight: x: expected shape [.., 8], got []"],
        );
    }
}

/// A layer with this output projection.
fn with_output(out_proj: Projection, c: &GdnConfig, device: &Device) -> GatedDeltaNet {
    let drawn = |shape: &[usize], seed: u64| {
        let numbers: Vec<f32> =
            Rng::new(seed).normals(shape.iter().product()).iter().map(|x| 0.2 * *x as f32).collect();
        Tensor::from_vec(numbers, shape, device).unwrap()
    };
    let rows = c.conv_channels() + c.value_size() + 2 * c.num_value_heads;
    let parts = GdnParts {
        in_proj: InProjection::Fused(DenseWeight::new(drawn(&[rows, c.hidden_size], 1)).unwrap().into()),
        conv_weight: drawn(&[c.conv_channels(), 4], 2).into(),
        a_log: drawn(&[c.num_value_heads], 3),
        dt_bias: drawn(&[c.num_value_heads], 4),
        norm_weight: drawn(&[c.value_head_dim], 5),
        out_proj,
    };
    GatedDeltaNet::new(c, parts).unwrap()
}

/// A ring then has advanced like a state without one: by the token with which it is flushed, by a prompt, and by drafts not at all.
#[test]
fn a_ring_after_an_output_projection_that_fails() {
    for device in &devices() {
        let c = of_128();
        let fails = Arc::new(AtomicBool::new(false));
        let (switch, hidden) = (fails.clone(), c.hidden_size);
        let module = candle_nn::func(move |x| match switch.load(Ordering::Relaxed) {
            true => candle_core::bail!("no product today"),
            false => x.narrow(D::Minus1, 0, hidden)?.contiguous(),
        });
        let layer = with_output(Projection::module(module), &c, device);
        let [mut plain, mut ring] =
            [PoolOptions::default(), PoolOptions::default().ring()].map(|o| layer.new_pool_with(1, &o).unwrap());
        let (slots, rng) = (Slots::new(&[0], device).unwrap(), &mut Rng::new(6));
        for call in 1..=40 {
            let failing = [17, 18, 30, 35].contains(&call);
            fails.store(failing, Ordering::Relaxed);
            let x =
                packed(&rows(rng, if call % 6 == 0 && call > 20 { 20 } else { 1 }, c.hidden_size), DType::F32, device);
            let x = x.unsqueeze(0).unwrap();
            let [want, got] = [&mut plain, &mut ring].map(|pool| layer.forward_slots(&x, None, &slots, pool));
            match failing {
                true => [want, got].into_iter().for_each(|y| refused(y, &["no product today"])),
                false => {
                    let error = rel_rms(&values(&got.unwrap()), &values(&want.unwrap()));
                    // Of one head, normed: of what cancels in its o the rounding shows.
                    assert!(error < 1e-4, "y of call {call} is off by {error:e}");
                }
            }
            let near = |plain: &StatePool, ring: &StatePool| {
                let [got, want] = [ring, plain].map(|pool| parts(&pool.snapshot(0).unwrap()));
                assert!(got[0] == want[0] && rel_rms(&got[1], &want[1]) < 1e-5, "the state after call {call}");
            };
            near(&plain, &ring);
            // A draft flushes what waits in the ring: not before the token with which it is full.
            if call < 20 {
                continue;
            }
            fails.store(true, Ordering::Relaxed);
            let cu = CuSeqlens::from_lengths(&[16], device).unwrap();
            let draft = packed(&rows(rng, 16, c.hidden_size), DType::F32, device);
            refused(layer.verify(&draft, &cu, &slots, &mut ring), &["no product today"]);
            near(&plain, &ring);
        }
    }
}

/// What the docs of `forward` say: a module as output projection is the last to fail.
#[test]
fn a_state_after_an_output_projection_that_fails() {
    let device = &Device::Cpu;
    let c = small();
    let good = layer(&c, DType::F32, device, 4);
    let x = Tensor::ones((1, 3, 32), DType::F32, device).unwrap();
    let run = |out_proj: Projection| {
        let layer = with_output(out_proj, &c, device);
        let mut state = layer.new_state(1).unwrap();
        let y = layer.forward(&x, &mut state);
        (y, values(state.recurrent()))
    };
    let dense = DenseWeight::new(Tensor::ones((32, 64), DType::F32, device).unwrap()).unwrap();
    let (y, want) = run(dense.into());
    y.unwrap();
    let (y, got) = run(Projection::module(candle_nn::func(|_| candle_core::bail!("no product today"))));
    refused(y, &["no product today"]);
    assert_eq!(got, want);
    assert!(want.iter().any(|x| *x != 0.0));
    // What is refused before leaves it as it was.
    let mut state = good.new_state(1).unwrap();
    refused(good.forward(&x.narrow(2, 0, 31).unwrap(), &mut state), &["x: expected shape"]);
    assert!(values(state.recurrent()).iter().all(|x| *x == 0.0));
}

#[test]
fn a_state_through_a_file() {
    for device in &devices() {
        let path = std::env::temp_dir().join(format!("candle-gdn-state-test-{}.safetensors", std::process::id()));
        for dtype in [DType::F32, DType::BF16] {
            let layer = layer(&small(), DType::F32, device, 5);
            let x = Tensor::randn(0f32, 1., (2, 3, 32), device).unwrap();
            let mut state = layer.new_state_as(2, dtype).unwrap();
            layer.forward(&x, &mut state).unwrap();
            let parts = HashMap::from([("c", state.conv().clone()), ("r", state.recurrent().clone())]);
            safetensors::save(&parts, &path).unwrap();
            let parts = safetensors::load(&path, device).unwrap();
            let mut loaded = GdnState::from_tensors(&parts["c"], &parts["r"]).unwrap();
            assert_eq!((loaded.batch(), loaded.recurrent().dtype()), (2, dtype));
            let next = values(&layer.forward(&x, &mut state).unwrap());
            assert_eq!(values(&layer.forward(&x, &mut loaded).unwrap()), next);
            // A copy: the tensors are as they were.
            let mut again = GdnState::from_tensors(&parts["c"], &parts["r"]).unwrap();
            assert_eq!(values(&layer.forward(&x, &mut again).unwrap()), next);
            let mut pool = layer.new_pool_with(3, &PoolOptions::default().dtype(dtype)).unwrap();
            let one = |t: &Tensor| t.narrow(0, 1, 1).unwrap();
            pool.restore(2, &GdnState::from_tensors(&one(&parts["c"]), &one(&parts["r"])).unwrap()).unwrap();
            assert_eq!(values(&pool.recurrent().get(2).unwrap()), values(&one(&parts["r"])));
        }
        std::fs::remove_file(&path).unwrap();

        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
        let (conv, recurrent) = (zeros(&[2, 3, 128], DType::F32), zeros(&[2, 4, 16, 16], DType::F32));
        let bad = |conv: &Tensor, recurrent: &Tensor, parts: &[&str]| {
            refused(GdnState::from_tensors(conv, recurrent), parts);
        };
        bad(&recurrent, &conv, &["GdnState: conv: expected shape [batch, width - 1, channels], got [2, 4, 16, 16]"]);
        bad(&conv, &conv, &["GdnState: recurrent: expected shape [batch, value_heads, value_dim, key_dim], got"]);
        bad(&conv.narrow(0, 0, 1).unwrap(), &recurrent, &["recurrent: expected a batch of 1 (conv has it), got 2"]);
        let (u8, f16) = (zeros(&[2, 3, 128], DType::U8), zeros(&[2, 4, 16, 16], DType::F16));
        bad(&u8, &recurrent, &["GdnState: conv: expected dtype f32, bf16 or f16, got U8"]);
        bad(&conv, &f16, &["GdnState: recurrent: expected dtype f32 or bf16, got F16"]);
        // Another layer's is refused where it is used.
        let mut other = GdnState::from_tensors(&conv, &recurrent).unwrap();
        let x = Tensor::zeros((2, 1, 64), DType::F32, device).unwrap();
        let large = crate::random_layer::layer(&of_128(), DType::F32, device, 5);
        refused(
            large.forward(&x, &mut other),
            &["state: expected states of conv [3, 1024] and recurrent [4, 128, 128]"],
        );
    }
}
