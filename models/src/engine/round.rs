//! A round on buffers that stay where they are: the draft head drafts, the model verifies, and what is right stays, without
//! the host.
//!
//! A round of depth `d` has `d + 1` tokens of each sequence, the certain one and its drafts. Between rounds there are of each
//! the tokens of the last one that stayed, with their hidden states, which the head is fed when the next one begins. Rows
//! behind those go through the head as well: what they leave in its cache is written over.

use super::kv::KvRows;
use super::pass::{arena, Mode, Pass};
use super::pool::SequencePool;
use super::sampling::{Choice, Rows, Sampler};
use crate::causal_lm::CausalLm;
use crate::cpu::round::Round;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn::plumbing::Launch;
use candle_gdn::{CuSeqlens, Slots, NO_SLOT};

pub(super) const OP: &str = "round";

/// Words of a sequence besides its tokens: how many stayed, the row of the last of them, and three lengths.
const WORDS: usize = 5;

/// Inputs and output of a round of up to so many sequences. Rows of nobody are padding.
#[derive(Debug)]
pub(super) struct RoundBuffers {
    batch: usize,
    /// Of a sequence: the certain one, and those drafted.
    tokens: usize,
    /// Of all sequences the tokens that stayed of the round before, the row of the last of them, their lengths in the model's
    /// caches, in the head's, and in that with the tokens that stayed, then the tokens of the round, and what comes out.
    words: Tensor,
    /// How the tokens of a round are drawn. Before a round its ids are the tokens behind the hidden states.
    rows: Rows,
    sampler: Sampler,
    /// How the head's are.
    greedy: Rows,
    /// `[batch * tokens, hidden_size]`: of the round before, those that stayed first.
    hidden: Tensor,
    pass: Pass,
    /// Of the head: with the tokens that stayed, and behind them.
    first: KvRows,
    later: KvRows,
    /// For benchmarks: the chance of a draft to be taken for right.
    forced: f32,
}

/// Of one sequence, what the buffers are to hold before a round.
#[derive(Debug)]
pub(super) struct Start {
    pub slot: usize,
    /// How the token behind `next` is chosen.
    pub choice: Choice,
}

impl RoundBuffers {
    /// All rows are padding.
    pub fn new(
        model: &CausalLm,
        pool: &SequencePool,
        batch: usize,
        depth: usize,
        sampler: &Sampler,
        forced: Option<f32>,
        tells: bool,
    ) -> Result<Self> {
        if pool.cursors.is_none() {
            bail!("{OP}: pool: expected one with rings, whose drafts stay by their number")
        }
        let (device, tokens) = (&pool.device, depth + 1);
        let words = Tensor::zeros(batch * (WORDS + 2 * tokens + 1), DType::U32, device)?;
        let mut rows = Rows::new(batch * tokens, pool.max_len, device)?;
        if tells {
            rows = rows.telling(model.config.vocab_size)?;
        }
        let slots = || Slots::new(&vec![NO_SLOT; batch], device);
        let at = |positions: usize| {
            let positions = words.narrow(0, positions * batch, batch)?;
            Ok::<_, candle_core::Error>(KvRows::Device { slots: slots()?, positions, max_len: pool.max_len })
        };
        let pass = Pass {
            lengths: vec![tokens; batch],
            cu_seqlens: Some(CuSeqlens::from_lengths(&vec![tokens; batch], device)?),
            states: slots()?,
            kv: at(2)?,
            launch: Launch { overlap: true, arena: arena(device)? },
            _working: None,
        };
        let buffers = Self {
            batch,
            tokens,
            first: at(3)?,
            later: at(4)?,
            words,
            rows,
            sampler: sampler.clone(),
            greedy: Rows::greedy(batch, device)?,
            hidden: Tensor::zeros((batch * tokens, model.config.hidden_size), model.dtype, device)?,
            pass,
            forced: forced.unwrap_or(-1.),
        };
        buffers.words.slice_set(&Tensor::ones(batch, DType::U32, device)?, 0, 0)?;
        Ok(buffers)
    }

