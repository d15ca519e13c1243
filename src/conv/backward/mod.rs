//! The convolution as an op with gradients, out of place.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::cpu::Conv;
use candle_core::{bail, CpuStorage, Layout, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::{Element, Slots};
use candle_gdn_core::device::Working;
use candle_gdn_core::{custom_op, host, CuSeqlens, SequencePlan};
use half::{bf16, f16};

const OP: &str = "causal_conv1d_diff";

struct ConvDiff {
    cu_seqlens: Option<CuSeqlens>,
    silu: bool,
    /// Whether the third argument is the window; without one it is the weight once more.
    has_window: bool,
}

/// A checked call.
struct DiffPlan {
    x: HeadsLayout,
    channels: usize,
    width: usize,
    seqs: SequencePlan,
    weight_offset: usize,
    /// First element of the window.
    window: Option<usize>,
    out_shape: Shape,
}

impl ConvDiff {
    fn plan(&self, [x, weight, window]: [Arg<'_>; 3]) -> Result<DiffPlan> {
        check_float(OP, "x", x.dtype)?;
        check_weight_dtype(OP, "weight", weight.dtype, x.dtype)?;
        weight.check_place(OP, &x.device(), &[])?;
        let &[channels, width] = weight.layout.dims() else {
            bail!("{OP}: weight: expected shape [channels, width], got {:?}", weight.layout.dims());
        };
        if !(2..=8).contains(&width) || channels == 0 {
            bail!("{OP}: weight: expected [channels, width] with a width of 2 to 8, got {:?}", weight.layout.dims());
        }
        check_dense(OP, "weight", weight.layout, &[channels, width])?;
        let lead = if self.cu_seqlens.is_some() { Lead::Packed } else { Lead::Batched };
        let dims = x.layout.dims();
        if dims.len() != lead.rank() + 1 {
            let packed = if lead == Lead::Batched { "; packed tokens need cu_seqlens" } else { "" };
            bail!("{OP}: x: expected shape [{}, {channels}], got {dims:?}{packed}", lead.names());
        }
        let lead_dims = &dims[..lead.rank()];
        let seqs = SequencePlan::of_tokens((OP, "x"), (lead, lead_dims), self.cu_seqlens.as_ref())?;
        if self.has_window {
            check_dtype(OP, "window", window.dtype, x.dtype)?;
            window.check_place(OP, &x.device(), &[])?;
            check_dense(OP, "window", window.layout, &[seqs.count, width - 1, channels])?;
        }
        Ok(DiffPlan {
            x: heads_layout(OP, "x", x.layout, lead, lead_dims, (1, channels))?,
            channels,
            width,
            seqs,
            weight_offset: weight.layout.start_offset(),
            window: self.has_window.then(|| window.layout.start_offset()),
            out_shape: x.layout.shape().clone(),
        })
    }

    fn on_cpu(&self, [x, weight, window]: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        let plan = self.plan([Arg::cpu("x", x), Arg::cpu("weight", weight), Arg::cpu("window", window)])?;
        let weight = &host::values(weight.0, plan.weight_offset, plan.channels * plan.width)?[..];
        let out = match x.0 {
            F32(x) => F32(self.forward::<f32>(&plan, x, weight, window.0)),
            BF16(x) => BF16(self.forward::<bf16>(&plan, x, weight, window.0)),
            F16(x) => F16(self.forward::<f16>(&plan, x, weight, window.0)),
            x => bail!("{OP}: x: expected dtype f32, bf16 or f16, got {:?}", storage_dtype(x)),
        };
        Ok((out, plan.out_shape))
    }

    fn forward<T: Element>(&self, plan: &DiffPlan, x: &[T], weight: &[f32], window: &CpuStorage) -> Vec<T> {
        let mut out = vec![T::ZERO; plan.out_shape.elem_count()];
        let mut state = match plan.window_of::<T>(window) {
            Some(window) => window.to_vec(),
            None => vec![T::ZERO; plan.window_len()],
        };
        let conv = Conv {
            x: heads(x, plan.x),
            weight,
            channels: plan.channels,
            width: plan.width,
            seqs: plan.seqs.cpu(self.cu_seqlens.as_ref()),
            slots: Slots { read: None, write: None, stride: (plan.width - 1) * plan.channels },
            max_tokens: plan.seqs.max_tokens,
            silu: self.silu,
        };
        conv.run(&mut out, &mut state);
        out
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(
        &self,
        [x, weight, window]: [(&candle_core::CudaStorage, &Layout); 3],
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let plan = self.plan([Arg::cuda("x", x), Arg::cuda("weight", weight), Arg::cuda("window", window)])?;
        Ok((cuda::run(self, &plan, [x.0, weight.0, window.0])?, plan.out_shape))
    }

    fn backward(&self, args: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let _working = Working::new(args[0].device());
        let [x, weight, window] = args;
        let plan = self.plan([Arg::tensor("x", x), Arg::tensor("weight", weight), Arg::tensor("window", window)])?;
        let grad = dense_rows(grad)?;
        #[cfg(feature = "cuda")]
        let [d_x, d_weight, d_window] = match x.device().is_cuda() {
            true => cuda::backward(self, &plan, args, &grad)?,
            false => self.backward_on_cpu(&plan, args, &grad)?,
        };
        #[cfg(not(feature = "cuda"))]
        let [d_x, d_weight, d_window] = self.backward_on_cpu(&plan, args, &grad)?;
        let [d_x, d_weight, d_window] = tracked(args, [d_x, d_weight.to_dtype(weight.dtype())?, d_window]);
        Ok([d_x, d_weight, d_window.filter(|_| self.has_window)])
    }

    fn backward_on_cpu(&self, plan: &DiffPlan, [x, weight, window]: [&Tensor; 3], d_y: &Tensor) -> Result<[Tensor; 3]> {
        let d_y_plan =
            self.plan([Arg::tensor("x", d_y), Arg::tensor("weight", weight), Arg::tensor("window", window)])?;
        let ((d_x, d_weight, d_window), shape) =
            host::with_storages([x, weight, window, d_y], |[x, weight, window, d_y]| {
                use CpuStorage::{BF16, F16, F32};
                let weight = &host::values(weight, plan.weight_offset, plan.channels * plan.width)?[..];
                let d_y_rows = d_y_plan.x;
                let out = match (x, d_y) {
                    (F32(x), F32(d_y)) => {
                        let (x, w, window) =
                            self.gradients::<f32>(plan, [(x, plan.x), (d_y, d_y_rows)], weight, window);
                        (F32(x), w, F32(window))
                    }
                    (BF16(x), BF16(d_y)) => {
                        let (x, w, window) =
                            self.gradients::<bf16>(plan, [(x, plan.x), (d_y, d_y_rows)], weight, window);
                        (BF16(x), w, BF16(window))
                    }
                    (F16(x), F16(d_y)) => {
                        let (x, w, window) =
                            self.gradients::<f16>(plan, [(x, plan.x), (d_y, d_y_rows)], weight, window);
                        (F16(x), w, F16(window))
                    }
                    (x, _) => bail!("{OP}: expected a gradient in {:?}", storage_dtype(x)),
                };
                Ok((out, (plan.seqs.count, plan.width - 1, plan.channels)))
            })?;
        Ok([
            host::tensor_of(d_x, plan.out_shape.clone()),
            Tensor::from_vec(d_weight, (plan.channels, plan.width), x.device())?,
            host::tensor_of(d_window, shape),
        ])
    }

    fn gradients<T: Element>(
        &self,
        plan: &DiffPlan,
        [x, d_y]: [(&[T], HeadsLayout); 2],
        weight: &[f32],
        window: &CpuStorage,
    ) -> (Vec<T>, Vec<f32>, Vec<T>) {
        let mut d_x = vec![T::ZERO; plan.out_shape.elem_count()];
        let mut d_weight = vec![0.0; weight.len()];
        let mut d_window = vec![T::ZERO; plan.window_len()];
        let conv = cpu::ConvBackward {
            x: heads(x.0, x.1),
            d_y: heads(d_y.0, d_y.1),
            weight,
            window: plan.window_of(window),
            channels: plan.channels,
            width: plan.width,
            seqs: plan.seqs.cpu(self.cu_seqlens.as_ref()),
            silu: self.silu,
        };
        conv.run(cpu::Gradients { x: &mut d_x, weight: &mut d_weight, window: &mut d_window });
        (d_x, d_weight, d_window)
    }
}

custom_op!(differentiable CustomOp3 for ConvDiff, OP, x x_layout, weight weight_layout, window window_layout);

impl DiffPlan {
    fn window_len(&self) -> usize {
        self.seqs.count * (self.width - 1) * self.channels
    }

    fn window_of<'a, T: Element>(&self, storage: &'a CpuStorage) -> Option<&'a [T]> {
        let start = self.window?;
        T::slice(storage).map(|data| &data[start..][..self.window_len()])
    }
}

/// The depthwise causal convolution, then SiLU where `silu` is set, for training: [`causal_conv1d`](crate::ops::causal_conv1d) out of place, with
/// gradients of all three tensors.
///
/// ```text
/// y[t, c] = silu(sum_j weight[c, j] * x[t - width + 1 + j, c])
/// ```
///
/// where inputs before a sequence come from `window`, and are zero without one. Nothing crosses the border of a sequence,
/// neither inputs nor gradients.
///
/// | tensor | without `cu_seqlens` | with `cu_seqlens` (packed) | dtype |
/// |---|---|---|---|
/// | `x` | `[batch, tokens, channels]`, may be a strided view | `[tokens, channels]` | f32, bf16 or f16 |
/// | `weight` | `[channels, width]`, width 2 to 8 | same | as x, or f32 |
/// | `window` | `[batch, width - 1, channels]`, the last inputs, oldest first | `[sequences, ..]` | as x |
/// | result y | as x, contiguous | as x | as x |
///
/// Saved for the backward pass are the three tensors, which lie in memory anyhow. Sums are f32 or better and have a fixed order:
/// equal inputs give equal bits. With `p` the convolution and `dp = dy silu'(p)`: `dx[t] = sum_j weight[j] dp[t + width - 1 - j]`
/// and `d_weight[j] = sum_t dp[t] x[t - width + 1 + j]`.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit; the message names the argument, what was expected and what came.
pub fn causal_conv1d_diff(
    x: &Tensor,
    weight: &Tensor,
    window: Option<&Tensor>,
    cu_seqlens: Option<&CuSeqlens>,
    silu: bool,
) -> Result<Tensor> {
    for (arg, tensor) in
        [("weight", Some(weight)), ("window", window), ("cu_seqlens", cu_seqlens.map(CuSeqlens::tensor))]
    {
        tensor.map_or(Ok(()), |tensor| check_device(OP, arg, tensor, x.device()))?;
    }
    let op = ConvDiff { cu_seqlens: cu_seqlens.cloned(), silu, has_window: window.is_some() };
    let _working = Working::new(x.device());
    let weight = weight.contiguous()?;
    let window = window.map_or_else(|| Ok(weight.clone()), Tensor::contiguous)?;
    dense_rows(x)?.apply_op3(&weight, &window, op)
}
