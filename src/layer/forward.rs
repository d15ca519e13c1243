//! Tokens through the layer: on a state of their own, or on the slots of a pool.

use super::projection::Projected;
use super::{GatedDeltaNet, OP};
use crate::conv::CausalConv1d;
use crate::norm::GatedRmsNorm;
use crate::plan;
use crate::rule::GdnPrefill;
use crate::state::{GdnState, PoolRing, Ring, RingMove, RingSpans, StatePool, Window};
use crate::step::GdnStep;
use candle_core::{bail, Result, Tensor};
use candle_gdn_core::check::check_untracked;
use candle_gdn_core::device::{Launch, Working};
use candle_gdn_core::{cpu_slots, CuSeqlens, Slots, NO_SLOT};
use std::sync::atomic::Ordering;

/// The states, slots and boundaries of a call.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub states: &'a GdnState,
    /// The ring beside the states of a pool that has one.
    pub ring: Option<&'a PoolRing>,
    /// In u32. Without them sequence `n` has state `n`.
    pub slots: Option<&'a Slots>,
    /// Where tokens are packed.
    pub cu_seqlens: Option<&'a CuSeqlens>,
    /// The tokens are drafts in place on a ring: the call uses the step, however many they are.
    pub drafts: bool,
    pub launch: &'a Launch,
}

impl<'a> Call<'a> {
    /// On slots of a pool, which are in u32.
    pub fn of_pool(pool: &'a StatePool, slots: &'a Slots, cu_seqlens: Option<&'a CuSeqlens>) -> Self {
        let (states, ring, launch) = (pool.states(), pool.ring(), pool.launch());
        Self { states, ring, slots: Some(slots), cu_seqlens, drafts: false, launch }
    }
}

impl GatedDeltaNet {
    /// Feeds the next tokens of every sequence: x and y are `[batch, tokens, hidden_size]` in the weights' dtype.
    ///
    /// Any number of tokens continues the state: a prompt whole, in parts, or token by token gives the same up to rounding.
    ///
    /// # Errors
    /// When x or the state does not fit, or x is tracked for gradients ([training](GatedDeltaNet#training)); the message says
    /// what was expected. The state is then unchanged. It has advanced where a module as output projection fails, which comes
    /// after everything else, and may be half written where the device fails: go back to a [`GdnState::snapshot`] then.
    pub fn forward(&self, x: &Tensor, state: &mut GdnState) -> Result<Tensor> {
        let (batch, tokens) = self.check_batched(x)?;
        self.check_states("state", state)?;
        if state.batch() != batch || state.conv.dims()[0] != batch {
            bail!("{OP}: state: expected one of batch {batch} (x has it), got {}", state.batch());
        }
        if batch * tokens == 0 {
            return Ok(x.clone()); // y is as empty as x
        }
        let _working = state.take()?;
        let launch = &Launch::default();
        let call = Call { states: state, ring: None, slots: None, cu_seqlens: None, drafts: false, launch };
        self.feed(&self.project(x, tokens, launch)?, tokens, call)
    }

    /// Feeds the next tokens of sequences whose states lie in a pool: sequence `n` goes on from slot `slots.read()[n]`
    /// and leaves its new state in slot `slots.write()[n]`; see [`Slots`].
    ///
    /// x is `[batch, tokens, hidden_size]`; or with `cu_seqlens` packed, `[tokens of all, hidden_size]`, sequences of any
    /// lengths, some of which begin, go on with many tokens, or have one. y has x's shape. Where no sequence has more than
    /// 8 tokens (on the CPU 16) the call uses the decode step ([`GdnStep`](crate::ops::GdnStep)). A sequence of no tokens has its state copied
    /// where the slots differ. Rows of padding are zero in y where what the
    /// projection makes of them is finite and `rms_norm_eps` is above 0.
    ///
    /// A sequence that begins needs a slot that is zero ([`StatePool::zero`]).
    ///
    /// # Errors
    /// When x, the slots or the pool do not fit; the message says what was expected. The pool is then unchanged, but for the
    /// two failures that [`GatedDeltaNet::forward`] names. After either, the slots written of a pool whose rings share their spans
    /// ([`PoolOptions::shared_ring`](crate::PoolOptions::shared_ring)) hold no state: zero or restore them. A call without tokens on CUDA
    /// needs slots made from host values where they differ.
    pub fn forward_slots(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        slots: &Slots,
        pool: &mut StatePool,
    ) -> Result<Tensor> {
        match self.begin_slots(x, cu_seqlens, slots, pool)? {
            Some((slots, _working)) => Ok(self.run_slots(x, Call::of_pool(pool, &slots, cu_seqlens))?.0),
            None => Ok(x.clone()),
        }
    }

