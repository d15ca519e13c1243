//! Pools of a model whose softmax layers have windows.

use super::tests::{assert_near, model_with, VOCAB};
use super::{Sequence, SequencePool};
use crate::causal_lm::CausalLm;
use crate::loader::DraftHeadChoice;
use candle_core::{DType, Result, Tensor};

const WINDOWS: [[Option<usize>; 2]; 4] = [[Some(1), None], [Some(7), Some(7)], [None, Some(40)], [Some(40), Some(300)]];

fn tokens(n: usize, step: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * step + i / 7) % VOCAB) as u32).collect()
}

fn feed(model: &CausalLm, pool: &mut SequencePool, s: Sequence, tokens: &[u32]) -> Result<Tensor> {
    model.feed(pool, &[(s, tokens)])
}

/// Whole prompts, which a ring takes in rounds; packed ones of other lengths; parts; token by token.
#[test]
fn a_window_however_the_tokens_come() -> Result<()> {
    for windows in WINDOWS {
        let model = model_with(0.4, windows, DraftHeadChoice::On)?;
        let (a, b) = (tokens(230, 5), tokens(90, 11));
        let mut pool = model.new_sequences(4, 256)?;
        let s = [pool.begin()?, pool.begin()?, pool.begin()?, pool.begin()?];
        let whole = model.feed_hidden(&mut pool, &[(s[0], &a), (s[1], &b)])?;
        let mut parts = Vec::new();
        for part in [0..1, 1..80, 80..81, 81..150, 150..230] {
            parts.push(match part.start {
                // With the other sequence before it.
                80 => model.feed_hidden(&mut pool, &[(s[3], &b), (s[2], &a[part])])?.narrow(0, 90, 1)?,
                _ => model.feed_hidden(&mut pool, &[(s[2], &a[part])])?,
            });
        }
        assert_near(&Tensor::cat(&parts, 0)?, &whole.narrow(0, 0, 230)?, &format!("{windows:?} in parts"))?;
        pool.end(s[2])?;
        let again = pool.begin()?;
        let ones =
            a.iter().map(|token| model.feed_hidden(&mut pool, &[(again, &[*token])])).collect::<Result<Vec<_>>>()?;
        assert_near(&Tensor::cat(&ones, 0)?, &whole.narrow(0, 0, 230)?, &format!("{windows:?} by tokens"))?;
        let (got, want) = (feed(&model, &mut pool, s[3], &[1])?, feed(&model, &mut pool, s[1], &[1])?);
        assert_near(&got, &want, &format!("{windows:?} packed"))?;
    }
    Ok(())
}

#[test]
fn a_rejected_draft_leaves_the_window() -> Result<()> {
    for windows in WINDOWS {
        let model = model_with(0.4, windows, DraftHeadChoice::Off)?;
        let (fed, drafted) = (tokens(240, 5), tokens(64, 7));
        let mut pool = model.new_sequences(2, 256)?;
        let (a, b) = (pool.begin()?, pool.begin()?);
        let mut seen = 0;
        for (new, accepted) in [(60, 0), (1, 3), (30, 0), (1, 2), (70, 5), (2, 0), (1, 1)] {
            feed(&model, &mut pool, a, &fed[seen..seen + new])?;
            seen += new;
            let draft = [&fed[seen..seen + accepted], &drafted[accepted..]].concat();
            let (_, drafts) = model.verify(&mut pool, &[(a, &draft)])?;
            model.accept(&mut pool, drafts, &[accepted])?;
            seen += accepted;
        }
        feed(&model, &mut pool, b, &fed[..seen])?;
        let (got, want) = (feed(&model, &mut pool, a, &[3])?, feed(&model, &mut pool, b, &[3])?);
        assert_near(&got, &want, &format!("{windows:?}"))?;
        let long = model.verify(&mut pool, &[(a, &tokens(65, 1))]).map(drop);
        assert!(long.unwrap_err().to_string().contains("expected drafts of at most 64 tokens"));
    }
    Ok(())
}

/// Snapshots that share segments, in another slot and another pool; a fork; and tensors of the host.
#[test]
fn a_snapshot_has_all_of_the_window() -> Result<()> {
    for windows in WINDOWS {
        let model = model_with(0.4, windows, DraftHeadChoice::Off)?;
        let fed = tokens(250, 5);
        let (mut pool, mut other) = (model.new_sequences(2, 256)?, model.new_sequences(1, 256)?);
        let (a, c) = (pool.begin()?, other.begin()?);
        let mut seen = 0;
        let mut snapshots = Vec::new();
        for end in [3, 50, 51, 140, 200] {
            feed(&model, &mut pool, a, &fed[seen..end])?;
            seen = end;
            snapshots.push(pool.snapshot(a)?);
        }
        for snapshot in &snapshots {
            let rest = &fed[snapshot.len()..snapshot.len() + 50];
            pool.restore(a, snapshot)?;
            other.restore(c, snapshot)?;
            let fork = pool.fork(a)?;
            let want = feed(&model, &mut pool, a, rest)?;
            assert_near(&feed(&model, &mut other, c, rest)?, &want, &format!("{windows:?} restored"))?;
            assert_near(&feed(&model, &mut pool, fork, rest)?, &want, &format!("{windows:?} forked"))?;
            pool.end(fork)?;
            let copy = model.snapshot_from_host(snapshot.len(), &snapshot.to_host()?)?;
            other.restore(c, &copy)?;
            assert_near(&feed(&model, &mut other, c, rest)?, &want, &format!("{windows:?} from the host"))?;
            let fresh = pool.begin()?;
            feed(&model, &mut pool, fresh, &fed[..snapshot.len()])?;
            assert_near(&feed(&model, &mut pool, fresh, rest)?, &want, &format!("{windows:?} fed"))?;
            pool.end(fresh)?;
        }
    }
    Ok(())
}

#[test]
fn a_window_takes_the_same_memory_however_long_the_sequence() -> Result<()> {
    let model = model_with(0.4, [Some(40), Some(40)], DraftHeadChoice::Off)?;
    let mut pool = model.new_sequences(1, 256)?;
    let s = pool.begin()?;
    let mut held = Vec::new();
    for part in [105, 1, 100, 44] {
        feed(&model, &mut pool, s, &tokens(part, 5))?;
        held.push(pool.size_in_bytes());
    }
    assert!(held.iter().all(|bytes| *bytes == held[0] && *bytes == pool.bytes_per_sequence()), "{held:?}");
    let bytes = model.config().sequence_bytes(DType::F32);
    let layers = 2 * 2 * 2 * 16 * 4;
    assert_eq!((bytes.kv_per_token, bytes.window_tokens), (0, 104));
    assert_eq!((bytes.kv(50), bytes.kv(104), bytes.kv(100_000)), (50 * layers, 104 * layers, 104 * layers));
    assert_eq!(bytes.total(1000), bytes.recurrent + bytes.conv + 104 * layers);
    Ok(())
}