    /// Tokens of each sequence in a round.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    pub fn forced(&self) -> Option<f32> {
        Some(self.forced).filter(|forced| *forced >= 0.)
    }

    /// The launches of a round: what is captured.
    pub fn run(&self, model: &CausalLm, pool: &mut SequencePool) -> Result<()> {
        let launch = &self.pass.launch;
        #[cfg(feature = "cuda")]
        if let Some(arena) = &launch.arena {
            arena.begin_pass();
        }
        self.draft(model, pool)?;
        self.around_draw(true)?;
        let ids = self.part(WORDS, self.tokens)?;
        let mut drafted = vec![];
        let x = model.through_layers(&ids, &self.pass, pool, Mode::Verify(&mut drafted))?;
        let (_, y) = x.norm(&model.norm, launch)?;
        self.hidden.slice_set(&y, 0, 0)?;
        self.sampler.launch(&model.scores_launched(&y, launch)?, &self.rows)?;
        self.around_draw(false)?;
        match (&pool.cursors, &self.pass.cu_seqlens) {
            (Some(cursors), Some(cu)) => cursors.accept(&self.pass.states, cu, &self.part(0, 1)?),
            _ => bail!("{OP}: expected a pool with rings"),
        }
    }

    /// The tokens of the round behind the first.
    fn draft(&self, model: &CausalLm, pool: &mut SequencePool) -> Result<()> {
        let (Some(head), Some(draft_head), launch) = (&mut pool.head, &model.draft_head, &self.pass.launch) else {
            bail!("{OP}: model: expected one with a draft head, got one without")
        };
        let round = self.part(WORDS, self.tokens)?.reshape((self.batch, self.tokens))?;
        let (cu, last) = (self.pass.cu_seqlens.as_ref(), self.part(1, 1)?);
        let packed = (&self.rows.ids()?, &self.hidden);
        let mut y = model.head_pass(draft_head, &mut head.kv, packed, (cu, &self.first), Some(&last), launch)?;
        for depth in 1..self.tokens {
            if depth > 1 {
                let packed = (&self.greedy.ids()?, &y);
                y = model.head_pass(draft_head, &mut head.kv, packed, (None, &self.later), None, launch)?;
                if let Some(cache) = head.kv.attention_cache(&self.later)? {
                    cache.advance(1)?;
                }
            }
            self.sampler.launch(&model.draft_scores(draft_head, &y, launch)?, &self.greedy)?;
            round.slice_set(&self.greedy.ids()?.unsqueeze(1)?, 1, depth)?;
        }
        Ok(())
    }

    /// `gdn_round_begin`, or `gdn_round_end`.
    fn around_draw(&self, before: bool) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.words.device().is_cuda() {
            use crate::cuda::round::{round, Half};
            let (half, sizes) =
                (if before { Half::Begin } else { Half::End }, [self.batch, self.tokens, self.rows.history]);
            return round(half, &self.words, &self.rows.words, sizes, self.forced);
        }
        let change = |mut round: Round<'_>| if before { round.begin() } else { round.end() };
        on_host((&self.words, &self.rows), [self.batch, self.tokens], self.forced, change)
    }

    /// Of all sequences `count` words, behind `first` of each.
    fn part(&self, first: usize, count: usize) -> Result<Tensor> {
        self.words.narrow(0, first * self.batch, count * self.batch)
    }

    /// What comes out, `[batch * (1 + tokens)]`: of each sequence how many tokens stayed, and what was drawn behind each; and what
    /// is told of all of these, if there is such.
    pub fn out(&self) -> Result<Vec<Tensor>> {
        let out = self.part(WORDS + self.tokens, self.tokens + 1)?;
        Ok([out].into_iter().chain(self.rows.told()?).collect())
    }

    /// The hidden states behind a round of so many sequences, a copy for the draft head.
    pub fn hidden(&self, sequences: usize) -> Result<Tensor> {
        self.hidden.narrow(0, 0, sequences * self.tokens)?.force_contiguous()
    }

    /// Uploads all that a round of these sequences reads. Of each the hidden state of the last token that it was fed waits in
    /// the pool, and no more than fit besides.
    pub fn load(&mut self, pool: &SequencePool, starts: &[Start]) -> Result<()> {
        let Some(head) = &pool.head else { bail!("{OP}: pool: expected one with a draft head") };
        let (batch, tokens) = (self.batch, self.tokens);
        let mut words = vec![0u32; batch * (WORDS + tokens)];
        let mut choices: Vec<Choice> = (0..batch * tokens).map(|_| Choice::nobody(0)).collect();
        let [mut states, mut slots] = [vec![NO_SLOT; batch], vec![NO_SLOT; batch]];
        for n in 0..batch {
            let first = n * tokens;
            let mut each = [1, first, 0, 0, 0];
            if let Some(Start { slot, choice }) = starts.get(n) {
                let (entry, state) = (&pool.entries[*slot], &head.slots[*slot]);
                let stayed = state.tokens().len() + 1;
                if stayed > tokens {
                    bail!("{OP}: expected at most {tokens} hidden states to wait, got {stayed}")
                }
                (states[n], slots[n]) = (entry.state, *slot as u32);
                let last = first + stayed - 1;
                each = [stayed, last, entry.len, state.len, state.len + stayed];
                state.tokens().iter().enumerate().for_each(|(i, id)| choices[first + i].last = *id);
                choices[last] = choice.clone();
                words[WORDS * batch + first] = choice.last;
                state.copy_waiting(&self.hidden, first)?;
            }
            each.iter().enumerate().for_each(|(i, value)| words[i * batch + n] = *value as u32);
        }
        self.words.slice_set(&Tensor::new(words, self.words.device())?, 0, 0)?;
        self.rows.load(&choices)?;
        self.pass.states.set(&states, &states)?;
        for rows in [&mut self.pass.kv, &mut self.first, &mut self.later] {
            if let KvRows::Device { slots: of_rows, .. } = rows {
                of_rows.set(&slots, &slots)?;
            }
        }
        Ok(())
    }
}

