//! Snapshots as tensors of the host, for the engine of another process.

use super::{KvSegment, SequenceSnapshot};
use crate::causal_lm::CausalLm;
use crate::sequences::fingerprint::hash_model;
use candle_core::{bail, Device, Result, Tensor};
use candle_gdn::GdnState;
use candle_gdn_core::{LastThread, Working};
use std::collections::HashMap;
use std::sync::Arc;

const OP: &str = "SequenceSnapshot";

impl SequenceSnapshot {
    /// Copies on the host, by name: `conv.{i}` and `recurrent.{i}` of Gated DeltaNet layer `i`, shaped as in
    /// [`GdnState`], `k.{i}` and `v.{i}` of softmax layer `i`, `[1, kv_heads, tokens, head_dim]`, with a window of its last tokens; and `fingerprint`, i64 `[2]`: a hash of
    /// the model's configuration and dtype, and one of the tokens.
    ///
    /// # Errors
    /// When the snapshot has a draft head's state, or the device refuses.
    pub fn to_host(&self) -> Result<HashMap<String, Tensor>> {
        if self.head.is_some() {
            bail!("{OP}: to_host: expected one without a draft head's state")
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
    /// with the same dtype.
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape or dtype than here, the fingerprint is of another model, this model has a draft
    /// head, or the device refuses.
    pub fn snapshot_from_host(&self, len: usize, tensors: &HashMap<String, Tensor>) -> Result<SequenceSnapshot> {
        if self.has_draft_head() {
            bail!("{OP}: snapshot_from_host: expected a model without a draft head")
        }
        let _working = Working::new(&self.device);
        let named = |name: String| match tensors.get(&name) {
            Some(tensor) => Ok(tensor),
            None => bail!("{OP}: snapshot_from_host: expected a tensor {name}"),
        };
        let model_hash = hash_model(&self.config, self.dtype);
        let hash = match named("fingerprint".into())?.to_vec1::<i64>()?[..] {
            [model, tokens] if model as u64 == model_hash => tokens as u64,
            _ => bail!("{OP}: snapshot_from_host: fingerprint: expected one of this model's configuration and dtype"),
        };
        let put = |dst: &Tensor, name: String| {
            let src = named(name.clone())?;
            if src.dims() != dst.dims() || src.dtype() != dst.dtype() {
                let (want, got) = ((dst.dtype(), dst.dims()), (src.dtype(), src.dims()));
                bail!("{OP}: snapshot_from_host: {name}: expected {want:?}, got {got:?}")
            }
            dst.slice_set(&src.to_device(&self.device)?, 0, 0)
        };
        let state = |(i, gdn): (usize, &candle_gdn::GatedDeltaNet)| -> Result<GdnState> {
            let state = gdn.new_state(1)?;
            put(state.conv(), format!("conv.{i}"))?;
            put(state.recurrent(), format!("recurrent.{i}"))?;
            Ok(state)
        };
        let states = self.gated_delta_nets().enumerate().map(state).collect::<Result<Vec<_>>>()?;
        let shape = self.cache_shape(len);
        let windows: Vec<_> = self.attention_windows().collect();
        let layer = |(i, window): (usize, &Option<usize>)| -> Result<[Tensor; 2]> {
            let dims = (1, shape.kv_heads, window.map_or(len, |window| window.min(len)), shape.head_dim);
            let zeros = || Tensor::zeros(dims, shape.dtype, &self.device);
            let (k, v) = (zeros()?, zeros()?);
            put(&k, format!("k.{i}"))?;
            put(&v, format!("v.{i}"))?;
            Ok([k, v])
        };
        let layers = windows.iter().enumerate().map(layer).collect::<Result<Vec<_>>>()?;
        let segment = KvSegment { end: len, layers, head_end: 0, head: None, thread: LastThread::default() };
        let segments = if segment.layers.is_empty() { Vec::new() } else { vec![Arc::new(segment)] };
        Ok(SequenceSnapshot { model: self.id, model_hash, len, hash, states, head: None, segments, windows })
    }
}
