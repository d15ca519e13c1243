//! The way of CUDA on the CPU: keys and values as tensors, positions on the device, a step on fixed buffers.

use super::pool::{Sequence, SequencePool};
use super::step::StepBuffers;
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::engine::{
    DraftDepth, Engine, EngineOptions, Event, FinishReason, Logprobs, Request, RequestId, Rings, Sampling,
};
use crate::loader::DraftHeadChoice;
use candle_core::{DType, Device, Result, Tensor, D};
use candle_nn::VarBuilder;
use std::collections::HashMap;

const VOCAB: usize = 24;
const HIDDEN: usize = 16;

/// A softmax layer between two of Gated DeltaNet, and one behind.
fn model() -> Result<CausalLm> {
    model_of(0.4)
}

/// With matrices of the layers so large. Where they are small the next token is above all one of the last token, and the draft
/// head of such a model knows it.
fn model_of(size: f64) -> Result<CausalLm> {
    let json = serde_json::json!({
        "model_type": "qwen3_next", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 24,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25, "tie_word_embeddings": false, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    });
    let mut weights = HashMap::new();
    let mut add = |name: String, dims: &[usize]| -> Result<()> {
        let size = if name.contains("_proj") { size as f32 } else { 0.4 };
        weights.insert(name, Tensor::randn(0f32, size, dims, &Device::Cpu)?);
        Ok(())
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN])?;
    add("model.norm.weight".into(), &[HIDDEN])?;
    add("lm_head.weight".into(), &[VOCAB, HIDDEN])?;
    for i in 0..4 {
        let mut add = |name: &str, dims: &[usize]| add(format!("model.layers.{i}.{name}"), dims);
        add("input_layernorm.weight", &[HIDDEN])?;
        add("post_attention_layernorm.weight", &[HIDDEN])?;
        for (name, rows, columns) in [("gate", 24, HIDDEN), ("up", 24, HIDDEN), ("down", HIDDEN, 24)] {
            add(&format!("mlp.{name}_proj.weight"), &[rows, columns])?;
        }
        if i % 2 == 1 {
            for (name, rows) in [("q", 2 * 4 * 16), ("k", 2 * 16), ("v", 2 * 16)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, HIDDEN])?;
            }
            add("self_attn.o_proj.weight", &[HIDDEN, 4 * 16])?;
            add("self_attn.q_norm.weight", &[16])?;
            add("self_attn.k_norm.weight", &[16])?;
        } else {
            add("linear_attn.in_proj_qkvz.weight", &[2 * 16 + 2 * 32, HIDDEN])?;
            add("linear_attn.in_proj_ba.weight", &[8, HIDDEN])?;
            add("linear_attn.conv1d.weight", &[2 * 16 + 32, 1, 4])?;
            add("linear_attn.A_log", &[4])?;
            add("linear_attn.dt_bias", &[4])?;
            add("linear_attn.norm.weight", &[8])?;
            add("linear_attn.out_proj.weight", &[HIDDEN, 32])?;
        }
    }
    // A draft head like the last layer.
    let last = weights
        .iter()
        .filter_map(|(name, x)| Some((format!("mtp.layers.0.{}", name.strip_prefix("model.layers.3.")?), x.clone())));
    let last: Vec<(String, Tensor)> = last.collect();
    weights.extend(last);
    // Of the embedding all, of the hidden state so much.
    let of_hidden = Tensor::randn(0f32, size as f32, (HIDDEN, HIDDEN), &Device::Cpu)?;
    let fc = Tensor::cat(&[Tensor::eye(HIDDEN, DType::F32, &Device::Cpu)?, of_hidden], 1)?;
    weights.insert("mtp.fc.weight".into(), fc);
    weights.insert("mtp.pre_fc_norm_embedding.weight".into(), Tensor::zeros(HIDDEN, DType::F32, &Device::Cpu)?);
    weights.insert("mtp.pre_fc_norm_hidden.weight".into(), Tensor::randn(0f32, 0.4, HIDDEN, &Device::Cpu)?);
    weights.insert("mtp.norm.weight".into(), weights["model.norm.weight"].clone());
    let config = ModelConfig::from_json(&json.to_string())?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    CausalLm::loader(&config).draft_head(DraftHeadChoice::On).load(vb)
}

#[track_caller]
fn assert_near(got: &Tensor, want: &Tensor, what: &str) -> Result<()> {
    assert_eq!(got.dims(), want.dims(), "{what}");
    let error = (got - want)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
    assert!(error < 1e-3, "{what}: {error:e}");
    Ok(())
}

