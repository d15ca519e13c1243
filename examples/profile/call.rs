//! What is profiled: one call of an op, with random inputs.

use crate::args::{Args, Op};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_gdn::ops::{Gates, GdnDecode, GdnPrefill, GdnStep, RuleOptions, StepOptions};
use candle_gdn::Algo;

/// Of the convolution.
const WIDTH: usize = 4;

/// The inputs of a call: q, k and v, or qkv, z and the convolution's weight.
pub struct Call {
    op: Op,
    inputs: [Tensor; 3],
    gates: Gates,
    state: Tensor,
    /// Of a step: the convolution's state and the norm's weight.
    step: Option<[Tensor; 2]>,
    rule_options: RuleOptions,
    step_options: StepOptions,
}

impl Call {
    pub fn new(args: &Args, tokens: usize, device: &Device) -> Result<Self> {
        let ((key_heads, value_heads), dim) = (args.heads, args.dim);
        let lead = if args.op == Op::Prefill || tokens > 1 { vec![args.batch, tokens] } else { vec![args.batch] };
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device)?.to_dtype(args.dtype);
        let rows = |tail: &[usize]| randn(&[&lead[..], tail].concat());
        let channels = (2 * key_heads + value_heads) * dim;
        let inputs = match args.op {
            Op::Step => [rows(&[channels])?, rows(&[value_heads * dim])?, randn(&[channels, WIDTH])?],
            _ => [rows(&[key_heads, dim])?, rows(&[key_heads, dim])?, rows(&[value_heads, dim])?],
        };
        let gates = Gates {
            a: rows(&[value_heads])?,
            b: rows(&[value_heads])?,
            a_log: Tensor::rand(0f32, 1.2, value_heads, device)?,
            dt_bias: Tensor::rand(-1f32, 0., value_heads, device)?,
        };
        let step = || -> Result<_> { Ok([randn(&[args.batch, WIDTH - 1, channels])?, randn(&[dim])?]) };
        let (mut rule_options, mut step_options) = (RuleOptions::default(), StepOptions::default());
        match args.op {
            Op::Step => step_options.rule.algo = args.step_algo()?,
            _ => rule_options.algo = args.algo()?,
        }
        Ok(Self {
            op: args.op,
            inputs,
            gates,
            state: Tensor::zeros((args.batch, value_heads, dim, dim), DType::F32, device)?,
            step: if args.op == Op::Step { Some(step()?) } else { None },
            rule_options,
            step_options,
        })
    }

    fn decode(&self) -> candle_core::Result<GdnDecode> {
        GdnDecode::new(self.gates.clone(), &self.state, self.rule_options)
    }

    fn prefill(&self) -> candle_core::Result<GdnPrefill> {
        GdnPrefill::new(self.gates.clone(), &self.state, None, self.rule_options)
    }

    fn step(&self, [conv_state, norm_weight]: &[Tensor; 2]) -> candle_core::Result<GdnStep> {
        GdnStep::new(self.gates.clone(), norm_weight, conv_state, &self.state, self.step_options)
    }

    /// The rule's kernel where it is called by itself, and the name of whatever runs.
    pub fn algo(&self) -> candle_core::Result<(Option<Algo>, String)> {
        let [x, y, z] = &self.inputs;
        let algo = match (&self.step, self.op) {
            (Some(step), _) => return Ok((None, format!("{:?}", self.step(step)?.algo(x, y, z)?))),
            (None, Op::Prefill) => self.prefill()?.algo(x, y, z)?,
            (None, _) => self.decode()?.algo(x, y, z)?,
        };
        Ok((Some(algo), format!("{algo:?}")))
    }

    pub fn launch(&self) -> candle_core::Result<Tensor> {
        let [x, y, z] = &self.inputs;
        match (&self.step, self.op) {
            (Some(step), _) => self.step(step)?.forward(x, y, z),
            (None, Op::Prefill) => self.prefill()?.forward(x, y, z),
            (None, _) => self.decode()?.forward(x, y, z),
        }
    }
}
