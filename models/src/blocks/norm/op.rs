//! A residual and the norm of its sum.

use super::cpu::rms_norm;
use crate::ops::RowsLayout;
#[cfg(doc)]
use candle_core::CustomOp3;
use candle_core::{bail, CpuStorage, DType, Layout, Result, Tensor};
use candle_gdn_core::cpu::Element;
use candle_gdn_core::*;
use std::borrow::Cow;

const OP: &str = "add_rms_norm";

/// A residual and the norm of its sum in one pass over memory, as a [`CustomOp3`] over (x, h, weight), or the norm alone:
///
/// ```text
/// sum = x + h;   y = sum * rsqrt(mean(sum^2) + eps) * weight
/// ```
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `x`, `h` | `[.., dim]`; may be strided views | f32, bf16 or f16 |
/// | `weight` | `[dim]`; `1 + w` where the model's weight w is zero-centred | f32 |
/// | results `(sum, y)` | as x, views of one tensor `[2, .., dim]`, which the [`CustomOp3`] returns | as x |
///
/// Arithmetic is f32; the norm is that of the sum rounded to x's dtype.
#[derive(Debug, Clone)]
pub struct AddRmsNorm {
    eps: f64,
    /// With overlap, the kernel reads the weight while the one before it on the stream still runs, which must not write it. The
    /// next launch may begin as early; neither of the two may write what that one reads before it waits.
    pub(crate) launch: Launch,
    /// Whether the second argument is added; if not, it is x again.
    add: bool,
}

/// A checked call.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) struct ResidualPlan {
    pub x: RowsLayout,
    pub h: Option<RowsLayout>,
    pub weight_offset: usize,
    pub rows: usize,
    pub dim: usize,
    /// x's; with h two of it, the sum and the norm.
    pub out_shape: Vec<usize>,
    pub launch: Launch,
    pub eps: f64,
}

impl AddRmsNorm {
    /// # Errors
    /// When `eps` is negative or not finite.
    pub fn new(eps: f64) -> Result<Self> {
        if !eps.is_finite() || eps < 0.0 {
            bail!("{OP}: eps: expected a finite value of at least 0, got {eps}");
        }
        Ok(Self { eps, launch: Launch::default(), add: true })
    }

    /// `x + h`, and its norm.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, or a tensor is tracked for gradients; the message names the argument.
    pub fn forward(&self, x: &Tensor, h: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
        let both = self.apply(x, h, weight)?;
        Ok((both.get(0)?, both.get(1)?))
    }

