//! Snapshots as tensors of the host, for the engine of another process.

use super::{KvSegment, SequenceSnapshot};
use crate::causal_lm::CausalLm;
use crate::sequences::fingerprint::hash_model;
use crate::sequences::pool::{LayerSlots, SequencePool};
use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn_core::Working;
use std::collections::HashMap;
use std::sync::Arc;

const OP: &str = "SequenceSnapshot";

impl SequenceSnapshot {
    /// Copies on the host, by name: `conv.{i}` and `recurrent.{i}` of Gated DeltaNet layer `i`, shaped as in
    /// [`GdnState`](candle_gdn::GdnState), `k.{i}` and `v.{i}` of softmax layer `i`, `[1, kv_heads, tokens, head_dim]`, with a window of its last tokens; and `fingerprint`, i64 `[2]`: a hash of
    /// the model's configuration and dtype, and one of the tokens.
    ///
    /// # Errors
    /// When the snapshot has a draft head's state, or the device refuses.
    pub fn to_host(&self) -> Result<HashMap<String, Tensor>> {
        if self.head.is_some() {
            bail!("{OP}: to_host: expected one without a draft head's state")
        }
        if let Some(host) = &self.host {
            return Ok(host.clone());
        }
        let fingerprint = [self.model_hash as i64, self.hash as i64];
        let mut tensors = HashMap::from([("fingerprint".to_string(), Tensor::new(&fingerprint, &Device::Cpu)?)]);
        for (i, state) in self.states.iter().enumerate() {
            // A copy of its own is read by the thread that makes it.
            let state = state.snapshot()?;
            tensors.insert(format!("conv.{i}"), state.conv().to_device(&Device::Cpu)?);
            tensors.insert(format!("recurrent.{i}"), state.recurrent().to_device(&Device::Cpu)?);
        }
        for (i, window) in self.windows.iter().enumerate().filter(|_| !self.segments.is_empty()) {
            let kept = window.map_or(self.len, |window| window.min(self.len));
            for (part, name) in ["k", "v"].into_iter().enumerate() {
                let on_host = |segment: &Arc<KvSegment>| {
                    let tensor = &segment.layers[i][part];
                    segment.thread.reading(tensor.device(), || tensor.to_device(&Device::Cpu))
                };
                let segments = self.segments.iter().map(on_host).collect::<Result<Vec<_>>>()?;
                let all = Tensor::cat(&segments, 2)?;
                let last = all.narrow(2, all.dim(2)? - kept, kept)?.contiguous()?;
                tensors.insert(format!("{name}.{i}"), last);
            }
        }
        Ok(tensors)
    }
}

impl CausalLm {
    /// The snapshot of a sequence of `len` tokens whose [`SequenceSnapshot::to_host`] this is, by this model loaded elsewhere
    /// with the same dtype. It stays on the host until [`SequencePool::restore`].
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape or dtype than here, the fingerprint is of another model, this model has a draft
    /// head, or the device refuses.
    pub fn snapshot_from_host(&self, len: usize, tensors: &HashMap<String, Tensor>) -> Result<SequenceSnapshot> {
        if self.has_draft_head() {
            bail!("{OP}: snapshot_from_host: expected a model without a draft head")
        }
        let model_hash = hash_model(&self.config, self.dtype);
        let (mut host, fingerprint) = (HashMap::new(), "fingerprint".to_string());
        let hash = match named(tensors, &fingerprint)?.to_vec1::<i64>()?[..] {
            [model, tokens] if model as u64 == model_hash => tokens as u64,
            _ => bail!("{OP}: snapshot_from_host: fingerprint: expected one of this model's configuration and dtype"),
        };
        host.insert(fingerprint.clone(), named(tensors, &fingerprint)?.clone());
        let mut keep = |name: String, dtype: DType, dims: &[usize]| {
            let src = named(tensors, &name)?;
            if src.dims() != dims || src.dtype() != dtype {
                let (want, got) = ((dtype, dims), (src.dtype(), src.dims()));
                bail!("{OP}: snapshot_from_host: {name}: expected {want:?}, got {got:?}")
            }
            host.insert(name, src.to_device(&Device::Cpu)?);
            Ok(())
        };
        {
            let _working = Working::new(&self.device);
            for (i, gdn) in self.gated_delta_nets().enumerate() {
                let state = gdn.new_state(1)?;
                for (name, like) in [("conv", state.conv()), ("recurrent", state.recurrent())] {
                    keep(format!("{name}.{i}"), like.dtype(), like.dims())?;
                }
            }
        }
        let (shape, windows) = (self.cache_shape(len), self.attention_windows().collect::<Vec<_>>());
        for (i, window) in windows.iter().enumerate().filter(|_| len > 0) {
            let tokens = window.map_or(len, |window| window.min(len));
            for name in ["k", "v"] {
                keep(format!("{name}.{i}"), shape.dtype, &[1, shape.kv_heads, tokens, shape.head_dim])?;
            }
        }
        let (states, segments, host) = (Vec::new(), Vec::new(), Some(host));
        Ok(SequenceSnapshot { model: self.id, model_hash, len, hash, states, head: None, segments, windows, host })
    }
}

impl SequencePool {
    /// Copies a snapshot on the host to a slot, layer by layer, so that the device holds the copy of one at a time.
    pub(super) fn upload(&mut self, slot: usize, len: usize, host: &HashMap<String, Tensor>) -> Result<()> {
        let (state, device, mut linear, mut full) = (self.entries[slot].state, self.device.clone(), 0.., 0..);
        let on_device = |name: &str, i: Option<usize>| {
            named(host, &format!("{name}.{}", i.unwrap_or_default()))?.to_device(&device)
        };
        for layer in &mut self.layers {
            match layer {
                LayerSlots::Linear(states) => {
                    let i = linear.next();
                    states.zero(state)?;
                    let copy = states.snapshot(state)?;
                    copy.conv().slice_set(&on_device("conv", i)?, 0, 0)?;
                    copy.recurrent().slice_set(&on_device("recurrent", i)?, 0, 0)?;
                    states.restore(state, &copy)?;
                }
                LayerSlots::Full(_) if len == 0 => {}
                LayerSlots::Full(kv) => {
                    let i = full.next();
                    kv.write(slot, len, [&on_device("k", i)?, &on_device("v", i)?])?;
                }
            }
        }
        Ok(())
    }
}

fn named<'a>(tensors: &'a HashMap<String, Tensor>, name: &str) -> Result<&'a Tensor> {
    match tensors.get(name) {
        Some(tensor) => Ok(tensor),
        None => bail!("{OP}: snapshot_from_host: expected a tensor {name}"),
    }
}
