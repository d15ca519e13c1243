//! What a layer remembers of each sequence.

#[cfg(feature = "cuda")]
mod common;
mod copy_slot;
mod pool;
mod ring;

#[cfg(feature = "cuda")]
pub(crate) use common::{common_of, State};
pub(crate) use pool::PoolRing;
pub use pool::{PoolOptions, StatePool};
#[cfg(feature = "cuda")]
pub(crate) use ring::with_ring;
pub use ring::RingSpans;
pub(crate) use ring::{ring_get, ring_set, Ring, RingMove, Window, RING_ROWS, RING_TOKENS};

use candle_core::{bail, DType, Device, Result, Tensor};
use candle_gdn_core::check::{check_device, check_float, check_state_dtype, check_untracked, zeros};
use candle_gdn_core::device::{LastThread, Working};

const OP: &str = "GdnState";

/// The state of one Gated DeltaNet layer for a batch of sequences: the last inputs of the convolution and the
/// recurrent matrix of every value head. Its size does not depend on how many tokens were fed.
///
/// A new state is zero, which is the state of a sequence that has not begun. Every `forward` of the layer advances it
/// in place. It is not `Clone`, because a clone of a tensor shares its memory: [`GdnState::snapshot`] copies.
///
/// [`StatePool`] holds those of many sequences that come and go. For several host threads see
/// [there](StatePool#threads).
#[derive(Debug)]
pub struct GdnState {
    /// `[batch, width - 1, channels]`, the layer's dtype: the last inputs, oldest first.
    pub(crate) conv: Tensor,
    /// `[batch, HV, V, K]`, f32 or bf16.
    pub(crate) recurrent: Tensor,
    thread: LastThread,
}

impl GdnState {
    pub(crate) fn zeros(
        conv_shape: [usize; 3],
        recurrent_shape: [usize; 4],
        (conv_dtype, recurrent_dtype): (DType, DType),
        device: &Device,
    ) -> Result<Self> {
        let recurrent = zeros(OP, "recurrent", &recurrent_shape, recurrent_dtype, device)?;
        Ok(Self::owning(zeros(OP, "conv", &conv_shape, conv_dtype, device)?, recurrent))
    }

    /// A zero state of another batch.
    pub(crate) fn zeros_like(&self, batch: usize) -> Result<Self> {
        let zeros = |arg: &str, like: &Tensor| {
            let shape = [&[batch], &like.dims()[1..]].concat();
            zeros(OP, arg, &shape, like.dtype(), like.device())
        };
        Ok(Self::owning(zeros("conv", &self.conv)?, zeros("recurrent", &self.recurrent)?))
    }

    /// What `read` makes of the state, which another thread may have written.
    pub(crate) fn reading<R>(&self, read: impl FnOnce() -> Result<R>) -> Result<R> {
        self.thread.reading(self.recurrent.device(), read)
    }

    /// Of tensors that share no memory with others, written by this thread.
    fn owning(conv: Tensor, recurrent: Tensor) -> Self {
        Self { conv, recurrent, thread: LastThread::default() }
    }

    /// The state with these two parts, which are copied: what [`GdnState::conv`] and [`GdnState::recurrent`] of another state
    /// returned, or a file that keeps it. A layer refuses a state that does not fit it.
    ///
    /// ```
    /// # use candle_core::{safetensors, DType, Device, Result};
    /// # use candle_gdn::{GatedDeltaNet, GdnConfig, GdnState};
    /// # use std::collections::HashMap;
    /// # fn main() -> Result<()> {
    /// # let device = &Device::Cpu;
    /// # let vb = candle_nn::VarBuilder::zeros(DType::F32, device);
    /// # let layer = GatedDeltaNet::load(&GdnConfig::new(32, (2, 16), (4, 16)), vb)?;
    /// # let file = &std::env::temp_dir().join(format!("candle-gdn-state-{}.safetensors", std::process::id()));
    /// let state = layer.new_state(1)?;
    /// let parts = HashMap::from([("0.conv", state.conv().clone()), ("0.recurrent", state.recurrent().clone())]);
    /// safetensors::save(&parts, file)?;
    ///
    /// let parts = safetensors::load(file, device)?;
    /// let state = GdnState::from_tensors(&parts["0.conv"], &parts["0.recurrent"])?;
    /// # std::fs::remove_file(file)?;
    /// # let _ = state;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// When a part has another rank or dtype than those of a state, or is tracked for gradients, or the parts differ in device
    /// or batch.
    pub fn from_tensors(conv: &Tensor, recurrent: &Tensor) -> Result<Self> {
        check_float(OP, "conv", conv.dtype())?;
        check_state_dtype(OP, "recurrent", recurrent.dtype())?;
        check_untracked(OP, "conv", conv)?;
        check_untracked(OP, "recurrent", recurrent)?;
        let [batch, _, _] = *conv.dims() else {
            bail!("{OP}: conv: expected shape [batch, width - 1, channels], got {:?}", conv.dims());
        };
        let [same, _, _, _] = *recurrent.dims() else {
            bail!(
                "{OP}: recurrent: expected shape [batch, value_heads, value_dim, key_dim], got {:?}",
                recurrent.dims()
            );
        };
        if batch != same {
            bail!("{OP}: recurrent: expected a batch of {batch} (conv has it), got {same}");
        }
        check_device(OP, "recurrent", recurrent, conv.device())?;
        let _working = Working::new(conv.device());
        Ok(Self::owning(own_copy(conv)?, own_copy(recurrent)?))
    }

