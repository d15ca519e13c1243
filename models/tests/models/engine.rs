//! The engine on a GPU, where it draws tokens on the device and is a step ahead, against itself without a graph; and whatever
//! runs beside a request.

use crate::golden::DEMO;
use crate::serving::{Completion, Completions};
use crate::support::{gpus, single_stream_devices};
use candle_core::{DType, Result};
use candle_gdn_models::{CausalLm, Engine, EngineOptions, FinishReason, GraphChoice, Request, Sampling};

fn request(n: u32) -> Request {
    let sampling = match n % 4 {
        0 => Sampling::default(),
        1 => Sampling { temperature: 0.8, top_p: 0.9, ..Sampling::default() },
        2 => Sampling {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.2,
            ..Sampling::default()
        },
        _ => Sampling { repeat_penalty: 1.3, repeat_last_n: 7, ..Sampling::default() },
    };
    let prompt = (0..1 + n * 7 % 50).map(|i| (n * 31 + i * i) % 1000).collect();
    // Many stops, so that requests end while the next step is under way.
    let stop = (0..if n.is_multiple_of(3) { 100 } else { 0 }).map(|i| i * 10 + 3).collect();
    let snapshot_end = n % 7 == 6;
    Request { sampling, stop, seed: n.into(), snapshot_end, ..Request::new(prompt, [40, 13, 1, 25][n as usize % 4]) }
}

fn run(
    model: &CausalLm,
    options: EngineOptions,
    cancelled: &[(usize, usize)],
) -> Result<Vec<(Vec<u32>, FinishReason)>> {
    let (mut engine, mut ids, mut ends) = (Engine::new(model, options)?, vec![], Completions::default());
    for step in 0.. {
        while ids.len() < 24 && ids.len() <= step / 2 * 3 {
            ids.push(engine.submit(request(ids.len() as u32))?);
        }
        for (_, n) in cancelled.iter().filter(|(at, _)| *at == step) {
            engine.cancel(ids[*n])?;
        }
        engine.step()?.into_iter().for_each(|event| ends.add(event));
        if engine.is_idle() && ids.len() == 24 {
            break;
        }
    }
    let end = |id| {
        let Completion { tokens, end, .. } = ends.remove(id);
        (tokens, end.expect("an end"))
    };
    Ok(ids.into_iter().map(end).collect())
}

#[test]
fn a_step_ahead_changes_nothing() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let model = DEMO.model(DType::F32, device)?;
        let options = |sequences, cuda_graph| EngineOptions { cuda_graph, ..EngineOptions::new(sequences, 100) };
        let want = run(&model, options(1, GraphChoice::Off), &[])?;
        assert!(want.iter().filter(|end| end.1 == FinishReason::Stop).count() > 2);
        for sequences in [1, 3, 8, 24] {
            for choice in [GraphChoice::Off, GraphChoice::On] {
                let what = format!("{sequences} sequences, graphs {choice:?}");
                assert_eq!(run(&model, options(sequences, choice), &[])?, want, "{what}");
                let cancelled = [(2, 0), (5, 3), (6, 4), (9, 8), (20, 17), (30, 22)];
                for (n, (got, want)) in
                    run(&model, options(sequences, choice), &cancelled)?.iter().zip(&want).enumerate()
                {
                    match got.1 {
                        FinishReason::Cancelled => assert_eq!(got.0, want.0[..got.0.len()], "request {n}, {what}"),
                        _ => assert_eq!(got, want, "request {n}, {what}"),
                    }
                }
            }
        }
        // Guesses and passes in a graph take turns.
        let drafts = EngineOptions { draft: 4, ..options(8, GraphChoice::On) };
        assert_eq!(run(&model, drafts, &[])?, want, "with drafts");
    }
    Ok(())
}

/// The same logits up to rounding, so that the CPU draws the same but for close calls: from the same random numbers.
#[test]
fn the_cpu_draws_the_same() -> Result<()> {
    let here = run(&DEMO.model(DType::F32, &candle_core::Device::Cpu)?, EngineOptions::new(8, 100), &[])?;
    for device in &gpus(single_stream_devices()) {
        let there = run(&DEMO.model(DType::F32, device)?, EngineOptions::new(8, 100), &[])?;
        let same = here.iter().zip(&there).filter(|(a, b)| a == b).count();
        assert!(same >= 22, "{same} of 24 requests");
    }
    Ok(())
}
