//! Requests through an engine, and steps by a graph beside the same steps without.

use candle_core::Result;
use candle_gdn_models::{
    CausalLm, DecodeGraph, Engine, EngineOptions, EngineStats, Event, FinishReason, Logprobs, Request, RequestId,
};
use std::collections::HashMap;

/// What a request got.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    pub tokens: Vec<u32>,
    /// Of each token, where the request asked for them.
    pub logprobs: Vec<Option<Box<Logprobs>>>,
    pub end: Option<FinishReason>,
}

#[derive(Debug, Default)]
pub struct Completions(HashMap<RequestId, Completion>);

impl Completions {
    pub fn add(&mut self, event: Event) {
        match event {
            Event::Token { id, token, logprobs } => {
                let completion = self.0.entry(id).or_default();
                completion.tokens.push(token);
                completion.logprobs.push(logprobs);
            }
            Event::Finished { id, reason } => {
                assert_eq!(self.0.entry(id).or_default().end.replace(reason), None, "finished twice");
            }
            _ => {}
        }
    }

    pub fn remove(&mut self, id: RequestId) -> Completion {
        self.0.remove(&id).unwrap_or_default()
    }
}

/// Runs the engine until it is idle.
pub fn finish(engine: &mut Engine<&CausalLm>) -> Result<Completions> {
    let mut all = Completions::default();
    while !engine.is_idle() {
        engine.step()?.into_iter().for_each(|event| all.add(event));
    }
    Ok(all)
}

/// The completions of all requests, in order. None may fail, nor a graph where they are `graphed`.
pub fn complete(
    model: &CausalLm,
    options: EngineOptions,
    requests: &[Request],
    graphed: bool,
) -> Result<(Vec<Completion>, EngineStats)> {
    let mut engine = Engine::new(model, options)?;
    let ids = requests.iter().map(|request| engine.submit(request.clone())).collect::<Result<Vec<_>>>()?;
    let mut all = Completions::default();
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::Finished { reason: FinishReason::Failed(e), .. } => panic!("{e}"),
                Event::NoGraph { why, .. } if graphed => panic!("{why}"),
                event => all.add(event),
            }
        }
    }
    Ok((ids.into_iter().map(|id| all.remove(id)).collect(), engine.stats()))
}

/// Steps of `count` sequences by a graph, and of as many with the same `prompts` without: `check` compares the logits of each
/// step, one row a sequence. `token`: of a sequence at a step.
pub fn steps_beside_graph(
    model: &CausalLm,
    prompts: &[Vec<u32>],
    steps: usize,
    token: impl Fn(usize, usize) -> u32,
    check: impl Fn(&[Vec<f32>], &[Vec<f32>], &str),
) -> Result<()> {
    let count = prompts.len();
    let mut pools = [model.new_sequences(count, 32)?, model.new_sequences(count, 32)?];
    let mut graph = DecodeGraph::capture(model, &mut pools[0], count)?;
    let sequences = pools.iter_mut().map(|pool| (0..count).map(|_| pool.begin()).collect::<Result<Vec<_>>>());
    let sequences = sequences.collect::<Result<Vec<_>>>()?;
    for (pool, sequences) in pools.iter_mut().zip(&sequences) {
        let fed = sequences.iter().zip(prompts).map(|(s, prompt)| (*s, &prompt[..]));
        let fed: Vec<_> = fed.filter(|(_, prompt)| !prompt.is_empty()).collect();
        if !fed.is_empty() {
            model.feed_only(pool, &fed)?;
        }
    }
    for step in 0..steps {
        let ids: Vec<[u32; 1]> = (0..count).map(|i| [token(i, step)]).collect();
        let graphed: Vec<_> = sequences[0].iter().zip(&ids).map(|(s, id)| (*s, id[0])).collect();
        let eager: Vec<_> = sequences[1].iter().zip(&ids).map(|(s, id)| (*s, &id[..])).collect();
        let got = graph.step(model, &mut pools[0], &graphed)?.to_vec2()?;
        let want = model.feed(&mut pools[1], &eager)?.to_vec2()?;
        check(&got, &want, &format!("{count} sequences, step {step}"));
    }
    Ok(())
}