    /// The convolution's part: `[batch, width - 1, channels]`, the last inputs, oldest first; channels are q, k, v.
    pub fn conv(&self) -> &Tensor {
        &self.conv
    }

    /// The recurrent part: `[batch, HV, V, K]`, f32 unless it was made in bf16.
    pub fn recurrent(&self) -> &Tensor {
        &self.recurrent
    }

    /// Number of sequences.
    pub fn batch(&self) -> usize {
        self.recurrent.dims()[0]
    }

    /// Bytes of device memory held.
    pub fn size_in_bytes(&self) -> usize {
        [&self.conv, &self.recurrent].iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
    }

    /// Forgets everything: the next token begins new sequences.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn reset(&mut self) -> Result<()> {
        let _working = self.take()?;
        for tensor in [&self.conv, &self.recurrent] {
            for (first, count) in copyable(tensor)? {
                tensor.narrow(0, first, count)?.zero_set()?;
            }
        }
        Ok(())
    }

    /// A copy that later steps do not touch.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn snapshot(&self) -> Result<Self> {
        self.rows(0, self.batch())
    }

    /// Goes back to a snapshot, which stays as it is.
    ///
    /// # Errors
    /// When the snapshot is of another shape, dtype or device.
    pub fn restore(&mut self, snapshot: &GdnState) -> Result<()> {
        self.put(OP, 0, snapshot, self.batch())
    }

    /// Before this thread writes the state.
    pub(crate) fn take(&mut self) -> Result<Working> {
        self.thread.take(self.recurrent.device())
    }

    /// A copy of the states of `count` sequences from number `first` on.
    pub(crate) fn rows(&self, first: usize, count: usize) -> Result<Self> {
        let rows = |tensor: &Tensor| own_copy(&tensor.narrow(0, first, count)?);
        let copies = || Ok(Self::owning(rows(&self.conv)?, rows(&self.recurrent)?));
        self.thread.reading(self.recurrent.device(), copies)
    }

    /// Copies all states of `src`, which must be `count`, over those from number `first` on.
    pub(crate) fn put(&mut self, op: &str, first: usize, src: &GdnState, count: usize) -> Result<()> {
        let parts = [("conv", &self.conv, &src.conv), ("recurrent", &self.recurrent, &src.recurrent)];
        for (arg, dst, src) in parts {
            let want = [&[count], &dst.dims()[1..]].concat();
            if want != src.dims() || dst.dtype() != src.dtype() || !dst.device().same_device(src.device()) {
                bail!(
                    "{op}: restore: {arg}: expected {:?} {want:?} on {:?}, got {:?} {:?} on {:?}",
                    dst.dtype(),
                    dst.device().location(),
                    src.dtype(),
                    src.dims(),
                    src.device().location()
                );
            }
        }
        let _working = self.take()?;
        src.thread.reading(src.recurrent.device(), || {
            for (dst, src) in [(&self.conv, &src.conv), (&self.recurrent, &src.recurrent)] {
                for (place, count) in copyable(src)? {
                    dst.slice_set(&src.narrow(0, place, count)?, 0, first + place)?;
                }
            }
            Ok(())
        })
    }
}

impl Drop for GdnState {
    fn drop(&mut self) {
        // A device that fails here fails the next call too.
        let _ = self.thread.wait(self.recurrent.device());
    }
}

/// A copy in memory of its own, where there is anything to copy.
fn own_copy(tensor: &Tensor) -> Result<Tensor> {
    match tensor.elem_count() {
        0 => zeros(OP, "empty", tensor.dims(), tensor.dtype(), tensor.device()),
        _ => tensor.force_contiguous(),
    }
}

/// The sequences of `tensor [sequences, ..]` in ranges, first and count, of as many as candle copies or fills in one
/// call: on CUDA it counts elements in 32 bits, and more than that it leaves as they were.
fn copyable(tensor: &Tensor) -> Result<impl Iterator<Item = (usize, usize)>> {
    let sequences = tensor.dims()[0];
    let elements = tensor.elem_count() / sequences.max(1);
    if elements > u32::MAX as usize {
        bail!("state: expected at most {} elements of a sequence, got {elements}", u32::MAX)
    }
    let most = u32::MAX as usize / elements.max(1);
    let sequences = if elements == 0 { 0 } else { sequences };
    Ok((0..sequences).step_by(most).map(move |first| (first, most.min(sequences - first))))
}
