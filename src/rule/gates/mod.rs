//! The gates of the rule as an op of their own, for training.

pub(super) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{bail, CpuStorage, DType, Result, Shape, Tensor};
use candle_gdn_core::check::*;
use candle_gdn_core::device::Working;
use candle_gdn_core::{custom_op, host};

const OP: &str = "gdn_gates";

struct GdnGates {
    beta_scale: f64,
}

/// A checked call.
struct GatesPlan {
    lead: Vec<usize>,
    tokens: usize,
    heads: usize,
    ba: HeadsLayout,
    /// First elements of A_log and dt_bias.
    offsets: [usize; 2],
}

impl GdnGates {
    fn plan(&self, [ba, a_log, dt_bias]: [Arg<'_>; 3]) -> Result<GatesPlan> {
        check_float(OP, "ba", ba.dtype)?;
        for arg in [a_log, dt_bias] {
            check_dtype(OP, arg.name, arg.dtype, DType::F32)?;
            arg.check_place(OP, &ba.device(), &[])?;
        }
        let &[heads] = a_log.layout.dims() else {
            bail!("{OP}: a_log: expected shape [value_heads], got {:?}", a_log.layout.dims());
        };
        for arg in [a_log, dt_bias] {
            check_dense(OP, arg.name, arg.layout, &[heads])?;
        }
        let (dims, stride) = (ba.layout.dims(), ba.layout.stride());
        let Some((&columns, lead)) = dims.split_last().filter(|(columns, _)| **columns == 2 * heads && heads > 0)
        else {
            bail!("{OP}: ba: expected shape [.., {}] (twice the heads of a_log), got {dims:?}", 2 * heads);
        };
        let Some(token_stride) = token_stride(lead, &stride[..lead.len()]) else {
            bail!("{OP}: ba: expected leading dimensions with one common stride, got {stride:?}");
        };
        if stride[lead.len()] != 1 && columns > 1 {
            bail!("{OP}: ba: expected a contiguous last dimension, got strides {stride:?}");
        }
        Ok(GatesPlan {
            lead: lead.to_vec(),
            tokens: lead.iter().product(),
            heads,
            ba: HeadsLayout { offset: ba.layout.start_offset(), seq_stride: 0, token_stride, head_stride: 1 },
            offsets: [a_log, dt_bias].map(|arg| arg.layout.start_offset()),
        })
    }

    fn on_cpu(&self, [ba, a_log, dt_bias]: [CpuArg<'_>; 3]) -> CpuOutput {
        let plan = self.plan([Arg::cpu("ba", ba), Arg::cpu("a_log", a_log), Arg::cpu("dt_bias", dt_bias)])?;
        let [a_log, dt_bias] = plan.parameters([a_log.0, dt_bias.0])?;
        let mut gates = vec![0.0; plan.tokens * 2 * plan.heads];
        cpu::Heads::new(&a_log, &dt_bias, self.beta_scale as f32).run(&plan.rows(ba.0)?, &mut gates);
        Ok((CpuStorage::F32(gates), plan.shape()))
    }

    #[cfg(feature = "cuda")]
    fn on_cuda(&self, [ba, a_log, dt_bias]: [CudaArg<'_>; 3]) -> CudaOutput {
        let plan = self.plan([Arg::cuda("ba", ba), Arg::cuda("a_log", a_log), Arg::cuda("dt_bias", dt_bias)])?;
        Ok((cuda::run(self, &plan, [ba.0, a_log.0, dt_bias.0])?, plan.shape()))
    }

    fn backward(&self, args: [&Tensor; 3], grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let _working = Working::new(args[0].device());
        let [ba, a_log, dt_bias] = args;
        let plan = self.plan([Arg::tensor("ba", ba), Arg::tensor("a_log", a_log), Arg::tensor("dt_bias", dt_bias)])?;
        let grad = grad.contiguous()?;
        #[cfg(feature = "cuda")]
        if ba.device().is_cuda() {
            return Ok(tracked(args, cuda::backward(self, &plan, args, &grad)?));
        }
        let mut d_ba = vec![0.0; plan.tokens * 2 * plan.heads];
        let [d_a_log, d_dt_bias] = host::with_storages([ba, a_log, dt_bias], |[ba, a_log, dt_bias]| {
            let ba = plan.rows(ba)?;
            let [a_log, dt_bias] = plan.parameters([a_log, dt_bias])?;
            let heads = cpu::Heads::new(&a_log, &dt_bias, self.beta_scale as f32);
            host::with_f32(&grad, |grad| heads.backward(&ba, grad, &mut d_ba))
        })?;
        let vector = |x| Tensor::from_vec(x, plan.heads, ba.device());
        Ok(tracked(args, [host::tensor(d_ba, plan.shape(), ba.dtype())?, vector(d_a_log)?, vector(d_dt_bias)?]))
    }
}

custom_op!(differentiable CustomOp3 for GdnGates, OP, ba ba_layout, a_log a_log_layout, dt_bias dt_bias_layout);

impl GatesPlan {
    fn shape(&self) -> Shape {
        [&self.lead[..], &[2 * self.heads]].concat().into()
    }

    /// `[tokens, 2 HV]` on the CPU.
    fn rows(&self, ba: &CpuStorage) -> Result<Vec<f32>> {
        let seqs = candle_gdn_core::cpu::Sequences { cu_seqlens: None, count: 1, tokens: self.tokens };
        host::rows(ba, self.ba, seqs, (1, 2 * self.heads))
    }

    fn parameters(&self, [a_log, dt_bias]: [&CpuStorage; 2]) -> Result<[Vec<f32>; 2]> {
        let values = |storage, offset| host::values(storage, offset, self.heads);
        Ok([values(a_log, self.offsets[0])?, values(dt_bias, self.offsets[1])?])
    }
}

/// The gates of the gated delta rule, for training: log decay and beta of [`gdn_rule_diff`](crate::ops::gdn_rule_diff), in f32, with gradients of all
/// three tensors.
///
/// ```text
/// [b | a] = ba;   log_decay = -exp(a_log) * softplus(a + dt_bias);   beta = beta_scale * sigmoid(b)
/// ```
///
/// | tensor | shape | dtype |
/// |---|---|---|
/// | `ba` | `[.., 2 HV]`, b before a; may be a narrow view of a projection | f32, bf16 or f16 |
/// | `a_log`, `dt_bias` | `[HV]` | f32 |
/// | result | `[.., 2 HV]`, log decay before beta, contiguous | f32 |
///
/// `a_log` and `dt_bias` of another float dtype are converted, and have their gradients in it. Arithmetic is f32 or better.
/// Sums over tokens have a fixed order: equal inputs give equal bits. Formula: Yang et al., *Gated Delta Networks*, arXiv
/// 2412.06464; its gradients: `da = -exp(a_log) sigmoid(a + dt_bias) d_log_decay`, `d_dt_bias = sum da`,
/// `d_a_log = sum log_decay d_log_decay`, `db = d_beta beta (1 - beta / beta_scale)`.
///
/// # Errors
/// When a rank, shape, dtype or device does not fit, or `beta_scale` is not above 0 and up to 2; the message names the argument,
/// what was expected and what came.
pub fn gdn_gates(ba: &Tensor, a_log: &Tensor, dt_bias: &Tensor, beta_scale: f64) -> Result<Tensor> {
    if !(beta_scale > 0.0 && beta_scale <= 2.0) {
        bail!("{OP}: beta_scale: expected a value above 0 and up to 2, got {beta_scale}");
    }
    for (arg, tensor) in [("a_log", a_log), ("dt_bias", dt_bias)] {
        check_float(OP, arg, tensor.dtype())?;
        check_device(OP, arg, tensor, ba.device())?;
    }
    let lead = ba.rank().saturating_sub(1);
    let vector = |x: &Tensor| x.to_dtype(DType::F32)?.contiguous();
    let _working = Working::new(ba.device());
    uniform_tokens(ba, lead)?.apply_op3(&vector(a_log)?, &vector(dt_bias)?, GdnGates { beta_scale })
}
