//! Whole models with random weights and a draft head in an engine: what a step costs by sequences and depth, and how fast
//! text comes where drafts are taken for right with a given chance. Times by the host's clock; nothing is kept.

use crate::model::{config, ids};
use crate::Bench;
use anyhow::{bail, Result};
use candle_gdn_cli::dummy::Dummy;
use candle_gdn_models::{
    CausalLm, DraftDepth, DraftHeadChoice, Engine, EngineOptions, EngineStats, Event, FinishReason, Request,
};
use candle_nn::VarBuilder;

const BATCHES: [usize; 2] = [1, 32];
const PROMPT: usize = 128;
/// Tokens of a completion where a depth is timed, and where the engine chooses; of many sequences, whose steps take longer, half.
const TIMED: usize = 192;
const CHOSEN: usize = 768;
const ACCEPTED: [f32; 3] = [0.8, 0.65, 0.5];

pub fn drafts(bench: &Bench, names: &[String], ordinal: usize) -> Result<()> {
    let device = candle_gdn::single_stream_device(ordinal)?;
    for name in names {
        let config = config(name)?;
        let weights = Box::new(Dummy::new(&config));
        let vb = VarBuilder::from_backend(weights, bench.dtype, device.clone());
        let model = CausalLm::loader(&config).algo(bench.layer_algo()).draft_head(DraftHeadChoice::On).load(vb)?;
        for batch in bench.choice.batches(&BATCHES) {
            of_batch(name, &model, batch)?;
        }
    }
    Ok(())
}

fn of_batch(name: &str, model: &CausalLm, batch: usize) -> Result<()> {
    println!("{name}, {batch} sequences: depth, ms a step, tokens a second (and over none) with drafts accepted by");
    println!("depth      ms{}", ACCEPTED.map(|p| format!("{p:>18}")).concat());
    let [timed, chosen] = [TIMED, CHOSEN].map(|tokens| if batch < 8 { tokens } else { tokens / 2 });
    let most = PROMPT + timed.max(chosen) + 64;
    let run = |depth, accepted, tokens| run(model, batch, depth, accepted, tokens, most);
    let mut plain = 0.;
    for depth in 0..=DraftDepth::MOST {
        let stats = run(DraftDepth::Fixed(depth), 0., timed)?;
        let seconds = step_seconds(&stats, batch);
        let speed = |p: f32| {
            let tokens: f64 = (0..=depth).map(|d| f64::from(p).powi(d as i32)).sum();
            batch as f64 * tokens / seconds
        };
        plain = if depth == 0 { speed(0.) } else { plain };
        let each = ACCEPTED.map(|p| format!("{:>11.0} ({:.2})", speed(p), speed(p) / plain));
        println!("{depth:>5} {:>7.3}{}", 1e3 * seconds, each.concat());
    }
    // All that it tries on the way counts. As many steps, as long sequences.
    let speed = |stats: EngineStats| stats.decode.tokens as f64 / stats.decode.time.as_secs_f64();
    let plain = speed(run(DraftDepth::Fixed(0), 0., chosen)?);
    let each = ACCEPTED.iter().chain(&[0.1]).map(|&p| {
        let stats = run(DraftDepth::Auto, p, chosen)?;
        Ok(format!("  accepted {p}: {:.0} ({:.2}), {}", speed(stats), speed(stats) / plain, stats.head))
    });
    println!(
        " auto, from the first token on, over {plain:.0} without drafts:\n{}",
        each.collect::<Result<Vec<_>>>()?.join("\n")
    );
    Ok(())
}

fn step_seconds(stats: &EngineStats, batch: usize) -> f64 {
    stats.decode.time.as_secs_f64() * batch as f64 / stats.head.steps.max(1) as f64
}

/// In a pool for sequences of up to `most` tokens, which decides how attention is divided.
fn run(
    model: &CausalLm,
    batch: usize,
    draft_depth: DraftDepth,
    accepted: f32,
    tokens: usize,
    most: usize,
) -> Result<EngineStats> {
    let options = EngineOptions { draft_depth, prefill_chunk: PROMPT * batch, ..EngineOptions::new(batch, most) };
    let mut engine = Engine::with_forced_acceptance(model, options, accepted)?;
    for n in 0..batch {
        engine.submit(Request::new(ids(model, n, PROMPT), tokens))?;
    }
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::NoGraph { why, .. } => bail!("no graph: {why}"),
                Event::Finished { reason: FinishReason::Failed(why), .. } => bail!("{why}"),
                _ => {}
            }
        }
    }
    Ok(engine.stats())
}
