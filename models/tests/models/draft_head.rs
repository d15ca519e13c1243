//! The draft head against transformers, and what a pool keeps of it against the same tokens fed again.

use crate::gguf::wide;
use crate::gguf_writer::{GgufOfTiny, Layout};
use crate::golden::{drafted, log_softmax, max_diff, DEMO};
use crate::parallel::{four_heads, on_ranks, parts_with};
use crate::support::{devices, refused, rel_rms, Rng};
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, DraftHeadChoice, Sequence, SequencePool};

/// Bound on logits and log-probabilities against transformers.
const GOLDEN: f32 = 1e-3;
/// Rounding of other kernels, on logits up to about 20 large.
const LOGITS: f32 = 1e-3;

fn on_every_device(test: impl Fn(&CausalLm) -> Result<()>) -> Result<()> {
    devices().iter().try_for_each(|device| test(&DEMO.model_with_head(DType::F32, device)?))
}

#[test]
fn drafts_match_transformers() -> Result<()> {
    on_every_device(|model| {
        let (mut worst_logit, mut worst_logprob) = (0f32, 0f32);
        for i in 0..DEMO.prompts() {
            let want = drafted(i)?;
            // Whole, in pieces, and token by token.
            for piece in [want.ids.len(), 7, 1] {
                let mut pool = model.new_sequences(1, 512)?;
                let s = pool.begin()?;
                for piece in want.ids.chunks(piece) {
                    model.feed_only(&mut pool, &[(s, piece)])?;
                }
                let (drafts, logits) = model.draft(&mut pool, &[(s, want.next, 4)])?;
                assert_eq!(drafts[0], want.drafts, "prompt {i} in pieces of {piece}");
                worst_logit = worst_logit.max(max_diff(&logits.squeeze(0)?.to_vec1()?, &want.logits));
            }
            // The tokens of the prompt as drafts of each other.
            let mut pool = model.new_sequences(1, 512)?;
            let s = pool.begin()?;
            let mut logprobs = vec![];
            for three in want.ids.windows(3) {
                model.feed_only(&mut pool, &[(s, &three[..1])])?;
                let (_, logits) = model.draft(&mut pool, &[(s, three[1], 1)])?;
                logprobs.push(log_softmax(&logits.squeeze(0)?.to_vec1::<f32>()?, three[2]));
            }
            worst_logprob = worst_logprob.max(max_diff(&logprobs, &want.logprobs));
        }
        println!("max logit error {worst_logit:e}, logprob {worst_logprob:e}");
        assert!(worst_logit <= GOLDEN, "logits are off by {worst_logit}");
        assert!(worst_logprob <= GOLDEN, "logprobs are off by {worst_logprob}");
        Ok(())
    })
}

/// Drafts and first logits of a sequence that has seen `seen` and is fed `next`, in a pool of its own.
fn want(model: &CausalLm, seen: &[u32], next: u32) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut pool = model.new_sequences(1, 512)?;
    let s = pool.begin()?;
    model.feed_only(&mut pool, &[(s, seen)])?;
    let (drafts, logits) = model.draft(&mut pool, &[(s, next, 3)])?;
    Ok((drafts[0].clone(), logits.squeeze(0)?.to_vec1()?))
}

/// Whatever came before, each sequence is drafted as if its tokens had been fed at once.
fn check(model: &CausalLm, pool: &mut SequencePool, all: &[(Sequence, Vec<u32>)], what: &str) -> Result<()> {
    let batch: Vec<_> = all.iter().enumerate().map(|(n, (s, _))| (*s, n as u32 + 3, 3)).collect();
    let (drafts, logits) = model.draft(pool, &batch)?;
    for (n, (s, seen)) in all.iter().enumerate() {
        assert_eq!(pool.len(*s)?, seen.len(), "{what}");
        let (want_drafts, want_logits) = want(model, seen, n as u32 + 3)?;
        let error = max_diff(&logits.get(n)?.to_vec1()?, &want_logits);
        assert!(error < LOGITS, "{what}, sequence {n}: off by {error:e}");
        assert_eq!(drafts[n], want_drafts, "{what}, sequence {n}");
    }
    Ok(())
}

