//! What a layer remembers of each sequence.

use candle_core::{bail, DType, Device, Result, Tensor};

/// The state of one Gated DeltaNet layer for a batch of sequences: the last inputs of the convolution and the
/// recurrent matrix of every value head. Its size does not depend on how many tokens were fed.
///
/// A new state is zero, which is the state of a sequence that has not begun. Every `forward` of the layer advances it
/// in place. It is not `Clone`, because a clone of a tensor shares its memory: [`GdnState::snapshot`] copies.
#[derive(Debug)]
pub struct GdnState {
    /// `[batch, width - 1, channels]`, the layer's dtype: the last inputs, oldest first.
    pub(crate) conv: Tensor,
    /// `[batch, HV, V, K]`, f32 or bf16.
    pub(crate) recurrent: Tensor,
}

impl GdnState {
    pub(crate) fn zeros(
        conv_shape: (usize, usize, usize),
        recurrent_shape: (usize, usize, usize, usize),
        (conv_dtype, recurrent_dtype): (DType, DType),
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            conv: Tensor::zeros(conv_shape, conv_dtype, device)?,
            recurrent: Tensor::zeros(recurrent_shape, recurrent_dtype, device)?,
        })
    }

    /// The convolution's part: `[batch, width - 1, channels]`, the last inputs, oldest first; channels are q, k, v.
    pub fn conv(&self) -> &Tensor {
        &self.conv
    }

    /// The recurrent part: `[batch, HV, V, K]`, f32 unless it was asked for in bf16.
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
        for tensor in [&self.conv, &self.recurrent] {
            tensor.zero_set()?;
        }
        Ok(())
    }

    /// A copy that later steps do not touch.
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn snapshot(&self) -> Result<Self> {
        Ok(Self { conv: self.conv.force_contiguous()?, recurrent: self.recurrent.force_contiguous()? })
    }

    /// Goes back to a snapshot, which stays as it is.
    ///
    /// # Errors
    /// When the snapshot is of another shape, dtype or device.
    pub fn restore(&mut self, snapshot: &GdnState) -> Result<()> {
        for (arg, to, from) in
            [("conv", &self.conv, &snapshot.conv), ("recurrent", &self.recurrent, &snapshot.recurrent)]
        {
            if to.dims() != from.dims() || to.dtype() != from.dtype() || !to.device().same_device(from.device()) {
                bail!(
                    "restore: {arg}: expected {:?} {:?} on {:?}, got {:?} {:?} on {:?}",
                    to.dtype(),
                    to.dims(),
                    to.device().location(),
                    from.dtype(),
                    from.dims(),
                    from.device().location()
                );
            }
            if to.elem_count() > 0 {
                to.slice_set(from, 0, 0)?;
            }
        }
        Ok(())
    }
}
