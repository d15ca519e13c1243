//! Drafts of the model's draft head, and what it remembers of each sequence.
//!
//! The head's token `j` is made of the model's hidden state at `j` and token `j + 1`: of a sequence that has seen `n`
//! tokens it can know `n - 1`, and the last hidden state waits for the token that comes next. Hidden states of prompts go
//! into its keys and values with each pass. Those of single tokens and of accepted drafts wait for the next draft, and take
//! no pass of their own.

use super::kv::{KvRows, KvSlots};
use super::pool::{Sequence, SequencePool};
use super::sampling::Token;
use crate::blocks::decoder::{Mixer, Residual};
use crate::blocks::draft_head::DraftHead;
use crate::blocks::rotary::Angles;
use crate::causal_lm::CausalLm;
use candle_core::{bail, DType, Result, Tensor, D};
use candle_gdn::plumbing::Launch;
use candle_gdn::{CuSeqlens, Slots};
use std::ops::Range;

const DRAFT: &str = "draft";

/// Hidden states that wait at most, before they take a pass after all: this bounds their memory.
const WAITING: usize = 64;
/// Pieces that are put together by copies; more are looked up by their rows.
const COPIES: usize = 4;

/// Of all sequences of a pool.
#[derive(Debug)]
pub(super) struct HeadSlots {
    pub kv: KvSlots,
    /// Whether hidden states are not worth a pass of the head: of those that wait all but the last are forgotten then. Drafts know
    /// less of a sequence for it, and nothing else does.
    pub idle: bool,
    pub slots: Vec<HeadState>,
}

/// Of one sequence.
#[derive(Debug, Default, Clone)]
pub(super) struct HeadState {
    /// Tokens in the head's cache.
    pub len: usize,
    /// The model's hidden states from there on, one of each token.
    waiting: Vec<Rows>,
    /// The tokens behind these: of all but the last.
    tokens: Vec<u32>,
    /// One more token is in the cache, if this is the one that comes next.
    pub next: Option<u32>,
}

/// Some rows of a tensor.
#[derive(Debug, Clone)]
struct Rows {
    of: Tensor,
    range: Range<usize>,
}

impl HeadState {
    /// The tokens that wait: the last hidden state waits for the one behind them.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Copies the hidden states that wait to row `at` of a tensor.
    pub fn copy_waiting(&self, to: &Tensor, mut at: usize) -> Result<()> {
        for rows in &self.waiting {
            to.slice_set(&rows.of.narrow(0, rows.range.start, rows.range.len())?, 0, at)?;
            at += rows.range.len();
        }
        Ok(())
    }

    /// The model was fed `tokens`, and these are its hidden states.
    fn push(&mut self, tokens: &[u32], rows: impl IntoIterator<Item = Rows>) {
        match (self.waiting.is_empty(), self.next.take()) {
            // Before the first token there is no hidden state.
            (true, _) => self.tokens = tokens[1..].to_vec(),
            (false, Some(next)) if next == tokens[0] => {
                self.len += 1;
                self.waiting.clear();
                self.tokens = tokens[1..].to_vec();
            }
            (false, _) => self.tokens.extend(tokens),
        }
        self.waiting.extend(rows);
    }

    /// The first `count` of what waits are in the cache.
    fn cached(&mut self, count: usize) {
        self.len += count;
        self.forget(count);
    }

    /// The first `count` of what waits are not to wait any more.
    fn forget(&mut self, mut count: usize) {
        self.tokens.drain(..count);
        self.waiting.retain_mut(|rows| {
            let gone = count.min(rows.range.len());
            (rows.range.start, count) = (rows.range.start + gone, count - gone);
            !rows.range.is_empty()
        });
    }

    /// A copy that keeps no more memory than its own.
    pub fn own(&self) -> Result<Self> {
        let own = |rows: &Rows| {
            let of = rows.of.narrow(0, rows.range.start, rows.range.len())?.force_contiguous()?;
            Ok(Rows { range: 0..rows.range.len(), of })
        };
        let waiting = self.waiting.iter().map(own).collect::<Result<_>>()?;
        Ok(Self { waiting, next: None, ..self.clone() })
    }

