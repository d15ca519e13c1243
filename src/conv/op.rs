//! The op of the convolution and the one check of its calls.

#[cfg(doc)]
use candle_core::CustomOp2;
use candle_core::{bail, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::{CuSeqlens, SequencePlan, Slots};

pub(super) const OP: &str = "causal_conv1d";

/// Depthwise causal convolution over time with an optional SiLU, as a [`CustomOp2`] over (x, weight); see
/// [`causal_conv1d`](super::causal_conv1d) for shapes. The op holds the state and updates it when it is applied.
#[derive(Debug, Clone)]
pub struct CausalConv1d {
    pub(super) state: Tensor,
    pub(super) slots: Option<Slots>,
    pub(super) cu_seqlens: Option<CuSeqlens>,
    pub(super) silu: bool,
}

/// A checked call.
pub(crate) struct ConvPlan {
    pub x: HeadsLayout,
    pub channels: usize,
    pub width: usize,
    pub seqs: SequencePlan,
    pub weight_offset: usize,
    pub out_shape: Shape,
}

impl CausalConv1d {
    /// With `cu_seqlens` the tokens of all sequences are packed along one dimension.
    ///
    /// # Errors
    /// When the dtype or shape of the state does not fit; the message names the argument.
    pub fn new(state: &Tensor, cu_seqlens: Option<&CuSeqlens>, silu: bool) -> Result<Self> {
        check_float(OP, "state", state.dtype())?;
        if state.rank() != 3 {
            bail!("{OP}: state: expected shape [slots, width - 1, channels], got {:?}", state.dims());
        }
        check_state_strides(OP, "state", state.layout())?;
        if let Some(cu) = cu_seqlens {
            check_device(OP, "cu_seqlens", cu.tensor(), state.device())?;
        }
        Ok(Self::unchecked(state, cu_seqlens, None, silu))
    }

    /// An op on arguments that a layer or a step has checked.
    pub(crate) fn unchecked(state: &Tensor, cu_seqlens: Option<&CuSeqlens>, slots: Option<&Slots>, silu: bool) -> Self {
        Self { state: state.clone(), slots: slots.cloned(), cu_seqlens: cu_seqlens.cloned(), silu }
    }

    /// Sequence `n` uses slot `slots[n]` of the state, or reads one slot and writes another; see
    /// [`GdnDecode::with_slots`](crate::ops::GdnDecode::with_slots).
    pub fn with_slots(mut self, slots: impl Into<Slots>) -> Self {
        self.slots = Some(slots.into());
        self
    }

    pub(super) fn plan(&self, x: Arg<'_>, weight: Arg<'_>) -> Result<ConvPlan> {
        check_dtype(OP, "x", x.dtype, self.state.dtype())?;
        check_weight_dtype(OP, "weight", weight.dtype, x.dtype)?;
        for arg in [x, weight] {
            arg.check_place(OP, self.state.device(), &[("the state", &self.state)])?;
        }
        let (x, weight) = (x.layout, weight.layout);
        let (_, history, channels) = self.state.dims3()?;
        let width = history + 1;
        if !(2..=8).contains(&width) || channels == 0 {
            bail!(
                "{OP}: state: expected [slots, width - 1, channels] with a width of 2 to 8, got {:?}",
                self.state.dims()
            );
        }
        if weight.dims() != [channels, width] || !weight.is_contiguous() {
            bail!(
                "{OP}: weight: expected a contiguous tensor of shape {:?}, got {:?}",
                [channels, width],
                weight.dims()
            );
        }
        let lead = if self.cu_seqlens.is_some() { Lead::Packed } else { Lead::Batched };
        if x.dims().len() != lead.rank() + 1 {
            bail!("{OP}: x: expected shape [{}, {channels}], got {:?}", lead.names(), x.dims());
        }
        let lead_dims = &x.dims()[..lead.rank()];
        let (cu_seqlens, slots) = (self.cu_seqlens.as_ref(), self.slots.as_ref());
        let seqs = SequencePlan::new((OP, "x"), (lead, lead_dims), cu_seqlens, slots, &self.state)?;
        Ok(ConvPlan {
            x: heads_layout(OP, "x", x, lead, lead_dims, (1, channels))?,
            channels,
            width,
            seqs,
            weight_offset: weight.start_offset(),
            out_shape: x.shape().clone(),
        })
    }
}
