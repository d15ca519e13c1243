//! Models with a mixture of experts whose widths the CUDA kernels take: 16-bit on CUDA against f32 on the CPU, from the
//! same weights.

use crate::serving::steps_beside_graph;
use crate::support::{devices, gpus, rel_rms, single_stream_devices};
use crate::tiny::{Tiny, VOCAB};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::CausalLm;
use candle_nn::VarBuilder;

/// Routing is not continuous: where the rounding of 16 bits sends a token to another expert its logits are others, and so
/// are those of the tokens after it. So it is the middle one of all errors that is held to this, and not the worst.
const MIDDLE: f64 = 7e-2;

/// More than the kernels for few rows support.
pub const TOKENS: usize = 60;

fn tiny(shared: usize) -> Tiny {
    Tiny::qwen3_next()
        .set("hidden_size", 128)
        .set("num_experts", 16)
        .set("num_experts_per_tok", 4)
        .set("moe_intermediate_size", 64)
        .set("shared_expert_intermediate_size", shared)
        .set("max_position_embeddings", 128)
        .fill()
}

/// With weights that `dtype` can hold, whatever the model computes in.
fn load(tiny: &Tiny, weights: DType, dtype: DType, device: &Device) -> Result<CausalLm> {
    let round = |(name, w): (&String, &Tensor)| Ok((name.clone(), w.to_dtype(weights)?.to_dtype(DType::F32)?));
    let weights = tiny.weights.iter().map(round).collect::<Result<_>>()?;
    let config = tiny.model_config()?;
    CausalLm::load(&config, VarBuilder::from_tensors(weights, dtype, device))
}

pub fn id(i: usize) -> u32 {
    (i * i + 3 * i) as u32 % VOCAB as u32
}

/// Logits of every position, fed in parts of these lengths.
pub fn logits_in_parts(model: &CausalLm, parts: &[usize]) -> Result<Vec<Vec<f32>>> {
    let (mut state, mut rows, mut first) = (model.new_state(1)?, vec![], 0);
    for &part in parts {
        let ids: Vec<u32> = (first..first + part).map(id).collect();
        let x = Tensor::new(ids, model.device())?.unsqueeze(0)?;
        rows.extend(model.forward(&x, &mut state)?.squeeze(0)?.to_dtype(DType::F32)?.to_vec2::<f32>()?);
        first += part;
    }
    assert_eq!(first, TOKENS);
    Ok(rows)
}

/// The middle one of the rows' errors.
fn middle(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let error = |(x, y): (&Vec<f32>, &Vec<f32>)| {
        assert!(x.iter().all(|v| v.is_finite()));
        rel_rms(x, y)
    };
    let mut errors: Vec<f64> = got.iter().zip(want).map(error).collect();
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

#[test]
fn prompts_and_steps_agree_with_f32() -> Result<()> {
    for shared in [64, 0] {
        let tiny = tiny(shared);
        for weights in [DType::BF16, DType::F16] {
            let cpu = load(&tiny, weights, DType::F32, &Device::Cpu)?;
            let want = logits_in_parts(&cpu, &[TOKENS])?;
            for device in devices() {
                // f32 takes the tensor ops there, 16 bits the kernels: those for many tokens, and those for few.
                for (dtype, bound) in [(DType::F32, 1e-4), (weights, MIDDLE)] {
                    let model = load(&tiny, weights, dtype, &device)?;
                    for parts in [&[TOKENS][..], &[33, 1, 2, 24], &[1; TOKENS]] {
                        let error = middle(&logits_in_parts(&model, parts)?, &want);
                        assert!(error < bound, "{dtype:?} on {:?}, {parts:?}: {error}", device.location());
                    }
                }
            }
        }
    }
    Ok(())
}

/// More sequences than the kernels for few tokens take: nothing asks the host.
#[test]
fn graphs_of_many_sequences() -> Result<()> {
    let tiny = tiny(64);
    for device in &gpus(single_stream_devices()) {
        let model = load(&tiny, DType::BF16, DType::BF16, device)?;
        for count in [1, 8, 40] {
            let token = |i: usize, step: usize| ((i + 5 * step) % VOCAB) as u32;
            steps_beside_graph(&model, &vec![vec![]; count], 4, token, |got, want, what| {
                let error = middle(got, want);
                assert!(error < MIDDLE, "{what}: {error}");
            })?;
        }
    }
    Ok(())
}
