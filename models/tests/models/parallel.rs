//! A model in parts, one a rank, against the whole: on the CPU, where ranks are host threads.

use crate::golden::{argmax, Goldens, DEMO, QWEN3_5, QWEN3_5_MOE};
use crate::sequences::takes_rings;
use crate::support::{refused, rel_rms};
use crate::tiny::Tiny;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{
    shard_of, CausalLm, Collective, DraftHeadChoice, Engine, EngineHandle, EngineOptions, Event, FinishReason,
    Followers, LocalRank, LoraAdapter, Request, SafetensorsFiles, SequencePool, StateLayout, Submitted,
};
use std::sync::Arc;

const PROMPT: [u32; 9] = [1, 5, 2, 30, 7, 7, 11, 0, 19];
const STEPS: usize = 24;
pub const BOUND: f64 = 1e-5;

/// Logits of a prompt, then the tokens that follow it, by the sequences of a pool.
pub fn run(model: &CausalLm) -> Result<(Vec<f32>, Vec<u32>)> {
    run_steps(model, STEPS)
}

/// The same with other than [`STEPS`] tokens.
pub fn run_steps(model: &CausalLm, steps: usize) -> Result<(Vec<f32>, Vec<u32>)> {
    let ids = Tensor::from_slice(&PROMPT, (1, PROMPT.len()), model.device())?;
    let logits = model.forward(&ids, &mut model.new_state(1)?)?.flatten_all()?.to_vec1()?;
    let kinds = [Some(StateLayout::Plain), takes_rings(model).then_some(StateLayout::Ring)];
    let pool = |rings| model.new_sequences_with(2, PROMPT.len() + steps, rings);
    let mut pools: Vec<SequencePool> = kinds.into_iter().flatten().map(pool).collect::<Result<_>>()?;
    let (mut fed, mut text) = (PROMPT.to_vec(), vec![]);
    let sequences: Vec<_> = pools.iter_mut().map(SequencePool::begin).collect::<Result<_>>()?;
    for step in 0..steps {
        let pools = pools.iter_mut().zip(&sequences);
        let last = pools.map(|(pool, s)| model.feed(pool, &[(*s, &fed)])?.squeeze(0)?.to_vec1::<f32>());
        let last: Vec<Vec<f32>> = last.collect::<Result<_>>()?;
        let error = rel_rms(&last[last.len() - 1], &last[0]);
        assert!(error <= ring_bound(model), "step {step} with rings: off by {error:e}");
        fed = vec![argmax(&last[0])];
        text.extend(&fed);
    }
    Ok((logits, text))
}

/// How far logits with rings may be from those without. Products with quantised matrices round x to 8 bits on the CPU, candle's as
/// well as ours: where x differs in its last bits a number is rounded to another one, and after that all rounding differs.
fn ring_bound(model: &CausalLm) -> f64 {
    match model.is_quantized() {
        true => 6e-2,
        false => BOUND,
    }
}

