//! Log-probabilities of a token sequence.

use anyhow::{bail, Result};
use candle_core::{Device, Tensor};
use candle_gdn_cli::{bar, status};
use candle_gdn_models::CausalLm;
use std::time::Instant;

/// Positions whose logits are held at a time: a large vocabulary is a megabyte a position.
const HEAD_ROWS: usize = 64;

/// Calls `emit(id, logprob)` for each token from the second on, and returns the sum of the
/// log-probabilities.
pub fn score(model: &CausalLm, ids: &[u32], chunk: usize, mut emit: impl FnMut(u32, f64) -> Result<()>) -> Result<f64> {
    let mut state = model.new_state(1)?;
    let start = Instant::now();
    let mut total = 0.;
    // The last token is predicted but predicts nothing.
    let inputs = &ids[..ids.len() - 1];
    let bar = bar("scoring", inputs.len(), "tokens");
    for (c, inputs) in inputs.chunks(chunk).enumerate() {
        let first = c * chunk;
        let input = Tensor::from_slice(inputs, (1, inputs.len()), &Device::Cpu)?;
        let hidden = model.forward_hidden(&input, &mut state)?;
        for row in (0..inputs.len()).step_by(HEAD_ROWS) {
            let rows = HEAD_ROWS.min(inputs.len() - row);
            let logits = model.logits(&hidden.narrow(1, row, rows)?)?;
            for (i, logits) in logits.squeeze(0)?.to_vec2::<f32>()?.iter().enumerate() {
                let position = first + row + i + 1;
                let logprob = log_softmax(logits, ids[position] as usize);
                if !logprob.is_finite() {
                    bail!("the model gave the log-probability {logprob} at position {position}")
                }
                total += logprob;
                emit(ids[position], logprob)?;
            }
        }
        bar.inc(inputs.len() as u64);
    }
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    status!("scored {} tokens in {seconds:.3} s, {:.1} tokens/s", inputs.len(), inputs.len() as f64 / seconds);
    Ok(total)
}

/// In f64: the last digit printed is meant.
fn log_softmax(logits: &[f32], id: usize) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = logits.iter().map(|&x| (x as f64 - max).exp()).sum();
    logits[id] as f64 - max - sum.ln()
}
