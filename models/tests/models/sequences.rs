//! Many sequences of a model in one pool, against the same tokens through a state of their own.

use crate::golden::{max_diff, DEMO};
use crate::support::{devices, refused, rel_rms, Rng};
use crate::tiny::Tiny;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, Sequence, SequencePool, StateLayout};

/// Rounding of other kernels, on logits up to about 20 large.
const LOGITS: f32 = 1e-3;

/// A model that the device's kernels take.
pub fn model(device: &Device) -> Result<CausalLm> {
    match device.is_cpu() {
        true => Tiny::qwen3_next().set("max_position_embeddings", 512).model(),
        false => DEMO.model(DType::F32, device),
    }
}

fn on_every_device(test: impl Fn(&CausalLm) -> Result<()>) -> Result<()> {
    on_each(devices(), test)
}

/// On pools without rings and with them, where there are kernels for the model.
fn on_every_pool(test: impl Fn(&CausalLm, StateLayout) -> Result<()>) -> Result<()> {
    on_every_device(|model| {
        test(model, StateLayout::Plain)?;
        match takes_rings(model) {
            true => test(model, StateLayout::Ring),
            false => Ok(()),
        }
    })
}

/// On CUDA rings take the sizes of the fused step.
pub fn takes_rings(model: &CausalLm) -> bool {
    model.device().is_cpu() || model.config().gdn.has_fused_step()
}

pub fn on_each(devices: Vec<Device>, test: impl Fn(&CausalLm) -> Result<()>) -> Result<()> {
    devices.iter().try_for_each(|device| test(&model(device)?))
}

pub fn tokens(rng: &mut Rng, n: usize, model: &CausalLm) -> Vec<u32> {
    (0..n).map(|_| (rng.uniform() * model.config().vocab_size as f64) as u32).collect()
}

/// Logits after the last of `tokens`, by a state of their own.
pub fn want(model: &CausalLm, tokens: &[u32]) -> Result<Vec<f32>> {
    let ids = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu)?;
    model.forward_last(&ids, &mut model.new_state(1)?)?.squeeze(0)?.to_vec1()
}

#[track_caller]
pub fn assert_near(got: &[f32], want: &[f32], what: &str) {
    let worst = max_diff(got, want);
    assert!(worst < LOGITS, "{what}: off by {worst:e}");
}

/// One token more of a sequence that should have seen `seen`, and what it says.
fn check(model: &CausalLm, pool: &mut SequencePool, s: Sequence, seen: &[u32], what: &str) -> Result<()> {
    assert_eq!(pool.len(s)?, seen.len(), "{what}");
    let snapshot = pool.snapshot(s)?;
    let logits = model.feed(pool, &[(s, &[7])])?.squeeze(0)?.to_vec1()?;
    assert_near(&logits, &want(model, &[seen, &[7]].concat())?, what);
    pool.restore(s, &snapshot)
}

#[test]
fn mixed_batches_are_their_sequences() -> Result<()> {
    on_every_pool(|model, rings| {
        let rng = &mut Rng::new(1);
        let mut pool = model.new_sequences_with(4, 256, rings)?;
        let sequences = (0..4).map(|_| pool.begin()).collect::<Result<Vec<_>>>()?;
        let mut seen = vec![vec![]; 4];
        // Prompts beside single tokens, across the ends of chunks and panels, and decode steps in any order.
        let rounds: [&[(usize, usize)]; 8] = [
            &[(0, 70), (1, 1), (2, 33)],
            &[(3, 5), (0, 1), (2, 1)],
            &[(2, 1), (0, 1), (1, 1), (3, 1)],
            &[(2, 1), (0, 1), (1, 1), (3, 1)],
            &[(2, 1), (0, 1), (1, 1), (3, 1)],
            &[(1, 64)],
            &[(3, 4), (2, 4)],
            &[(0, 17), (1, 16)],
        ];
        for (i, round) in rounds.into_iter().enumerate() {
            let new: Vec<Vec<u32>> = round.iter().map(|(_, n)| tokens(rng, *n, model)).collect();
            let batch: Vec<_> = round.iter().zip(&new).map(|((n, _), new)| (sequences[*n], &new[..])).collect();
            if i == 5 {
                model.feed_only(&mut pool, &batch)?;
            } else {
                let logits = model.feed(&mut pool, &batch)?;
                assert_eq!(
                    (logits.dims(), logits.dtype()),
                    (&[round.len(), model.config().vocab_size][..], DType::F32)
                );
                for (row, ((n, _), new)) in round.iter().zip(&new).enumerate() {
                    let all = [&seen[*n][..], new].concat();
                    assert_near(&logits.get(row)?.to_vec1()?, &want(model, &all)?, &format!("round {i}, row {row}"));
                }
            }
            round.iter().zip(new).for_each(|((n, _), new): (&(usize, usize), Vec<u32>)| seen[*n].extend(new));
        }
        (0..4).try_for_each(|n| check(model, &mut pool, sequences[n], &seen[n], &format!("sequence {n}")))
    })
}

