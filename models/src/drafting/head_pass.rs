//! Passes of the draft head: drafts, and hidden states that enter its cache.

use super::head_state::{HeadSlots, Rows};
use crate::blocks::decoder::Mixer;
use crate::blocks::draft_head::DraftHead;
use crate::causal_lm::CausalLm;
use crate::sequences::kv::{KvRows, KvSlots};
use crate::sequences::pass::{boundaries, last_tokens};
use crate::sequences::pool::{Sequence, SequencePool};
use candle_core::{bail, DType, Device, Result, Tensor, D};
use candle_gdn::CuSeqlens;
use candle_gdn_core::Launch;

const DRAFT: &str = "draft";

/// The most hidden states that wait before they take a pass of their own: this bounds their memory.
const WAITING: usize = 64;

impl SequencePool {
    /// After a pass of the model with the packed hidden states `hidden`; `last` has the last row of each sequence.
    pub(crate) fn feed_head<'a>(
        &mut self,
        model: &CausalLm,
        slots: &[usize],
        tokens: impl Iterator<Item = &'a [u32]>,
        hidden: &Tensor,
        last: &Tensor,
    ) -> Result<()> {
        let Some(head) = &mut self.head else { return Ok(()) };
        let (mut first, mut prompts) = (0, Vec::new());
        for (row, (&slot, tokens)) in slots.iter().zip(tokens).enumerate() {
            let state = &mut head.slots[slot];
            let before = Rows { tensor: hidden.clone(), range: first..first + tokens.len() - 1 };
            // Of a long prompt the last row alone waits, so that the others can be freed.
            let last = Rows { tensor: last.clone(), range: row..row + 1 };
            state.push(tokens, [before, last].into_iter().filter(|rows| !rows.range.is_empty()));
            first += tokens.len();
            if !state.tokens.is_empty() && tokens.len() > 1 {
                prompts.push(slot);
            }
        }
        if !head.idle {
            self.fill_head(model, &prompts)?;
            return self.bound_waiting(model, slots);
        }
        self.bound_waiting(model, slots)?;
        self.own_waiting(&prompts)
    }

    /// The rows that wait in these slots get memory of their own: the other rows of their pass can be freed.
    fn own_waiting(&mut self, slots: &[usize]) -> Result<()> {
        let Some(head) = &mut self.head else { return Ok(()) };
        slots.iter().try_for_each(|&slot| head.slots[slot].own().map(|own| head.slots[slot] = own))
    }

    /// Where many hidden states wait, they enter the head's cache or are dropped.
    pub(crate) fn bound_waiting(&mut self, model: &CausalLm, slots: &[usize]) -> Result<()> {
        match &mut self.head {
            Some(head) if head.idle => {
                for &slot in slots {
                    let state = &mut head.slots[slot];
                    state.drop_waiting(state.tokens.len().saturating_sub(head.idle_waiting));
                }
                Ok(())
            }
            _ => self.fill_head_from(model, slots, WAITING),
        }
    }

    /// Where `most` hidden states or more wait in a slot, they enter the head's cache.
    pub(crate) fn fill_head_from(&mut self, model: &CausalLm, slots: &[usize], most: usize) -> Result<()> {
        let Some(head) = &self.head else { return Ok(()) };
        let full = |slot: &usize| head.slots[*slot].tokens.len() >= most;
        let full: Vec<usize> = slots.iter().copied().filter(full).collect();
        self.fill_head(model, &full)
    }

    /// After a speculative step on the device, which fed the head what waited in a slot and drew `drawn`. `hidden` has the new hidden
    /// states from a row on; None where another step that was launched before feeds them.
    #[cfg(feature = "cuda")]
    pub(crate) fn end_speculative(
        &mut self,
        slot: usize,
        drawn: &[crate::sampling::Token],
        hidden: Option<(&Tensor, usize)>,
    ) {
        let entry = &mut self.entries[slot];
        (entry.len, entry.broken) = (entry.len + drawn.len(), hidden.is_none());
        // All but the last one drawn were drafts, which the model was fed.
        let drafts: Vec<u32> = drawn[..drawn.len().saturating_sub(1)].iter().flatten().map(|drawn| drawn.id).collect();
        self.record_tokens(slot, &drafts);
        let Some(head) = &mut self.head else { return };
        let state = &mut head.slots[slot];
        state.len += state.tokens.len() + 1;
        (state.next, state.tokens) = (None, drafts);
        let rows =
            |(tensor, first): (&Tensor, usize)| Rows { tensor: tensor.clone(), range: first..first + drawn.len() };
        state.waiting = hidden.into_iter().map(rows).collect();
    }

    /// What waits in these slots enters the head's cache, except for the last hidden state of each.
    pub(crate) fn fill_head(&mut self, model: &CausalLm, full: &[usize]) -> Result<()> {
        let (Some(head), Some(draft_head)) = (&mut self.head, &model.draft_head) else { return Ok(()) };
        if full.is_empty() {
            return Ok(());
        }
        let counts: Vec<usize> = full.iter().map(|&slot| head.slots[slot].tokens.len()).collect();
        let ids: Vec<u32> = full.iter().flat_map(|&slot| head.slots[slot].tokens.iter().copied()).collect();
        let launch = Launch::default().overlapping();
        let cu_seqlens = boundaries(&counts, &model.device)?;
        let hidden = head.hidden(full, &counts)?;
        let x = draft_head.input(&model.embed(&Tensor::new(ids, &model.device)?)?, &hidden, &launch)?;
        let x = draft_head.layer.mixer_input(x, &launch)?.1;
        let place = full.iter().map(|&slot| (slot, head.slots[slot].len)).collect();
        let rows = KvRows::new(model, &head.kv, place, &counts)?;
        let Mixer::Full(attention) = &draft_head.layer.mixer else { bail!("{DRAFT}: expected a softmax layer") };
        attention.append_slots(&x, cu_seqlens.as_ref(), &rows, &mut head.kv, &launch)?;
        for (&slot, &count) in full.iter().zip(&counts) {
            head.slots[slot].cached(count);
        }
        Ok(())
    }

    /// After single tokens, or drafts that were accepted in part: each sequence's tokens, and the row of `hidden` where theirs begin.
    pub(crate) fn feed_head_later<'a>(
        &mut self,
        slots: &[usize],
        tokens: impl Iterator<Item = (&'a [u32], usize)>,
        hidden: &Tensor,
    ) {
        let Some(head) = &mut self.head else { return };
        for (&slot, (tokens, first)) in slots.iter().zip(tokens) {
            if !tokens.is_empty() {
                head.slots[slot].push(tokens, [Rows { tensor: hidden.clone(), range: first..first + tokens.len() }]);
            }
        }
    }

    /// After a step whose hidden states the head does not get. It treats the next ones as if they followed those that it has.
    #[cfg(feature = "cuda")]
    pub(crate) fn skip_head(&mut self, slots: &[usize]) {
        let Some(head) = &mut self.head else { return };
        for &slot in slots {
            let state = &mut head.slots[slot];
            (state.next, _, _) = (None, state.waiting.clear(), state.tokens.clear());
        }
    }

    /// Whether each of these sequences has a hidden state to draft from.
    pub(crate) fn can_draft(&self, mut sequences: impl Iterator<Item = Sequence>) -> bool {
        let waits = |head: &HeadSlots, s: Sequence| !head.slots[s.slot as usize].waiting.is_empty();
        self.head.as_ref().is_some_and(|head| sequences.all(|s| waits(head, s)))
    }

    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Sets whether hidden states are not worth a pass of the head for now.
    pub(crate) fn set_head_idle(&mut self, idle: bool) {
        if let Some(head) = &mut self.head {
            head.idle = idle;
        }
    }

    /// How many hidden states wait while the head is idle, and the last one.
    pub(crate) fn idle_waiting(device: &Device) -> usize {
        // Each that waits keeps heap memory from being reused: steps of the demo were 2 % slower.
        if device.is_cpu() {
            0
        } else {
            WAITING
        }
    }

    /// Frees the memory of the draft head: no drafts from now on.
    pub(crate) fn drop_head(&mut self) {
        self.head = None;
    }
}

