//! Attention over a cache: its two ops against the definition in f64.

use crate::attention_case::Case;
use crate::support::{devices, gpus, refused, rel_rms, rounded, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{rotary_frequencies, AttentionCache, AttentionDecode, AttentionPrepare, PrepareOptions};

#[test]
fn attention_is_the_definition() {
    let mut seed = 0;
    for device in gpus(devices()) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (heads, kv_heads, dim) in [(2, 2, 64), (4, 1, 128), (16, 2, 256), (6, 2, 24), (3, 1, 200)] {
                for (before, lens) in [
                    (vec![0], vec![1]),
                    (vec![33, 0, 70], vec![1; 3]),
                    (vec![31, 129, 5, 64], vec![4; 4]),
                    (vec![9, 40], vec![16; 2]),
                    (vec![3, 0, 50, 7], vec![2, 5, 0, 1]),
                ] {
                    seed += 1;
                    Case {
                        dtype,
                        slots: seed % 2 == 0,
                        gated: seed % 3 != 0,
                        zero_centred: seed % 5 != 0,
                        scale: (seed % 4 == 1).then_some(0.2),
                        ..Case::new(&before, &lens, heads, kv_heads, dim, seed)
                    }
                    .check(&device);
                }
            }
        }
    }
}

/// Rings of the least capacity in which every token sees its whole window and of more, that have wrapped never, once and often;
/// prompts have a kernel of their own.
#[test]
fn attention_with_a_window_is_the_definition() {
    let mut seed = 100;
    for device in gpus(devices()) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (heads, kv_heads, dim) in [(4, 1, 64), (16, 2, 128), (16, 4, 256), (6, 2, 24)] {
                for (before, lens) in [
                    (vec![0], vec![1]),
                    (vec![33, 0, 1070], vec![1; 3]),
                    (vec![310, 129, 5, 64], vec![4; 4]),
                    (vec![903, 0, 350, 7], vec![2, 65, 0, 1]),
                    (vec![500, 0, 77], vec![200, 130, 301]),
                ] {
                    for window in [1, 7, 40, 2000] {
                        let longest = before.iter().zip(&lens).map(|(b, t)| b + t).max().unwrap_or(0);
                        let least = window + lens.iter().max().copied().unwrap_or(0) - 1;
                        for more in [0, 13] {
                            seed += 1;
                            Case {
                                dtype,
                                window: Some(window),
                                capacity: (least + more).min(longest + 3),
                                slots: seed % 2 == 0,
                                gated: seed % 3 != 0,
                                scale: (seed % 5 == 1).then_some(0.2),
                                ..Case::new(&before, &lens, heads, kv_heads, dim, seed)
                            }
                            .check(&device);
                        }
                    }
                }
            }
        }
    }
}

/// The last tokens of a call have overwritten what the first ones would see: these see fewer, and none that come after them.
#[test]
fn attention_in_a_ring_as_long_as_its_window() {
    for device in gpus(devices()) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (heads, tokens) in [(2, 128), (2, 16), (16, 300)] {
                let before = [tokens, 0, 3 * tokens + 5, 70];
                let ring = Case {
                    dtype,
                    window: Some(tokens),
                    capacity: tokens,
                    ..Case::new(&before, &[tokens; 4], heads, 2, 64, tokens as u64)
                };
                ring.check(&device);
                Case { window: Some(tokens / 2), ..ring }.check(&device);
            }
        }
    }
}

/// The kernels read several elements at once: what begins elsewhere is copied.
#[test]
fn attention_of_rows_that_begin_anywhere() {
    for device in gpus(devices()) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (before, lens) in [([40, 7], [1, 1]), ([40, 7], [3, 3]), ([9, 0], [2, 5]), ([300, 0], [600, 600])] {
                let case = Case { dtype, shifted: true, ..Case::new(&before, &lens, 16, 2, 64, 11) };
                Case { gated: false, ..case.clone() }.check(&device);
                case.check(&device);
            }
        }
    }
}

/// Enough keys that CUDA shares them out.
#[test]
fn attention_over_many_keys() {
    for device in gpus(devices()) {
        for dtype in [DType::F32, DType::BF16] {
            for before in [1000, 2047] {
                let case = Case { dtype, ..Case::new(&[before], &[1], 4, 1, 256, before as u64) };
                Case { window: Some(700), capacity: 750, ..case.clone() }.check(&device);
                case.check(&device);
            }
        }
    }
}