    /// Checks a call on a pool and makes it this thread's. Returns the slots in u32, or nothing where there are no tokens:
    /// all is done then.
    pub(super) fn begin_slots(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        slots: &Slots,
        pool: &mut StatePool,
    ) -> Result<Option<(Slots, Working)>> {
        let (sequences, total) = match cu_seqlens {
            Some(cu) => (cu.num_sequences(), self.check_packed(x, cu)?),
            None => {
                let (batch, tokens) = self.check_batched(x)?;
                (batch, batch * tokens)
            }
        };
        self.check_pool(pool)?;
        slots.check(OP, sequences, pool.capacity(), self.conv_weight.device())?;
        if total == 0 {
            self.copy_states(slots, pool)?;
            return Ok(None);
        }
        let working = pool.states_mut().take()?;
        // Before the projection, which must be the kernel right before the step.
        Ok(Some((slots.in_u32()?, working)))
    }

    /// Checked tokens on slots: y, and what the projection gave.
    pub(super) fn run_slots(&self, x: &Tensor, call: Call<'_>) -> Result<(Tensor, Projected)> {
        // Equal lengths as a batch, for which the step has kernels of its own.
        if let Some(len) = call.cu_seqlens.and_then(CuSeqlens::uniform_len).filter(|len| self.uses_step(*len, call)) {
            let batch = x.dims()[0] / len;
            let p = self.project(&x.reshape((batch, len, x.dims()[1]))?, len, call.launch)?;
            let y = self.feed(&p, len, Call { cu_seqlens: None, ..call })?;
            return Ok((y.flatten(0, 1)?, p.packed(&self.config)?));
        }
        let longest = call.cu_seqlens.map_or_else(|| x.dims()[1], CuSeqlens::max_len);
        let p = self.project(x, longest, call.launch)?;
        Ok((self.feed(&p, longest, call)?, p))
    }

    /// Moves the spans of a pool that has its own: right after the state has moved, so that no later failure comes between.
    /// `none`: counts of zero where the tokens are drafts.
    fn advance(&self, longest: usize, call: Call<'_>, none: Option<&Tensor>) -> Result<()> {
        match (call.ring, call.slots) {
            (Some(PoolRing { ring, own: true }), Some(slots)) if call.drafts => {
                ring.spans.advance(slots, RingMove { accepted: none, ..RingMove::append(call.cu_seqlens, longest) })
            }
            (Some(PoolRing { ring, own: true }), Some(slots)) => {
                self.advance_rings(&ring.spans, slots, call.cu_seqlens, longest)
            }
            _ => Ok(()),
        }
    }

    /// Moves the spans that the pools of several layers share after [`Self::forward_slots`] in all of them: of the same
    /// slots and boundaries, with at most `longest` tokens a sequence.
    ///
    /// # Errors
    /// When the slots do not fit the spans, or the device refuses.
    pub fn advance_rings(
        &self,
        spans: &RingSpans,
        slots: &Slots,
        cu_seqlens: Option<&CuSeqlens>,
        longest: usize,
    ) -> Result<()> {
        spans.advance(
            slots,
            match self.fuses(longest) {
                true => RingMove::append(cu_seqlens, longest),
                false => RingMove::flush(),
            },
        )
    }

    /// Whether calls of at most so many tokens a sequence use the step.
    pub(super) fn fuses(&self, longest: usize) -> bool {
        plan::uses_step(longest, self.conv_weight.device().is_cuda())
    }

    /// Whether this call uses the step.
    fn uses_step(&self, longest: usize, call: Call<'_>) -> bool {
        self.fuses(longest) || call.drafts
    }

    /// The input projection of x `[lead.., hidden_size]`, `longest` being the most tokens of a sequence. In a step its launch
    /// may overlap the one before it: no launch of a layer writes a weight, and this one writes no state.
    fn project(&self, x: &Tensor, longest: usize, launch: &Launch) -> Result<Projected> {
        let mut launch = launched(launch, x, longest);
        // The layer's first launch waits for whatever wrote the weights, and so does every later one.
        launch.overlap &= self.launched.swap(true, Ordering::Relaxed);
        let outputs = self.in_proj.forward(OP, &self.config, &x.contiguous()?, &launch)?;
        Projected::new(&self.config, outputs, &self.a_log, &self.dt_bias)
    }

