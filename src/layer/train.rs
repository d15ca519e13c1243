//! The layer in training.

use super::checkpoint::checkpoint;
use super::columns;
use super::projection::Outputs;
#[cfg(doc)]
use super::{GatedDeltaNet, Projection};
use super::{GdnConfig, GdnParts};
use crate::algo::Algo;
use crate::conv::causal_conv1d_diff;
use crate::norm::gated_rms_norm;
use crate::rule::{gdn_gates, gdn_rule_diff, RuleOptions};
use candle_core::{bail, DType, Result, Tensor, D};
use candle_gdn_core::check::{check_device, check_dtype, check_float, check_shape, check_weight_dtype, zeros};
use candle_gdn_core::device::Working;
use candle_gdn_core::CuSeqlens;

const OP: &str = "TrainableGatedDeltaNet";

/// A Gated DeltaNet layer in training: [`GatedDeltaNet`] with gradients of x, of every weight and of the state, on the CPU and on
/// CUDA, batched and packed.
///
/// It holds the tensors it is given, and copies none: a `Var` stays that `Var`, which an optimiser writes and the next `forward`
/// reads. [`TrainableGatedDeltaNet::freeze`] makes the layer that decodes.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gdn::{GdnConfig, TrainableGatedDeltaNet};
/// use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
///
/// # fn main() -> candle_core::Result<()> {
/// let (weights, device) = (VarMap::new(), Device::Cpu);
/// let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
/// let layer = TrainableGatedDeltaNet::init(&GdnConfig::new(32, (2, 16), (4, 16)), vb.pp("linear_attn"))?;
/// let mut optimizer = AdamW::new(weights.all_vars(), ParamsAdamW::default())?;
/// let x = Tensor::randn(0f32, 1., (2, 50, 32), &device)?;
/// let loss = layer.forward(&x, None)?.sqr()?.mean_all()?;
/// optimizer.backward_step(&loss)?;
/// let layer = layer.freeze()?; // a GatedDeltaNet
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
///
/// # Projections
/// Each is a `Module` ([`Projection::module`]): a `candle_nn::Linear` or one with a LoRA around it. A [`DenseWeight`](crate::DenseWeight) has no gradients
/// and refuses a tracked input; an output that is not tracked where the input is, such as that of candle's `QMatMul` of a quantised matrix, is refused too. A
/// module that adds such an output to a tracked one loses its gradient unseen.
///
/// # Precision
/// Weights and x have one dtype, f32, bf16 or f16; `A_log`, `dt_bias` and the norm's weight are best in f32, and then have their
/// gradients in it. In another dtype they are converted for each call, and their gradients back.
///
/// # Memory
/// Between forward and backward a call keeps, for each token, in elements of x's dtype: x itself (`hidden_size`) and what the input
/// projection gave (`2 HK K + 2 HV V + 2 HV`), both for the products' own gradients; q, k and v after the convolution (`2 HK K + HV V`);
/// o, and o after the norm (`HV V` each); and the gates, `8 HV` bytes. With [`TrainableGatedDeltaNet::with_recompute`] it keeps x alone, and the
/// backward pass runs the forward pass once more. For 16 key heads and 32 value heads of 128, hidden 2048, in bf16 that is 61,824 bytes a
/// token without and 4,096 with it (and the state that a call begins with). The columns of one matrix for all, or of Qwen3-Next's
/// interleaved layout, as tensors of their own: 24,704 more on the CPU; on CUDA 41,216 in the interleaved layout and none in the other.
/// Separate projections of q, k and v (OLMo-Hybrid) keep their outputs beside the joined ones: `2 HK K + HV V` elements more.
/// A copy of every state is kept by neither: the backward pass computes them again from one in a chunk of tokens.
#[derive(Debug, Clone)]
pub struct TrainableGatedDeltaNet {
    config: GdnConfig,
    parts: GdnParts,
    options: RuleOptions,
    recompute: bool,
}

