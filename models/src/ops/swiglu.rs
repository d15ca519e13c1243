//! The gate of a feed-forward.

use crate::weights::cpu::swiglu::activate;
#[cfg(doc)]
use candle_core::CustomOp1;
use candle_core::{bail, Result, Tensor};
use candle_gdn_core::*;

const OP: &str = "swiglu";

/// The gate of a SwiGLU feed-forward, as a [`CustomOp1`]: `gate * sigmoid(gate) * up` of rows `[gate | up]`, as one projection
/// of stacked weights gives them. Everything between reading and the last rounding is f32.
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `gate_up` | `[.., 2 * columns]`; may be a strided view | f32, bf16 or f16 |
/// | result | `[.., columns]`, contiguous | as gate_up |
#[derive(Debug, Clone, Default)]
pub struct Swiglu {
    /// With overlap, the kernel waits for the one before it on the stream before it reads anything.
    pub(crate) launch: Launch,
}

/// Rows of one length at one distance.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct RowsLayout {
    pub offset: usize,
    pub stride: usize,
}

/// A checked call of SwiGLU.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct SwigluPlan {
    pub gate_up: RowsLayout,
    pub rows: usize,
    /// Of a half.
    pub columns: usize,
    pub out_shape: Vec<usize>,
    pub launch: Launch,
}

impl Swiglu {
    /// The op.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies the op: `[.., 2 * columns]` to `[.., columns]`, contiguous.
    ///
    /// # Errors
    /// When the dtype or shape does not fit, or gate_up is tracked for gradients.
    pub fn forward(&self, gate_up: &Tensor) -> Result<Tensor> {
        let _working = Working::new(gate_up.device());
        let rows = uniform_tokens(gate_up, gate_up.rank().saturating_sub(1))?;
        apply1(self, self.launch.arena.as_ref(), ("gate_up", &rows))
    }

    fn plan(&self, Arg { dtype, layout, .. }: Arg<'_>) -> Result<SwigluPlan> {
        check_float(OP, "gate_up", dtype)?;
        let (dims, stride) = (layout.dims(), layout.stride());
        let Some((&both, lead)) = dims.split_last().filter(|(last, _)| last.is_multiple_of(2)) else {
            bail!("{OP}: gate_up: expected shape [.., gate and up], got {dims:?}")
        };
        let Some(rows_stride) = token_stride(lead, &stride[..lead.len()]).filter(|_| stride[lead.len()] == 1) else {
            bail!("{OP}: gate_up: expected rows of one common stride, got strides {stride:?}");
        };
        Ok(SwigluPlan {
            gate_up: RowsLayout { offset: layout.start_offset(), stride: rows_stride },
            rows: lead.iter().product(),
            columns: both / 2,
            out_shape: [lead, &[both / 2]].concat(),
            launch: self.launch.clone(),
        })
    }

    fn on_cpu(&self, [gate_up]: [CpuArg<'_>; 1]) -> CpuOutput {
        let plan = self.plan(Arg::cpu("gate_up", gate_up))?;
        let RowsLayout { offset, stride } = plan.gate_up;
        let layout = HeadsLayout { offset, seq_stride: 0, token_stride: stride, head_stride: 0 };
        let rows = cpu::Sequences { cu_seqlens: None, count: 1, tokens: plan.rows };
        let wide = host::rows(gate_up.0, layout, rows, (1, 2 * plan.columns))?;
        let mut out = vec![0f32; plan.rows * plan.columns];
        if !out.is_empty() {
            activate(&wide, plan.columns, &mut out);
        }
        Ok((host::storage(out, storage_dtype(gate_up.0))?, plan.out_shape.into()))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [gate_up]: [CudaArg<'_>; 1]) -> CudaOutput {
        let plan = self.plan(Arg::cuda("gate_up", gate_up))?;
        Ok((super::cuda::swiglu(&plan, gate_up.0)?, plan.out_shape.into()))
    }
}

custom_op!(CustomOp1 for Swiglu, OP, gate_up layout);
