//! Whole models with random weights: a decode step with and without a CUDA graph, and next to it what an engine does
//! between steps: snapshots, forks, drafts, prompts. The device has one stream, as graphs need it.

use crate::check::{self, f64s};
use crate::clock::{Clock, Tier};
use crate::Bench;
use anyhow::{ensure, Context, Result};
use candle_core::DType;
use candle_gdn_benches::parts::{parts, ATTENTION, EXPERTS, GDN, HEAD, PROJECTIONS};
use candle_gdn_benches::record::{Row, Shape};
use candle_gdn_cli::dummy::Dummy;
use candle_gdn_models::{
    experts_chosen, CausalLm, DecodeGraph, FfnKind, MixerKind, ModelConfig, Sequence, SequencePool, StateLayout,
};
use candle_nn::VarBuilder;
use std::cell::{Cell, RefCell};
use std::path::Path;

/// Tokens that a sequence has seen when it is timed.
const SEEN: usize = 512;
const DECODE: [usize; 3] = [1, 8, 32];
const PREFILL: [usize; 2] = [512, 8192];
/// Tokens of a prompt that run in one pass, as `generate` has it.
const PASS: usize = 8192;
const DRAFTED: [usize; 3] = [1, 4, 8];
/// Steps whose experts are counted.
const COUNTED: usize = 4;
/// Room for the steps that are timed.
const STEPS: usize = 1024 + 16;
/// The graph plans its attention for the longest sequence it may serve, so sums come in another order than without.
const BOUND: f64 = 2e-2;

/// A name of examples/generate/configs, or `demo`.
pub fn config(name: &str) -> Result<ModelConfig> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/generate");
    let path = match name {
        "demo" => folder.join("demo/config.json"),
        _ => folder.join("configs").join(format!("{name}.json")),
    };
    let text = std::fs::read_to_string(&path).with_context(|| format!("--models: {name}: {}", path.display()))?;
    Ok(ModelConfig::from_json(&text)?)
}

/// Bytes of the weights that the parts of a step read, in which tokens chose so many experts over all layers.
fn weight_bytes(config: &ModelConfig, dtype: DType, chosen: usize) -> [(&'static str, u64); 3] {
    let (size, hidden) = (dtype.size_in_bytes(), config.hidden_size);
    let weights = if config.fp8.is_some() { config.fp8_weight_bytes(dtype) } else { config.weight_bytes(dtype) };
    let head = (config.vocab_size * hidden * size) as u64;
    // Of a table of its own each token reads a row.
    let table = if config.tie_word_embeddings { 0 } else { head };
    let (mut stored, mut read) = (0, 0);
    if let Some(moe) = &config.moe {
        let layers = config.layers.iter().filter(|layer| layer.ffn == FfnKind::Moe).count();
        let matrices = |mlps: usize, width: usize| {
            (mlps * 3 * hidden * width * if config.fp8.is_some() { 1 } else { size }) as u64
        };
        let router = (layers * (moe.num_experts + 1) * hidden) as u64;
        let shared = matrices(layers, moe.shared_intermediate_size);
        // The router is counted as f32, and read in bf16.
        stored = matrices(layers * moe.num_experts, moe.intermediate_size) + shared + 4 * router;
        read = matrices(chosen, moe.intermediate_size) + shared + size as u64 * router;
    }
    [(PROJECTIONS, weights - table - head - stored), (HEAD, head), (EXPERTS, read)]
}

/// Bytes of keys and values that a step of one sequence reads; of a layer with a window, those in it.
fn key_bytes(config: &ModelConfig, dtype: DType) -> u64 {
    let softmax = config.layers.iter().filter(|layer| layer.mixer != MixerKind::LinearAttention);
    let tokens: usize = softmax.map(|layer| layer.window.map_or(SEEN, |window| window.min(SEEN))).sum();
    (2 * tokens * config.attention.num_kv_heads * config.attention.head_dim * dtype.size_in_bytes()) as u64
}

struct Case<'a> {
    name: &'a str,
    model: &'a CausalLm,
    clock: &'a Clock,
}

pub fn model(bench: &mut Bench, names: &[String], ordinal: usize) -> Result<()> {
    let device = candle_gdn::single_stream_device(ordinal)?;
    let tiers: Vec<Tier> = bench.clock.tiers().iter().copied().filter(|tier| *tier != Tier::Event).collect();
    let clock = Clock::new(&device, &tiers)?;
    for name in names {
        let config = config(name)?;
        ensure!(bench.dtype == DType::BF16 || bench.dtype == DType::F32, "--dtype: expected bf16 or f32 for models");
        let weights = Box::new(Dummy::new(&config));
        let vb = VarBuilder::from_backend(weights, bench.dtype, device.clone());
        let loaded = CausalLm::loader(&config).algo(bench.layer_algo()).load(vb)?;
        let case = Case { name, model: &loaded, clock: &clock };
        for batch in bench.choice.batches(&DECODE) {
            case.decode(bench, batch, StateLayout::Plain)?;
            case.decode(bench, batch, StateLayout::Ring)?;
        }
        case.between(bench, StateLayout::Plain)?;
        case.between(bench, StateLayout::Ring)?;
        let fits = |tokens: &usize| *tokens < config.max_position_embeddings;
        for tokens in bench.choice.tokens(&PREFILL).into_iter().filter(fits) {
            case.prefill(bench, tokens)?;
        }
    }
    Ok(())
}