/// `gdn_round_begin` or `gdn_round_end` on the CPU.
fn on_host(
    (words, rows): (&Tensor, &Rows),
    [batch, tokens]: [usize; 2],
    forced: f32,
    change: impl FnOnce(Round<'_>),
) -> Result<()> {
    let mut all = words.to_vec1::<u32>()?;
    rows.on_host(|host| {
        let (of_each, rest) = all.split_at_mut(WORDS * batch);
        let (ids, out) = rest.split_at_mut(batch * tokens);
        let mut of_each = of_each.chunks_exact_mut(batch);
        let mut next = || of_each.next().unwrap_or_default();
        change(Round {
            tokens,
            history: rows.history,
            stayed: next(),
            last: next(),
            positions: next(),
            head: next(),
            behind: next(),
            ids,
            out,
            rows: &mut host.rows,
            chosen: &mut host.ids,
            drawn: &mut host.drawn,
            recent: &mut host.recent,
            forced,
        });
        Ok(())
    })?;
    words.slice_set(&Tensor::new(all, words.device())?, 0, 0)
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::abi::sampling::{SamplingRow, ROW_WORDS};
    use crate::cuda::round::{round, Half};
    use crate::SplitMix64;
    use candle_core::Device;

    /// Whatever rounds bring: what the kernels leave is what the CPU leaves.
    #[test]
    fn rounds_are_the_same_on_every_device() -> Result<()> {
        let Some(device) = candle_gdn::plumbing::cuda::testing::device() else { return Ok(()) };
        let mut rng = SplitMix64::new(17);
        let mut below = |n: usize| (rng.next() % n as u64) as usize;
        for case in 0..40 {
            let (batch, tokens, history) = (1 + below(300), 1 + below(8), 1 + below(40));
            let forced = [-1., -1., 0., 0.5, 1.][below(5)];
            let devices = [&Device::Cpu, &device];
            let rows = devices.map(|device| Rows::new(batch * tokens, history, device));
            let [here, there] = rows;
            let (here, there) = (here?, there?);
            let mut choices = vec![];
            let mut words = vec![0u32; batch * (WORDS + 2 * tokens + 1)];
            for n in 0..batch {
                let (nobody, stayed) = (below(6) == 0, 1 + below(tokens));
                let window = [0, 1 + below(history)][below(2)] as u32;
                let row = SamplingRow {
                    scale: [0., 1.5][below(2)],
                    seed: n as u64,
                    index: below(100) as u64,
                    top_k: 7,
                    penalty: 1.25,
                    window,
                    seen: below(60) as u32,
                    ..SamplingRow::GREEDY
                };
                let recent = (0..history).map(|_| below(50) as u32).collect();
                let own = Choice { row, last: below(50) as u32, recent };
                for i in 0..tokens {
                    let here = i + 1 == stayed && !nobody;
                    choices.push(if here { own.clone() } else { Choice::nobody(below(50) as u32) });
                }
                for (i, value) in [stayed, n * tokens + stayed - 1, below(99), below(99), below(99)].iter().enumerate()
                {
                    words[i * batch + n] = *value as u32;
                }
                // Of few ids, so that drafts are often what was drawn.
                (0..tokens).for_each(|i| words[WORDS * batch + n * tokens + i] = below(2) as u32);
            }
            here.load(&choices)?;
            there.load(&choices)?;
            let both = devices.map(|device| Tensor::new(&words[..], device));
            let [words, on_device] = both;
            let (words, on_device) = (words?, on_device?);
            for again in 0..3 {
                on_host((&words, &here), [batch, tokens], forced, |mut round| round.begin())?;
                round(Half::Begin, &on_device, &there.words, [batch, tokens, history], forced)?;
                let drawn: Vec<u32> = (0..batch * tokens).map(|_| below(2) as u32).collect();
                for rows in [&here, &there] {
                    // As gdn_sampling leaves them.
                    let drawn = Tensor::new(&drawn[..], rows.words.device())?;
                    rows.words.slice_set(&drawn, 0, batch * tokens * ROW_WORDS)?;
                    rows.words.slice_set(&drawn, 0, batch * tokens * (ROW_WORDS + 1))?;
                }
                on_host((&words, &here), [batch, tokens], forced, |mut round| round.end())?;
                round(Half::End, &on_device, &there.words, [batch, tokens, history], forced)?;
                let what = format!("case {case}, {again}: {batch} of {tokens}, {history}, {forced}");
                assert_eq!(on_device.to_vec1::<u32>()?, words.to_vec1::<u32>()?, "{what}");
                assert_eq!(there.words.to_vec1::<u32>()?, here.words.to_vec1::<u32>()?, "{what}");
            }
        }
        Ok(())
    }
}