/// Prompts, steps, drafts accepted in part, forks, snapshots and slots used again, in any order.
#[test]
fn sequences_keep_what_the_head_saw() -> Result<()> {
    on_every_device(|model| {
        let rng = &mut Rng::new(11);
        let mut pool = model.new_sequences(4, 400)?;
        let mut below = |n: usize| (rng.uniform() * n as f64) as usize;
        let mut all: Vec<(Sequence, Vec<u32>)> = vec![];
        let mut snapshots = vec![];
        for round in 0..60 {
            let mut some = |n: usize| (0..n).map(|_| below(1024) as u32).collect::<Vec<u32>>();
            let (token, prompt) = (some(1), some(1 + round * 7 % 90));
            let what = below(8);
            let n = below(all.len().max(1));
            match what {
                _ if all.len() < 2 => {
                    let s = pool.begin()?;
                    model.feed_only(&mut pool, &[(s, &prompt)])?;
                    all.push((s, prompt));
                }
                0 if all.len() < 4 => {
                    let (s, seen) = all[n].clone();
                    all.push((pool.fork(s)?, seen));
                }
                1 if all.len() > 2 => pool.end(all.remove(n).0)?,
                2 => snapshots.push((pool.snapshot(all[n].0)?, all[n].1.clone())),
                3 if !snapshots.is_empty() => {
                    let (snapshot, seen) = &snapshots[below(snapshots.len())];
                    pool.restore(all[n].0, snapshot)?;
                    all[n].1 = seen.clone();
                }
                // A prompt's piece beside single tokens.
                4 if all[n].1.len() < 250 => {
                    let batch: Vec<_> = all
                        .iter()
                        .enumerate()
                        .map(|(i, (s, _))| (*s, if i == n { &prompt[..] } else { &token }))
                        .collect();
                    model.feed(&mut pool, &batch)?;
                    all.iter_mut().enumerate().for_each(|(i, a)| a.1.extend(if i == n { &prompt } else { &token }));
                }
                5 | 6 => {
                    let draft: Vec<u32> = [&token[..], &prompt[..prompt.len().min(3)]].concat();
                    let batch: Vec<_> = all.iter().map(|(s, _)| (*s, &draft[..])).collect();
                    let (_, drafts) = model.verify(&mut pool, &batch)?;
                    let accepted: Vec<usize> = all.iter().map(|_| below(draft.len() + 1)).collect();
                    model.accept(&mut pool, drafts, &accepted)?;
                    all.iter_mut().zip(accepted).for_each(|(a, count)| a.1.extend(&draft[..count]));
                }
                _ => {
                    for _ in 0..1 + round % 3 {
                        let batch: Vec<_> = all.iter().map(|(s, _)| (*s, &token[..])).collect();
                        model.feed(&mut pool, &batch)?;
                        all.iter_mut().for_each(|a| a.1.extend(&token));
                    }
                }
            }
            if round % 3 == 0 {
                check(model, &mut pool, &all, &format!("round {round}, step {what}"))?;
            }
            if round % 4 == 1 {
                // What is fed is what was drafted after: the head has it already.
                let batch: Vec<_> = all.iter().map(|(s, _)| (*s, token[0], 2)).collect();
                let (drafts, _) = model.draft(&mut pool, &batch)?;
                let fed: Vec<Vec<u32>> = drafts.iter().map(|draft| [&token[..], draft].concat()).collect();
                let batch: Vec<_> = all.iter().zip(&fed).map(|((s, _), fed)| (*s, &fed[..])).collect();
                let (_, drafts) = model.verify(&mut pool, &batch)?;
                model.accept(&mut pool, drafts, &vec![2; all.len()])?;
                all.iter_mut().zip(fed).for_each(|(a, fed)| a.1.extend(&fed[..2]));
                check(model, &mut pool, &all, &format!("round {round}, after drafts"))?;
            }
        }
        Ok(())
    })
}

