//! Tokens through the layer: on a state of their own, or on the slots of a pool.

use super::projection::Projected;
use super::{GatedDeltaNet, OP};
use crate::ops::ring::{Move, Ring, Window};
use crate::ops::{CausalConv1d, CuSeqlens, GatedRmsNorm, GdnPrefill, GdnStep, Launch, Slots, STEP_TOKENS};
use crate::state::threads::Working;
use crate::state::{GdnState, PoolRing, StatePool};
use candle_core::{bail, Result, Tensor};

/// Tokens a sequence up to which a call takes the fused step on CUDA. With more, convolution, rule and norm one by one are
/// faster (`auto` and `unfused` of the suite `layer`, benches/chain.md).
pub(super) const FUSED_TOKENS: usize = 8;

/// Sequences up to which the launches of one token overlap. With more tokens, or more rows than `gdn_linear` is taken for,
/// the step's blocks only stand in the way of the products' (benches/chain.md).
const OVERLAP_ROWS: usize = 16;

/// What a call runs on.
#[derive(Clone, Copy)]
pub(super) struct On<'a> {
    pub states: &'a GdnState,
    /// The ring beside the states of a pool that has one.
    pub ring: Option<&'a PoolRing>,
    /// In u32. Without them sequence `n` has state `n`.
    pub slots: Option<&'a Slots>,
    /// Where tokens are packed.
    pub cu_seqlens: Option<&'a CuSeqlens>,
    /// The tokens are drafts in place on a ring: they take the step, however many they are.
    pub drafts: bool,
    pub launch: &'a Launch,
}

impl<'a> On<'a> {
    /// Slots of a pool, in u32.
    pub fn pool(pool: &'a StatePool, slots: &'a Slots, cu_seqlens: Option<&'a CuSeqlens>) -> Self {
        const LAUNCH: &Launch = &Launch { overlap: false, arena: None };
        let (states, ring) = (pool.states(), pool.ring());
        Self { states, ring, slots: Some(slots), cu_seqlens, drafts: false, launch: LAUNCH }
    }
}