/// Token by token over a cache that grows, with positions added to on the device, is the whole at once.
#[test]
fn attention_token_by_token_is_the_whole() -> Result<()> {
    let (heads, kv_heads, dim, tokens) = (4, 2, 64, 40);
    for device in gpus(devices()) {
        let rng = &mut Rng::new(7);
        let mut normal = |shape: &[usize]| -> Result<Tensor> {
            rounded(&rng.normals(shape.iter().product()), shape, DType::F32)?.0.to_device(&device)
        };
        let (q, k, v) = (
            normal(&[2, tokens, heads, dim])?,
            normal(&[2, tokens, kv_heads, dim])?,
            normal(&[2, tokens, kv_heads, dim])?,
        );
        let gate = normal(&[2, tokens, heads, dim])?;
        let weight = normal(&[dim])?;
        let frequencies = rotary_frequencies(&[1.0, 0.1, 0.01], &device)?;
        let run = |parts: &[usize]| -> Result<Vec<f64>> {
            let cache = || Tensor::zeros((2, kv_heads, tokens, dim), DType::F32, &device);
            let cache = (cache()?, cache()?, Tensor::zeros(2, DType::U32, &device)?);
            let (mut start, mut out) = (0, vec![]);
            for &part in parts {
                let held = AttentionCache::new(&cache.0, &cache.1, &cache.2)?;
                let [q, k, v, gate] = [&q, &k, &v, &gate].map(|x| x.narrow(1, start, part).unwrap());
                let options = PrepareOptions::default();
                let prepare = AttentionPrepare::new(&held, &weight, &weight, &frequencies, options)?;
                let q = prepare.forward(&q, &k, &v)?;
                out.push(AttentionDecode::new(&held, None)?.forward(&q, Some(&gate))?);
                held.advance(part)?;
                start += part;
            }
            Ok(values(&Tensor::cat(&out, 1)?))
        };
        let whole = run(&[tokens])?;
        for parts in [vec![1; tokens], vec![16, 3, 1, 20]] {
            let error = rel_rms(&run(&parts)?, &whole);
            assert!(error < 2e-6, "{error:e} in parts of {parts:?} on {:?}", device.location());
        }
    }
    Ok(())
}

#[test]
fn attention_refuses() -> Result<()> {
    let device = &Device::Cpu;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, device).unwrap();
    let positions = |values: &[u32]| Tensor::new(values, device).unwrap();
    let (k, v) = (zeros(&[2, 2, 8, 16]), zeros(&[2, 2, 8, 16]));
    // Columns of wider rows.
    let from = |width: usize, first: usize| zeros(&[2, 2, 8, width]).narrow(3, first, 16).unwrap();
    let cache = |k: &Tensor, v: &Tensor| AttentionCache::new(k, v, &positions(&[0, 6])).map(|_| ());
    for (result, want) in [
        (cache(&k, &k), "v: shares its storage with k"),
        (cache(&k, &zeros(&[2, 2, 9, 16])), "v: expected shape [2, 2, 8, 16]"),
        (cache(&zeros(&[2, 2, 8, 12]), &zeros(&[2, 2, 8, 12])), "multiple of 8 up to 256"),
        (cache(&from(18, 0), &from(18, 0)), "k: expected rows at multiples of 16 bytes"),
        (cache(&from(20, 4), &from(20, 2)), "v: expected rows at multiples of 16 bytes"),
        (cache(&zeros(&[2, 2, 8]), &v), "k: expected shape [slots, kv_heads, capacity, head_dim]"),
    ] {
        refused(result, &[want]);
    }
    let cache = AttentionCache::new(&k, &v, &positions(&[0, 6]))?;
    let decode = |q: &Tensor| AttentionDecode::new(&cache, None)?.forward(q, None);
    refused(decode(&zeros(&[2, 1, 3, 16])), &["q: expected a multiple of 2 heads"]);
    refused(decode(&zeros(&[3, 1, 4, 16])), &["expected 3 slots"]);
    refused(decode(&zeros(&[2, 1, 4, 8])), &["q: expected shape"]);
    refused(decode(&zeros(&[2, 64])), &["q: expected shape [batch, tokens, heads, 16]"]);
    let bf16 = zeros(&[2, 1, 4, 16]).to_dtype(DType::BF16)?;
    refused(decode(&bf16), &["q: expected dtype F32"]);
    let (q, new, weight) = (zeros(&[2, 1, 4, 16]), zeros(&[2, 1, 2, 16]), zeros(&[16]));
    let prepare = |k: &Tensor, inv_freq: &Tensor| {
        AttentionPrepare::new(&cache, &weight, &weight, inv_freq, PrepareOptions::default())?.forward(&q, k, &new)
    };
    let bare = AttentionDecode::new(&cache, None)?;
    refused(q.apply_op2_no_bwd(&bf16, &bare), &["gate: expected dtype F32, got BF16"]);
    refused(prepare(&new, &zeros(&[9])), &["inv_freq: expected shape [pairs]"]);
    refused(prepare(&k.narrow(2, 0, 1)?.transpose(1, 2)?, &zeros(&[4])), &["shares its storage with k"]);
    refused(prepare(&new, &zeros(&[2, 4])), &["q: expected a tensor on CUDA"]);
    refused(decode(&q), &["q: expected a tensor on CUDA"]);
    refused(cache.clone().with_window(0), &["window: expected at least 1 token, got 0"]);
    let ring = cache.clone().with_window(4)?;
    let long = AttentionDecode::new(&ring, None)?.forward(&zeros(&[2, 9, 4, 16]), None);
    refused(long, &["q: expected at most 8 tokens of a sequence (the cache's capacity), got 9"]);
    refused(cache.advance(1), &["positions: expected a tensor on CUDA"]);
    Ok(())
}