#[test]
fn a_prompt_in_pieces_is_the_prompt() -> Result<()> {
    on_every_pool(|model, rings| {
        let prompt = tokens(&mut Rng::new(2), 130, model);
        let whole = want(model, &prompt)?;
        let mut pool = model.new_sequences_with(1, 130, rings)?;
        for piece in [1, 3, 16, 17, 64, 100, 130] {
            let s = pool.begin()?;
            let mut logits = vec![];
            for part in prompt.chunks(piece) {
                logits = model.feed(&mut pool, &[(s, part)])?.squeeze(0)?.to_vec1()?;
            }
            assert_near(&logits, &whole, &format!("pieces of {piece}"));
            pool.end(s)?; // the next one begins from nothing in the same slot
        }
        Ok(())
    })
}

#[test]
fn forks_and_snapshots_go_their_own_way() -> Result<()> {
    on_every_pool(|model, rings| {
        let rng = &mut Rng::new(3);
        let mut pool = model.new_sequences_with(3, 128, rings)?;
        let a = pool.begin()?;
        let empty = pool.snapshot(a)?;
        assert!(empty.is_empty());
        let mut seen = tokens(rng, 37, model);
        model.feed_only(&mut pool, &[(a, &seen)])?;
        let (early, before) = (pool.snapshot(a)?, seen.clone());
        let b = pool.fork(a)?;
        let more = tokens(rng, 9, model);
        model.feed_only(&mut pool, &[(a, &more)])?;
        seen.extend(&more);
        let late = pool.snapshot(a)?;
        assert_eq!((early.len(), late.len()), (37, 46));
        // The later one shares the earlier one's keys and values.
        assert!(late.bytes_added() < early.bytes_added() && late.size_in_bytes() > early.size_in_bytes());
        check(model, &mut pool, b, &before, "the fork")?;
        check(model, &mut pool, a, &seen, "its origin")?;
        let c = pool.begin()?;
        model.feed_only(&mut pool, &[(c, &tokens(rng, 60, model))])?;
        for (snapshot, seen) in [(&early, &before), (&late, &seen), (&empty, &vec![]), (&late, &seen)] {
            pool.restore(c, snapshot)?;
            check(model, &mut pool, c, seen, "restored")?;
        }
        pool.end(a)?;
        let other = tokens(rng, 50, model);
        let a = pool.begin()?;
        model.feed_only(&mut pool, &[(a, &other)])?;
        check(model, &mut pool, a, &other, "a slot's next owner")?;
        check(model, &mut pool, a, &other, "the same from its snapshot")?;
        check(model, &mut pool, c, &seen, "one restored from its last owner")?;
        // Into another pool of the model.
        let mut second = model.new_sequences_with(1, 64, rings)?;
        let d = second.begin()?;
        second.restore(d, &late)?;
        check(model, &mut second, d, &seen, "in another pool")
    })
}