/// The states of sequences between two calls in training, with their gradients: unlike a [`GdnState`](crate::GdnState) it is not
/// written in place.
#[derive(Debug, Clone)]
pub struct TrainingState {
    /// `[sequences, width - 1, channels]`, x's dtype: the last inputs of the convolution, oldest first.
    pub conv: Tensor,
    /// `[sequences, HV, V, K]`, f32.
    pub recurrent: Tensor,
}

impl TrainingState {
    /// The same values without gradients: for backpropagation that is cut between two calls.
    pub fn detach(&self) -> Self {
        Self { conv: self.conv.detach(), recurrent: self.recurrent.detach() }
    }
}

impl TrainableGatedDeltaNet {
    /// The layer of these parts, which are used as they are. A module as a projection gives x's dtype.
    ///
    /// # Errors
    /// When the config does not fit together, or a part does not fit the config (the message names it).
    pub fn new(config: &GdnConfig, parts: GdnParts) -> Result<Self> {
        let device = parts.conv_weight.first().device();
        let _working = Working::new(device);
        config.check()?;
        let c = config;
        parts.conv_weight.check(OP, c)?;
        parts.in_proj.check(OP, c, device)?;
        parts.out_proj.check((OP, "out_proj"), [c.hidden_size, c.value_size()], device)?;
        for (arg, tensor, len) in [
            ("a_log", &parts.a_log, c.num_value_heads),
            ("dt_bias", &parts.dt_bias, c.num_value_heads),
            ("norm_weight", &parts.norm_weight, c.value_head_dim),
        ] {
            check_float(OP, arg, tensor.dtype())?;
            check_shape(OP, arg, tensor, &[len])?;
            check_device(OP, arg, tensor, device)?;
        }
        let options = RuleOptions::with(|options| options.beta_scale = c.beta_scale);
        Ok(Self { config: c.clone(), parts, options, recompute: false })
    }

    /// The layer with a choice: the backward pass runs the forward pass once more, projections included, so that of the layer
    /// only x and the state before it are kept until then. The gradients have the same bits, unless a projection draws random numbers (a dropout).
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// The layer with another choice of the rule's kernel, of both passes. A call that it does not support is an error.
    pub fn with_algo(mut self, algo: Algo) -> Self {
        self.options.algo = algo;
        self
    }

    /// The config it was made with.
    pub fn config(&self) -> &GdnConfig {
        &self.config
    }

    /// What it is made of.
    pub fn parts(&self) -> &GdnParts {
        &self.parts
    }

    /// x and y are `[batch, tokens, hidden_size]`, each row of the batch a sequence of its own; or with `cu_seqlens` packed,
    /// `[tokens of all, hidden_size]`: neither convolution nor rule cross the border of a sequence. Sequences begin at a zero state.
    ///
    /// # Errors
    /// When x or `cu_seqlens` does not fit, a projection gives another shape or dtype, or memory is short; the message says what
    /// was expected.
    pub fn forward(&self, x: &Tensor, cu_seqlens: Option<&CuSeqlens>) -> Result<Tensor> {
        let _working = Working::new(x.device());
        self.check_x(x, cu_seqlens)?;
        if x.elem_count() == 0 {
            return Ok(x.clone()); // y is as empty as x
        }
        if !self.recompute {
            return Ok(self.run(x, cu_seqlens, None)?.0);
        }
        let (layer, cu_seqlens) = (self.clone(), cu_seqlens.cloned());
        let mut outputs = checkpoint(&[x], move |x| Ok(vec![layer.run(&x[0], cu_seqlens.as_ref(), None)?.0]))?;
        Ok(outputs.swap_remove(0))
    }