/// Two pools of one model that see the same, in the two layouts.
struct Both {
    model: CausalLm,
    pools: [SequencePool; 2],
}

impl Both {
    fn new() -> Result<Self> {
        let model = model()?;
        let pools = [
            model.new_sequences_as(4, 200, Rings::Never, false)?,
            model.new_sequences_as(4, 200, Rings::Always, true)?,
        ];
        assert!(pools[0].uses_panels() && !pools[1].uses_panels());
        Ok(Self { model, pools })
    }

    fn begin(&mut self) -> Result<[Sequence; 2]> {
        Ok([self.pools[0].begin()?, self.pools[1].begin()?])
    }

    fn feed(&mut self, batch: &[([Sequence; 2], &[u32])]) -> Result<()> {
        let mut logits = vec![];
        for (i, pool) in self.pools.iter_mut().enumerate() {
            let batch: Vec<_> = batch.iter().map(|(s, tokens)| (s[i], *tokens)).collect();
            logits.push(self.model.feed(pool, &batch)?);
        }
        assert_near(&logits[1], &logits[0], "feed")
    }

    fn verify(&mut self, batch: &[([Sequence; 2], &[u32])], accepted: &[usize]) -> Result<()> {
        let mut logits = vec![];
        for (i, pool) in self.pools.iter_mut().enumerate() {
            let batch: Vec<_> = batch.iter().map(|(s, tokens)| (s[i], *tokens)).collect();
            let (all, drafts) = self.model.verify(pool, &batch)?;
            logits.push(all);
            self.model.accept(pool, drafts, accepted)?;
        }
        assert_near(&logits[1], &logits[0], "verify")
    }

    fn draft(&mut self, batch: &[([Sequence; 2], u32)]) -> Result<()> {
        let mut logits = vec![];
        for (i, pool) in self.pools.iter_mut().enumerate() {
            let batch: Vec<_> = batch.iter().map(|(s, next)| (s[i], *next, 1)).collect();
            logits.push(self.model.draft(pool, &batch)?.1);
        }
        assert_near(&logits[1], &logits[0], "draft")
    }
}

#[test]
fn tensors_are_as_panels() -> Result<()> {
    let mut both = Both::new()?;
    let (a, b, c) = (both.begin()?, both.begin()?, both.begin()?);
    let prompt: Vec<u32> = (0..70).map(|i| i * 7 % VOCAB as u32).collect();
    both.feed(&[(a, &prompt), (b, &[1]), (c, &prompt[..20])])?;
    for t in 0..3 {
        both.feed(&[(c, &[t]), (a, &[t + 1]), (b, &[t + 2])])?; // the second finds its inputs on the device
    }
    both.feed(&[(a, &[1]), (c, &[2])])?;
    both.feed(&[(a, &[1, 2, 3]), (c, &[2, 1, 4])])?;
    for accepted in [[0, 3], [1, 2], [4, 0], [4, 3]] {
        both.draft(&[(b, 1), (a, 4)])?;
        both.verify(&[(a, &[4, 5, 6, 7]), (b, &[1, 2, 3])], &accepted)?;
        both.feed(&[(a, &[9]), (b, &[8])])?;
    }
    let fork = [both.pools[0].fork(a[0])?, both.pools[1].fork(a[1])?];
    let snapshots = [both.pools[0].snapshot(a[0])?, both.pools[1].snapshot(a[1])?];
    both.feed(&[(a, &[1; 30]), (fork, &[2; 30])])?;
    for (i, pool) in both.pools.iter_mut().enumerate() {
        pool.restore(b[i], &snapshots[i])?;
        pool.end(c[i])?;
    }
    both.feed(&[(fork, &[3]), (b, &[3])])?;
    both.draft(&[(fork, 7), (a, 2), (b, 7)])?;
    // A snapshot is the same in either layout.
    for (i, pool) in both.pools.iter_mut().enumerate() {
        pool.restore(b[i], &snapshots[1 - i])?;
    }
    both.feed(&[(fork, &[3]), (b, &[3])])?;
    Ok(())
}

