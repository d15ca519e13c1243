//! The engine with drafts of the demo's draft head: the text is what it is without.

use crate::golden::{drafted, DEMO};
use crate::serving;
use crate::support::{single_stream_devices, soak};
use candle_core::{DType, Result};
use candle_gdn_models::{CausalLm, DraftDepth, EngineOptions, EngineStats, GraphChoice, Request, Sampling};
use std::collections::BTreeMap;

/// Below this difference of the two best logits, rounding may choose.
const MARGIN: f32 = 2e-3;

/// On CUDA steps and rounds of up to 32 tokens are graphs: of more the experts of a model in f32 ask the host.
fn on_every_device(test: impl Fn(&CausalLm) -> Result<()>) -> Result<()> {
    single_stream_devices().iter().try_for_each(|device| test(&DEMO.model_with_head(DType::F32, device)?))
}

/// Pieces of the golden prompts, of 3 to 22 tokens; of some a longer one is the common beginning.
fn prompts(count: usize) -> Result<Vec<Vec<u32>>> {
    let texts = (0..DEMO.prompts()).map(|i| Ok(drafted(i)?.ids)).collect::<Result<Vec<_>>>()?.concat();
    let prompt = |n: usize| {
        let first = n * 7 % (texts.len() - 22);
        let common = if n % 4 == 3 { &texts[..70] } else { &[] };
        [common, &texts[first..first + 3 + n % 20]].concat()
    };
    Ok((0..count).map(prompt).collect())
}

/// The completions of all requests, in order.
fn complete(model: &CausalLm, options: EngineOptions, requests: &[Request]) -> Result<(Vec<Vec<u32>>, EngineStats)> {
    let graphed = match options.draft_depth {
        DraftDepth::Fixed(depth) => options.sequences * (depth + 1) <= 32,
        _ => false,
    };
    let (all, stats) = serving::complete(model, options, requests, graphed)?;
    Ok((all.into_iter().map(|completion| completion.tokens).collect(), stats))
}

/// Whether the long runs are asked for.
fn soaks() -> bool {
    soak().is_some_and(|n| n >= 1000)
}

fn options(sequences: usize, depth: DraftDepth) -> EngineOptions {
    EngineOptions { draft_depth: depth, ..EngineOptions::new(sequences, 200) }
}

/// Fails unless the texts are the same up to the first choice that is a tie within rounding; how many such there are.
fn ties(model: &CausalLm, prompts: &[Vec<u32>], got: &[Vec<u32>], want: &[Vec<u32>], what: &str) -> Result<usize> {
    let mut ties = 0;
    for ((prompt, got), want) in prompts.iter().zip(got).zip(want) {
        assert_eq!(got.len(), want.len(), "{what}");
        let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) else { continue };
        let mut pool = model.new_sequences(1, 200)?;
        let s = pool.begin()?;
        let logits = model.feed(&mut pool, &[(s, &[prompt, &want[..at]].concat())])?.squeeze(0)?.to_vec1::<f32>()?;
        let margin = logits[want[at] as usize] - logits[got[at] as usize];
        assert!(margin.abs() < MARGIN, "{what}: {got:?} instead of {want:?}, {margin} at {at}");
        ties += 1;
    }
    Ok(ties)
}

#[test]
fn greedy_text_is_what_it_is_without_drafts() -> Result<()> {
    on_every_device(|model| {
        let prompts = prompts(if soaks() { 1000 } else { 150 })?;
        let requests: Vec<Request> = prompts.iter().map(|prompt| Request::new(prompt.clone(), 10)).collect();
        let (want, stats) = complete(model, options(8, DraftDepth::Fixed(0)), &requests)?;
        assert_eq!(stats.head.drafted, [0; DraftDepth::MOST]);
        for (sequences, depth, prefix_cache, draft) in [
            (1, DraftDepth::Fixed(2), 0, 0),
            (8, DraftDepth::Fixed(3), 1 << 24, 0),
            (8, DraftDepth::Fixed(7), 0, 0),
            (4, DraftDepth::Fixed(7), 0, 0),
            (8, DraftDepth::Fixed(1), 0, 4),
            (1, DraftDepth::Auto, 1 << 24, 0),
            (8, DraftDepth::Auto, 0, 0),
        ] {
            let what = format!("{sequences} sequences, {depth:?}, cache {prefix_cache}, draft {draft}");
            let options = EngineOptions { prefix_cache, draft, ..options(sequences, depth) };
            let (got, stats) = complete(model, options.clone(), &requests)?;
            if prefix_cache > 0 {
                let options = EngineOptions { cuda_graph: GraphChoice::Off, ..options };
                ties(model, &prompts, &complete(model, options, &requests)?.0, &want, &format!("{what}, no graphs"))?;
            }
            let ties = ties(model, &prompts, &got, &want, &what)?;
            assert!(prefix_cache == 0 || stats.prefixes.hits > 0, "{what}: {:?}", stats.prefixes);
            println!("{what}: {ties} ties; {}; {}", stats.head, stats.drafts);
            if let DraftDepth::Fixed(depth) = depth {
                assert!(stats.head.drafted[depth - 1] > 0 && stats.head.accepted[0] > 0, "{what}: {}", stats.head);
                assert!(draft == 0 || stats.drafts.accepted > 0, "{what}: {}", stats.drafts);
            }
        }
        Ok(())
    })
}

/// A token is drawn as it would be without a draft, and by the same random number.
#[test]
fn sampled_text_is_what_it_is_without_drafts() -> Result<()> {
    on_every_device(sampled_text)
}