    pub fn size_in_bytes(&self) -> usize {
        self.waiting.iter().map(|rows| rows.of.elem_count() * rows.of.dtype().size_in_bytes()).sum()
    }
}

impl HeadSlots {
    /// Slots, and tokens in each before the new ones.
    fn rows(&self, model: &CausalLm, rows: Vec<(usize, usize)>, lengths: &[usize]) -> Result<KvRows> {
        if let KvSlots::Panels(..) = self.kv {
            let mut angles = Angles::default();
            for ((_, position), tokens) in rows.iter().zip(lengths) {
                model.rotary.append(*position, *tokens, &mut angles);
            }
            return Ok(KvRows::Host { rows, angles });
        }
        let max_len = rows.iter().zip(lengths).map(|((_, at), new)| at + new).max().unwrap_or(0);
        let [slots, positions]: [Vec<u32>; 2] =
            [rows.iter().map(|row| row.0 as u32).collect(), rows.iter().map(|row| row.1 as u32).collect()];
        let slots = Slots::new(&slots, &model.device)?;
        Ok(KvRows::Device { slots, positions: Tensor::new(positions, &model.device)?, max_len })
    }

    /// The first `counts` of what waits in the slots, packed.
    fn hidden(&self, slots: &[usize], counts: &[usize]) -> Result<Tensor> {
        let mut pieces: Vec<Rows> = Vec::new();
        for (&slot, &count) in slots.iter().zip(counts) {
            let mut left = count;
            for rows in &self.slots[slot].waiting {
                let range = rows.range.start..rows.range.start + left.min(rows.range.len());
                left -= range.len();
                match pieces.last_mut() {
                    _ if range.is_empty() => {}
                    Some(last) if last.of.id() == rows.of.id() && last.range.end == range.start => {
                        last.range.end = range.end;
                    }
                    _ => pieces.push(Rows { of: rows.of.clone(), range }),
                }
            }
            if left > 0 {
                bail!("{DRAFT}: expected {count} hidden states in slot {slot}, got {}", count - left)
            }
        }
        if let [one] = pieces.as_slice() {
            return one.of.narrow(0, one.range.start, one.range.len());
        }
        if pieces.len() <= COPIES {
            let pieces = pieces.iter().map(|rows| rows.of.narrow(0, rows.range.start, rows.range.len()));
            return Tensor::cat(&pieces.collect::<Result<Vec<_>>>()?, 0);
        }
        let (mut sources, mut rows): (Vec<(Tensor, usize)>, Vec<u32>) = (Vec::new(), Vec::new());
        let mut end = 0;
        for piece in &pieces {
            let known = sources.iter().find(|(of, _)| of.id() == piece.of.id());
            let first = known.map_or(end, |(_, first)| *first);
            if first == end {
                end += piece.of.dim(0)?;
                sources.push((piece.of.clone(), first));
            }
            rows.extend(piece.range.clone().map(|row| (first + row) as u32));
        }
        let sources: Vec<Tensor> = sources.into_iter().map(|(of, _)| of).collect();
        let rows = Tensor::new(rows, sources[0].device())?;
        match sources.as_slice() {
            [one] => one.index_select(&rows, 0),
            all => Tensor::cat(all, 0)?.index_select(&rows, 0),
        }
    }
}

/// Boundaries of packed tokens; `None` where each sequence has one.
fn boundaries(model: &CausalLm, lengths: &[usize]) -> Result<Option<CuSeqlens>> {
    match lengths.iter().all(|&n| n == 1) {
        true => Ok(None),
        false => CuSeqlens::from_lengths(lengths, &model.device).map(Some),
    }
}