impl Case<'_> {
    fn time(&self, bench: &mut Bench, row: Row, call: impl Fn() -> candle_core::Result<()>) -> Result<()> {
        bench.push_sample(self.clock.time(row, &[Box::new(call)])?)
    }

    fn row(&self, what: &str, variant: &str, batch: usize, tokens: usize) -> Row {
        let config = self.model.config();
        let shape = Shape::default().hidden(config.hidden_size).batch(batch).tokens(tokens);
        Row::new("model", &format!("{} {what}", self.name), "candle-gdn").variant(variant).l2("cold").shape(shape)
    }

    /// Sequences that have seen [`SEEN`] tokens.
    fn pool(&self, sequences: usize, spare: usize, rings: StateLayout) -> Result<(SequencePool, Vec<Sequence>)> {
        let mut pool = self.model.new_sequences_with(sequences + spare, SEEN + STEPS, rings)?;
        let all = (0..sequences).map(|_| pool.begin()).collect::<candle_core::Result<Vec<_>>>()?;
        for (n, s) in all.iter().enumerate() {
            self.model.feed_only(&mut pool, &[(*s, &ids(self.model, n, SEEN)[..])])?;
        }
        Ok((pool, all))
    }

    /// Feeds the sequences tokens one by one, from 0 to 15 of them: so rings are of all lengths, and every step flushes some.
    fn stagger(&self, pool: &mut SequencePool, all: &[Sequence]) -> candle_core::Result<()> {
        (0..15).try_for_each(|step| {
            let next = self.next(all, step);
            let some = next.iter().enumerate().filter(|(n, _)| n % 16 > step).map(|(_, next)| next);
            match some.cloned().collect::<Vec<_>>() {
                some if some.is_empty() => Ok(()),
                some => self.model.feed_only(pool, &passed(&some)),
            }
        })
    }

    /// A token of its own for each sequence, another at each step: equal tokens would choose equal experts.
    fn next(&self, all: &[Sequence], step: usize) -> Vec<(Sequence, u32)> {
        let tokens = ids(self.model, SEEN + step, all.len());
        all.iter().copied().zip(tokens).collect()
    }

    /// Experts that a step reads, over all layers: the mean of some steps.
    fn chosen(&self, pool: &mut SequencePool, all: &[Sequence]) -> Result<usize> {
        let counted = (0..COUNTED).map(|step| {
            let next = self.next(all, step);
            Ok(experts_chosen(|| self.model.feed(pool, &passed(&next)))?.1)
        });
        Ok(counted.sum::<Result<usize>>()? / COUNTED)
    }

    fn decode(&self, bench: &mut Bench, batch: usize, rings: StateLayout) -> Result<()> {
        let what = format!("step B={batch}{}", with(rings));
        let (mut pool, all) = self.pool(batch, 0, rings)?;
        let mut graph = DecodeGraph::capture(self.model, &mut pool, batch)?;
        let first = self.next(&all, 0);

        let before = all.iter().map(|s| pool.snapshot(*s)).collect::<candle_core::Result<Vec<_>>>()?;
        let restore = |pool: &mut SequencePool| {
            all.iter().zip(&before).try_for_each(|(s, b)| pool.restore(*s, b))?;
            self.stagger(pool, &all)
        };
        restore(&mut pool)?;
        let want = self.model.feed(&mut pool, &passed(&first))?;
        restore(&mut pool)?;
        let got = graph.step(self.model, &mut pool, &first)?;
        let error = check::error(&got, &f64s(&got)?, &f64s(&want)?)?;

        let per_sequence = self.model.config().sequence_bytes(self.model.dtype());
        let times = if rings == StateLayout::Ring { 1 } else { 2 }; // read, and written
        let states = batch as u64 * times * (per_sequence.recurrent + per_sequence.conv);
        let keys = batch as u64 * key_bytes(self.model.config(), self.model.dtype());
        let chosen = self.chosen(&mut pool, &all)?;
        let weights = weight_bytes(self.model.config(), self.model.dtype(), chosen);
        let read: Vec<_> = weights.into_iter().chain([(GDN, states), (ATTENTION, keys)]).collect();
        let bytes = read.iter().map(|(_, bytes)| bytes).sum();
        let note = if chosen > 0 { format!("{chosen} experts chosen") } else { String::new() };
        let row = |variant: &str| self.row(&what, variant, batch, 1).work(bytes, 0).error("logits", error).note(&note);
        if !bench.holds(&row("graph"), BOUND)? {
            return Ok(());
        }
        let pool = RefCell::new(pool);
        let graph = RefCell::new(graph);
        // Made beforehand: a step should not wait for its tokens.
        let steps: Vec<_> = (0..STEPS).map(|step| self.next(&all, step)).collect();
        let turn = Cell::new(0);
        let next = || {
            turn.set((turn.get() + 1) % STEPS);
            &steps[turn.get()]
        };
        // What is timed must not run out of room.
        let with_room = |pool: &mut SequencePool| match pool.len(all[0])? >= SEEN + STEPS - 17 {
            true => restore(pool),
            false => Ok(()),
        };
        let step = || {
            let mut pool = pool.borrow_mut();
            with_room(&mut pool)?;
            graph.borrow_mut().step(self.model, &mut pool, next()).map(|_| ())
        };
        let mut sample = self.clock.time(row("graph"), &[Box::new(step)])?;
        sample.row.parts = parts(sample.calls());
        for part in &mut sample.row.parts {
            part.bytes = read.iter().find(|(name, bytes)| *name == part.name && *bytes > 0).map(|(_, bytes)| *bytes);
        }
        bench.push_sample(sample)?;
        self.time(bench, row("eager"), || {
            let mut pool = pool.borrow_mut();
            with_room(&mut pool)?;
            self.model.feed(&mut pool, &passed(next())).map(|_| ())
        })
    }

    /// One sequence: what is done besides its steps. Times by the host's clock.
    fn between(&self, bench: &mut Bench, rings: StateLayout) -> Result<()> {
        let (pool, all) = self.pool(1, 1, rings)?;
        let (pool, s) = (RefCell::new(pool), all[0]);
        let bytes = pool.borrow().snapshot(s)?.bytes_added() as u64;
        let row = |what: &str| self.row(&format!("{what}{}", with(rings)), "-", 1, 0).work(2 * bytes, 0);
        self.time(bench, row("snapshot"), || pool.borrow().snapshot(s).map(|_| ()))?;
        let kept = pool.borrow().snapshot(s)?;
        self.time(bench, row("restore"), || pool.borrow_mut().restore(s, &kept))?;
        self.time(bench, row("fork"), || {
            let fork = pool.borrow_mut().fork(s)?;
            pool.borrow_mut().end(fork)
        })?;
        for drafted in DRAFTED {
            let draft = ids(self.model, 7, drafted);
            for accepted in [0, drafted] {
                let row =
                    self.row(&format!("verify {drafted}{}", with(rings)), &format!("{accepted} accepted"), 1, drafted);
                // Back to where it was: a draft that is taken makes the sequence longer.
                self.time(bench, row, || {
                    let mut pool = pool.borrow_mut();
                    if pool.len(s)? + drafted + 1 >= SEEN + STEPS {
                        pool.restore(s, &kept)?;
                    }
                    let (_, drafts) = self.model.verify(&mut pool, &[(s, &draft[..])])?;
                    self.model.accept(&mut pool, drafts, &[accepted])
                })?;
            }
        }
        Ok(())
    }

    fn prefill(&self, bench: &mut Bench, tokens: usize) -> Result<()> {
        let prompt = ids(self.model, 3, tokens);
        let pool = RefCell::new(self.model.new_sequences(1, tokens + 1)?);
        self.time(bench, self.row(&format!("prompt T={tokens}"), "-", 1, tokens), || {
            let mut pool = pool.borrow_mut();
            let s = pool.begin()?;
            let passes: Vec<&[u32]> = prompt.chunks(PASS).collect();
            let Some((last, first)) = passes.split_last() else { return Ok(()) };
            for pass in first {
                self.model.feed_only(&mut pool, &[(s, pass)])?;
            }
            self.model.feed(&mut pool, &[(s, last)])?;
            pool.end(s)
        })
    }
}

/// As a pass takes them.
fn passed(next: &[(Sequence, u32)]) -> Vec<(Sequence, &[u32])> {
    next.iter().map(|(s, token)| (*s, std::slice::from_ref(token))).collect()
}

fn with(rings: StateLayout) -> &'static str {
    if rings == StateLayout::Ring {
        ", rings"
    } else {
        ""
    }
}

/// Tokens that look like none in particular, the same in every run.
pub fn ids(model: &CausalLm, seed: usize, n: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size;
    (0..n).map(|i| ((i + seed * 7919).wrapping_mul(2654435761) % vocab) as u32).collect()
}