/// In any order: what the next step finds on the device must be right for it.
#[test]
fn tensors_are_as_panels_whatever_comes() -> Result<()> {
    let mut seed = 12345u64;
    let mut below = move |n: usize| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize % n
    };
    let mut both = Both::new()?;
    let mut live = vec![both.begin()?];
    let mut snapshots = vec![];
    for _ in 0..250 {
        // Up to three sequences, seldom in another order than before.
        let (first, count) = (below(8) / 7 % live.len(), 1 + below(3).min(live.len() - 1));
        let most = [1, 1, 1, 5, 20][below(5)];
        let chosen: Vec<[Sequence; 2]> = (0..count).map(|i| live[(first + i) % live.len()]).collect();
        let tokens: Vec<Vec<u32>> =
            chosen.iter().map(|_| (0..1 + below(most)).map(|_| below(VOCAB) as u32).collect()).collect();
        let batch: Vec<_> = chosen.iter().copied().zip(tokens.iter().map(Vec::as_slice)).collect();
        let s = live[below(live.len())];
        match below(12) {
            0 if live.len() < 4 => live.push(both.begin()?),
            1 if live.len() < 4 => live.push([both.pools[0].fork(s[0])?, both.pools[1].fork(s[1])?]),
            2 => snapshots.push([both.pools[0].snapshot(s[0])?, both.pools[1].snapshot(s[1])?]),
            3 if !snapshots.is_empty() => {
                let from = &snapshots[below(snapshots.len())];
                both.pools[0].restore(s[0], &from[0])?;
                both.pools[1].restore(s[1], &from[1])?;
            }
            4 | 5 => {
                let accepted: Vec<usize> = tokens.iter().map(|draft| below(draft.len() + 1)).collect();
                both.verify(&batch, &accepted)?;
            }
            _ => both.feed(&batch)?,
        }
        // Room for what comes next.
        if let Some(long) = live.iter().position(|s| both.pools[0].len(s[0]).is_ok_and(|len| len > 150)) {
            let s = live.swap_remove(long);
            both.pools[0].end(s[0])?;
            both.pools[1].end(s[1])?;
            if live.is_empty() {
                live.push(both.begin()?);
            }
        }
        for s in &live {
            assert_eq!(both.pools[0].len(s[0])?, both.pools[1].len(s[1])?);
        }
    }
    Ok(())
}

#[test]
fn steps_on_fixed_buffers_are_feeds() -> Result<()> {
    [Rings::Never, Rings::Always].into_iter().try_for_each(fixed_buffers)
}

fn fixed_buffers(rings: Rings) -> Result<()> {
    let model = model()?;
    let mut pools = [model.new_sequences_as(4, 64, Rings::Never, false)?, model.new_sequences_as(4, 64, rings, true)?];
    let mut buffers = StepBuffers::new(&model, &pools[1], 3)?;
    buffers.run(&model, &mut pools[1])?; // padding only, as before a capture
    let mut sequences = vec![];
    for n in 0..4 {
        let both = [pools[0].begin()?, pools[1].begin()?];
        for i in 0..2 {
            model.feed_only(&mut pools[i], &[(both[i], &[n, 3, n + 1])])?;
        }
        sequences.push(both);
    }
    let rounds: [&[usize]; 9] =
        [&[0, 1, 2], &[0, 1, 2], &[0, 1], &[0, 1], &[2, 0, 3], &[3], &[3], &[3, 1, 0], &[3, 1, 0]];
    for (id, round) in rounds.into_iter().enumerate() {
        if id == 6 {
            // Other slots of the states for one of them, and a length that jumps.
            for i in 0..2 {
                let (_, drafts) = model.verify(&mut pools[i], &[(sequences[3][i], &[4, 5, 6])])?;
                model.accept(&mut pools[i], drafts, &[2])?;
            }
        }
        if id == 7 {
            for i in 0..2 {
                let snapshot = pools[i].snapshot(sequences[2][i])?;
                pools[i].restore(sequences[0][i], &snapshot)?;
            }
        }
        let ids: Vec<u32> = (0..round.len()).map(|n| (n + id) as u32).collect();
        let batch: Vec<_> =
            round.iter().zip(&ids).map(|(&n, id)| (sequences[n][0], std::slice::from_ref(id))).collect();
        let want = model.feed(&mut pools[0], &batch)?;
        let pool = &mut pools[1];
        let slots = round.iter().map(|&n| pool.slot("test", sequences[n][1])).collect::<Result<Vec<_>>>()?;
        buffers.load_ids(&ids)?;
        buffers.load(pool, &slots)?;
        pool.about_to_write(&slots);
        let held = buffers.running();
        buffers.run(&model, pool)?;
        buffers.ran(held, slots.len());
        let got = buffers.logits(slots.len())?;
        if let Some(hidden) = buffers.hidden(slots.len())? {
            pool.heard(&model, &slots, ids.chunks(1), &hidden, &hidden)?;
        }
        pool.written(&slots, &vec![1; slots.len()]);
        assert_near(&got, &want, &format!("step {id}"))?;
        let mut drafted = vec![];
        for (i, pool) in pools.iter_mut().enumerate() {
            let batch: Vec<_> = round.iter().map(|&n| (sequences[n][i], 5, 1)).collect();
            drafted.push(model.draft(pool, &batch)?.1);
        }
        assert_near(&drafted[1], &drafted[0], &format!("draft {id}"))?;
        let pool = &mut pools[1];
        assert_eq!(pool.len(sequences[round[0]][1])?, pools[0].len(sequences[round[0]][0])?);
    }
    Ok(())
}