impl SequencePool {
    /// After a pass of the model that gave `hidden`, packed, and of it the `last` row of each sequence.
    pub(super) fn heard<'a>(
        &mut self,
        model: &CausalLm,
        slots: &[usize],
        tokens: impl Iterator<Item = &'a [u32]>,
        hidden: &Tensor,
        last: &Tensor,
    ) -> Result<()> {
        let Some(head) = &mut self.head else { return Ok(()) };
        let (mut first, mut full) = (0, Vec::new());
        for (row, (&slot, tokens)) in slots.iter().zip(tokens).enumerate() {
            let state = &mut head.slots[slot];
            let before = Rows { of: hidden.clone(), range: first..first + tokens.len() - 1 };
            // Of a long prompt the last row alone waits, and not with all others.
            let last = Rows { of: last.clone(), range: row..row + 1 };
            state.push(tokens, [before, last].into_iter().filter(|rows| !rows.range.is_empty()));
            first += tokens.len();
            if !head.idle && !state.tokens.is_empty() && tokens.len() > 1 {
                full.push(slot);
            }
        }
        self.digest(model, &full)?;
        self.bound_waiting(model, slots)
    }

    /// Where many hidden states wait they go into the head's cache, or are forgotten.
    pub(super) fn bound_waiting(&mut self, model: &CausalLm, slots: &[usize]) -> Result<()> {
        match &mut self.head {
            Some(head) if head.idle => {
                // Each that waits keeps a piece of the heap from being used again: steps of the demo were 2 % slower.
                let most = if model.device.is_cpu() { 0 } else { WAITING };
                for &slot in slots {
                    let state = &mut head.slots[slot];
                    state.forget(state.tokens.len().saturating_sub(most));
                }
                Ok(())
            }
            _ => self.digest_to(model, slots, WAITING),
        }
    }

    /// In none of these slots more than `most` hidden states wait.
    pub(super) fn digest_to(&mut self, model: &CausalLm, slots: &[usize], most: usize) -> Result<()> {
        let Some(head) = &self.head else { return Ok(()) };
        let full = |slot: &usize| head.slots[*slot].tokens.len() >= most;
        let full: Vec<usize> = slots.iter().copied().filter(full).collect();
        self.digest(model, &full)
    }

    /// A round on the device took in what waited in a slot, and `drawn` came of it; of what waits now the hidden states are the
    /// rows of a tensor from one on, or with the next round that has begun already.
    pub(super) fn landed(&mut self, slot: usize, drawn: &[Token], hidden: Option<(&Tensor, usize)>) {
        let entry = &mut self.entries[slot];
        (entry.len, entry.broken) = (entry.len + drawn.len(), hidden.is_none());
        let Some(head) = &mut self.head else { return };
        let state = &mut head.slots[slot];
        state.len += state.tokens.len() + 1;
        state.next = None;
        // All but the last one drawn were drafts, which the model was fed.
        state.tokens = drawn[..drawn.len().saturating_sub(1)].iter().flatten().map(|drawn| drawn.id).collect();
        let rows = |(of, first): (&Tensor, usize)| Rows { of: of.clone(), range: first..first + drawn.len() };
        state.waiting = hidden.into_iter().map(rows).collect();
    }

    /// What waits in these slots goes into the head's cache, but for the last hidden state of each.
    pub(super) fn digest(&mut self, model: &CausalLm, full: &[usize]) -> Result<()> {
        let (Some(head), Some(draft_head)) = (&mut self.head, &model.draft_head) else { return Ok(()) };
        if full.is_empty() {
            return Ok(());
        }
        let counts: Vec<usize> = full.iter().map(|&slot| head.slots[slot].tokens.len()).collect();
        let ids: Vec<u32> = full.iter().flat_map(|&slot| head.slots[slot].tokens.iter().copied()).collect();
        let launch = Launch::default().overlapping();
        let cu_seqlens = boundaries(model, &counts)?;
        let hidden = head.hidden(full, &counts)?;
        let x = draft_head.input(&model.embed(&Tensor::new(ids, &model.device)?)?, &hidden, &launch)?;
        let x = draft_head.layer.mixer_input(x, &launch)?;
        let at = full.iter().map(|&slot| (slot, head.slots[slot].len)).collect();
        let rows = head.rows(model, at, &counts)?;
        let Mixer::Full(attention) = &draft_head.layer.mixer else { bail!("{DRAFT}: expected a softmax layer") };
        attention.append_slots(&x, cu_seqlens.as_ref(), &rows, &mut head.kv, &launch)?;
        for (&slot, &count) in full.iter().zip(&counts) {
            head.slots[slot].cached(count);
        }
        Ok(())
    }

    /// After single tokens, or drafts of which some were accepted: `rows` of `hidden` are those of each sequence's tokens.
    pub(super) fn heard_later<'a>(
        &mut self,
        slots: &[usize],
        tokens: impl Iterator<Item = (&'a [u32], usize)>,
        hidden: &Tensor,
    ) {
        let Some(head) = &mut self.head else { return };
        for (&slot, (tokens, first)) in slots.iter().zip(tokens) {
            if !tokens.is_empty() {
                head.slots[slot].push(tokens, [Rows { of: hidden.clone(), range: first..first + tokens.len() }]);
            }
        }
    }

    /// A step of which the head does not learn: what it is fed next it takes for what follows what it knows.
    #[cfg(feature = "cuda")]
    pub(super) fn unheard(&mut self, slots: &[usize]) {
        let Some(head) = &mut self.head else { return };
        for &slot in slots {
            let HeadState { waiting, tokens, next, .. } = &mut head.slots[slot];
            (*next, _, _) = (None, waiting.clear(), tokens.clear());
        }
    }

    /// Whether a hidden state waits for each of these sequences, without which there are no drafts.
    pub(crate) fn can_draft(&self, mut sequences: impl Iterator<Item = Sequence>) -> bool {
        let waits = |head: &HeadSlots, s: Sequence| !head.slots[s.slot as usize].waiting.is_empty();
        self.head.as_ref().is_some_and(|head| sequences.all(|s| waits(head, s)))
    }

    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Whether hidden states of prompts and of many single tokens are not worth a pass of the head for now.
    pub(crate) fn set_head_idle(&mut self, idle: bool) {
        if let Some(head) = &mut self.head {
            head.idle = idle;
        }
    }

    /// Without memory for drafts of the head.
    pub(crate) fn forget_head(&mut self) {
        self.head = None;
    }
}