#[test]
fn every_number_of_accepted_tokens() -> Result<()> {
    on_every_pool(|model, rings| {
        let rng = &mut Rng::new(4);
        for lengths in [[5, 1], [3, 20]] {
            let prompts = [tokens(rng, 30, model), tokens(rng, 3, model)];
            let drafts = lengths.map(|n| tokens(rng, n, model));
            for first in 0..=lengths[0] {
                for second in [0, lengths[1] / 2, lengths[1]] {
                    let mut pool = model.new_sequences_with(2, 64, rings)?;
                    let s = [pool.begin()?, pool.begin()?];
                    model.feed_only(&mut pool, &[(s[0], &prompts[0]), (s[1], &prompts[1])])?;
                    let batch = [(s[0], &drafts[0][..]), (s[1], &drafts[1][..])];
                    let (logits, kept) = model.verify(&mut pool, &batch)?;
                    assert_eq!(logits.dims(), [lengths[0] + lengths[1], model.config().vocab_size]);
                    let mut row = 0;
                    for (prompt, draft) in prompts.iter().zip(&drafts) {
                        for n in 1..=draft.len() {
                            let want = want(model, &[&prompt[..], &draft[..n]].concat())?;
                            assert_near(&logits.get(row)?.to_vec1()?, &want, "a draft's row");
                            row += 1;
                        }
                    }
                    assert_eq!((pool.len(s[0])?, pool.len(s[1])?, kept.lengths()), (30, 3, lengths.to_vec()));
                    model.accept(&mut pool, kept, &[first, second])?;
                    for (n, accepted) in [first, second].into_iter().enumerate() {
                        let seen = [&prompts[n][..], &drafts[n][..accepted]].concat();
                        check(model, &mut pool, s[n], &seen, &format!("{lengths:?}: {first}, {second} accepted"))?;
                    }
                    // Again, and beside a plain step.
                    let (_, kept) = model.verify(&mut pool, &[(s[1], &[1, 2])])?;
                    model.accept(&mut pool, kept, &[1])?;
                    let logits = model.feed(&mut pool, &[(s[0], &[3]), (s[1], &[4])])?;
                    let seen = [&prompts[1][..], &drafts[1][..second], &[1, 4]].concat();
                    assert_near(&logits.get(1)?.to_vec1()?, &want(model, &seen)?, "after a second draft");
                }
            }
        }
        Ok(())
    })
}

#[test]
fn drafts_leave_no_trace_and_are_void_after_a_change() -> Result<()> {
    on_every_pool(|model, rings| {
        let mut pool = model.new_sequences_with(2, 64, rings)?;
        let (a, b) = (pool.begin()?, pool.begin()?);
        model.feed_only(&mut pool, &[(a, &[1, 2, 3]), (b, &[4])])?;
        let bytes = pool.size_in_bytes();
        drop(model.verify(&mut pool, &[(a, &[9, 9, 9])])?);
        check(model, &mut pool, a, &[1, 2, 3], "a draft dropped")?;
        let grown = pool.size_in_bytes();
        assert_eq!(grown > bytes, rings == StateLayout::Plain); // a ring has room for drafts
        let stale = model.verify(&mut pool, &[(a, &[8, 8])])?.1;
        model.feed_only(&mut pool, &[(a, &[5])])?;
        refused(model.accept(&mut pool, stale, &[2]), &["accept", "changed since at 0"]);
        let first = model.verify(&mut pool, &[(b, &[8])])?.1;
        let second = model.verify(&mut pool, &[(b, &[9])])?.1;
        refused(model.accept(&mut pool, first, &[1]), &["changed since"]);
        model.accept(&mut pool, second, &[1])?;
        for (counts, part) in [(&[3][..], "at most 2"), (&[1, 1][..], "expected 1 counts")] {
            let drafts = model.verify(&mut pool, &[(a, &[8, 8])])?.1;
            refused(model.accept(&mut pool, drafts, counts), &["accept: accepted", part]);
        }
        let ended = model.verify(&mut pool, &[(b, &[8])])?.1;
        pool.end(b)?;
        refused(model.accept(&mut pool, ended, &[1]), &["ended or is another pool's"]);
        check(model, &mut pool, a, &[1, 2, 3, 5], "after refusals")?;
        // Two at once need a second spare state without rings, and no more than that ever.
        for _ in 0..3 {
            let b = pool.begin()?;
            let drafts = model.verify(&mut pool, &[(a, &[8, 8]), (b, &[1])])?.1;
            model.accept(&mut pool, drafts, &[0, 1])?;
            check(model, &mut pool, b, &[1], "a new one")?;
            pool.end(b)?;
        }
        Ok(())
    })
}

