//! The layers of the model over one pass.

use super::pass::{Mode, Pass};
use super::pool::{LayerSlots, SequencePool};
use crate::blocks::decoder::{Mixer, Residual};
use crate::causal_lm::CausalLm;
use candle_core::{bail, Result, Tensor};
use candle_gdn::{CuSeqlens, GatedDeltaNet, StatePool};

impl CausalLm {
    /// Packed ids `[tokens]` through all layers: `[tokens, hidden_size]`, before the last norm. Copies nothing to or from the
    /// host. Positions on the device advance at the end, unless the tokens are drafts.
    pub(crate) fn through_layers(
        &self,
        ids: &Tensor,
        pass: &Pass,
        pool: &mut SequencePool,
        mut mode: Mode<'_>,
    ) -> Result<Residual> {
        let launch = &pass.launch;
        let mut x = Residual::new(self.embed(ids)?);
        for (layer, slots) in self.layers.iter().zip(&mut pool.layers) {
            launch.next_layer();
            let (sum, y) = layer.mixer_input(x, launch)?;
            let h = match (&layer.mixer, slots) {
                (Mixer::Linear(gdn), LayerSlots::Linear(states)) => linear(gdn, &y, pass, states, &mut mode)?,
                (Mixer::Full(attention), LayerSlots::Full(kv)) => {
                    attention.forward_slots(&y, pass.cu_seqlens.as_ref(), &pass.kv, kv, launch)?
                }
                _ => bail!("sequences: the pool's layers are of other kinds than the model's"),
            };
            x = layer.feed_forward(&sum, h, launch)?;
        }
        launch.next_layer();
        if let Some((spans, gdn)) = pool.spans.as_ref().zip(self.gated_delta_nets().next()) {
            let cu = pass.cu_seqlens.as_ref();
            match (&mode, cu) {
                (Mode::Verify(_), Some(cu)) if pass.states.in_place() => {
                    spans.draft(&pass.states, cu)?;
                }
                _ => gdn.advance_rings(spans, &pass.states, cu, cu.map_or(1, CuSeqlens::max_len))?,
            }
        }
        if !matches!(mode, Mode::Verify(_)) {
            let cache = pool.layers.iter().find_map(|layer| match layer {
                LayerSlots::Full(kv) => kv.attention_cache(&pass.kv).transpose(),
                LayerSlots::Linear(_) => None,
            });
            match (cache.transpose()?, &pass.cu_seqlens) {
                (Some(cache), Some(cu)) => cache.advance_packed(cu)?,
                (Some(cache), None) => cache.advance(1)?,
                (None, _) => {}
            }
        }
        Ok(x)
    }

    /// An error for an id outside the vocabulary, which would be undefined behaviour in a GPU gather.
    pub(crate) fn check_ids<'a>(&self, what: &str, batch: impl Iterator<Item = &'a [u32]>) -> Result<()> {
        let vocab = self.config.vocab_size;
        for (n, tokens) in batch.enumerate() {
            if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
                bail!("{what}: batch: expected token ids below vocab_size ({vocab}), got {id} at {n}")
            }
        }
        Ok(())
    }

    /// The ids in one row on the device, checked.
    pub(crate) fn packed_ids<'a>(&self, what: &str, batch: impl Iterator<Item = &'a [u32]> + Clone) -> Result<Tensor> {
        self.check_ids(what, batch.clone())?;
        let ids: Vec<u32> = batch.flatten().copied().collect();
        let tokens = ids.len();
        Tensor::from_vec(ids, tokens, &self.device)
    }
}

fn linear(gdn: &GatedDeltaNet, x: &Tensor, pass: &Pass, states: &mut StatePool, mode: &mut Mode<'_>) -> Result<Tensor> {
    states.launch_with(&pass.launch);
    match (mode, &pass.cu_seqlens) {
        (Mode::Feed, None) => gdn.forward_slots(&x.unsqueeze(1)?, None, &pass.states, states)?.squeeze(1),
        (Mode::Feed, cu) => gdn.forward_slots(x, cu.as_ref(), &pass.states, states),
        (Mode::Verify(kept), Some(cu)) => {
            let (y, drafted) = gdn.verify(x, cu, &pass.states, states)?;
            kept.push(drafted);
            Ok(y)
        }
        (Mode::Verify(_), None) => bail!("sequences: expected boundaries of packed tokens"),
    }
}
