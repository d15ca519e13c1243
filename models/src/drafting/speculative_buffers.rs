//! A speculative step on buffers that stay where they are: the draft head drafts, the model verifies, drafts are accepted, all
//! without the host.
//!
//! A step of depth `d` has `d + 1` tokens of each sequence, the certain one and its drafts. Between two steps each sequence
//! keeps its accepted tokens and their hidden states. The next step feeds them to the draft head. Padding rows are fed too;
//! their cache entries are overwritten.

use super::cuda::{speculate, Launcher, Sizes};
use crate::abi::speculate::{gdn_speculate_begin, gdn_speculate_end};
use crate::causal_lm::CausalLm;
use crate::sampling::rows::Rows;
use crate::sampling::{Choice, Sampler};
use crate::sequences::kv::KvRows;
use crate::sequences::pass::{arena, Mode, Pass};
use crate::sequences::pool::SequencePool;
use candle_core::{bail, DType, Result, Tensor};
use candle_gdn::{CuSeqlens, Slots, NO_SLOT};
use candle_gdn_core::device::Launch;

pub(super) const OP: &str = "speculative step";

/// Words of a sequence besides its tokens: how many were accepted, the row of the last of them, and three lengths.
pub(super) const WORDS: usize = 5;

/// Inputs and output of a step of up to so many sequences; the others are padding.
#[derive(Debug)]
pub(super) struct SpeculativeBuffers {
    batch: usize,
    /// Of a sequence: the certain one, and those drafted.
    pub tokens: usize,
    /// Words of all sequences: accepted tokens of the step before, the row of the last of them, tokens in the model's caches, in the
    /// head's cache, and in that with the accepted tokens; then the tokens of the step, and the output.
    words: Tensor,
    /// How the tokens of a step are drawn. Before a step, its ids are the tokens after the hidden states.
    rows: Rows,
    pub sampler: Sampler,
    /// How the drafts are drawn.
    greedy: Rows,
    /// `[batch * tokens, hidden_size]`: those of the step before, accepted ones first.
    hidden: Tensor,
    pass: Pass,
    /// The head's rows: for the accepted tokens, and after them.
    first: KvRows,
    later: KvRows,
    pub forced_acceptance: Option<f32>,
}

/// What the buffers hold of one sequence before a step.
#[derive(Debug)]
pub(super) struct Start {
    pub slot: usize,
    /// How the next token is chosen.
    pub choice: Choice,
}

impl SpeculativeBuffers {
    /// All rows are padding.
    pub fn new(
        model: &CausalLm,
        pool: &SequencePool,
        batch: usize,
        depth: usize,
        sampler: &Sampler,
        forced_acceptance: Option<f32>,
        logprobs: bool,
    ) -> Result<Self> {
        if pool.spans.is_none() {
            bail!("{OP}: pool: expected one with rings, where drafts are accepted by their number")
        }
        let (device, tokens) = (&pool.device, depth + 1);
        let words = Tensor::zeros(batch * (WORDS + 2 * tokens + 1), DType::U32, device)?;
        let rows = Rows::new(batch * tokens, pool.max_len, logprobs.then_some(model.config.vocab_size), device)?;
        let slots = || Slots::new(&vec![NO_SLOT; batch], device);
        let kv_rows = |column: usize| {
            let positions = words.narrow(0, column * batch, batch)?;
            Ok::<_, candle_core::Error>(KvRows::Device {
                slots: slots()?,
                positions,
                max_len: pool.max_len,
                pieces: Vec::new(),
            })
        };
        let pass = Pass {
            lengths: vec![tokens; batch],
            cu_seqlens: Some(CuSeqlens::from_lengths(&vec![tokens; batch], device)?),
            states: slots()?,
            kv: kv_rows(2)?,
            launch: Launch { overlap: true, arena: arena(device)? },
            _working: None,
        };
        let buffers = Self {
            batch,
            tokens,
            first: kv_rows(3)?,
            later: kv_rows(4)?,
            words,
            rows,
            sampler: sampler.clone(),
            greedy: Rows::greedy(batch, device)?,
            hidden: Tensor::zeros((batch * tokens, model.config.hidden_size), model.dtype, device)?,
            pass,
            forced_acceptance,
        };
        buffers.words.slice_set(&Tensor::ones(batch, DType::U32, device)?, 0, 0)?;
        Ok(buffers)
    }