impl CausalLm {
    /// Drafts of the draft head ([`Loader::draft_head`](crate::Loader::draft_head)). Each entry of the batch is a sequence with
    /// at least one token, the token that it will be fed next, and how many tokens are drafted after that one, at least
    /// one; fewer where there is no room. Returns the drafts, for [`verify`](Self::verify) after that next token, and
    /// the logits of the first of each, `[batch, vocab_size]` in f32. On CUDA in 16 bits the logits of up to 8 sequences come
    /// from a copy of `lm_head` in q8_0; the model verifies drafts with its own.
    ///
    /// The sequences stay as they are.
    ///
    /// # Errors
    /// When the model has no draft head, the batch is empty, a handle is none of a sequence of this pool, comes twice or
    /// has seen no token or has no room for two more, no draft is requested, an id is outside the vocabulary, or the device refuses.
    pub fn draft(&self, pool: &mut SequencePool, batch: &[(Sequence, u32, usize)]) -> Result<(Vec<Vec<u32>>, Tensor)> {
        let (slots, depths) = self.draft_slots(pool, batch)?;
        let next: Vec<u32> = batch.iter().map(|(_, next, _)| *next).collect();
        self.check_ids(DRAFT, [&next[..]].into_iter())?;
        let _working = pool.working()?;
        let (Some(head), Some(draft_head)) = (&mut pool.head, &self.draft_head) else {
            bail!("{DRAFT}: model: expected one with a draft head, got one without")
        };
        let counts: Vec<usize> = slots.iter().map(|&slot| head.slots[slot].tokens.len() + 1).collect();
        let waiting = slots.iter().zip(&next);
        let ids = waiting.flat_map(|(&slot, &next)| head.slots[slot].tokens.iter().copied().chain([next]));
        let ids = Tensor::from_iter(ids, &self.device)?;
        let hidden = head.hidden(&slots, &counts)?;
        let place: Vec<(usize, usize)> = slots.iter().map(|&slot| (slot, head.slots[slot].len)).collect();
        let mut y = self.head_of_slots(draft_head, head, (&ids, &hidden), place, &counts)?;
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
            let place = active.iter().map(|&i| (slots[i], head.slots[slots[i]].len + counts[i] + depth - 1)).collect();
            y = self.head_of_slots(draft_head, head, (&ids, &y), place, &vec![1; active.len()])?;
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
        // The next token and a draft.
        let slots = pool.batch_slots(DRAFT, self.id, batch.iter().map(|(s, _, _)| (*s, 2)))?;
        let mut depths = Vec::with_capacity(slots.len());
        for (n, (&slot, (_, _, depth))) in slots.iter().zip(batch).enumerate() {
            let len = pool.entries[slot].len;
            if *depth == 0 || len == 0 {
                bail!("{DRAFT}: batch: expected sequences with tokens and at least 1 to draft, got {depth} after {len} at {n}")
            }
            depths.push((*depth).min(pool.max_len - len - 1));
        }
        Ok((slots, depths))
    }

