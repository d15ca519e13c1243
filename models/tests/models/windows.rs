//! Sequences of models whose softmax layers have windows, some turns of their rings.

use crate::golden::DEMO;
use crate::sequences::{assert_near, want};
use crate::serving::complete;
use crate::support::{devices, refused, single_stream_devices};
use crate::tiny::Tiny;
use candle_core::{DType, Device, Result};
use candle_gdn_models::{
    CausalLm, EngineOptions, GraphChoice, MixerKind, ModelConfig, Request, Sequence, SequencePool,
};
use std::collections::HashMap;

/// Of the softmax layers, one after the other and again.
const WINDOWS: [[Option<usize>; 2]; 4] = [[Some(1), None], [Some(7), Some(7)], [Some(40), None], [Some(40), Some(300)]];

/// A model that the device's kernels take.
fn model(device: &Device, windows: [Option<usize>; 2]) -> Result<CausalLm> {
    let (mut config, weights) = match device.is_cpu() {
        true => {
            let (linear, full) = ("linear_attention", "full_attention");
            let tiny = Tiny::qwen3_next().set("layer_types", vec![linear, full, linear, full]);
            let tiny = Tiny { weights: HashMap::new(), ..tiny.set("max_position_embeddings", 512) }.fill();
            (tiny.model_config()?, tiny.var_builder(DType::F32, device))
        }
        false => (DEMO.config()?, DEMO.weights(DType::F32, device)?),
    };
    let softmax = config.layers.iter_mut().filter(|layer| layer.mixer == MixerKind::FullAttention);
    softmax.zip(windows.into_iter().cycle()).for_each(|(layer, window)| layer.window = window);
    CausalLm::load(&config, weights)
}

fn on_every_device(windows: &[[Option<usize>; 2]], test: impl Fn(&CausalLm, &str) -> Result<()>) -> Result<()> {
    for device in devices() {
        for windows in windows {
            test(&model(&device, *windows)?, &format!("{windows:?} on {:?}", device.location()))?;
        }
    }
    Ok(())
}

fn tokens(n: usize, step: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * step + i / 7) % crate::tiny::VOCAB) as u32).collect()
}

/// The logits after the last of them.
fn feed(model: &CausalLm, pool: &mut SequencePool, s: Sequence, tokens: &[u32]) -> Result<Vec<f32>> {
    model.feed(pool, &[(s, tokens)])?.flatten_all()?.to_vec1()
}

/// The logits after each of the last tokens of the batch.
fn feed_all(model: &CausalLm, pool: &mut SequencePool, batch: &[(Sequence, &[u32])]) -> Result<Vec<f32>> {
    let hidden = model.feed_hidden(pool, batch)?;
    model.logits(&hidden)?.flatten_all()?.to_vec1()
}

/// Whole prompts, which a ring takes in rounds; packed ones of other lengths; parts; token by token.
#[test]
fn a_window_however_the_tokens_come() -> Result<()> {
    on_every_device(&WINDOWS, |model, what| {
        let vocab = model.config().vocab_size;
        let (a, b) = (tokens(230, 5), tokens(90, 11));
        let mut pool = model.new_sequences(4, 256)?;
        let s = [pool.begin()?, pool.begin()?, pool.begin()?, pool.begin()?];
        let whole = feed_all(model, &mut pool, &[(s[0], &a), (s[1], &b)])?;
        let (whole, after_b) = (&whole[..230 * vocab], &whole[319 * vocab..]);
        let mut parts = Vec::new();
        for part in [0..1, 1..80, 80..81, 81..150, 150..230] {
            parts.extend(match part.start {
                // With the other sequence before it.
                80 => feed_all(model, &mut pool, &[(s[3], &b), (s[2], &a[part])])?.split_off(90 * vocab),
                _ => feed_all(model, &mut pool, &[(s[2], &a[part])])?,
            });
        }
        assert_near(&parts, whole, &format!("{what} in parts"));
        pool.end(s[2])?;
        let again = pool.begin()?;
        let mut ones = Vec::new();
        for token in &a {
            ones.extend(feed(model, &mut pool, again, &[*token])?);
        }
        assert_near(&ones, whole, &format!("{what} token by token"));
        // A state of its own, whose rings grow, or are as long as the sequence.
        assert_near(&want(model, &b)?, after_b, &format!("{what} alone"));
        let (got, want) = (feed(model, &mut pool, s[3], &[1])?, feed(model, &mut pool, s[1], &[1])?);
        assert_near(&got, &want, &format!("{what} packed"));
        Ok(())
    })
}