    /// The same from a state, `None` being zeros, with the state after the last tokens. Both have gradients.
    ///
    /// # Errors
    /// As [`Self::forward`], and when the state does not fit.
    pub fn forward_with_state(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        state: Option<&TrainingState>,
    ) -> Result<(Tensor, TrainingState)> {
        let _working = Working::new(x.device());
        self.check_x(x, cu_seqlens)?;
        let sequences = cu_seqlens.map_or(x.dims()[0], CuSeqlens::num_sequences);
        if let Some(state) = state {
            self.check_state(state, sequences, x)?;
        }
        if x.elem_count() == 0 {
            return Ok((x.clone(), state.map_or_else(|| self.zero_state(sequences, x), |state| Ok(state.clone()))?));
        }
        if !self.recompute {
            let [y, conv, recurrent] = self.run_with_state(x, cu_seqlens, state)?;
            return Ok((y, TrainingState { conv, recurrent }));
        }
        let (layer, cu_seqlens) = (self.clone(), cu_seqlens.cloned());
        let inputs = state.map_or_else(|| vec![x], |state| vec![x, &state.conv, &state.recurrent]);
        let outputs = checkpoint(&inputs, move |inputs| {
            let state = match inputs {
                [_, conv, recurrent] => Some(TrainingState { conv: conv.clone(), recurrent: recurrent.clone() }),
                _ => None,
            };
            Ok(layer.run_with_state(&inputs[0], cu_seqlens.as_ref(), state.as_ref())?.to_vec())
        })?;
        let [y, conv, recurrent] = <[Tensor; 3]>::try_from(outputs).expect("as many as the function returns");
        Ok((y, TrainingState { conv, recurrent }))
    }

    /// y, and both parts of the state after it.
    fn run_with_state(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        state: Option<&TrainingState>,
    ) -> Result<[Tensor; 3]> {
        let (y, qkv, recurrent) = self.run(x, cu_seqlens, state)?;
        let conv = self.last_inputs(&qkv, cu_seqlens, state)?;
        Ok([y, conv, recurrent])
    }

    /// y, the inputs of the convolution, and the final recurrent state.
    fn run(
        &self,
        x: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        state: Option<&TrainingState>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (c, parts) = (&self.config, &self.parts);
        let [qkv, z, ba] = in_order(c, parts.in_proj.forward_tracked(OP, c, &x.contiguous()?)?)?;
        let conv_weight = parts.conv_weight.joined()?;
        let (window, recurrent) = state.map(|state| (&state.conv, &state.recurrent)).unzip();
        let gates = gdn_gates(&ba, &parts.a_log, &parts.dt_bias, c.beta_scale)?;
        let inner = causal_conv1d_diff(&qkv, &conv_weight, window, cu_seqlens, true)?;
        let (o, last) = gdn_rule_diff(&inner, &gates, recurrent, c.head_sizes(), cu_seqlens, self.options)?;
        let norm_weight = parts.norm_weight.to_dtype(DType::F32)?;
        let o = gated_rms_norm(&o, &z, &norm_weight, c.rms_norm_eps, c.output_gate)?;
        let y = parts.out_proj.forward_tracked((OP, "out_proj"), &o.flatten_from(o.rank() - 2)?, c.hidden_size)?;
        Ok((y, qkv, last))
    }

    fn zero_state(&self, sequences: usize, x: &Tensor) -> Result<TrainingState> {
        let (conv, recurrent) = self.state_shapes(sequences);
        Ok(TrainingState {
            conv: zeros(OP, "conv", &conv, x.dtype(), x.device())?,
            recurrent: zeros(OP, "recurrent", &recurrent, DType::F32, x.device())?,
        })
    }

    fn state_shapes(&self, sequences: usize) -> ([usize; 3], [usize; 4]) {
        let c = &self.config;
        let recurrent = [sequences, c.num_value_heads, c.value_head_dim, c.key_head_dim];
        ([sequences, c.conv_kernel - 1, c.conv_channels()], recurrent)
    }