/// A snapshot after a draft shares all keys and values of the model with one before it, and adds those of the head.
#[test]
fn a_snapshot_after_a_draft_is_restored() -> Result<()> {
    on_every_device(|model| {
        let mut pool = model.new_sequences(2, 64)?;
        let (s, other) = (pool.begin()?, pool.begin()?);
        model.feed_only(&mut pool, &[(s, &[1, 2, 3])])?;
        model.feed_only(&mut pool, &[(s, &[4])])?;
        let before = pool.snapshot(s)?;
        model.draft(&mut pool, &[(s, 9, 2)])?;
        let after = pool.snapshot(s)?;
        for snapshot in [&after, &before, &after] {
            pool.restore(other, snapshot)?;
            check(model, &mut pool, &[(other, vec![1, 2, 3, 4])], "restored")?;
        }
        Ok(())
    })
}

#[test]
fn what_cannot_be_drafted_is_refused() -> Result<()> {
    let model = DEMO.model_with_head(DType::F32, &Device::Cpu)?;
    let mut pool = model.new_sequences(2, 8)?;
    let s = pool.begin()?;
    refused(model.draft(&mut pool, &[(s, 1, 1)]), &["draft", "tokens", "after 0"]);
    model.feed_only(&mut pool, &[(s, &[1, 2, 3, 4, 5, 6])])?;
    refused(model.draft(&mut pool, &[]), &["draft", "at least 1 sequence"]);
    refused(model.draft(&mut pool, &[(s, 1, 0)]), &["at least 1 to draft", "got 0"]);
    refused(model.draft(&mut pool, &[(s, 1024, 1)]), &["vocab_size (1024)", "got 1024"]);
    refused(model.draft(&mut pool, &[(s, 1, 1), (s, 1, 1)]), &["each sequence once"]);
    // As many as can be verified after the next token.
    let draft = model.draft(&mut pool, &[(s, 1, 9)])?.0.remove(0);
    assert_eq!(draft.len(), 1);
    drop(model.verify(&mut pool, &[(s, &[1, draft[0]])])?);
    model.feed_only(&mut pool, &[(s, &[1])])?;
    refused(model.draft(&mut pool, &[(s, 1, 1)]), &["at most 8 tokens", "got 2 after 7"]);
    let plain = DEMO.model(DType::F32, &Device::Cpu)?;
    let mut pool = plain.new_sequences(1, 8)?;
    let s = pool.begin()?;
    plain.feed_only(&mut pool, &[(s, &[1])])?;
    refused(plain.draft(&mut pool, &[(s, 1, 1)]), &["draft head", "one without"]);
    Ok(())
}

#[test]
fn a_head_is_loaded_when_asked_for() -> Result<()> {
    let plain = Tiny::qwen3_next();
    let load = |tiny: &Tiny, choice| tiny.load_with(DType::F32, choice);
    assert!(!load(&plain, DraftHeadChoice::Auto)?.has_draft_head());
    refused(load(&plain, DraftHeadChoice::On), &["draft head", "mtp.fc.weight"]);
    let head = plain.clone().with_draft_head();
    assert!(!load(&head, DraftHeadChoice::Off)?.has_draft_head());
    assert!(load(&head, DraftHeadChoice::Auto)?.has_draft_head());
    for name in head.weights.keys().filter(|name| name.starts_with("mtp.") && *name != "mtp.fc.weight") {
        let mut missing = head.clone();
        missing.remove(name);
        refused(load(&missing, DraftHeadChoice::Auto), &[name]);
    }
    let mut misshapen = head.clone();
    misshapen.weights.insert("mtp.fc.weight".into(), Tensor::zeros((16, 31), DType::F32, &Device::Cpu)?);
    refused(load(&misshapen, DraftHeadChoice::On), &["mtp.fc.weight", "[16, 31]"]);
    Ok(())
}