#[test]
fn a_rejected_draft_leaves_the_window() -> Result<()> {
    on_every_device(&WINDOWS, |model, what| {
        let (fed, drafted) = (tokens(240, 5), tokens(64, 7));
        let mut pool = model.new_sequences(2, 256)?;
        let (a, b) = (pool.begin()?, pool.begin()?);
        let mut seen = 0;
        for (new, accepted) in [(60, 0), (1, 3), (30, 0), (1, 2), (70, 5), (2, 0), (1, 1)] {
            feed(model, &mut pool, a, &fed[seen..seen + new])?;
            seen += new;
            let draft = [&fed[seen..seen + accepted], &drafted[accepted..]].concat();
            let (_, drafts) = model.verify(&mut pool, &[(a, &draft)])?;
            model.accept(&mut pool, drafts, &[accepted])?;
            seen += accepted;
        }
        feed(model, &mut pool, b, &fed[..seen])?;
        let (got, want) = (feed(model, &mut pool, a, &[3])?, feed(model, &mut pool, b, &[3])?);
        assert_near(&got, &want, what);
        let long = model.verify(&mut pool, &[(a, &tokens(65, 1))]).map(drop);
        refused(long, &["expected drafts of at most 64 tokens"]);
        Ok(())
    })
}

/// Snapshots that share segments, in another slot and another pool; a fork; and tensors of the host.
#[test]
fn a_snapshot_has_all_of_the_window() -> Result<()> {
    on_every_device(&WINDOWS, |model, what| {
        let fed = tokens(250, 5);
        let (mut pool, mut other) = (model.new_sequences(2, 256)?, model.new_sequences(1, 256)?);
        let (a, c) = (pool.begin()?, other.begin()?);
        let mut seen = 0;
        let mut snapshots = Vec::new();
        for end in [3, 50, 51, 140, 200] {
            feed(model, &mut pool, a, &fed[seen..end])?;
            seen = end;
            snapshots.push(pool.snapshot(a)?);
        }
        for snapshot in &snapshots {
            let rest = &fed[snapshot.len()..snapshot.len() + 50];
            pool.restore(a, snapshot)?;
            other.restore(c, snapshot)?;
            let fork = pool.fork(a)?;
            let want = feed(model, &mut pool, a, rest)?;
            assert_near(&feed(model, &mut other, c, rest)?, &want, &format!("{what} restored"));
            assert_near(&feed(model, &mut pool, fork, rest)?, &want, &format!("{what} forked"));
            pool.end(fork)?;
            let copy = model.snapshot_from_host(snapshot.len(), &snapshot.to_host()?)?;
            other.restore(c, &copy)?;
            assert_near(&feed(model, &mut other, c, rest)?, &want, &format!("{what} from the host"));
            let fresh = pool.begin()?;
            feed(model, &mut pool, fresh, &fed[..snapshot.len()])?;
            assert_near(&feed(model, &mut pool, fresh, rest)?, &want, &format!("{what} fed"));
            pool.end(fresh)?;
        }
        Ok(())
    })
}

#[test]
fn a_window_takes_the_same_memory_however_long_the_sequence() -> Result<()> {
    on_every_device(&[[Some(40); 2]], |model, what| {
        let config: &ModelConfig = model.config();
        let mut pool = model.new_sequences(1, 256)?;
        let s = pool.begin()?;
        let mut held = Vec::new();
        for part in [105, 1, 100, 44] {
            feed(model, &mut pool, s, &tokens(part, 5))?;
            held.push(pool.size_in_bytes());
        }
        assert!(held.iter().all(|bytes| *bytes == pool.bytes_per_sequence()), "{what}: {held:?}");
        let bytes = config.sequence_bytes(DType::F32);
        let layers = config.layers.iter().filter(|layer| layer.window.is_some()).count();
        let row = (layers * 2 * config.attention.num_kv_heads * config.attention.head_dim * 4) as u64;
        assert_eq!((bytes.kv_per_token, bytes.window_tokens), (0, 104));
        assert_eq!((bytes.kv(50), bytes.kv(104), bytes.kv(100_000)), (50 * row, 104 * row, 104 * row));
        assert_eq!(bytes.total(1000), bytes.recurrent + bytes.conv + 104 * row);
        Ok(())
    })
}

/// In chunks, batched, from the prefix cache, with longer drafts by look-up than a ring has room for, and in graphs.
#[test]
fn an_engine_completes_alike() -> Result<()> {
    for device in single_stream_devices() {
        for windows in [[Some(7), Some(7)], [Some(40), Some(300)]] {
            let model = model(&device, windows)?;
            let prompt = |n: usize| [tokens(130 + 9 * n, 5), tokens(n * n, 3)].concat();
            let requests: Vec<Request> = (0..6).map(|n| Request::new(prompt(n), 60)).collect();
            let alone = EngineOptions { cuda_graph: GraphChoice::Off, ..EngineOptions::new(1, 300) };
            let want = complete(&model, alone, &requests, false)?.0;
            let chunks = EngineOptions { prefill_chunk: 100, ..EngineOptions::new(4, 300) };
            let cached = EngineOptions { prefix_cache: 1 << 28, prefix_recent: 4, ..chunks.clone() };
            for options in [chunks, EngineOptions { draft: 100, ..cached.clone() }, cached] {
                let (got, stats) = complete(&model, options.clone(), &requests, false)?;
                let what = format!("{windows:?} on {:?}, {options:?}, {stats:?}", device.location());
                assert_eq!(got, want, "{what}");
            }
        }
    }
    Ok(())
}