    /// The window of the convolution after the last tokens.
    fn last_inputs(
        &self,
        qkv: &Tensor,
        cu_seqlens: Option<&CuSeqlens>,
        state: Option<&TrainingState>,
    ) -> Result<Tensor> {
        let history = self.config.conv_kernel - 1;
        let sequences = cu_seqlens.map_or(qkv.dims()[0], CuSeqlens::num_sequences);
        let before = match state {
            Some(state) => state.conv.clone(),
            None => self.zero_state(sequences, qkv)?.conv,
        };
        let after = |before: &Tensor, inputs: &Tensor| {
            let tokens = inputs.dims()[1];
            match tokens {
                0 => Ok(before.clone()),
                tokens if tokens >= history => inputs.narrow(1, tokens - history, history)?.contiguous(),
                tokens => Tensor::cat(&[&before.narrow(1, tokens, history - tokens)?, inputs], 1),
            }
        };
        let Some(cu) = cu_seqlens else { return after(&before, qkv) };
        let (packed, mut windows) = (qkv.unsqueeze(0)?, Vec::with_capacity(sequences));
        for (n, pair) in cu.as_slice().windows(2).enumerate() {
            let (first, end) = (pair[0] as usize, pair[1] as usize);
            windows.push(after(&before.narrow(0, n, 1)?, &packed.narrow(1, first, end - first)?)?);
        }
        match windows.is_empty() {
            true => Ok(before),
            false => Tensor::cat(&windows, 0),
        }
    }

    fn check_x(&self, x: &Tensor, cu_seqlens: Option<&CuSeqlens>) -> Result<()> {
        let (hidden, dims) = (self.config.hidden_size, x.dims());
        match (cu_seqlens, dims) {
            (Some(cu), [tokens, n]) if [cu.total_tokens(), hidden] == [*tokens, *n] => {}
            (None, [_, _, n]) if *n == hidden => {}
            (Some(cu), _) => bail!(
                "{OP}: x: expected shape [{}, {hidden}] (cu_seqlens has the tokens), got {dims:?}",
                cu.total_tokens()
            ),
            (None, _) => {
                let packed = if dims.len() == 2 { "; packed tokens need cu_seqlens" } else { "" };
                bail!("{OP}: x: expected shape [batch, tokens, {hidden}], got {dims:?}{packed}")
            }
        }
        check_float(OP, "x", x.dtype())?;
        let conv_weight = self.parts.conv_weight.first();
        if let Some((name, dtype)) = self.parts.in_proj.dtype(&self.config).filter(|(_, dtype)| *dtype != x.dtype()) {
            bail!("{OP}: x: expected dtype {dtype:?} (that of {name}), got {:?}", x.dtype());
        }
        check_weight_dtype(OP, "conv_weight", conv_weight.dtype(), x.dtype())?;
        check_device(OP, "x", x, conv_weight.device())
    }

    /// Before anything runs, since parts of the state are read by ops that call them otherwise.
    fn check_state(&self, state: &TrainingState, sequences: usize, x: &Tensor) -> Result<()> {
        let (conv, recurrent) = self.state_shapes(sequences);
        for (arg, tensor, shape, dtype) in [
            ("state.conv", &state.conv, &conv[..], x.dtype()),
            ("state.recurrent", &state.recurrent, &recurrent[..], DType::F32),
        ] {
            check_shape(OP, arg, tensor, shape)?;
            check_dtype(OP, arg, tensor.dtype(), dtype)?;
            check_device(OP, arg, tensor, x.device())?;
        }
        Ok(())
    }
}

/// q|k|v, z and b|a.
fn in_order(c: &GdnConfig, outputs: Outputs) -> Result<[Tensor; 3]> {
    match outputs {
        Outputs::Fused(all) => {
            let (channels, values) = (c.conv_channels(), c.value_size());
            let ends = [channels, channels + values, channels + values + 2 * c.num_value_heads];
            let runs = [0..ends[0], ends[0]..ends[1], ends[1]..ends[2]];
            if all.device().is_cpu() {
                return columns::columns(&all, runs.map(|run| vec![run]));
            }
            let [qkv, z, ba] = runs.map(|run| all.narrow(D::Minus1, run.start, run.len()));
            Ok([qkv?, z?, ba?])
        }
        Outputs::Split { qkv, z, b, a } => Ok([qkv, z, Tensor::cat(&[b, a], D::Minus1)?]),
    }
}