    /// The norm of x.
    ///
    /// # Errors
    /// When a dtype, shape or device does not fit, or a tensor is tracked for gradients; the message names the argument.
    pub fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Self { add: false, ..self.clone() }.apply(x, x, weight)
    }

    fn apply(&self, x: &Tensor, h: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let _working = Working::new(x.device());
        for (arg, tensor) in [("h", h), ("weight", weight)] {
            check_device(OP, arg, tensor, x.device())?;
        }
        let lead = x.rank().saturating_sub(1);
        let rows = uniform_tokens(x, lead)?;
        let h = if self.add { uniform_tokens(h, lead)? } else { rows.clone() };
        apply3(self, self.launch.arena.as_ref(), [("x", &rows), ("h", &h), ("weight", &weight.contiguous()?)])
    }

    fn plan(&self, [x, h, weight]: [Arg<'_>; 3]) -> Result<ResidualPlan> {
        check_float(OP, "x", x.dtype)?;
        check_dtype(OP, "h", h.dtype, x.dtype)?;
        check_dtype(OP, "weight", weight.dtype, DType::F32)?;
        let [x, h, weight] = [x, h, weight].map(|arg| arg.layout);
        let dims = x.dims();
        if h.dims() != dims {
            bail!("{OP}: h: expected shape {dims:?}, got {:?}", h.dims());
        }
        let Some((&dim, lead)) = dims.split_last() else { bail!("{OP}: x: expected at least one dimension, got none") };
        if dim == 0 {
            bail!("{OP}: x: expected a last dimension of at least 1, got {dims:?}");
        }
        check_dense(OP, "weight", weight, &[dim])?;
        let rows_layout = |arg: &str, layout: &Layout| {
            let stride = layout.stride();
            match token_stride(&dims[..lead.len()], &stride[..lead.len()]) {
                Some(rows) if stride[lead.len()] == 1 || dim == 1 => {
                    Ok(RowsLayout { offset: layout.start_offset(), stride: rows })
                }
                _ => bail!("{OP}: {arg}: expected rows of one common stride, got strides {stride:?}"),
            }
        };
        let out_shape = if self.add { [&[2], dims].concat() } else { dims.to_vec() };
        Ok(ResidualPlan {
            x: rows_layout("x", x)?,
            h: if self.add { Some(rows_layout("h", h)?) } else { None },
            weight_offset: weight.start_offset(),
            rows: lead.iter().product(),
            dim,
            out_shape,
            launch: self.launch.clone(),
            eps: self.eps,
        })
    }

    fn cpu_run(&self, plan: &ResidualPlan, x: &[f32], h: &[f32], weight: &[f32]) -> Vec<f32> {
        let (x, weight) = (&*plan.dense(x, plan.x), &weight[plan.weight_offset..][..plan.dim]);
        let mut out = vec![0f32; plan.out_shape.iter().product()];
        let (sum, y) = out.split_at_mut(if self.add { x.len() } else { 0 });
        if let Some(rows) = plan.h {
            sum.iter_mut().zip(x).zip(&*plan.dense(h, rows)).for_each(|((sum, x), h)| *sum = x + h);
        }
        rms_norm(if self.add { sum } else { x }, weight, self.eps as f32, y);
        out
    }

    /// The same of 16 bits, with the sum rounded before its norm is taken.
    fn cpu_run_half<T: Element>(&self, plan: &ResidualPlan, x: &[T], h: &[T], weight: &[f32]) -> Vec<T> {
        let x = &*plan.dense(x, plan.x);
        let add = |(x, h): (&T, &T)| T::from_f32(x.to_f32() + h.to_f32());
        let mut out: Vec<T> = match plan.h {
            Some(rows) => x.iter().zip(&*plan.dense(h, rows)).map(add).collect(),
            None => vec![],
        };
        let wide: Vec<f32> = if self.add { &out } else { x }.iter().map(|x| x.to_f32()).collect();
        let mut y = vec![0f32; wide.len()];
        rms_norm(&wide, &weight[plan.weight_offset..][..plan.dim], self.eps as f32, &mut y);
        out.extend(y.into_iter().map(T::from_f32));
        out
    }

    fn on_cpu(&self, [x, h, weight]: [CpuArg<'_>; 3]) -> CpuOutput {
        use CpuStorage::{BF16, F16, F32};
        let plan = self.plan([Arg::cpu("x", x), Arg::cpu("h", h), Arg::cpu("weight", weight)])?;
        let out = match (x.0, h.0, weight.0) {
            (F32(x), F32(h), F32(w)) => F32(self.cpu_run(&plan, x, h, w)),
            (BF16(x), BF16(h), F32(w)) => BF16(self.cpu_run_half(&plan, x, h, w)),
            (F16(x), F16(h), F32(w)) => F16(self.cpu_run_half(&plan, x, h, w)),
            _ => unreachable!("the plan checks dtypes"),
        };
        Ok((out, plan.out_shape.into()))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [x, h, weight]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("x", x), Arg::cuda("h", h), Arg::cuda("weight", weight)])?;
        Ok((super::cuda::residual(&plan, x.0, h.0, weight.0)?, plan.out_shape.into()))
    }
}

impl ResidualPlan {
    /// All rows `[rows, dim]` as they lie, or a copy where others lie between them.
    fn dense<'a, T: Copy>(&self, x: &'a [T], layout: RowsLayout) -> Cow<'a, [T]> {
        let row = |i: usize| &x[layout.offset + i * layout.stride..][..self.dim];
        match self.rows <= 1 || layout.stride == self.dim {
            true => Cow::Borrowed(&x[layout.offset..][..self.rows * self.dim]),
            false => Cow::Owned((0..self.rows).flat_map(row).copied().collect()),
        }
    }
}

custom_op!(CustomOp3 for AddRmsNorm, OP, x x_layout, h h_layout, weight weight_layout);
