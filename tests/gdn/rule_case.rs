//! One random case of the rule: its inputs in a chosen layout on a device, its result, and the reference's.

use crate::rule_drawn::Drawn;
use crate::sixteen_bits;
use crate::support::{has, on_tensor_cores, Rng};
use candle_core::{DType, Device};
use candle_gdn::ops::RuleOptions;
use candle_gdn::reference::Dims;
use candle_gdn::Algo;

/// How the decay input is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// Log decay of zero: the state never fades.
    None,
    Usual,
    /// Log decay down to about -30 a token.
    Strong,
    /// One token in eight forgets everything, the others hardly anything.
    Bursts,
    /// Inputs that overflow `exp`: the decay is total.
    Huge,
}

/// How q, k and v lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    /// Tensors of their own.
    Dense,
    /// Views of one projection `[.., q | k | v | a | b]` with padding before and between, heads merged, and rows that
    /// belong to nobody around the tokens. What lies around is NaN.
    Projection,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub dims: Dims,
    pub lengths: Vec<usize>,
    /// Packed with cu_seqlens; otherwise all lengths are the same.
    pub packed: bool,
    pub dtype: DType,
    pub gate_dtype: DType,
    /// f32 or bf16: how the state is stored. It is drawn so that either holds it.
    pub state_dtype: DType,
    pub form: Form,
    /// The states are slots of a larger pool, in a shuffled order; a pool view where false.
    pub slots: bool,
    /// With `slots`, every third sequence is padding, its inputs NaN.
    pub padding: bool,
    pub l2norm: bool,
    pub l2_eps: f64,
    /// `None`: K^-0.5.
    pub scale: Option<f64>,
    pub beta_scale: f64,
    /// Mean of b: large values make beta near its maximum.
    pub b_mean: f64,
    pub decay: Decay,
    pub repeat_keys: bool,
    pub norm: f64,
    pub algo: Algo,
    pub segments: usize,
    pub seed: u64,
}

impl Case {
    pub fn new(dims: Dims, lengths: &[usize]) -> Self {
        Self {
            dims,
            lengths: lengths.to_vec(),
            packed: true,
            dtype: DType::F32,
            gate_dtype: DType::F32,
            state_dtype: DType::F32,
            form: Form::Dense,
            slots: false,
            padding: false,
            l2norm: true,
            l2_eps: 1e-6,
            scale: None,
            beta_scale: 1.0,
            b_mean: 0.0,
            decay: Decay::Usual,
            repeat_keys: false,
            norm: 1.0,
            algo: Algo::Auto,
            segments: 0,
            seed: 1,
        }
    }

    /// Most that o and the states may be off where `algo` ran: f32 1e-5 on all; with bf16 or f16 inputs the output's
    /// rounding (4e-3, 5e-4) and 1e-5 on the states; where tensor cores multiply in bf16 or f16 5e-3 on all, on inputs that
    /// are hard for 16 bits, or where products cancel, more ([`Self::check`]).
    fn bounds(&self, algo: Algo) -> [f64; 2] {
        match self.dtype {
            _ if on_tensor_cores(algo) => [5e-3, 5e-3],
            DType::BF16 => [4e-3, 1e-5],
            DType::F16 => [5e-4, 1e-5],
            _ => [1e-5, 1e-5],
        }
    }

    /// What operands of 16 bits cost on this input, as relative RMS errors of o and of the state.
    pub fn cost_of_sixteen_bits(&self) -> [f64; 2] {
        let drawn = Drawn::new(self).unwrap();
        let exact = drawn.reference(self, None);
        sixteen_bits::cost(|draw| drawn.reference(self, Some(draw)).errors(&exact))
    }

    /// What the last place of f32 operands is worth on this input, as relative RMS errors: hardly anything, but where a
    /// single product of q and k nearly cancels. q, k and v move by half a unit of it, up or down.
    fn cost_of_f32(&self, drawn: &Drawn) -> [f64; 2] {
        let mut rng = Rng::new(self.seed ^ 0xf32);
        let mut moved = drawn.clone();
        for x in moved.q.iter_mut().chain(&mut moved.k).chain(&mut moved.v) {
            *x *= 1.0 + 2f64.powi(-24) * if rng.uniform() < 0.5 { 1.0 } else { -1.0 };
        }
        moved.reference(self, None).errors(&drawn.reference(self, None))
    }

    /// Fails unless the errors are within the bounds. Passes with a message where the device lacks the kernel's
    /// instructions.
    pub fn check(&self, device: &Device) {
        if !has(device, self.algo) {
            return;
        }
        let drawn = Drawn::new(self).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        let (algo, got) = drawn.run(self, device).unwrap_or_else(|e| panic!("{e}\n{self:?}"));
        // A bf16 state starts exact and is rounded at the end, which takes o nothing and adds to an element of the state at
        // most half a unit of its last place, 2^-8 of it.
        let stored = if self.state_dtype == DType::BF16 { 2f64.powi(-8) } else { 0.0 };
        let (errors, bounds) = (got.errors(&drawn.reference(self, None)), self.bounds(algo));
        let mut costs = None;
        for (i, what) in ["o", "state"].iter().enumerate() {
            let (error, mut bound, stored) = (errors[i], bounds[i], if i == 0 { 0.0 } else { stored });
            if error > bound + stored {
                bound = match on_tensor_cores(algo) {
                    true => sixteen_bits::bound(bound, costs.get_or_insert_with(|| self.cost_of_sixteen_bits())[i]),
                    false => bound.max(F32_SUMS * costs.get_or_insert_with(|| self.cost_of_f32(&drawn))[i]).min(0.1),
                };
            }
            let case = || format!("bound {:e}, {algo:?} on {:?}: {self:?}", bound + stored, device.location());
            assert!(error <= bound + stored, "{what} off by {error:e}, {}", case());
        }
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub fn options(&self) -> RuleOptions {
        let Self { l2norm, l2_eps, scale, beta_scale, algo, segments, .. } = *self;
        RuleOptions::with(|o| {
            (o.l2norm, o.l2_eps, o.scale, o.beta_scale) = (l2norm, l2_eps, scale, beta_scale);
            (o.algo, o.segments) = (algo, segments);
        })
    }

    /// Whether sequence `n` has no state.
    pub fn is_padding(&self, n: usize) -> bool {
        self.slots && self.padding && n % 3 == 1
    }

    /// First token and length of each sequence.
    pub fn ranges(&self) -> Vec<(usize, usize)> {
        let mut first = 0;
        let range = |&length: &usize| {
            first += length;
            (first - length, length)
        };
        self.lengths.iter().map(range).collect()
    }
}

/// A sum of f32 products may be off by so many times what rounding its operands does: partial
/// sums are that much larger than the root of the squares.
const F32_SUMS: f64 = 8.0;
