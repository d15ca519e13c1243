//! A decode step as a CUDA graph against the same step without; on the CPU that it says it cannot be.

use crate::faults::Faulty;
use crate::golden::{argmax, DEMO};
use crate::sequences::{assert_near, model, on_each, tokens, want};
use crate::serving::Completions;
use crate::support::{devices, gpus, refused, rel_rms, single_stream_devices, Rng};
use candle_core::{DType, Device, Result};
use candle_gdn_models::{
    shard_of, CausalLm, Collective, DecodeGraph, DraftDepth, DraftHeadChoice, Engine, EngineOptions, GraphChoice,
    Request, Sequence, SequencePool,
};
use std::sync::Arc;

#[test]
fn refused_on_the_cpu() -> Result<()> {
    let model = model(&Device::Cpu)?;
    let mut pool = model.new_sequences(2, 16)?;
    refused(DecodeGraph::capture(&model, &mut pool, 2), &["DecodeGraph: model: expected one on CUDA"]);
    refused(DecodeGraph::capture(&model, &mut pool, 0), &["batch: expected at least 1"]);
    let mut other = self::model(&Device::Cpu)?.new_sequences(2, 16)?;
    refused(DecodeGraph::capture(&model, &mut other, 2), &["another model"]);
    Ok(())
}

/// A captured stream that belongs to a host thread brings the driver down when the thread ends.
#[test]
fn refused_where_threads_have_streams() -> Result<()> {
    for device in &gpus(devices()) {
        let model = model(device)?;
        let graph = DecodeGraph::capture(&model, &mut model.new_sequences(2, 16)?, 2);
        refused(graph, &["DecodeGraph: device: expected one of `single_stream_device`"]);
    }
    Ok(())
}

/// Two pools that see the same: one by the graph, one without.
struct Pair<'a> {
    model: &'a CausalLm,
    graph: DecodeGraph,
    pools: [SequencePool; 2],
}

impl Pair<'_> {
    fn begin(&mut self, prompt: &[u32]) -> Result<[Sequence; 2]> {
        let s = [self.pools[0].begin()?, self.pools[1].begin()?];
        for (pool, s) in self.pools.iter_mut().zip(s) {
            self.model.feed_only(pool, &[(s, prompt)])?;
        }
        Ok(s)
    }

    fn each(&mut self, f: impl Fn(&CausalLm, &mut SequencePool, usize) -> Result<()>) -> Result<()> {
        (0..2).try_for_each(|i| f(self.model, &mut self.pools[i], i))
    }

    /// One step of each; the tokens that come next.
    fn step(&mut self, batch: &[([Sequence; 2], u32)], what: &str) -> Result<Vec<u32>> {
        let ids: Vec<[u32; 1]> = batch.iter().map(|(_, id)| [*id]).collect();
        let eager: Vec<_> = batch.iter().zip(&ids).map(|((s, _), id)| (s[1], &id[..])).collect();
        let eager = self.model.feed(&mut self.pools[1], &eager)?.to_vec2::<f32>()?;
        let graphed: Vec<_> = batch.iter().map(|(s, id)| (s[0], *id)).collect();
        let graphed = self.graph.step(self.model, &mut self.pools[0], &graphed)?.to_vec2::<f32>()?;
        assert_eq!(graphed.len(), batch.len());
        let mut next = vec![];
        for (row, (got, want)) in graphed.iter().zip(&eager).enumerate() {
            assert_near(got, want, &format!("{what}, row {row}"));
            let (got, want) = (argmax(got), argmax(want));
            // A tie may go either way; otherwise the tokens are the same.
            assert!(got == want || (eager[row][got as usize] - eager[row][want as usize]).abs() < 1e-3, "{what}");
            next.push(want);
        }
        Ok(next)
    }
}