    /// The launches of a step: what is captured.
    pub fn run(&self, model: &CausalLm, pool: &mut SequencePool) -> Result<()> {
        let launch = &self.pass.launch;
        if let Some(arena) = &launch.arena {
            arena.begin_pass();
        }
        self.draft(model, pool)?;
        self.bookkeeping(gdn_speculate_begin)?;
        let ids = self.columns(WORDS, self.tokens)?;
        let mut drafted = vec![];
        let x = model.through_layers(&ids, &self.pass, pool, Mode::Verify(&mut drafted))?;
        let (_, y) = x.norm(&model.norm, launch)?;
        self.hidden.slice_set(&y, 0, 0)?;
        self.sampler.launch(&model.scores_launched(&y, launch)?, &self.rows)?;
        self.bookkeeping(gdn_speculate_end)?;
        match (&pool.spans, &self.pass.cu_seqlens) {
            (Some(spans), Some(cu)) => spans.accept(&self.pass.states, cu, &self.columns(0, 1)?),
            _ => bail!("{OP}: expected a pool with rings"),
        }
    }

    /// Drafts the tokens after the first.
    fn draft(&self, model: &CausalLm, pool: &mut SequencePool) -> Result<()> {
        let (Some(head), Some(draft_head), launch) = (&mut pool.head, &model.draft_head, &self.pass.launch) else {
            bail!("{OP}: model: expected one with a draft head, got one without")
        };
        let step = self.columns(WORDS, self.tokens)?.reshape((self.batch, self.tokens))?;
        let (cu, last) = (self.pass.cu_seqlens.as_ref(), self.columns(1, 1)?);
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
            step.slice_set(&self.greedy.ids()?.unsqueeze(1)?, 1, depth)?;
        }
        Ok(())
    }

    fn bookkeeping(&self, launcher: Launcher) -> Result<()> {
        let sizes = Sizes { sequences: self.batch, tokens: self.tokens, history: self.rows.history };
        speculate(launcher, &self.words, &self.rows.words, sizes, self.forced_acceptance)
    }

    /// `count` words of all sequences from word `first` on.
    fn columns(&self, first: usize, count: usize) -> Result<Tensor> {
        self.words.narrow(0, first * self.batch, count * self.batch)
    }

    /// The output, `[batch * (1 + tokens)]`: how many tokens of each sequence were accepted, and the token drawn after each; then
    /// the log-probabilities, where they may be requested.
    pub fn out(&self) -> Result<Vec<Tensor>> {
        let out = self.columns(WORDS + self.tokens, self.tokens + 1)?;
        Ok([out].into_iter().chain(self.rows.logprobs()?).collect())
    }

    /// The hidden states after a step of so many sequences, a copy for the draft head.
    pub fn hidden(&self, sequences: usize) -> Result<Tensor> {
        self.hidden.narrow(0, 0, sequences * self.tokens)?.force_contiguous()
    }

    /// Uploads all that a step of these sequences reads. The hidden state of the last token of each waits in the pool, and no more
    /// than fit besides.
    pub fn load(&mut self, pool: &SequencePool, starts: &[Start]) -> Result<()> {
        let Some(head) = &pool.head else { bail!("{OP}: pool: expected one with a draft head") };
        let (batch, tokens) = (self.batch, self.tokens);
        let mut words = vec![0u32; batch * (WORDS + tokens)];
        let mut choices: Vec<Choice> = (0..batch * tokens).map(|_| Choice::padding(0)).collect();
        let [mut states, mut slots] = [vec![NO_SLOT; batch], vec![NO_SLOT; batch]];
        for n in 0..batch {
            let first = n * tokens;
            let mut columns = [1, first, 0, 0, 0];
            if let Some(Start { slot, choice }) = starts.get(n) {
                let (entry, state) = (&pool.entries[*slot], &head.slots[*slot]);
                let accepted = state.tokens.len() + 1;
                if accepted > tokens {
                    bail!("{OP}: expected at most {tokens} hidden states to wait, got {accepted}")
                }
                (states[n], slots[n]) = (entry.state, *slot as u32);
                let last = first + accepted - 1;
                columns = [accepted, last, entry.len, state.len, state.len + accepted];
                state.tokens.iter().enumerate().for_each(|(i, id)| choices[first + i].last = *id);
                choices[last] = choice.clone();
                words[WORDS * batch + first] = choice.last;
                state.copy_waiting(&self.hidden, first)?;
            }
            columns.iter().enumerate().for_each(|(i, value)| words[i * batch + n] = *value as u32);
        }
        self.words.slice_set(&Tensor::new(words, self.words.device())?, 0, 0)?;
        self.rows.load(&choices)?;
        self.pass.states.set(&states, &states)?;
        for rows in [&mut self.pass.kv, &mut self.first, &mut self.later] {
            if let KvRows::Device { slots: row_slots, .. } = rows {
                row_slots.set(&slots, &slots)?;
            }
        }
        Ok(())
    }
}
