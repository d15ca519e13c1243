//! What is drawn from given logits: as often as it should be, and the same on every device.

#[cfg(feature = "cuda")]
use super::rows::{tokens, Rows};
use super::{Choice, Drawn, Sampler, Sampling, Token};
use candle_core::{DType, Device, Result, Tensor};
use std::collections::BTreeSet;

/// Numbers for tests.
struct Rng(crate::SplitMix64);

impl Rng {
    #[cfg(feature = "cuda")]
    fn below(&mut self, n: usize) -> usize {
        (self.0.next() % n as u64) as usize
    }

    fn uniform(&mut self) -> f64 {
        (self.0.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2. * (1. - self.uniform()).ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    #[cfg(feature = "cuda")]
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The CPU, and the GPU where there is one.
fn devices() -> Vec<Device> {
    let devices = [
        Some(Device::Cpu),
        #[cfg(feature = "cuda")]
        candle_gdn_core::device::cuda::testing::device(),
    ];
    devices.into_iter().flatten().collect()
}

fn tensor(logits: &[Vec<f32>], device: &Device) -> Result<Tensor> {
    Tensor::from_vec(logits.concat(), (logits.len(), logits[0].len()), device)
}

fn draw(sampler: &Sampler, logits: &[Vec<f32>], choices: &[Choice], device: &Device) -> Result<Vec<Option<u32>>> {
    draw_of(sampler, &tensor(logits, device)?, choices)
}

fn draw_of(sampler: &Sampler, logits: &Tensor, choices: &[Choice]) -> Result<Vec<Option<u32>>> {
    Ok(sampler.draw(logits, choices)?.into_iter().map(id).collect())
}

fn id(token: Token) -> Option<u32> {
    token.ok().map(|drawn| drawn.id)
}

fn one(logits: &[f32], sampling: &Sampling, tokens: &[u32]) -> Option<u32> {
    one_of_seed(1, logits, sampling, tokens)
}

fn one_of_seed(seed: u64, logits: &[f32], sampling: &Sampling, tokens: &[u32]) -> Option<u32> {
    let choice = sampling.choice(seed, 0, 100, tokens, &[]);
    let sampler = Sampler::new(&Device::Cpu).unwrap();
    draw(&sampler, &[logits.to_vec()], &[choice], &Device::Cpu).unwrap()[0]
}

/// The probabilities by their definition.
fn probabilities(logits: &[f32], s: &Sampling) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if s.top_k > 0 {
        order.truncate(s.top_k);
    }
    let weight = |i: &usize| (f64::from(logits[*i] - logits[order[0]]) / s.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let (mut sum, mut kept) = (0., 0);
    while kept < order.len() && (kept == 0 || sum < s.top_p * total) {
        sum += weight(&order[kept]);
        kept += 1;
    }
    let drawn: Vec<usize> = order[..kept].iter().copied().filter(|i| weight(i) >= s.min_p).collect();
    let sum: f64 = drawn.iter().map(weight).sum();
    let mut all = vec![0.; logits.len()];
    drawn.iter().for_each(|i| all[*i] = weight(i) / sum);
    all
}

#[test]
fn tokens_come_as_often_as_they_should() -> Result<()> {
    const DRAWS: usize = 20_000;
    let (mut rng, sampler) = (Rng(crate::SplitMix64::new(3)), Sampler::new(&Device::Cpu)?);
    let logits: Vec<f32> = (0..60).map(|_| (1.5 * rng.normal()) as f32).collect();
    let some = Sampling { temperature: 0.8, ..Sampling::default() };
    for sampling in [
        some.clone(),
        Sampling { temperature: 2.5, ..some.clone() },
        Sampling { top_k: 7, ..some.clone() },
        Sampling { top_p: 0.7, ..some.clone() },
        Sampling { min_p: 0.2, ..some.clone() },
        Sampling { top_k: 20, top_p: 0.9, temperature: 1.5, ..some.clone() },
        // Each of the three bounds the choice: without `top_k` top_p keeps more, and min_p less than both.
        Sampling { top_k: 20, top_p: 0.9, min_p: 0.1, temperature: 1.5, ..some },
    ] {
        let mut count = vec![0usize; logits.len()];
        for index in 0..DRAWS {
            let choice = sampling.choice(9, index, 100, &[1], &[]);
            let token = draw(&sampler, std::slice::from_ref(&logits), &[choice], &Device::Cpu)?[0];
            count[token.expect("a token") as usize] += 1;
        }
        let (mut chi, mut degrees) = (0., -1f64);
        for (count, p) in count.iter().zip(probabilities(&logits, &sampling)) {
            let want = p * DRAWS as f64;
            match want < 5. {
                true => assert!((*count as f64) < want + 20., "{sampling:?}: {count}, not {want}"),
                false => (chi, degrees) = (chi + (*count as f64 - want).powi(2) / want, degrees + 1.),
            }
            assert!(p > 0. || *count == 0, "{sampling:?}");
        }
        // Seldom more than 4 deviations off.
        assert!(chi < degrees + 4. * (2. * degrees).sqrt(), "{sampling:?}: chi square {chi} of {degrees}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_drawn_from_and_what_ties() {
    let greedy = Sampling::default();
    let warm = Sampling { temperature: 0.7, ..Sampling::default() };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for sampling in [&greedy, &warm] {
            assert_eq!(one(&[0., bad, 1.], sampling, &[0]), None);
        }
    }
    assert_eq!(one(&[0., 3., 1., 3., -2.], &greedy, &[0]), Some(1));
    assert_eq!(one(&[-5.; 5], &greedy, &[0]), Some(0));
    assert_eq!(one(&[-1., -0., 0.], &greedy, &[0]), Some(2), "-0 is below 0");
    // The best one alone: of equal ones the first.
    for sampling in [
        Sampling { top_k: 1, ..warm.clone() },
        Sampling { top_p: 1e-9, ..warm.clone() },
        Sampling { top_k: 1, temperature: 1e9, ..warm.clone() },
        Sampling { top_k: 1, min_p: 1., ..warm.clone() },
    ] {
        assert_eq!(one(&[1., 2., 2., 2.], &sampling, &[0]), Some(1), "{sampling:?}");
    }
    assert_eq!(one(&[1., 2., 1.999, 1.], &Sampling { temperature: 1e-300, ..warm }, &[0]), Some(1));
}

/// `min_p` measures by the most likely token, at the temperature, and after the penalties.
#[test]
fn min_p_keeps_what_is_likely_enough() {
    let drawn = |logits: &[f32], sampling: &Sampling| -> Vec<u32> {
        let ids: BTreeSet<u32> = (0..200).filter_map(|seed| one_of_seed(seed, logits, sampling, &[0])).collect();
        ids.into_iter().collect()
    };
    let (half, warm) = (0.5f32.ln(), Sampling { temperature: 1., min_p: 0.5, ..Sampling::default() });
    assert_eq!(drawn(&[1., 1. + half + 1e-4, 1. + half - 1e-4, 0.9], &warm), [0, 1, 3]);
    let flat = Sampling { temperature: 2., ..warm.clone() };
    assert_eq!(drawn(&[1., 1. + 2. * half + 1e-4, 1. + 2. * half - 1e-4, 1. + half], &flat), [0, 1, 3]);
    assert_eq!(drawn(&[0., -0., -1e-30, 0.], &Sampling { min_p: 1., ..warm.clone() }), [0, 1, 3], "both zeros");
    // The first token came already: the others are measured by what the penalty leaves of it.
    let penalised = Sampling { repeat_penalty: 10., ..warm };
    assert_eq!(drawn(&[10., 1.2, 0.9, 0.2], &penalised), [0, 1, 2]);
}

/// `top_k` keeps one of two equal tokens, and `min_p`, whose bound is the next number above both, not even that.
#[test]
fn min_p_drops_ties_that_top_k_kept() -> Result<()> {
    let sampling = Sampling { temperature: 1., top_k: 2, min_p: 0.006_737_948_696_192_747, ..Sampling::default() };
    let choices: Vec<Choice> = (0..2000).map(|seed| sampling.choice(seed, 0, 100, &[0], &[])).collect();
    for device in devices() {
        let drawn = draw(&Sampler::new(&device)?, &vec![vec![10., 5., 5.]; choices.len()], &choices, &device)?;
        assert!(drawn.iter().all(|id| *id == Some(0)), "{:?}", device.location());
    }
    Ok(())
}

#[test]
fn penalties_are_of_the_last_tokens() {
    let penalty = |last_n| Sampling { repeat_penalty: 2., repeat_last_n: last_n, ..Sampling::default() };
    let logits = [4., 3., 2.5, -1.];
    assert_eq!(one(&logits, &penalty(2), &[0, 0]), Some(1), "once, though there twice");
    assert_eq!(one(&logits, &penalty(2), &[0, 1, 3]), Some(0), "too long ago");
    assert_eq!(one(&logits, &penalty(3), &[0, 1, 3]), Some(2));
    assert_eq!(one(&logits, &penalty(0), &[0, 0]), Some(0));
    assert_eq!(one(&[-1., -1.5], &penalty(1), &[0]), Some(1), "a negative one is multiplied");
    // Guesses count as the tokens that they may become.
    let (s, tokens) = (Sampling { temperature: 1., ..penalty(4) }, [5, 6, 7, 8, 9]);
    for n in 0..5 {
        let (a, b) = (s.choice(3, 10 + n, 50, &tokens, &[]), s.choice(3, 10 + n, 50, &tokens[..n], &tokens[n..]));
        assert_eq!((a.row, a.last, a.recent), (b.row, b.last, b.recent));
    }
}

/// Token after token by penalties of every kind, as their definitions have it.
#[test]
fn penalties_are_as_they_are_defined() -> Result<()> {
    const VOCAB: usize = 40;
    let (mut rng, sampler) = (Rng(crate::SplitMix64::new(8)), Sampler::new(&Device::Cpu)?);
    let mut changed = 0;
    for case in 0..200 {
        let most = 70;
        let s = Sampling {
            repeat_penalty: [1., 1.4, 0.8][case % 3],
            repeat_last_n: 1 + case % 11,
            presence_penalty: [0., 0.5, 1.5, -0.7][case / 3 % 4],
            frequency_penalty: [0., 0.25, -0.3][case / 12 % 3],
            ..Sampling::default()
        };
        let prompt: Vec<u32> = (0..1 + case % 9).map(|i| ((case + 7 * i) % VOCAB) as u32).collect();
        let mut tokens = prompt.clone();
        for index in 0..50 {
            // Few tokens are likely, so that they come again and again.
            let logits: Vec<f32> = (0..VOCAB).map(|i| (rng.normal() + if i < 6 { 2. } else { 0. }) as f32).collect();
            let penalised = |(id, x): (usize, &f32)| {
                let is = |other: &&u32| **other as usize == id;
                let mut y = f64::from(*x);
                if tokens.iter().rev().take(s.repeat_last_n).any(|other| is(&other)) {
                    let penalty = f64::from(s.repeat_penalty);
                    y = if y > 0. { y / penalty } else { y * penalty };
                }
                match tokens[prompt.len()..].iter().filter(is).count() {
                    0 => y,
                    n => y - f64::from(s.presence_penalty) - n as f64 * f64::from(s.frequency_penalty),
                }
            };
            let want: Vec<f64> = logits.iter().enumerate().map(penalised).collect();
            let best = (0..VOCAB).max_by(|a, b| want[*a].total_cmp(&want[*b])).unwrap_or(0) as u32;
            let choice = s.choice(0, index, most, &tokens, &[]);
            assert_eq!(draw(&sampler, std::slice::from_ref(&logits), &[choice], &Device::Cpu)?, [Some(best)], "{s:?}");
            changed += usize::from(logits.iter().any(|x| *x > logits[best as usize]));
            tokens.push(best);
        }
    }
    assert!(changed > 2000, "{changed}");
    Ok(())
}

/// Against a log-softmax in f64: of the logits as they are, whatever the penalties.
#[test]
fn log_probabilities_are_of_the_logits() -> Result<()> {
    let mut rng = Rng(crate::SplitMix64::new(4));
    for (case, vocab) in [3, 20, 21, 1000, 5000].into_iter().cycle().take(40).enumerate() {
        let logits: Vec<f32> = (0..vocab).map(|_| ((rng.normal() * 4.) as f32 * 2.).round() / 2.).collect();
        let sampling = Sampling { temperature: 3., presence_penalty: 9., repeat_penalty: 3., ..Sampling::default() };
        let count = [0, 1, 5, 20][case % 4];
        let mut choice = sampling.choice(case as u64, 3, 100, &[0, 1, 2, 0, 1], &[]);
        choice.row.likeliest = 1 + count as u32;
        let want = log_softmax(&logits);
        let mut order: Vec<u32> = (0..vocab as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        order.truncate(count);
        let token = Sampler::new(&Device::Cpu)?.draw(&tensor(&[logits], &Device::Cpu)?, &[choice])?.remove(0);
        let Ok(Drawn { id, logprobs: Some(got) }) = token else { panic!("{token:?}") };
        assert!((f64::from(got.token) - want[id as usize]).abs() < 1e-5, "{got:?}");
        assert_eq!(got.likeliest.iter().map(|(id, _)| *id).collect::<Vec<_>>(), order);
        assert!(got.likeliest.iter().all(|(id, x)| (f64::from(*x) - want[*id as usize]).abs() < 1e-5), "{got:?}");
    }
    Ok(())
}

/// Penalties and weights are of the numbers in f32, whatever they lie in.
#[test]
fn every_dtype_gives_the_same_tokens() -> Result<()> {
    let mut rng = Rng(crate::SplitMix64::new(11));
    let (rows, vocab) = (40, 1500);
    let logits: Vec<Vec<f32>> = (0..rows).map(|_| (0..vocab).map(|_| (2. * rng.normal()) as f32).collect()).collect();
    let choices: Vec<Choice> = (0..rows)
        .map(|n| {
            let (temperature, repeat_penalty) = ([0., 0.8][n % 2], 1.1 + 0.03 * n as f32);
            let sampling =
                Sampling { temperature, top_k: 40, repeat_penalty, repeat_last_n: 1000, ..Sampling::default() };
            // Nearly all tokens, so that what a penalty leaves is what is drawn from.
            let before: Vec<u32> = (0..1000).map(|_| (rng.uniform() * vocab as f64) as u32).collect();
            sampling.choice(n as u64, n, 1000, &before, &[])
        })
        .collect();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let narrow = tensor(&logits, &Device::Cpu)?.to_dtype(dtype)?;
        let want = draw_of(&Sampler::new(&Device::Cpu)?, &narrow.to_dtype(DType::F32)?, &choices)?;
        assert!(want.iter().all(Option::is_some));
        for device in &devices() {
            let (sampler, there) = (Sampler::new(device)?, narrow.to_device(device)?);
            let drawn = draw_of(&sampler, &there.copy()?, &choices)?;
            assert_eq!(drawn, want, "{dtype:?} on {:?}", device.location());
            #[cfg(feature = "cuda")]
            if device.is_cuda() {
                let on_device = Rows::new(rows, 1000, None, device)?;
                on_device.load(&choices)?;
                sampler.launch(&there, &on_device)?;
                let drawn = tokens(&on_device.ids()?.to_vec1()?, &[]).into_iter().map(id);
                assert_eq!(drawn.collect::<Vec<_>>(), want, "{dtype:?} on {:?}, as rows", device.location());
            }
        }
    }
    Ok(())
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().map(|x| f64::from(*x)).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - most).exp()).sum();
    logits.iter().map(|x| f64::from(*x) - most - sum.ln()).collect()
}

/// Rows of every kind in one launch, and tokens one after the other on what the launch before left.
#[test]
#[cfg(feature = "cuda")]
fn every_device_draws_the_same() -> Result<()> {
    let Some(device) = candle_gdn_core::device::cuda::testing::device() else { return Ok(()) };
    let (mut rng, here, there) = (Rng(crate::SplitMix64::new(5)), Sampler::new(&Device::Cpu)?, Sampler::new(&device)?);
    for round in 0..60 {
        let rows = rng.pick(&[1, 2, 3, 17, 128, 300, 700]);
        let vocab = rng.pick(&[1, 5, 511, 512, 513, 1024, 7001, 50_000, if rows < 129 { 248_320 } else { 1000 }]);
        let history = 1 + rng.below(70);
        let dtype = rng.pick(&[DType::F32, DType::BF16, DType::F16]);
        let (mut logits, mut choices) = (vec![], vec![]);
        for _ in 0..rows {
            let (kind, spread, mean) = (rng.below(6), rng.pick(&[0.01, 1., 3., 30.]), rng.pick(&[0., 5., -7.]));
            let mut row: Vec<f32> = (0..vocab)
                .map(|i| {
                    let x = (rng.normal() * spread + mean) as f32;
                    match kind {
                        0 => x.round(),
                        1 => 1.,
                        2 => (x * 4.).round() / 4.,
                        3 => [-0., 0., -x.abs()][i % 3],
                        _ => x,
                    }
                })
                .collect();
            if rng.below(12) == 0 {
                row[rng.below(vocab)] = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            }
            logits.push(Tensor::new(row, &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F32)?.to_vec1()?);
            let sampling = Sampling {
                temperature: rng.pick(&[0., 0., 0.7, 1., 1.3, 0.01, 1e-300, 100., 1e9]),
                top_k: rng.pick(&[0, 0, 1, 2, 20, 50, 300, 5000]),
                top_p: rng.pick(&[1., 1., 0.9, 0.5, 0.999, 1e-9]),
                min_p: rng.pick(&[0., 0., 0.05, 0.4, 1., 1e-12]),
                repeat_penalty: rng.pick(&[1., 1., 1.3, 0.7]),
                repeat_last_n: rng.below(80),
                presence_penalty: rng.pick(&[0., 0., 1.5, -0.4]),
                frequency_penalty: rng.pick(&[0., 0., 0.3, -0.2]),
            };
            let before: Vec<u32> = (0..1 + rng.below(90)).map(|_| rng.below(vocab.min(60)) as u32).collect();
            let likeliest = rng.pick(&[0, 0, 1, 2, 6, 21]);
            choices.push((sampling, (rng.0.next(), likeliest), before));
        }
        let choice = |(s, (seed, likeliest), before): &(Sampling, (u64, u32), Vec<u32>), index| {
            let mut choice = s.choice(*seed, index, history, before, &[]);
            choice.row.likeliest = *likeliest;
            choice
        };
        let first: Vec<Choice> = choices.iter().map(|row| choice(row, 4)).collect();
        let want = draw(&here, &logits, &first, &Device::Cpu)?;
        let got = draw_of(&there, &tensor(&logits, &device)?.to_dtype(dtype)?, &first)?;
        assert_eq!(got, want, "round {round}: {rows} rows of {vocab} in {dtype:?}");
        // Room for padding rows too, as in a graph.
        let on_device = Rows::new(rows + 3, history, Some(vocab), &device)?;
        on_device.load(&first)?;
        let padded = [logits.clone(), vec![vec![f32::NAN; vocab]; 3]].concat();
        for index in 4..8 {
            let now: Vec<Choice> = choices.iter().map(|row| choice(row, index)).collect();
            let drawn = here.draw(&tensor(&logits, &Device::Cpu)?, &now)?;
            there.launch(&tensor(&padded, &device)?.to_dtype(dtype)?, &on_device)?;
            let logprobs = on_device.logprobs()?.map(|words| words.to_vec1()).transpose()?.unwrap_or_default();
            let got = tokens(&on_device.drawn()?.to_vec1()?, &logprobs);
            let what = format!("round {round}, token {index}: {rows} rows of {vocab} in {dtype:?}");
            got.iter().zip(&drawn).for_each(|(got, want)| same_logprobs(got, want, &what));
            let want: Vec<_> = drawn.into_iter().map(id).collect();
            let got: Vec<_> = got.into_iter().map(id).collect();
            assert_eq!(got[..rows], want, "{what}");
            for ((_, _, before), token) in choices.iter_mut().zip(&want) {
                before.push(token.unwrap_or(0));
            }
            let ids = on_device.ids()?.to_vec1::<u32>()?;
            assert!(ids.iter().zip(&want).all(|(id, token)| *id == token.unwrap_or(0)));
        }
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn same_logprobs(got: &Token, want: &Token, what: &str) {
    let (Ok(got), Ok(want)) = (got, want) else { return };
    match (&got.logprobs, &want.logprobs) {
        (None, None) => {}
        (Some(got), Some(want)) => {
            let near = |a: f32, b: f32| (a - b).abs() <= 2e-5 + 1e-6 * b.abs();
            assert!(near(got.token, want.token), "{what}: {got:?}, not {want:?}");
            assert_eq!(got.likeliest.len(), want.likeliest.len(), "{what}");
            let same = |(got, want): (&(u32, f32), &(u32, f32))| got.0 == want.0 && near(got.1, want.1);
            assert!(got.likeliest.iter().zip(&want.likeliest).all(same), "{what}: {got:?}, not {want:?}");
        }
        _ => panic!("{what}: {got:?}, not {want:?}"),
    }
}
