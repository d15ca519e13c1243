//! What an engine says of its tokens, and what it takes off the logits of tokens that came before, against the logits of the model,
//! fed token by token: with and without graphs and drafts, beside requests that ask for nothing.

use crate::golden::{drafted, DEMO};
use crate::serving::{complete, Completion};
use crate::support::single_stream_devices;
use candle_core::{DType, Result};
use candle_gdn_models::{CausalLm, DraftDepth, Engine, EngineOptions, GraphChoice, Request, Sampling};

/// Bound on log-probabilities, and on a penalised logit below the best one.
const NEAR: f64 = 2e-3;

fn requests() -> Result<Vec<Request>> {
    let texts = (0..DEMO.prompts()).map(|i| Ok(drafted(i)?.ids)).collect::<Result<Vec<_>>>()?.concat();
    let request = |n: usize| {
        let first = n * 13 % (texts.len() - 30);
        let sampling = match n % 5 {
            0 => Sampling::default(),
            1 => Sampling { presence_penalty: 1.5, frequency_penalty: 0.4, ..Sampling::default() },
            2 => Sampling { temperature: 0.8, top_k: 20, presence_penalty: 0.5, ..Sampling::default() },
            3 => Sampling { frequency_penalty: 0.7, repeat_penalty: 1.2, repeat_last_n: 9, ..Sampling::default() },
            _ => Sampling { temperature: 1.1, top_p: 0.9, ..Sampling::default() },
        };
        let logprobs = [Some(5), None, Some(20), Some(0), None, Some(1)][n % 6];
        let prompt = texts[first..first + 4 + n % 17].to_vec();
        Request { sampling, logprobs, seed: n as u64, ..Request::new(prompt, 6 + n * 7 % 40) }
    };
    Ok((0..30).map(request).collect())
}

/// Each token of a completion against the model's logits after those before it. How often a penalty changed the most likely one.
fn check(model: &CausalLm, request: &Request, told: &Completion, what: &str) -> Result<usize> {
    let mut pool = model.new_sequences(1, 200)?;
    let s = pool.begin()?;
    let mut fed = request.tokens.clone();
    let (mut own, mut changed) = (Vec::new(), 0);
    for (token, logprobs) in told.tokens.iter().zip(&told.logprobs) {
        let logits = model.feed(&mut pool, &[(s, &fed)])?.squeeze(0)?.to_vec1::<f32>()?;
        let most = logits.iter().map(|x| f64::from(*x)).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (f64::from(*x) - most).exp()).sum();
        let of = |id: u32| f64::from(logits[id as usize]) - most - sum.ln();
        assert_eq!(logprobs.as_ref().map(|told| told.likeliest.len()), request.logprobs, "{what}");
        if let Some(told) = logprobs {
            let near = |id: u32, x: f32| (f64::from(x) - of(id)).abs() < NEAR;
            assert!(near(*token, told.token), "{what}: {token}: {}, not {}", told.token, of(*token));
            assert!(told.likeliest.iter().all(|(id, x)| near(*id, *x)), "{what}: {told:?}");
            let mut sorted: Vec<f64> = (0..logits.len() as u32).map(of).collect();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let ranks = told.likeliest.iter().zip(&sorted);
            assert!(ranks.into_iter().all(|((_, x), want)| (f64::from(*x) - want).abs() < NEAR), "{what}: {told:?}");
        }
        let Sampling { temperature, presence_penalty, frequency_penalty, repeat_penalty, repeat_last_n, .. } =
            request.sampling;
        if temperature == 0. {
            let all = [&request.tokens[..], &own].concat();
            let recent = &all[all.len() - repeat_last_n.min(all.len())..];
            let penalised = |id: u32| {
                let (x, penalty) = (f64::from(logits[id as usize]), f64::from(repeat_penalty));
                let x = if !recent.contains(&id) {
                    x
                } else if x > 0. {
                    x / penalty
                } else {
                    x * penalty
                };
                match own.iter().filter(|other| **other == id).count() {
                    0 => x,
                    n => x - f64::from(presence_penalty) - n as f64 * f64::from(frequency_penalty),
                }
            };
            let best = (0..logits.len() as u32).map(penalised).fold(f64::NEG_INFINITY, f64::max);
            assert!(penalised(*token) > best - NEAR, "{what}: {token}, {} below the best", best - penalised(*token));
            changed += usize::from(of(*token) + sum.ln() < -NEAR);
        }
        (fed, own) = (vec![*token], [&own[..], &[*token]].concat());
    }
    Ok(changed)
}

#[test]
fn what_is_told_is_the_model_s() -> Result<()> {
    for device in &single_stream_devices() {
        let (model, requests) = (DEMO.model_with_head(DType::F32, device)?, requests()?);
        for (sequences, depth, draft) in [
            (1, DraftDepth::Fixed(0), 0),
            (8, DraftDepth::Fixed(0), 0),
            (8, DraftDepth::Fixed(0), 4),
            (1, DraftDepth::Fixed(3), 0),
            (5, DraftDepth::Fixed(2), 0),
        ] {
            for cuda_graph in [GraphChoice::Off, GraphChoice::On] {
                if device.is_cpu() && cuda_graph == GraphChoice::On {
                    continue;
                }
                let what = format!("{sequences} sequences, {depth:?}, draft {draft}, graphs {cuda_graph:?}");
                let options =
                    EngineOptions { draft_depth: depth, draft, cuda_graph, ..EngineOptions::new(sequences, 100) };
                let (got, _) = complete(&model, options, &requests, true)?;
                let mut changed = 0;
                for (request, told) in requests.iter().zip(&got) {
                    assert_eq!(told.tokens.len(), request.max_new_tokens, "{what}");
                    changed += check(&model, request, told, &what)?;
                }
                assert!(changed > 10, "{what}: penalties changed {changed} tokens");
            }
        }
    }
    Ok(())
}

#[test]
fn no_more_are_asked_for_than_there_are() -> Result<()> {
    let device = &candle_core::Device::Cpu;
    let model = DEMO.model(DType::F32, device)?;
    let mut engine = Engine::new(&model, EngineOptions::new(1, 20))?;
    let error = engine.submit(Request { logprobs: Some(21), ..Request::new(vec![1], 1) }).unwrap_err().to_string();
    assert!(error.contains("at most 20 tokens, got 21"), "{error}");
    Ok(())
}