#[test]
fn a_pass_that_fails_breaks_its_sequences_only() -> Result<()> {
    let model = model()?;
    let mut pool = model.new_sequences(2, 64)?;
    let (a, b) = (pool.begin()?, pool.begin()?);
    model.feed_only(&mut pool, &[(a, &[1, 2]), (b, &[3])])?;
    let snapshot = pool.snapshot(a)?;
    pool.about_to_write(&[a.slot as usize]); // and nothing after
    let broken = |result: Result<()>| assert!(result.unwrap_err().to_string().contains("failed half-way"));
    broken(model.feed_only(&mut pool, &[(b, &[1]), (a, &[1])]));
    broken(pool.fork(a).map(drop));
    broken(pool.snapshot(a).map(drop));
    broken(model.verify(&mut pool, &[(a, &[1])]).map(drop));
    model.feed_only(&mut pool, &[(b, &[1])])?;
    pool.restore(a, &snapshot)?;
    model.feed_only(&mut pool, &[(b, &[1]), (a, &[1])])?;
    pool.about_to_write(&[a.slot as usize]);
    pool.end(a)?;
    let a = pool.begin()?;
    model.feed_only(&mut pool, &[(a, &[1])])
}

/// As the state behind `forward` does.
#[test]
fn a_pool_that_grows_forgets_nothing() -> Result<()> {
    let model = model()?;
    let tokens: Vec<u32> = (0..60).map(|i| i * 5 % VOCAB as u32).collect();
    for tensors in [false, true] {
        let (mut small, mut large) =
            (model.new_sequences_as(2, 8, Rings::Auto, tensors)?, model.new_sequences_as(2, 64, Rings::Auto, tensors)?);
        let (s, l) = ([small.begin()?, small.begin()?], [large.begin()?, large.begin()?]);
        for (i, part) in [0..7, 7..20, 20..60].into_iter().enumerate() {
            small.grow_to([8, 32, 64][i])?;
            let more = &tokens[part];
            let got = model.feed_hidden(&mut small, &[(s[0], more), (s[1], &more[1..])])?;
            let want = model.feed_hidden(&mut large, &[(l[0], more), (l[1], &more[1..])])?;
            assert_near(&got, &want, "grown")?;
        }
        assert!(model.feed(&mut small, &[(s[0], &[1; 5])]).is_err(), "there is room for 64");
    }
    Ok(())
}

/// What a run brings: each request's tokens, snapshots' lengths, end and log-probabilities.
type Ends = HashMap<RequestId, (Vec<u32>, Vec<usize>, Option<FinishReason>, Vec<Told>)>;

/// Log-probabilities, which are the same within rounding.
#[derive(Clone, Debug)]
struct Told(Option<Box<Logprobs>>);

impl PartialEq for Told {
    fn eq(&self, other: &Self) -> bool {
        let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                let all =
                    |told: &Logprobs| [told.token].into_iter().chain(told.likeliest.iter().map(|(_, x)| *x)).collect();
                let (a, b): (Vec<f32>, Vec<f32>) = (all(a), all(b));
                // Ids of equal ones are rounding's choice.
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| near(*a, b))
            }
            _ => false,
        }
    }
}

fn note(events: Vec<Event>, all: &mut Ends) {
    for event in events {
        match event {
            Event::Token { id, token, logprobs } => {
                let all = all.entry(id).or_default();
                all.0.push(token);
                all.3.push(Told(logprobs));
            }
            Event::Snapshot { id, snapshot } => all.entry(id).or_default().1.push(snapshot.len()),
            Event::Finished { id, reason } => {
                let end = &mut all.entry(id).or_default().2;
                assert_eq!(end.replace(reason), None, "finished twice");
            }
            _ => {}
        }
    }
}