impl CausalLm {
    /// What the draft head ([`Loader::draft_head`](crate::Loader::draft_head)) takes for the tokens behind the next one.
    /// Each of the batch is a sequence that has seen at least one token, the token that it will be fed next, and how many
    /// tokens are drafted behind it, at least one; fewer where there is no room for them. Returns the drafts, for
    /// [`verify`](Self::verify) behind that next token, and the logits of the first of each, `[batch, vocab_size]` in f32.
    /// On CUDA in 16 bits up to 8 sequences' logits come from a copy of `lm_head` in q8_0: what a draft is, the model judges with its own.
    ///
    /// The sequences stay as they are.
    ///
    /// # Errors
    /// When the model has no draft head, the batch is empty, a handle is none of a sequence of this pool, comes twice or
    /// has seen no token or has no room for one more, nothing is asked for, or an id is outside the vocabulary; or when the device refuses.
    pub fn draft(&self, pool: &mut SequencePool, batch: &[(Sequence, u32, usize)]) -> Result<(Vec<Vec<u32>>, Tensor)> {
        let (slots, depths) = self.draft_slots(pool, batch)?;
        let next: Vec<u32> = batch.iter().map(|(_, next, _)| *next).collect();
        self.check_ids(DRAFT, [&next[..]].into_iter())?;
        let _working = pool.take()?;
        let (Some(head), Some(draft_head)) = (&mut pool.head, &self.draft_head) else {
            bail!("{DRAFT}: model: expected one with a draft head, got one without")
        };
        let counts: Vec<usize> = slots.iter().map(|&slot| head.slots[slot].tokens.len() + 1).collect();
        let waiting = slots.iter().zip(&next);
        let ids = waiting.flat_map(|(&slot, &next)| head.slots[slot].tokens.iter().copied().chain([next]));
        let ids = Tensor::from_iter(ids, &self.device)?;
        let hidden = head.hidden(&slots, &counts)?;
        let at: Vec<(usize, usize)> = slots.iter().map(|&slot| (slot, head.slots[slot].len)).collect();
        let mut y = self.head_of_slots(draft_head, head, (&ids, &hidden), at, &counts)?;
        let launch = Launch::default().overlapping();
        let logits = self.draft_scores(draft_head, &y, &launch)?.to_dtype(DType::F32)?;
        let mut ids = logits.argmax(D::Minus1)?;
        let (mut active, mut drafted): (Vec<usize>, Vec<Tensor>) = ((0..slots.len()).collect(), vec![ids.clone()]);
        let mut rows = vec![active.clone()];
        for depth in 1..depths.iter().copied().max().unwrap_or(0) {
            let kept: Vec<u32> = (0..active.len()).filter(|&i| depths[active[i]] > depth).map(|i| i as u32).collect();
            if kept.len() < active.len() {
                active = kept.iter().map(|&i| active[i as usize]).collect();
                let kept = Tensor::new(kept, &self.device)?;
                (y, ids) = (y.index_select(&kept, 0)?, ids.index_select(&kept, 0)?);
            }
            let at = active.iter().map(|&i| (slots[i], head.slots[slots[i]].len + counts[i] + depth - 1)).collect();
            y = self.head_of_slots(draft_head, head, (&ids, &y), at, &vec![1; active.len()])?;
            ids = self.draft_scores(draft_head, &y, &launch)?.argmax(D::Minus1)?;
            drafted.push(ids.clone());
            rows.push(active.clone());
        }
        let tokens = Tensor::cat(&drafted, 0)?.to_vec1::<u32>()?;
        self.settle()?;
        for ((&slot, &count), &next) in slots.iter().zip(&counts).zip(&next) {
            let state = &mut head.slots[slot];
            state.cached(count - 1);
            state.next = Some(next);
        }
        let mut drafts = vec![Vec::new(); slots.len()];
        rows.into_iter().flatten().zip(tokens).for_each(|(row, token)| drafts[row].push(token));
        Ok((drafts, logits))
    }

