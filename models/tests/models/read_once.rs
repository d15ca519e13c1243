//! What loading does with variables, and with weights that no dtype of a model may round.

use crate::tiny::Tiny;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gdn_models::CausalLm;

fn ids() -> Result<Tensor> {
    Tensor::from_iter((0..12u32).map(|i| i * 7 % 32), &Device::Cpu)?.unsqueeze(0)
}

/// The logits of the last token.
fn last(model: &CausalLm) -> Result<Vec<f32>> {
    model.forward_last(&ids()?, &mut model.new_state(1)?)?.squeeze(0)?.to_vec1()
}

/// What is written to variables after the load does not show, and logits have no gradients.
#[test]
fn variables_are_read_once() -> Result<()> {
    let mut tiny = Tiny::qwen3_next();
    let want = last(&tiny.model()?)?;
    let variables = tiny.weights.values().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    for (weight, variable) in tiny.weights.values_mut().zip(&variables) {
        *weight = variable.as_tensor().clone();
    }
    let model = tiny.model()?;
    variables.iter().try_for_each(|variable| variable.set(&variable.zeros_like()?))?;
    assert_eq!(last(&model)?, want);
    assert!(!model.forward(&ids()?, &mut model.new_state(1)?)?.track_op());
    Ok(())
}

/// A model in bf16 has the decays and the norm of its linear layers as the file has them.
#[test]
fn what_is_kept_in_f32_is_read_in_f32() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let run = |tiny: &Tiny| last(&tiny.load(DType::BF16)?);
    for name in ["A_log", "dt_bias", "norm.weight"] {
        let mut rounded = tiny.clone();
        for (_, weight) in rounded.weights.iter_mut().filter(|(n, _)| n.ends_with(&format!("linear_attn.{name}"))) {
            *weight = weight.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
        }
        assert_ne!(run(&rounded)?, run(&tiny)?, "{name} was rounded");
    }
    Ok(())
}
