//! States along the way of a prefill, for prefix caching.

use super::forward::On;
use super::{GatedDeltaNet, OP};
use crate::ops::{checkpoint_rows, CuSeqlens, Slots, CHECKPOINT_MULTIPLE};
use crate::state::{GdnState, StatePool};
use candle_core::{bail, Result, Tensor};
use std::sync::Arc;

/// Which states a call keeps along the way: those after every `every` tokens of each of its sequences, counted from the
/// call's first. Made once a batch by [`GatedDeltaNet::checkpoint_plan`] and used for every layer.
#[derive(Debug, Clone)]
pub struct CheckpointPlan {
    every: usize,
    cu_seqlens: CuSeqlens,
    /// Rows of qkv that end in a checkpoint: `[rows * (width - 1)]`. `None` where no sequence reaches one.
    windows: Option<Arc<Tensor>>,
    rows: usize,
    history: usize,
}

/// The states that a call of one layer kept.
#[derive(Debug)]
pub struct Checkpoints {
    plan: CheckpointPlan,
    states: Option<GdnState>,
}

impl CheckpointPlan {
    /// Tokens from one checkpoint of a sequence to the next.
    pub fn every(&self) -> usize {
        self.every
    }

    /// How many checkpoints sequence `n` of the call has: its tokens divided by `every`.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn count(&self, n: usize) -> usize {
        let cu = self.cu_seqlens.as_slice();
        (cu[n + 1] - cu[n]) as usize / self.every
    }
}

impl Checkpoints {
    /// What was asked for.
    pub fn plan(&self) -> &CheckpointPlan {
        &self.plan
    }

    /// Bytes of device memory held, by this and not by its snapshots.
    pub fn size_in_bytes(&self) -> usize {
        self.states.as_ref().map_or(0, GdnState::size_in_bytes)
    }

    /// A copy of the state of sequence `n` after `(index + 1) * every` tokens of the call, of batch 1: for
    /// [`StatePool::restore`], from where the sequence goes on as if it had been fed that far. It holds its own memory and
    /// none of the others'.
    ///
    /// # Errors
    /// When there is no such sequence or checkpoint, or the device is out of memory.
    pub fn snapshot(&self, n: usize, index: usize) -> Result<GdnState> {
        let plan = &self.plan;
        if n >= plan.cu_seqlens.num_sequences() || index >= plan.count(n) {
            let count = if n < plan.cu_seqlens.num_sequences() { plan.count(n) } else { 0 };
            bail!("Checkpoints: snapshot: expected one of the {count} of sequence {n}, got {index}");
        }
        let Some(states) = &self.states else { bail!("Checkpoints: snapshot: none were kept") };
        let first = plan.cu_seqlens.as_slice()[n] as usize;
        states.rows(checkpoint_rows(first, plan.every, plan.every).start + index, 1)
    }
}

impl GatedDeltaNet {
    /// A plan to keep the states after every `every` tokens, a multiple of [`CHECKPOINT_MULTIPLE`], of the sequences of a
    /// call. It fits all layers whose convolution has this one's width.
    ///
    /// # Errors
    /// When `every` is no such multiple, or the device is out of memory.
    pub fn checkpoint_plan(&self, cu_seqlens: &CuSeqlens, every: usize) -> Result<CheckpointPlan> {
        if every == 0 || !every.is_multiple_of(CHECKPOINT_MULTIPLE) {
            bail!("{OP}: every: expected a positive multiple of {CHECKPOINT_MULTIPLE} tokens, got {every}");
        }
        let (rows, history) = (cu_seqlens.total_tokens() / every, self.config.conv_kernel - 1);
        let mut windows = vec![0u32; rows * history]; // rows of nobody may be any
        for pair in cu_seqlens.as_slice().windows(2) {
            let (first, end) = (pair[0] as usize, pair[1] as usize);
            let own = checkpoint_rows(first, end - first, every);
            for (j, row) in own.enumerate() {
                // Within the sequence: a checkpoint is further in than the window is long.
                let from = first + (j + 1) * every - history;
                for (i, to) in windows[row * history..][..history].iter_mut().enumerate() {
                    *to = (from + i) as u32;
                }
            }
        }
        let windows = match cu_seqlens.max_len() >= every {
            true => Some(Arc::new(Tensor::new(&windows[..], self.conv_weight.device())?)),
            false => None,
        };
        Ok(CheckpointPlan { every, cu_seqlens: cu_seqlens.clone(), windows, rows, history })
    }

    /// [`GatedDeltaNet::forward_slots`] of the packed tokens that `plan` was made for, with the states along the way. The
    /// states are those of calls that end there, the convolution's included, and asking for them changes nothing else.
    ///
    /// # Errors
    /// As [`GatedDeltaNet::forward_slots`], or when the plan is of a convolution of another width.
    pub fn forward_with_checkpoints(
        &self,
        x: &Tensor,
        plan: &CheckpointPlan,
        slots: &Slots,
        pool: &mut StatePool,
    ) -> Result<(Tensor, Checkpoints)> {
        if plan.history + 1 != self.config.conv_kernel {
            let got = plan.history + 1;
            bail!("{OP}: plan: expected one for a convolution of width {}, got {got}", self.config.conv_kernel);
        }
        let cu_seqlens = Some(&plan.cu_seqlens);
        let Some((slots, _working)) = self.begin_slots(x, cu_seqlens, slots, pool)? else {
            return Ok((x.clone(), Checkpoints { plan: plan.clone(), states: None }));
        };
        let (states, on) = (pool.states(), On::pool(pool, &slots, cu_seqlens));
        let Some(windows) = &plan.windows else {
            let (y, _) = self.run_slots(x, on)?;
            return Ok((y, Checkpoints { plan: plan.clone(), states: None }));
        };
        let shape = [&[plan.rows], &states.recurrent.dims()[1..]].concat();
        let recurrent = Tensor::zeros(shape, states.recurrent.dtype(), x.device())?;
        let (y, p) = self.run_slots(x, On { checkpoints: Some((&recurrent, plan.every)), ..on })?;
        let channels = self.config.conv_channels();
        let conv = p.rows().index_select(windows, 0)?.narrow(1, 0, channels)?;
        let conv = conv.contiguous()?.reshape((plan.rows, plan.history, channels))?;
        Ok((y, Checkpoints { plan: plan.clone(), states: Some(GdnState::from_tensors(conv, recurrent)) }))
    }
}