    /// What follows the projection, with y; `longest` is the most tokens of a sequence.
    fn feed(&self, p: &Projected, longest: usize, call: Call<'_>) -> Result<Tensor> {
        if self.uses_step(longest, call) {
            let launch = launched(call.launch, &p.z, longest);
            // Allocated before the step: a failure between it and the spans would leave rings that they do not describe.
            let none = match (call.ring, call.slots) {
                (Some(PoolRing { own: true, .. }), Some(slots)) if call.drafts => Some(RingSpans::no_counts(slots)?),
                _ => None,
            };
            let y = self.step(p, call).launched(&launch).forward(&p.qkv, &p.z, &self.conv_weight)?;
            self.advance(longest, call, none.as_ref())?;
            return self.out_proj.forward((OP, "out_proj"), &y, self.config.hidden_size, &launch);
        }
        let c = &self.config;
        let o = match (call.ring, call.slots) {
            (Some(PoolRing { ring, .. }), Some(slots)) => self.rule_after_flush(p, call, (ring, slots))?,
            _ => self.rule(p, call)?,
        };
        self.advance(longest, call, None)?;
        let o = GatedRmsNorm::new(c.rms_norm_eps, c.output_gate)?.forward(&o, &p.z, &self.norm_weight)?;
        self.out_proj.forward((OP, "out_proj"), &o.flatten_from(o.rank() - 2)?, c.hidden_size, call.launch)
    }

    /// [`Self::rule`] on states whose rings are flushed first.
    pub(super) fn rule_after_flush(
        &self,
        p: &Projected,
        call: Call<'_>,
        (ring, slots): (&Ring, &Slots),
    ) -> Result<Tensor> {
        let written = slots.written(call.states.recurrent().dims()[0])?;
        flushed(ring, call.states, slots, || self.rule(p, Call { slots: Some(&written), ..call }))
    }

    /// What sequences of no tokens leave: their states, where they are not written to where they were read.
    fn copy_states(&self, slots: &Slots, pool: &mut StatePool) -> Result<()> {
        let pairs: Vec<(u32, u32)> = match slots.on_host() {
            // No op of the call sees them, which would find two that write one slot.
            _ if slots.read().device().is_cpu() => {
                let maps = cpu_slots(OP, Some(slots), pool.capacity())?;
                let pairs = (0..slots.len()).filter_map(|n| maps.of_stride(1).numbers(n));
                pairs.map(|(src, dst)| (src as u32, dst as u32)).collect()
            }
            Some((read, write)) => read.iter().copied().zip(write.iter().copied()).collect(),
            None if slots.in_place() => return Ok(()),
            None => bail!("{OP}: slots: expected them made from host values for a call without tokens"),
        };
        let mut moved = pairs.into_iter().filter(|(src, dst)| ![*src, *dst].contains(&NO_SLOT) && src != dst);
        if !pool.has_ring() {
            // In any order: none is read after it was written.
            return moved.try_for_each(|(src, dst)| pool.copy(src, dst));
        }
        let (read, write): (Vec<u32>, Vec<u32>) = moved.unzip();
        if read.is_empty() {
            return Ok(());
        }
        // As a call with tokens leaves them, after which the spans move alike.
        let _working = pool.states_mut().take()?;
        let moved = Slots::from_to(&read, &write, self.conv_weight.device())?;
        let call = Call::of_pool(pool, &moved, None);
        if let Some(PoolRing { ring, .. }) = call.ring {
            flushed(ring, call.states, &moved, || Ok(()))?;
        }
        self.advance(0, call, None)
    }

    /// Convolution, rule and norm for up to 16 tokens a sequence. The layer has checked what the op holds.
    pub(super) fn step(&self, p: &Projected, call: Call<'_>) -> GdnStep {
        let (conv, recurrent) = (&call.states.conv, &call.states.recurrent);
        let mut rule = GdnStep::unchecked_rule(p.gates.clone(), recurrent, self.options.rule);
        (rule.slots, rule.cu_seqlens) = (call.slots.cloned(), call.cu_seqlens.cloned());
        let step = GdnStep::unchecked(rule, &self.norm_weight, conv, self.options);
        match call.ring {
            Some(PoolRing { ring, .. }) => step.with_ring(ring),
            None => step,
        }
    }