/// Drafts after a prompt and one token more, and the logits of the first.
fn drafts(model: &CausalLm) -> Result<(Vec<u32>, Vec<f32>)> {
    let mut pool = model.new_sequences(1, 40)?;
    let s = pool.begin()?;
    model.feed_only(&mut pool, &[(s, &[3, 1, 4, 1, 5, 9, 2, 6])])?;
    model.feed_only(&mut pool, &[(s, &[31])])?;
    let (drafts, logits) = model.draft(&mut pool, &[(s, 7, 4)])?;
    Ok((drafts[0].clone(), logits.squeeze(0)?.to_vec1()?))
}

/// One expert in each token's choice less would be a matter of rounding: all are chosen.
fn with_head(tiny: Tiny) -> Tiny {
    tiny.set("num_experts_per_tok", 4).with_draft_head()
}

#[test]
fn a_head_in_a_gguf_file_is_that_of_the_checkpoint() -> Result<()> {
    for tiny in [with_head(Tiny::qwen3_next()), Tiny::qwen3_next().unset("num_experts").fill().with_draft_head()] {
        let (want, logits) = drafts(&tiny.load_with(DType::F32, DraftHeadChoice::On)?)?;
        for layout in [Layout::Qwen3Next, Layout::OldQwen3Next, Layout::Qwen3_5] {
            let (got, of_file) = drafts(&GgufOfTiny::new(&tiny, layout)?.load()?)?;
            assert!(max_diff(&of_file, &logits) < 1e-5, "{layout:?}: {}", max_diff(&of_file, &logits));
            assert_eq!(got, want, "{layout:?}");
        }
    }
    assert!(!GgufOfTiny::new(&Tiny::qwen3_next(), Layout::Qwen3Next)?.load()?.has_draft_head());
    Ok(())
}

#[test]
fn a_head_in_parts_is_the_whole() -> Result<()> {
    for tiny in [with_head(four_heads()), four_heads().unset("num_experts").fill().with_draft_head()] {
        let (want, logits) = drafts(&tiny.load_with(DType::F32, DraftHeadChoice::On)?)?;
        for ranks in [2, 4] {
            let got = on_ranks(ranks, |group| drafts(&parts_with(&tiny, group, DraftHeadChoice::On)?));
            for rank in got {
                let (tokens, of_rank) = rank?;
                assert!(max_diff(&of_rank, &logits) < 1e-5, "{ranks} ranks: {}", max_diff(&of_rank, &logits));
                assert_eq!(tokens, want, "{ranks} ranks");
            }
        }
    }
    Ok(())
}

/// Its matrices become what those of the layers become.
#[test]
fn a_head_is_quantised_with_its_model() -> Result<()> {
    let mut tiny = wide().with_draft_head();
    for (_, weight) in tiny.weights.iter_mut().filter(|(name, x)| name.starts_with("mtp.") && x.rank() == 2) {
        *weight = (&*weight * 0.15)?;
    }
    let config = tiny.model_config()?;
    let say = |quantise: Option<GgmlDType>, dtype: DType| -> Result<[Vec<f32>; 2]> {
        let loader = CausalLm::loader(&config).draft_head(DraftHeadChoice::On).quantize(quantise);
        let model = loader.load(tiny.var_builder(dtype, &Device::Cpu))?;
        let mut pool = model.new_sequences(1, 40)?;
        let s = pool.begin()?;
        let logits = model.feed(&mut pool, &[(s, &[3, 1, 4, 1, 5, 9, 2, 6, 31])])?.squeeze(0)?.to_vec1()?;
        Ok([logits, drafts(&model)?.1])
    };
    let plain = say(None, DType::F32)?;
    for (what, quantise, dtype) in [
        ("bf16", None, DType::BF16),
        ("q8_0", Some(GgmlDType::Q8_0), DType::F32),
        ("q4k", Some(GgmlDType::Q4K), DType::F32),
    ] {
        let got = say(quantise, dtype)?;
        let [of_model, of_head] = [0, 1].map(|i| rel_rms(&got[i], &plain[i]));
        println!("{what}: relative error {of_model:e} of the model, {of_head:e} of its head");
        // It has the model's error, and that of one more layer.
        assert!(of_head > 0. && of_head < 2. * of_model, "{what}: {of_head:e} and {of_model:e}");
    }
    Ok(())
}