#[test]
fn steps_are_those_without_a_graph() -> Result<()> {
    on_each(gpus(single_stream_devices()), |model| {
        let rng = &mut Rng::new(21);
        let mut pools = [model.new_sequences(5, 300)?, model.new_sequences(5, 300)?];
        let graph = DecodeGraph::capture(model, &mut pools[0], 4)?;
        let mut pair = Pair { model, graph, pools };
        let prompts: Vec<Vec<u32>> = [30, 1, 65, 7].map(|n| tokens(rng, n, model)).to_vec();
        let s = prompts.iter().map(|prompt| pair.begin(prompt)).collect::<Result<Vec<_>>>()?;
        // Growing over the ends of tiles, all rows in use.
        let mut next = vec![1, 2, 3, 4];
        for step in 0..150 {
            let batch: Vec<_> = s.iter().copied().zip(next).collect();
            next = pair.step(&batch, &format!("step {step}"))?;
        }
        // Fewer, in another order, one alone.
        for (round, rows) in [&[2, 0][..], &[3], &[1, 2, 3], &[0]].into_iter().enumerate() {
            for step in 0..3 {
                let batch: Vec<_> = rows.iter().map(|&n| (s[n], step)).collect();
                pair.step(&batch, &format!("round {round}"))?;
            }
        }
        // A fork, and a sequence that goes back.
        let fork = [pair.pools[0].fork(s[2][0])?, pair.pools[1].fork(s[2][1])?];
        let snapshots = [pair.pools[0].snapshot(s[1][0])?, pair.pools[1].snapshot(s[1][1])?];
        for step in 0..3 {
            pair.step(&[(fork, step), (s[2], step + 1), (s[1], 5)], "forked")?;
        }
        pair.each(|_, pool, i| pool.restore(s[0][i], &snapshots[i]))?;
        pair.step(&[(s[0], 7), (s[1], 7)], "restored")?;
        // Drafts move states to other slots, and the first ones all states to other memory.
        for accepted in [1, 0, 3] {
            pair.each(|model, pool, i| {
                let (_, drafts) = model.verify(pool, &[(s[3][i], &[4, 5, 6])])?;
                model.accept(pool, drafts, &[accepted])
            })?;
            pair.step(&[(s[3], 8), (fork, 9)], "after a draft")?;
            pair.step(&[(s[3], 8), (fork, 9)], "after a draft")?;
        }
        // A slot's next owner, and plain feeds between.
        pair.each(|_, pool, i| pool.end(s[1][i]))?;
        let fresh = pair.begin(&prompts[2])?;
        pair.step(&[(fresh, 1), (s[3], 2)], "a new owner")?;
        pair.each(|model, pool, i| model.feed_only(pool, &[(fresh[i], &[1, 2]), (s[3][i], &[3])]))?;
        pair.step(&[(fresh, 1), (s[3], 2)], "after feeds")?;
        let seen = [&prompts[2][..], &[1, 1, 2, 1, 6]].concat();
        let logits = pair.graph.step(model, &mut pair.pools[0], &[(fresh[0], 6)])?.squeeze(0)?.to_vec1()?;
        assert_near(&logits, &want(model, &seen)?, "from its tokens");
        // Refusals; then another pool of the model.
        let five = [s[0][0], s[2][0], s[3][0], fork[0], fresh[0]].map(|s| (s, 1));
        assert!(pair.graph.step(model, &mut pair.pools[0], &five).is_err());
        assert!(pair.graph.step(model, &mut pair.pools[0], &[(s[1][0], 1)]).is_err());
        assert!(pair.graph.step(model, &mut pair.pools[0], &[(s[0][0], u32::MAX)]).is_err());
        let logits = pair.graph.step(model, &mut pair.pools[1], &[(fresh[1], 6)])?.squeeze(0)?.to_vec1()?;
        assert_near(&logits, &want(model, &seen)?, "in another pool");
        Ok(())
    })
}