    /// Convolution and rule for any number of tokens: o.
    pub(super) fn rule(&self, p: &Projected, call: Call<'_>) -> Result<Tensor> {
        let mut options = self.options.rule;
        options.algo = options.algo.of_rule();
        let conv = CausalConv1d::unchecked(&call.states.conv, call.cu_seqlens, call.slots, true);
        let rule = GdnPrefill::unchecked(p.gates.clone(), &call.states.recurrent, call.cu_seqlens, call.slots, options);
        let (last, keys) = (p.qkv.rank() - 1, self.config.key_size());
        let columns = [(0, keys), (keys, keys), (2 * keys, self.config.value_size())];
        // Before the convolution writes its state.
        rule.check_columns(&p.qkv, columns)?;
        let qkv = conv.forward(&p.qkv, &self.conv_weight)?;
        let [q, k, v] = columns.map(|(first, count)| qkv.narrow(last, first, count));
        rule.forward(&q?, &k?, &v?)
    }

    /// Batch and tokens of x.
    fn check_batched(&self, x: &Tensor) -> Result<(usize, usize)> {
        let hidden = self.config.hidden_size;
        match *x.dims() {
            [batch, tokens, n] if n == hidden => {
                self.check_x(x)?;
                Ok((batch, tokens))
            }
            ref dims => {
                let packed = if dims.len() == 2 { "; packed tokens need forward_slots with cu_seqlens" } else { "" };
                bail!("{OP}: x: expected shape [batch, tokens, {hidden}], got {dims:?}{packed}")
            }
        }
    }

    /// Tokens of x, which are those of the sequences.
    pub(super) fn check_packed(&self, x: &Tensor, cu_seqlens: &CuSeqlens) -> Result<usize> {
        let (hidden, total) = (self.config.hidden_size, cu_seqlens.total_tokens());
        if x.dims() != [total, hidden] {
            bail!("{OP}: x: expected shape [{total}, {hidden}] (cu_seqlens has the tokens), got {:?}", x.dims());
        }
        self.check_x(x)?;
        self.check_on_device("cu_seqlens", cu_seqlens.tensor())?;
        Ok(total)
    }

    fn check_x(&self, x: &Tensor) -> Result<()> {
        let weight = &self.conv_weight;
        if x.dtype() != weight.dtype() {
            bail!("{OP}: x: expected dtype {:?} (the weights'), got {:?}", weight.dtype(), x.dtype());
        }
        check_untracked(OP, "x", x)?;
        self.check_on_device("x", x)
    }

    /// Everything about a pool but how many slots it has.
    pub(super) fn check_pool(&self, pool: &StatePool) -> Result<()> {
        if pool.has_ring() {
            self.check_ring()?;
        }
        self.check_states("pool", pool.states())
    }

    /// Everything about states but how many there are.
    pub(super) fn check_states(&self, arg: &str, states: &GdnState) -> Result<()> {
        let (c, weight) = (&self.config, &self.conv_weight);
        self.check_on_device(arg, &states.recurrent)?;
        let conv = [c.conv_kernel - 1, c.conv_channels()];
        let recurrent = [c.num_value_heads, c.value_head_dim, c.key_head_dim];
        if states.conv.dims()[1..] != conv || states.recurrent.dims()[1..] != recurrent {
            bail!(
                "{OP}: {arg}: expected states of conv {conv:?} and recurrent {recurrent:?}, got {:?} and {:?}",
                &states.conv.dims()[1..],
                &states.recurrent.dims()[1..]
            );
        }
        if states.conv.dtype() != weight.dtype() {
            bail!("{OP}: {arg}: expected dtype {:?} (the weights'), got {:?}", weight.dtype(), states.conv.dtype());
        }
        Ok(())
    }

    fn check_on_device(&self, arg: &str, tensor: &Tensor) -> Result<()> {
        let weight = &self.conv_weight;
        if !tensor.device().same_device(weight.device()) {
            bail!(
                "{OP}: {arg}: expected a tensor on {:?} (the weights' device), got one on {:?}",
                weight.device().location(),
                tensor.device().location()
            );
        }
        Ok(())
    }
}

/// How a layer's kernels of x `[sequences, ..]` are launched, `longest` being the most tokens of a sequence.
fn launched(launch: &Launch, x: &Tensor, longest: usize) -> Launch {
    Launch { overlap: plan::overlaps(longest, x.dims()[0]), ..launch.clone() }
}

/// What `run` makes of states whose rings are flushed, into the slots written; their windows go out of the rings and into them again.
fn flushed<R>(ring: &Ring, states: &GdnState, slots: &Slots, run: impl FnOnce() -> Result<R>) -> Result<R> {
    let GdnState { conv, recurrent, .. } = states;
    ring.flush(recurrent, slots, None)?;
    ring.copy_window(conv, slots, Window::ToState)?;
    let out = run()?;
    ring.copy_window(conv, slots, Window::ToRing)?;
    Ok(out)
}