impl GatedDeltaNet {
    /// Feeds the next tokens of every sequence: x and y are `[batch, tokens, hidden_size]` in the weights' dtype.
    ///
    /// Any number of tokens continues the state: a prompt whole, in pieces, or token by token gives the same.
    ///
    /// # Errors
    /// When x or the state does not fit; the message says what was expected. The state is then unchanged, unless the
    /// device itself failed.
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
        let on = On { states: state, ring: None, slots: None, cu_seqlens: None, drafts: false, launch };
        self.feed(&self.project(x, tokens, launch)?, tokens, on)
    }

    /// Feeds the next tokens of sequences whose states lie in a pool: sequence `n` goes on from slot `slots.read()[n]`
    /// and leaves its new state in slot `slots.write()[n]`; see [`Slots`].
    ///
    /// x is `[batch, tokens, hidden_size]`; or with `cu_seqlens` packed, `[tokens of all, hidden_size]`, sequences of any
    /// lengths, some of which begin, go on with many tokens, or have one. y has x's shape. Where no sequence has more than
    /// 8 tokens (on the CPU 16) the call takes the decode step ([`GdnStep`]). A sequence of no tokens has its state copied
    /// where the slots differ. Rows of padding are zero in y, whatever finite numbers they hold in x.
    ///
    /// A sequence that begins needs a slot that is zero, as [`SlotAllocator::allocate`](crate::SlotAllocator::allocate)
    /// hands it out.
    ///
    /// # Errors
    /// When x, the slots or the pool do not fit; the message says what was expected. The pool is then unchanged, unless
    /// the device itself failed.
    pub fn forward_slots(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        slots: &Slots,
        pool: &mut StatePool,
    ) -> Result<Tensor> {
        self.forward_slots_launched(x, cu_seqlens, slots, pool, &Launch::default())
    }

    /// [`forward_slots`](Self::forward_slots) with a say in how its kernels are launched. They overlap by themselves where
    /// that is right.
    #[doc(hidden)]
    pub fn forward_slots_launched(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        slots: &Slots,
        pool: &mut StatePool,
        launch: &Launch,
    ) -> Result<Tensor> {
        match self.begin_slots(x, cu_seqlens, slots, pool)? {
            Some((slots, _working)) => {
                let on = On { launch, ..On::pool(pool, &slots, cu_seqlens) };
                let (y, _) = self.run_slots(x, on)?;
                Ok(y)
            }
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
            copy_states(slots, pool)?;
            return Ok(None);
        }
        let working = pool.states_mut().take()?;
        // Before the projection, which must be the kernel right before the step.
        Ok(Some((slots.in_u32()?, working)))
    }

    /// Checked tokens on slots: y, and what the projection gave.
    pub(super) fn run_slots(&self, x: &Tensor, on: On<'_>) -> Result<(Tensor, Projected)> {
        // Equal lengths as a batch, for which the step has kernels of its own.
        if let Some(len) = on.cu_seqlens.and_then(CuSeqlens::uniform_len).filter(|len| self.steps(*len, on)) {
            let batch = x.dims()[0] / len;
            let p = self.project(&x.reshape((batch, len, x.dims()[1]))?, len, on.launch)?;
            let y = self.feed(&p, len, On { cu_seqlens: None, ..on })?;
            self.advance(len, on)?;
            return Ok((y.flatten(0, 1)?, p.packed(&self.config)?));
        }
        let longest = on.cu_seqlens.map_or_else(|| x.dims()[1], CuSeqlens::max_len);
        let p = self.project(x, longest, on.launch)?;
        let y = self.feed(&p, longest, on)?;
        self.advance(longest, on)?;
        Ok((y, p))
    }

    /// Moves the cursors of a pool whose own they are.
    fn advance(&self, longest: usize, on: On<'_>) -> Result<()> {
        match (on.ring, on.slots) {
            (Some(PoolRing { ring, own: true }), Some(slots)) if !on.drafts => {
                ring.cursors.advance(slots, self.ring_move(on.cu_seqlens, longest))
            }
            _ => Ok(()),
        }
    }

    /// What a call with so many tokens a sequence at most does to rings.
    #[doc(hidden)]
    pub fn ring_move<'a>(&self, cu_seqlens: Option<&'a CuSeqlens>, longest: usize) -> Move<'a> {
        match self.fuses(longest) {
            true => Move::append(cu_seqlens, longest),
            false => Move::fold(),
        }
    }

    /// Whether the fused step runs calls of at most so many tokens a sequence.
    pub(super) fn fuses(&self, longest: usize) -> bool {
        longest <= if self.conv_weight.device().is_cuda() { FUSED_TOKENS } else { STEP_TOKENS }
    }

    /// Whether the fused step runs this call.
    fn steps(&self, longest: usize, on: On<'_>) -> bool {
        self.fuses(longest) || on.drafts
    }

    /// The input projection of x `[lead.., hidden_size]`, `longest` being the most tokens of a sequence. In a step its
    /// launch may overlap the one before it: no launch of a layer writes a weight (since `new` waited for those that did),
    /// and this one writes no state.
    fn project(&self, x: &Tensor, longest: usize, launch: &Launch) -> Result<Projected> {
        let launch = &launched(launch, x, longest);
        let outputs = self.in_proj.forward(&self.config, &x.contiguous()?, launch)?;
        Projected::new(&self.config, outputs, &self.a_log, &self.dt_bias)
    }

    /// What follows the projection, with y; `longest` is the most tokens of a sequence.
    fn feed(&self, p: &Projected, longest: usize, on: On<'_>) -> Result<Tensor> {
        if self.steps(longest, on) {
            let launch = launched(on.launch, &p.z, longest);
            let y = self.step(p, on)?.launched(&launch).forward(&p.qkv, &p.z, &self.conv_weight)?;
            return self.out_proj.forward("out_proj", &y, self.config.hidden_size, &launch);
        }
        let c = &self.config;
        let o = match (on.ring, on.slots) {
            (Some(PoolRing { ring, .. }), Some(slots)) => self.behind_ring(p, longest, on, (ring, slots))?,
            _ => self.rule(p, longest, on)?,
        };
        let o = GatedRmsNorm::new(c.rms_norm_eps, c.output_gate)?.forward(&o, &p.z, &self.norm_weight)?;
        self.out_proj.forward("out_proj", &o.flatten_from(o.rank() - 2)?, c.hidden_size, on.launch)
    }

    /// [`Self::rule`] on states whose rings are folded first; their windows go out of the rings and into them again.
    pub(super) fn behind_ring(
        &self,
        p: &Projected,
        longest: usize,
        on: On<'_>,
        (ring, slots): (&Ring, &Slots),
    ) -> Result<Tensor> {
        let GdnState { conv, recurrent, .. } = on.states;
        ring.fold(recurrent, slots, None)?;
        ring.window(conv, slots, Window::ToState)?;
        let o = self.rule(p, longest, On { slots: Some(&slots.written()), ..on })?;
        ring.window(conv, slots, Window::ToRing)?;
        Ok(o)
    }

    /// Convolution, rule and norm for up to 16 tokens a sequence.
    pub(super) fn step(&self, p: &Projected, on: On<'_>) -> Result<GdnStep> {
        let (conv, recurrent) = (&on.states.conv, &on.states.recurrent);
        let mut step = GdnStep::new(p.gates.clone(), &self.norm_weight, conv, recurrent, self.options)?;
        if let Some(slots) = on.slots {
            step = step.with_slots(slots);
        }
        if let Some(PoolRing { ring, .. }) = on.ring {
            step = step.with_ring(ring);
        }
        match on.cu_seqlens {
            Some(cu_seqlens) => step.with_cu_seqlens(cu_seqlens),
            None => Ok(step),
        }
    }

    /// Convolution and rule for any number of tokens: o. `longest` is the most tokens of a sequence.
    pub(super) fn rule(&self, p: &Projected, longest: usize, on: On<'_>) -> Result<Tensor> {
        let c = &self.config;
        let mut conv = CausalConv1d::new(&on.states.conv, on.cu_seqlens, true)?;
        let mut rule = GdnPrefill::new(p.gates.clone(), &on.states.recurrent, on.cu_seqlens, self.options.rule)?;
        if let Some(slots) = on.slots {
            conv = conv.with_slots(slots);
            rule = rule.with_slots(slots);
        }
        // Before the convolution writes its state.
        rule.check_algo(p.qkv.dtype(), (c.key_head_dim, c.value_head_dim), longest)?;
        let qkv = conv.forward(&p.qkv, &self.conv_weight)?;
        let (last, keys) = (qkv.rank() - 1, c.key_size());
        let q = qkv.narrow(last, 0, keys)?;
        let k = qkv.narrow(last, keys, keys)?;
        let v = qkv.narrow(last, 2 * keys, c.value_size())?;
        rule.forward(&q, &k, &v)
    }

    /// Batch and tokens of x.
    fn check_batched(&self, x: &Tensor) -> Result<(usize, usize)> {
        let hidden = self.config.hidden_size;
        match *x.dims() {
            [batch, tokens, n] if n == hidden => {
                self.check_x(x)?;
                Ok((batch, tokens))
            }
            ref dims => bail!("{OP}: x: expected shape [batch, tokens, {hidden}], got {dims:?}"),
        }
    }

    /// Tokens of x, which are those of the sequences.
    pub(super) fn check_packed(&self, x: &Tensor, cu_seqlens: &CuSeqlens) -> Result<usize> {
        let (hidden, total) = (self.config.hidden_size, cu_seqlens.total_tokens());
        if x.dims() != [total, hidden] {
            bail!("{OP}: x: expected shape [{total}, {hidden}] (cu_seqlens has the tokens), got {:?}", x.dims());
        }
        self.check_x(x)?;
        if !cu_seqlens.device().same_device(self.conv_weight.device()) {
            bail!(
                "{OP}: cu_seqlens: expected a tensor on {:?} (the weights' device), got one on {:?}",
                self.conv_weight.device().location(),
                cu_seqlens.device().location()
            );
        }
        Ok(total)
    }

    fn check_x(&self, x: &Tensor) -> Result<()> {
        let weight = &self.conv_weight;
        if x.dtype() != weight.dtype() {
            bail!("{OP}: x: expected dtype {:?} (the weights'), got {:?}", weight.dtype(), x.dtype());
        }
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
    Launch { overlap: longest == 1 && x.dims()[0] <= OVERLAP_ROWS, ..launch.clone() }
}

/// What sequences of no tokens leave: their states, where they are not written to where they were read.
fn copy_states(slots: &Slots, pool: &mut StatePool) -> Result<()> {
    if slots.in_place() {
        return Ok(());
    }
    let (read, write) = match slots.on_host() {
        Some((read, write)) => (read.to_vec(), write.to_vec()),
        None if slots.read().device().is_cpu() => {
            let slots = slots.in_u32()?;
            (slots.read().to_vec1()?, slots.write().to_vec1()?)
        }
        None => bail!("{OP}: slots: expected them made from host values for a call without tokens"),
    };
    // In any order: none is read after it was written.
    for (from, to) in read.into_iter().zip(write).filter(|(r, w)| *r != crate::NO_SLOT && *w != crate::NO_SLOT) {
        pool.copy(from, to)?;
    }
    Ok(())
}