#[test]
fn refusals_change_nothing() -> Result<()> {
    on_every_device(|model| {
        let vocab = model.config().vocab_size as u32;
        let other_model = self::model(model.device())?;
        let mut pool = model.new_sequences(2, 8)?;
        let mut other = model.new_sequences(2, 8)?;
        let (a, b) = (pool.begin()?, pool.begin()?);
        let foreign = other.begin()?;
        refused(pool.begin(), &["SequencePool: begin", "all 2 are in use"]);
        refused(pool.fork(a), &["all 2 are in use"]);
        pool.end(b)?;
        let old = b;
        let b = pool.begin()?;
        model.feed_only(&mut pool, &[(a, &[1, 2, 3]), (b, &[4])])?;
        let too_long = [1; 9];
        type Case<'a> = (&'a [(Sequence, &'a [u32])], &'a str);
        let cases: [Case; 8] = [
            (&[], "at least 1 sequence"),
            (&[(a, &[])], "at least 1 token of each sequence, got none at 0"),
            (&[(b, &[1]), (a, &[1]), (b, &[1])], "each sequence once, got one a second time at 2"),
            (&[(a, &[1]), (old, &[1])], "ended or is another pool's"),
            (&[(foreign, &[1])], "ended or is another pool's"),
            (&[(a, &[1, 1, 1, 1, 1, 1])], "at most 8 tokens in a sequence, got 6 after 3 at 0"),
            (&[(b, &too_long)], "got 9 after 1 at 0"),
            (&[(a, &[1]), (b, &[0, vocab])], "below vocab_size"),
        ];
        for (batch, part) in cases {
            refused(model.feed(&mut pool, batch), &["expected", part]);
            refused(model.feed_only(&mut pool, batch), &["expected", part]);
            refused(model.verify(&mut pool, batch), &["expected", part]);
        }
        refused(other_model.feed(&mut pool, &[(a, &[1])]), &["pool", "another model"]);
        let snapshot = pool.snapshot(a)?;
        for s in [old, foreign] {
            for result in [pool.end(s), pool.restore(s, &snapshot), pool.len(s).map(drop), pool.fork(s).map(drop)] {
                refused(result, &["ended or is another pool's"]);
            }
            refused(pool.snapshot(s), &["ended or is another pool's"]);
        }
        let mut theirs = other_model.new_sequences(1, 8)?;
        let t = theirs.begin()?;
        refused(theirs.restore(t, &snapshot), &["restore: snapshot", "of another"]);
        let mut short = model.new_sequences(1, 2)?;
        let t = short.begin()?;
        refused(short.restore(t, &snapshot), &["at most 2 tokens, got 3"]);
        refused(model.new_sequences(0, 8), &["sequences: expected at least 1"]);
        refused(model.new_sequences(1, 0), &["max_len: expected at least 1"]);
        let most = model.config().max_position_embeddings;
        let said = [&format!("max_len: expected at most max_position_embeddings ({most}), got {}", most + 1)[..]];
        refused(model.new_sequences(1, most + 1), &said);
        check(model, &mut pool, a, &[1, 2, 3], "after refusals")?;
        check(model, &mut pool, b, &[4], "after refusals")?;
        // To the very end.
        let logits = model.feed(&mut pool, &[(a, &[4, 5, 6, 7, 8])])?.squeeze(0)?.to_vec1()?;
        assert_near(&logits, &want(model, &[1, 2, 3, 4, 5, 6, 7, 8])?, "full");
        refused(model.feed(&mut pool, &[(a, &[1])]), &["got 1 after 8"]);
        Ok(())
    })
}

#[test]
fn bytes_are_as_documented() -> Result<()> {
    on_every_device(|model| {
        let (c, a) = (&model.config().gdn, &model.config().attention);
        for max_len in [32, 100] {
            let mut pool = model.new_sequences_with(3, max_len, StateLayout::Plain)?;
            let linear = 4 * c.num_value_heads * c.value_head_dim * c.key_head_dim
                + 4 * (c.conv_kernel - 1)
                    * (2 * c.num_key_heads * c.key_head_dim + c.num_value_heads * c.value_head_dim);
            let (len, values) = match model.device().is_cpu() {
                true => (max_len.next_multiple_of(32), a.head_dim.next_multiple_of(32)),
                false => (max_len, a.head_dim),
            };
            let full = 4 * a.num_kv_heads * len * (a.head_dim + values);
            let is_linear =
                |l: &&candle_gdn_models::LayerConfig| l.mixer == candle_gdn_models::MixerKind::LinearAttention;
            let linears = model.config().layers.iter().filter(is_linear).count();
            let fulls = model.config().layers.len() - linears;
            assert_eq!(pool.bytes_per_sequence(), linears * linear + fulls * full);
            let s = [pool.begin()?, pool.begin()?, pool.begin()?];
            let prompt = vec![1; max_len];
            model.feed_only(&mut pool, &s.map(|s| (s, &prompt[..])))?;
            assert_eq!(pool.size_in_bytes(), 3 * pool.bytes_per_sequence());
            let snapshot = pool.snapshot(s[0])?;
            let kv = 2 * 4 * a.num_kv_heads * max_len * a.head_dim;
            assert_eq!(snapshot.size_in_bytes(), linears * linear + fulls * kv);
            // A draft costs one more state.
            pool.end(s[0])?;
            let t = pool.begin()?;
            drop(model.verify(&mut pool, &[(t, &[1, 2])])?);
            assert_eq!(pool.size_in_bytes(), 3 * (linears * linear + fulls * full) + linears * linear);
            assert_eq!(pool.bytes_per_sequence(), linears * linear + fulls * full);
            assert_eq!((pool.available(), pool.capacity(), pool.max_len()), (0, 3, max_len));
        }
        Ok(())
    })
}

/// Rounded at every layer, in products of other sizes: near, not equal.
#[test]
fn in_half_precision() -> Result<()> {
    for device in devices() {
        for (dtype, bound) in [(DType::BF16, 0.05), (DType::F16, 0.01)] {
            let model = match device.is_cpu() {
                true => Tiny::qwen3_next().set("max_position_embeddings", 512).load(dtype)?,
                false => DEMO.model(dtype, &device)?,
            };
            let mut pool = model.new_sequences(3, 100)?;
            let (a, b) = (pool.begin()?, pool.begin()?);
            let seen = tokens(&mut Rng::new(6), 40, &model);
            model.feed_only(&mut pool, &[(a, &seen[..30]), (b, &[1])])?;
            let (_, drafts) = model.verify(&mut pool, &[(a, &seen[30..36])])?;
            model.accept(&mut pool, drafts, &[4])?;
            let snapshot = pool.snapshot(a)?;
            pool.restore(b, &snapshot)?;
            let c = pool.fork(b)?;
            let logits = model.feed(&mut pool, &[(a, &seen[34..]), (b, &seen[34..]), (c, &seen[34..])])?;
            let want = want(&model, &seen)?;
            for row in logits.to_vec2::<f32>()? {
                let error = rel_rms(&row, &want);
                assert!(error < bound, "{dtype:?}: relative error {error}");
            }
        }
    }
    Ok(())
}

#[test]
fn threads_may_share_and_move_them() {
    fn both<T: Send + Sync>() {}
    both::<SequencePool>();
    both::<Sequence>();
    both::<candle_gdn_models::SequenceSnapshot>();
    both::<candle_gdn_models::Drafts>();
}