    /// The slots of a batch, and how many tokens each may have drafted.
    fn draft_slots(&self, pool: &SequencePool, batch: &[(Sequence, u32, usize)]) -> Result<(Vec<usize>, Vec<usize>)> {
        let slots = pool.batch_slots(DRAFT, self.id, batch.iter().map(|(s, _, _)| (*s, 1)))?;
        let mut depths = Vec::with_capacity(slots.len());
        for (n, (&slot, (_, _, depth))) in slots.iter().zip(batch).enumerate() {
            let len = pool.entries[slot].len;
            if *depth == 0 || len == 0 {
                bail!("{DRAFT}: batch: expected sequences with tokens and at least 1 to draft, got {depth} after {len} at {n}")
            }
            // The head's token `len - 1` is the first.
            depths.push((*depth).min(pool.max_len + 1 - len));
        }
        Ok((slots, depths))
    }

    /// [`Self::head_pass`] of tokens behind those that the slots have: of the last token of each.
    fn head_of_slots(
        &self,
        draft_head: &DraftHead,
        head: &mut HeadSlots,
        packed: (&Tensor, &Tensor),
        at: Vec<(usize, usize)>,
        counts: &[usize],
    ) -> Result<Tensor> {
        let (cu_seqlens, rows) = (boundaries(self, counts)?, head.rows(self, at, counts)?);
        let last = match &cu_seqlens {
            Some(cu) => {
                let last: Vec<u32> = cu.as_slice()[1..].iter().map(|end| end - 1).collect();
                Some(Tensor::new(last, &self.device)?)
            }
            None => None,
        };
        let launch = Launch::default().overlapping();
        self.head_pass(draft_head, &mut head.kv, packed, (cu_seqlens.as_ref(), &rows), last.as_ref(), &launch)
    }

    /// Packed tokens and the hidden states before them through the head: of the `last` rows, or of all, what is the next
    /// hidden state, normed.
    pub(super) fn head_pass(
        &self,
        draft_head: &DraftHead,
        kv: &mut KvSlots,
        (ids, hidden): (&Tensor, &Tensor),
        (cu_seqlens, rows): (Option<&CuSeqlens>, &KvRows),
        last: Option<&Tensor>,
        launch: &Launch,
    ) -> Result<Tensor> {
        launch.next_layer();
        let x: Residual = draft_head.input(&self.embed(ids)?, hidden, launch)?;
        let mix = |mixer: &Mixer, x: &Tensor| match mixer {
            Mixer::Full(attention) => attention.forward_slots(x, cu_seqlens, rows, kv, launch),
            Mixer::Linear(_) => bail!("{DRAFT}: expected a softmax layer"),
        };
        let last = |x: &Tensor| last.map_or_else(|| Ok(x.clone()), |last| x.index_select(last, 0));
        let x = draft_head.layer.around_rows(x, launch, mix, last)?;
        Ok(x.norm(&draft_head.norm, launch)?.1)
    }
}