fn sampled_text(model: &CausalLm) -> Result<()> {
    let sampling = Sampling { temperature: 1., top_k: 50, ..Sampling::default() };
    let penalised = Sampling { repeat_penalty: 1.3, repeat_last_n: 9, ..sampling.clone() };
    let request = |(n, prompt): (usize, &Vec<u32>)| Request {
        sampling: if n % 3 == 0 { penalised.clone() } else { sampling.clone() },
        seed: n as u64,
        ..Request::new(prompt.clone(), 24)
    };
    let requests: Vec<Request> = prompts(100)?.iter().enumerate().map(request).collect();
    let (want, _) = complete(model, options(8, DraftDepth::Fixed(0)), &requests)?;
    for (sequences, depth) in [(1, 2), (8, 3)] {
        let (got, stats) = complete(model, options(sequences, DraftDepth::Fixed(depth)), &requests)?;
        println!("{}", stats.head);
        assert!(stats.head.accepted[0] > 0);
        // Where two tokens' shares meet, rounding may choose: hardly ever.
        let other = got.iter().zip(&want).filter(|(got, want)| got != want).count();
        assert!(other <= 1, "{other} of {} texts differ", got.len());
    }
    Ok(())
}

/// Every token drawn after one prompt, most of which were drafted and verified, against the model's own probabilities after
/// those before it.
#[test]
fn drafts_leave_the_distribution_as_it_is() -> Result<()> {
    on_every_device(distribution)
}

fn distribution(model: &CausalLm) -> Result<()> {
    // The full number draws 10^5 tokens.
    let draws = if soaks() { 25_000 } else { 800 };
    let prompt = prompts(1)?.remove(0);
    let sampling = Sampling { temperature: 1.5, top_k: 4, ..Sampling::default() };
    let request = |n: u64| Request { sampling: sampling.clone(), seed: n, ..Request::new(prompt.clone(), 4) };
    let requests: Vec<Request> = (0..draws).map(request).collect();
    // A pass that takes in a prompt drafts nothing: so few at once that most are steps.
    let (got, stats) = complete(model, options(2, DraftDepth::Fixed(2)), &requests)?;
    println!("{}", stats.head);
    let mut drawn_after: BTreeMap<&[u32], Vec<u32>> = BTreeMap::new();
    for tokens in &got {
        (0..tokens.len()).for_each(|n| drawn_after.entry(&tokens[..n]).or_default().push(tokens[n]));
    }
    let mut pool = model.new_sequences(1, 200)?;
    // What came seldom is counted together, by how good it was.
    let (mut chi, mut freedom, mut rare) = (0., 0, [[0.; 4]; 2]);
    let distance = |got: &[f64; 4], want: &[f64; 4]| -> f64 {
        got.iter().zip(want).map(|(got, want)| (got - want).powi(2) / want).sum()
    };
    for (before, drawn) in &drawn_after {
        let s = pool.begin()?;
        let logits = model.feed(&mut pool, &[(s, &[&prompt[..], before].concat())])?.squeeze(0)?.to_vec1::<f32>()?;
        pool.end(s)?;
        let mut best: Vec<(usize, f64)> = logits.iter().map(|x| f64::from(*x)).enumerate().collect();
        best.sort_by(|a, b| b.1.total_cmp(&a.1));
        let weight = |n: usize| ((best[n].1 - best[0].1) / 1.5).exp();
        let all: f64 = (0..4).map(weight).sum();
        let want: [f64; 4] = std::array::from_fn(|n| drawn.len() as f64 * weight(n) / all);
        let got: [f64; 4] =
            std::array::from_fn(|n| drawn.iter().filter(|token| **token as usize == best[n].0).count() as f64);
        assert_eq!(got.iter().sum::<f64>(), drawn.len() as f64, "of the four best after {before:?}");
        if want.iter().all(|want| *want >= 5.) {
            (chi, freedom) = (chi + distance(&got, &want), freedom + 3);
        } else {
            rare = std::array::from_fn(|side| std::array::from_fn(|n| rare[side][n] + [got, want][side][n]));
        }
    }
    if rare[1].iter().all(|want| *want >= 5.) {
        (chi, freedom) = (chi + distance(&rare[0], &rare[1]), freedom + 3);
    }
    let (counted, k) = (drawn_after.values().map(Vec::len).sum::<usize>(), f64::from(freedom));
    // More comes once in ten thousand times (Wilson and Hilferty), and the seeds are always the same.
    let bound = k * (1. - 2. / (9. * k) + 3.719 * (2. / (9. * k)).sqrt()).powi(3);
    println!("chi-square {chi:.1} of {counted} draws, at most {bound:.1}, {freedom} degrees of freedom");
    assert!(freedom > 20 && counted == 4 * got.len());
    assert!(chi < bound, "{chi} of {bound}");
    Ok(())
}

/// Drafts on a machine where they never pay, and where prompts come while they do not: what the head forgot is no harm.
#[test]
fn requests_that_come_and_go_are_completed_alike() -> Result<()> {
    on_every_device(|model| {
        let prompts = prompts(60)?;
        let requests: Vec<Request> =
            prompts.iter().enumerate().map(|(n, prompt)| Request::new(prompt.clone(), 3 + n * 5 % 90)).collect();
        let (want, _) = complete(model, options(3, DraftDepth::Fixed(0)), &requests)?;
        for draft in [0, 3] {
            let options = EngineOptions { draft, prefill_chunk: 9, ..options(3, DraftDepth::Auto) };
            let (got, stats) = complete(model, options, &requests)?;
            println!("{}", stats.head);
            let ties = ties(model, &prompts, &got, &want, "auto")?;
            assert!(ties <= 2, "{ties} ties");
        }
        Ok(())
    })
}
