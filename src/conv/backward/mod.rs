//! The convolution as an op with gradients, out of place.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::cpu::Conv;
use super::ConvPlan;
use candle_core::{bail, CpuStorage, Result, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::cpu::{Element, Heads, Slots};
use candle_gdn_core::device::Working;
use candle_gdn_core::{by_dtype, custom_op, host, CuSeqlens, SequencePlan};

const OP: &str = "causal_conv1d_diff";

struct ConvDiff {
    cu_seqlens: Option<CuSeqlens>,
    silu: bool,
    /// Whether the third argument is the window; without one it is a number that nobody reads.
    has_window: bool,
}

/// A checked call.
struct DiffPlan {
    conv: ConvPlan,
    /// First element of the window.
    window: Option<usize>,
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
        let cu_seqlens = self.cu_seqlens.as_ref();
        let conv = ConvPlan::new(OP, [x.layout, weight.layout], (channels, width), cu_seqlens, |lead| {
            SequencePlan::of_tokens((OP, "x"), lead, cu_seqlens)
        })?;
        if self.has_window {
            check_dtype(OP, "window", window.dtype, x.dtype)?;
            window.check_place(OP, &x.device(), &[])?;
            check_dense(OP, "window", window.layout, &conv.window_shape())?;
        }
        Ok(DiffPlan { conv, window: self.has_window.then(|| window.layout.start_offset()) })
    }

    fn on_cpu(&self, [x, weight, window]: [CpuArg<'_>; 3]) -> CpuOutput {
        let plan = self.plan([Arg::cpu("x", x), Arg::cpu("weight", weight), Arg::cpu("window", window)])?;
        let (x, weight) = (x.0, &plan.weight_of(weight.0)?[..]);
        let out = by_dtype!(x => self.forward(&plan, (x, weight), window.0), else bail!("{OP}: x: expected dtype f32, bf16 or f16"));
        Ok((out, plan.conv.out_shape))
    }

    fn forward<T: Element>(&self, plan: &DiffPlan, args: (&[T], &[f32]), window: &CpuStorage) -> CpuStorage {
        let mut out = vec![T::ZERO; plan.conv.out_shape.elem_count()];
        let mut state = match plan.window_of::<T>(window) {
            Some(window) => window.to_vec(),
            None => vec![T::ZERO; plan.window_len()],
        };
        self.conv(plan, args).run(&mut out, &mut state);
        T::storage(out)
    }

    /// Sequence `n` in window `n`.
    fn conv<'a, T>(&'a self, plan: &DiffPlan, args: (&'a [T], &'a [f32])) -> Conv<'a, T, f32> {
        let slots = Slots { read: None, write: None, stride: (plan.conv.width - 1) * plan.conv.channels };
        plan.conv.on_cpu(args, self.cu_seqlens.as_ref(), slots, self.silu)
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [x, weight, window]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("x", x), Arg::cuda("weight", weight), Arg::cuda("window", window)])?;
        Ok((cuda::run(self, &plan, [x.0, weight.0, window.0])?, plan.conv.out_shape))
    }

    fn backward(&self, args: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let _working = Working::new(args[0].device());
        let [x, weight, window] = args;
        let plan = self.plan([Arg::tensor("x", x), Arg::tensor("weight", weight), Arg::tensor("window", window)])?;
        let d_y = dense_rows(grad)?;
        let lead = Lead::of_tokens(self.cu_seqlens.as_ref());
        let lead_dims = &x.dims()[..lead.rank()];
        let rows = heads_layout(OP, "d_y", d_y.layout(), lead, lead_dims, (1, plan.conv.channels))?;
        #[cfg(feature = "cuda")]
        let [d_x, d_weight, d_window] = match x.device().is_cuda() {
            true => cuda::backward(self, &plan, args, (&d_y, rows))?,
            false => self.backward_on_cpu(&plan, args, (&d_y, rows))?,
        };
        #[cfg(not(feature = "cuda"))]
        let [d_x, d_weight, d_window] = self.backward_on_cpu(&plan, args, (&d_y, rows))?;
        Ok(tracked(args, [d_x, d_weight.to_dtype(weight.dtype())?, d_window]))
    }

    fn backward_on_cpu(
        &self,
        plan: &DiffPlan,
        [x, weight, window]: [&Tensor; 3],
        (d_y, rows): (&Tensor, HeadsLayout),
    ) -> Result<[Tensor; 3]> {
        host::with_storages([x, weight, window, d_y], |[x, weight, window, d_y]| {
            let weight = &plan.weight_of(weight)?[..];
            Ok(by_dtype!(
                x, d_y => self.gradients(plan, (x, weight), heads(d_y, rows), window),
                else bail!("{OP}: d_y: expected x's dtype")
            ))
        })
    }

    fn gradients<T: Element>(
        &self,
        plan: &DiffPlan,
        args: (&[T], &[f32]),
        d_y: Heads<'_, T>,
        window: &CpuStorage,
    ) -> [Tensor; 3] {
        let mut d_x = vec![T::ZERO; plan.conv.out_shape.elem_count()];
        let mut d_weight = vec![0.0; args.1.len()];
        let mut d_window = vec![T::ZERO; plan.window_len()];
        let conv = cpu::ConvBackward { conv: self.conv(plan, args), d_y, window: plan.window_of(window) };
        conv.run(cpu::Gradients { x: &mut d_x, weight: &mut d_weight, window: &mut d_window });
        [
            host::tensor_of(T::storage(d_x), plan.conv.out_shape.clone()),
            host::tensor_of(CpuStorage::F32(d_weight), (plan.conv.channels, plan.conv.width)),
            host::tensor_of(T::storage(d_window), plan.conv.window_shape().to_vec()),
        ]
    }
}

custom_op!(differentiable CustomOp3 for ConvDiff, OP, x x_layout, weight weight_layout, window window_layout);

impl DiffPlan {
    fn window_len(&self) -> usize {
        self.conv.window_shape().iter().product()
    }

    fn weight_of(&self, storage: &CpuStorage) -> Result<Vec<f32>> {
        host::values(storage, self.conv.weight_offset, self.conv.channels * self.conv.width)
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
    // Without a window a tensor that nobody reads and that is not tracked.
    let window = window.map_or_else(|| Tensor::zeros(1, x.dtype(), x.device()), Tensor::contiguous)?;
    dense_rows(x)?.apply_op3(&weight, &window, op)
}