/// Requests that come and are cancelled while others run, end by a token, by their number or by the room, draw or do not, and
/// want snapshots or do not.
#[test]
fn a_step_ahead_changes_nothing() -> Result<()> {
    let model = model_of(0.1)?;
    let request = |n: u32| {
        let sampling = match n % 3 {
            0 => Sampling::default(),
            1 => Sampling { temperature: 0.9, top_k: 9, repeat_penalty: 1.4, repeat_last_n: 5, ..Sampling::default() },
            _ => Sampling {
                temperature: 1.2,
                top_p: 0.8,
                presence_penalty: 0.6,
                frequency_penalty: 0.2,
                ..Sampling::default()
            },
        };
        let logprobs = [None, None, Some(3), Some(0), Some(20)][n as usize % 5];
        // One in 24 tokens, or some, or none.
        let stop = (0..[1, 0, 4][n as usize / 2 % 3]).map(|i| (n + 5 * i) % VOCAB as u32).collect();
        let prompt = (0..1 + n % 7).map(|i| (n + i * i) % VOCAB as u32).collect();
        let most = [50, 3, 17, 1, 2][n as usize % 5];
        Request { sampling, stop, seed: n.into(), snapshot_end: n % 8 == 5, logprobs, ..Request::new(prompt, most) }
    };
    let (mut rounds, mut accepted) = (0, 0);
    let mut run = |sequences: usize, how: Steps, cancelled: &[(usize, u64)]| {
        let depth = if let Steps::Rounds(depth) = how { depth } else { DraftDepth::Auto };
        let options = EngineOptions { prefill_chunk: 8, draft_depth: depth, ..EngineOptions::new(sequences, 40) };
        let mut engine = Engine::new(&model, options)?;
        match how {
            Steps::Waiting => {}
            Steps::Ahead => engine.ahead_without_graph = true,
            Steps::Rounds(_) => engine.as_with_graphs()?,
        }
        let (mut all, mut ids) = (Ends::new(), vec![]);
        for step in 0.. {
            // New ones come now and then.
            if step % 5 == 0 && ids.len() < 40 {
                ids.push(engine.submit(request(ids.len() as u32))?);
                ids.push(engine.submit(request(ids.len() as u32))?);
            }
            for (_, n) in cancelled.iter().filter(|(at, _)| *at == step) {
                if let Some(id) = ids.get(*n as usize) {
                    engine.cancel(*id)?;
                }
            }
            note(engine.step()?, &mut all);
            if engine.is_idle() && ids.len() == 40 {
                // All slots are free again.
                (0..sequences).try_for_each(|_| engine.submit(Request::new(vec![1], 2)).map(drop))?;
                engine.step()?;
                assert_eq!(engine.waiting(), 0);
                if let Steps::Rounds(_) = how {
                    rounds += engine.stats().head.drafted[1];
                    accepted += engine.stats().head.accepted[1];
                }
                break;
            }
        }
        Ok::<_, candle_core::Error>(ids.into_iter().map(|id| all.remove(&id).unwrap()).collect::<Vec<_>>())
    };
    let want = run(1, Steps::Waiting, &[])?;
    let ended = |reason: FinishReason| want.iter().filter(|end| end.2.as_ref() == Some(&reason)).count();
    assert!(ended(FinishReason::Stop) > 0 && ended(FinishReason::MaxLen) > 1 && ended(FinishReason::MaxNewTokens) > 4);
    for sequences in [1, 3, 6] {
        let fixed = [0, 1, 2, 3, 7].map(|depth| Steps::Rounds(DraftDepth::Fixed(depth)));
        for how in [Steps::Waiting, Steps::Ahead, Steps::Rounds(DraftDepth::Auto)].into_iter().chain(fixed) {
            assert_eq!(run(sequences, how, &[])?, want, "{sequences} sequences, {how:?}");
            let cancelled = [(3, 0), (7, 2), (12, 3), (21, 6), (22, 7), (40, 12), (41, 15), (60, 20)];
            let got = run(sequences, how, &cancelled)?;
            for (n, (got, want)) in got.iter().zip(&want).enumerate() {
                match &got.2 {
                    Some(FinishReason::Cancelled) => assert_eq!(got.0, want.0[..got.0.len()], "request {n}, {how:?}"),
                    _ => assert_eq!(got, want, "request {n}, {how:?}"),
                }
            }
        }
    }
    println!("{accepted} of {rounds} accepted at depth 2");
    assert!(accepted > 30);
    Ok(())
}

/// How decode steps run.
#[derive(Clone, Copy, Debug)]
enum Steps {
    /// The host sees what one drew before the next one.
    Waiting,
    Ahead,
    /// As with graphs, with rounds of the draft head.
    Rounds(DraftDepth),
}