/// `f` on every rank of a group of `n`, each a thread.
pub fn on_ranks<R: Send>(n: usize, f: impl Fn(Arc<dyn Collective>) -> Result<R> + Sync) -> Vec<Result<R>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = LocalRank::group(n).into_iter().map(|rank| scope.spawn(|| f(Arc::new(rank)))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// The same tokens, and logits whose relative error is at most `bound`: that of sums in another order.
pub fn check(
    what: &str,
    whole: &CausalLm,
    ranks: usize,
    bound: f64,
    part: impl Fn(Arc<dyn Collective>) -> Result<CausalLm> + Sync,
) {
    let (want, text) = run(whole).unwrap();
    let mut first: Option<Vec<f32>> = None;
    for got in on_ranks(ranks, |group| run(&part(group)?)) {
        let (logits, tokens) = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        let error = rel_rms(&logits, &want);
        assert!(error <= bound, "{what}, {ranks} ranks: off by {error:e}");
        assert_eq!(tokens, text, "{what}, {ranks} ranks");
        // The ranks choose tokens on their own: they must never see different logits.
        let same =
            first.get_or_insert_with(|| logits.clone()).iter().zip(&logits).all(|(x, y)| x.to_bits() == y.to_bits());
        assert!(same, "{what}: ranks differ");
    }
}

/// With four key heads, so that four ranks have one each and share the two key-value heads.
pub fn four_heads() -> Tiny {
    Tiny::qwen3_next().set("linear_num_key_heads", 4).set("linear_num_value_heads", 8).fill()
}

pub fn parts_of(tiny: &Tiny, group: Arc<dyn Collective>) -> Result<CausalLm> {
    parts_with(tiny, group, DraftHeadChoice::Off)
}

pub fn parts_with(tiny: &Tiny, group: Arc<dyn Collective>, head: DraftHeadChoice) -> Result<CausalLm> {
    let config = tiny.model_config()?;
    let part = shard_of(tiny.var_builder(DType::F32, &Device::Cpu), &config, &*group)?;
    CausalLm::loader(&config).group(group).draft_head(head).load(part)
}

#[test]
fn parts_are_the_whole() -> Result<()> {
    let mut fused = four_heads();
    fused.fuse_experts()?;
    let dense = four_heads().unset("num_experts").fill();
    let tied = four_heads().set("tie_word_embeddings", true).fill();
    for (what, tiny) in [("experts", four_heads()), ("fused experts", fused), ("dense", dense), ("tied", tied)] {
        for ranks in [1, 2, 4] {
            check(what, &tiny.model()?, ranks, BOUND, |group| parts_of(&tiny, group));
        }
    }
    Ok(())
}

/// A model of mapped files, with an adapter or without.
pub fn from_files(of: &Goldens, adapter: Option<&LoraAdapter>, group: Option<Arc<dyn Collective>>) -> Result<CausalLm> {
    let (config, files) = (of.config()?, [of.dir() + "/model.safetensors"]);
    // SAFETY: nobody writes the goldens.
    let files = unsafe { SafetensorsFiles::open(&files)? };
    CausalLm::loader(&config).lora(adapter).group(group).load_safetensors(&files, DType::F32, &Device::Cpu)
}

/// Of mapped files only the part is read.
#[test]
fn parts_of_files() -> Result<()> {
    for of in [&DEMO, &QWEN3_5, &QWEN3_5_MOE].into_iter().filter(|of| of.is_here()) {
        let whole = of.model(DType::F32, &Device::Cpu)?;
        check("files", &whole, 2, BOUND, |group| from_files(of, None, Some(group)));
    }
    Ok(())
}

#[test]
fn what_cannot_be_divided_is_named() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let bad = |tiny: &Tiny, ranks: usize, part: &str| {
        on_ranks(ranks, |group| parts_of(tiny, group).map(drop)).into_iter().for_each(|rank| refused(rank, &[part]));
    };
    bad(&tiny, 4, "at most as many ranks as key heads (2), got 4");
    let odd = four_heads().set("moe_intermediate_size", 15).fill();
    bad(&odd, 2, "divides the inner width of the experts (15), got 2");
    let config = tiny.model_config()?;
    assert!(config.split(0).is_err());
    assert_eq!(config.split(1)?, config);
    Ok(())
}

/// The first rank's snapshot is one of its own shard: the other one would wait for ever for a request that goes on from it, and has
/// none where the first one holds it.
#[test]
fn followers_have_no_part_in_snapshots() -> Result<()> {
    let ((handle, messages), (followers, mut follow)) = (EngineHandle::new(), Followers::new(1));
    let engine = |rank: LocalRank| -> Result<Engine<CausalLm>> {
        Engine::new(parts_of(&four_heads(), Arc::new(rank))?, EngineOptions::new(1, 64))
    };
    let (mut ranks, follower) = (LocalRank::group(2), follow.pop().expect("a follower"));
    let (second, first) = (ranks.remove(1), ranks.remove(0));
    let second = std::thread::spawn(move || follower.follow(&mut engine(second)?));
    let first = std::thread::spawn(move || messages.drive(engine(first)?, followers, ()));
    let events = |mut submitted: Submitted| std::iter::from_fn(move || submitted.events.blocking_recv());
    let request = Request::new(PROMPT.to_vec(), 4);
    let whole = four_heads().model()?;
    let mut pool = whole.new_sequences(1, 64)?;
    let sequence = pool.begin()?;
    whole.feed(&mut pool, &[(sequence, &PROMPT[..5])])?;
    let resume = Some(Arc::new(pool.snapshot(sequence)?));
    for (arg, wanted) in [
        ("resume: expected none", Request { resume, ..request.clone() }),
        ("snapshot_at: expected no snapshot", Request { snapshot_at: Some(5), ..request.clone() }),
        ("snapshot_end: expected no snapshot", Request { snapshot_end: true, ..request.clone() }),
    ] {
        refused(handle.submit(wanted), &[arg, "with several ranks"]);
    }
    let last = events(handle.submit(request)?).last();
    assert!(matches!(last, Some(Event::Finished { reason: FinishReason::MaxNewTokens, .. })), "{last:?}");
    drop(handle);
    first.join().expect("no panic")?;
    second.join().expect("no panic")
}