    /// [`Self::head_pass`] of tokens after those in the slots: the result of the last token of each.
    fn head_of_slots(
        &self,
        draft_head: &DraftHead,
        head: &mut HeadSlots,
        packed: (&Tensor, &Tensor),
        place: Vec<(usize, usize)>,
        counts: &[usize],
    ) -> Result<Tensor> {
        let (cu_seqlens, rows) = (boundaries(counts, &self.device)?, KvRows::new(self, &head.kv, place, counts)?);
        let last = cu_seqlens.as_ref().map(last_tokens).transpose()?;
        let launch = Launch::default().overlapping();
        self.head_pass(draft_head, &mut head.kv, packed, (cu_seqlens.as_ref(), &rows), last.as_ref(), &launch)
    }

    /// Packed tokens and the hidden states before them through the head: of the `last` rows, or of all, what is the next
    /// hidden state, normed.
    pub(crate) fn head_pass(
        &self,
        draft_head: &DraftHead,
        kv: &mut KvSlots,
        (ids, hidden): (&Tensor, &Tensor),
        (cu_seqlens, rows): (Option<&CuSeqlens>, &KvRows),
        last: Option<&Tensor>,
        launch: &Launch,
    ) -> Result<Tensor> {
        launch.next_layer();
        let x = draft_head.input(&self.embed(ids)?, hidden, launch)?;
        let (sum, y) = draft_head.layer.mixer_input(x, launch)?;
        let Mixer::Full(attention) = &draft_head.layer.mixer else { bail!("{DRAFT}: expected a softmax layer") };
        let h = attention.forward_slots(&y, cu_seqlens, rows, kv, launch)?;
        let x = match last {
            Some(last) => draft_head.layer.feed_forward_rows(&sum, h, last, launch)?,
            None => draft_head.layer.feed_forward(&sum, h, launch)?,
        };
        Ok(x.norm(&draft_head.norm, launch)?.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequences::tests::model;

    /// With the bound of a GPU: the rows of a prompt that nobody will read are not kept for those that wait.
    #[test]
    fn an_idle_head_keeps_no_prompts() -> Result<()> {
        let model = model(0.1)?;
        let mut pool = model.new_sequences(2, 200)?;
        pool.set_head_idle(true);
        pool.head.iter_mut().for_each(|head| head.idle_waiting = WAITING);
        let (a, b) = (pool.begin()?, pool.begin()?);
        for tokens in [150, 1, 40] {
            model.feed_only(&mut pool, &[(a, &vec![3; tokens]), (b, &[5; 2])])?;
        }
        let head = pool.head.as_ref().expect("a head");
        let rows = head.slots.iter().flat_map(|state| &state.waiting).map(|rows| rows.tensor.elem_count());
        let waiting = (1 + WAITING) + 3 * 2;
        assert_eq!(rows.sum::<usize>(), waiting * model.config.hidden_size);
        // The other one had a token of its own.
        model.draft(&mut pool, &[(a, 1, 2), (b, 1, 2)]).map(drop)
    }
}
