//! What a step takes, to be changed one at a time.

use crate::support::values;
use candle_core::{DType, Result, Tensor};
use candle_gdn::ops::{gdn_step_in_place, Gates, GdnStep, StepOptions};

/// HK 2, HV 4, a convolution of width 4.
#[derive(Clone)]
pub struct StepArgs {
    pub qkv: Tensor,
    pub z: Tensor,
    pub conv_weight: Tensor,
    pub gates: Gates,
    pub norm_weight: Tensor,
    pub conv: Tensor,
    pub state: Tensor,
    pub options: StepOptions,
}

pub type Argument = fn(&mut StepArgs) -> &mut Tensor;

/// What a call only reads.
pub const ARGUMENTS: [(&str, Argument); 8] = [
    ("qkv", |s| &mut s.qkv),
    ("z", |s| &mut s.z),
    ("conv_weight", |s| &mut s.conv_weight),
    ("norm_weight", |s| &mut s.norm_weight),
    ("a", |s| &mut s.gates.a),
    ("b", |s| &mut s.gates.b),
    ("a_log", |s| &mut s.gates.a_log),
    ("dt_bias", |s| &mut s.gates.dt_bias),
];

impl StepArgs {
    /// All that `make` makes of the shapes; `lead` are batch and tokens, batch, or packed tokens.
    pub fn new(
        lead: &[usize],
        slots: usize,
        [key_dim, value_dim]: [usize; 2],
        make: impl Fn(&[usize]) -> Tensor,
    ) -> Self {
        let rows = |columns: usize| make(&[lead, &[columns]].concat());
        let channels = 2 * 2 * key_dim + 4 * value_dim;
        Self {
            qkv: rows(channels),
            z: rows(4 * value_dim),
            conv_weight: make(&[channels, 4]),
            gates: Gates { a: rows(4), b: rows(4), a_log: make(&[4]), dt_bias: make(&[4]) },
            norm_weight: make(&[value_dim]),
            conv: make(&[slots, 3, channels]),
            state: make(&[slots, 4, value_dim, key_dim]),
            options: StepOptions::default(),
        }
    }

    pub fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut step = self.clone();
        change(&mut step);
        step
    }

    /// The same with `f` of what lies by token.
    pub fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        let gates = Gates { a: f(&self.gates.a), b: f(&self.gates.b), ..self.gates.clone() };
        Self { qkv: f(&self.qkv), z: f(&self.z), gates, ..self.clone() }
    }

    /// In `dtype` but for what is f32 always.
    pub fn in_dtype(&self, dtype: DType) -> Self {
        let to = |x: &Tensor| x.to_dtype(dtype).unwrap();
        let (conv_weight, norm_weight, conv) = (to(&self.conv_weight), to(&self.norm_weight), to(&self.conv));
        Self { conv_weight, norm_weight, conv, ..self.map(to) }
    }

    /// With states of its own, which are copies.
    pub fn copied(&self) -> Self {
        let [conv, state] = [&self.conv, &self.state].map(|x| x.force_contiguous().unwrap());
        Self { conv, state, ..self.clone() }
    }

    pub fn states(&self) -> [Vec<f64>; 2] {
        [values(&self.conv), values(&self.state)]
    }

    pub fn op(&self) -> Result<GdnStep> {
        GdnStep::new(self.gates.clone(), &self.norm_weight, &self.conv, &self.state, self.options)
    }

    /// The op that `complete` makes of its own.
    pub fn forward(&self, complete: impl FnOnce(GdnStep) -> GdnStep) -> Result<Tensor> {
        complete(self.op()?).forward(&self.qkv, &self.z, &self.conv_weight)
    }

    /// The same by the function.
    pub fn run(&self) -> Result<Tensor> {
        let Self { qkv, z, conv_weight, gates, norm_weight, conv, state, options } = self;
        gdn_step_in_place(qkv, z, conv_weight, gates, norm_weight, conv, state, *options)
    }
}