/// In bf16, where projections and attention take other kernels.
#[test]
fn in_bf16_too() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let model = DEMO.model(DType::BF16, device)?;
        let mut pool = model.new_sequences(4, 128)?;
        let mut graph = DecodeGraph::capture(&model, &mut pool, 2)?;
        let (a, b) = (pool.begin()?, pool.begin()?);
        model.feed_only(&mut pool, &[(a, &[1, 2, 3]), (b, &[4])])?;
        let (c, d) = (pool.fork(a)?, pool.fork(b)?);
        for step in 0..40 {
            // The shares of the keys differ, and with them the rounding.
            let eager = model.feed(&mut pool, &[(a, &[step]), (b, &[step + 1])])?.to_vec2::<f32>()?;
            let graphed = graph.step(&model, &mut pool, &[(c, step), (d, step + 1)])?.to_vec2::<f32>()?;
            for (got, want) in graphed.iter().zip(&eager) {
                let error = rel_rms(got, want);
                assert!(error <= 2e-2, "step {step}: {error}");
            }
        }
    }
    Ok(())
}

/// What fails after the launch, here where waiting hidden states enter the draft head's cache, breaks the sequence, which is no
/// longer than before.
#[test]
fn a_step_that_fails_advances_no_sequence() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let (config, group) = (DEMO.config()?, Faulty::new(None));
        let (weights, rank) = (shard_of(DEMO.weights(DType::F32, device)?, &config, &*group)?, group.clone());
        let loader = CausalLm::loader(&config).group(rank as Arc<dyn Collective>);
        let model = loader.draft_head(DraftHeadChoice::On).load(weights)?;
        let mut pool = model.new_sequences(1, 128)?;
        let mut graph = DecodeGraph::capture(&model, &mut pool, 1)?;
        let s = pool.begin()?;
        model.feed_only(&mut pool, &[(s, &[1, 2, 3])])?;
        let snapshot = pool.snapshot(s)?;
        let failed = (3..100).find_map(|len| {
            // A step without a pass of the head makes one call.
            group.after(1, false);
            let error = graph.step(&model, &mut pool, &[(s, 4)]).err()?;
            Some((len, error.to_string()))
        });
        let (len, error) = failed.expect("the head's cache is filled now and then");
        assert!(error.contains("a fault on purpose"), "{error}");
        assert_eq!(pool.len(s)?, len);
        refused(graph.step(&model, &mut pool, &[(s, 4)]), &["failed half-way"]);
        pool.restore(s, &snapshot)?;
        let logits = graph.step(&model, &mut pool, &[(s, 4)])?.squeeze(0)?.to_vec1()?;
        assert_near(&logits, &want(&model, &[1, 2, 3, 4])?, "restored");
    }
    Ok(())
}

/// Whichever launch fails, also of a step ahead that the device runs all the same: the engine draws the same tokens.
#[test]
fn a_speculative_step_that_fails_is_made_again() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let (config, group) = (DEMO.config()?, Faulty::new(None));
        let (weights, rank) = (shard_of(DEMO.weights(DType::F32, device)?, &config, &*group)?, group.clone());
        let loader = CausalLm::loader(&config).group(rank as Arc<dyn Collective>);
        let model = loader.draft_head(DraftHeadChoice::On).load(weights)?;
        let run = |calls: isize| -> Result<_> {
            let depth = if calls < -1 { 0 } else { 2 };
            let options = EngineOptions {
                draft_depth: DraftDepth::Fixed(depth),
                cuda_graph: GraphChoice::On,
                ..EngineOptions::new(1, 128)
            };
            let mut engine = Engine::new(&model, options)?;
            let id = engine.submit(Request::new(vec![3, 1, 4, 1, 5], 40))?;
            // The prompt makes calls of its own.
            let mut all = Completions::default();
            engine.step()?.into_iter().for_each(|event| all.add(event));
            group.after(calls, false);
            while !engine.is_idle() {
                engine.step()?.into_iter().for_each(|event| all.add(event));
            }
            let has_failed = group.disarm();
            Ok((all.remove(id), has_failed && calls >= 0))
        };
        let (want, _) = run(-2)?;
        for calls in 0.. {
            let (got, has_failed) = run(calls)?;
            assert_eq!(got, want, "call {calls}");
            if !has_failed {
                assert!(calls > 8, "{calls}");
                break;
            }
        }
    }
    Ok(())
}
