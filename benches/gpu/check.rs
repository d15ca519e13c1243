//! Results against formulas in f64, once a shape and before it is timed.

use crate::inputs::Inputs;
use crate::workloads::Heads;
use anyhow::{ensure, Result};
use candle_core::{DType, Device, Tensor};
use candle_gdn::reference::{gated_delta_rule, Constants, Dims, Inputs as Reference};
use candle_gdn::Algo;

/// How many (sequence, head) pairs are compared with the reference; all outputs are looked at for NaN.
const PAIRS: usize = 16;

/// Leaves NaN in memory that the output of the next op may get: candle allocates it, and gives back blocks just freed.
pub fn poison(shape: &[usize], dtype: DType, device: &Device) -> Result<()> {
    drop(Tensor::full(f32::NAN, shape, device)?.to_dtype(dtype)?);
    Ok(())
}

/// `||x - want|| / ||want||`
fn relative(x: &[f64], want: &[f64]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut x.iter().zip(want).map(|(x, w)| x - w)) / norm(&mut want.iter().copied()).max(f64::MIN_POSITIVE)
}

/// `relative`, or NaN where anything of `all`, of which `x` is a part, is not a number.
pub fn error(all: &Tensor, x: &[f64], want: &[f64]) -> Result<f64> {
    Ok(if finite(all)? { relative(x, want) } else { f64::NAN })
}

fn finite(x: &Tensor) -> Result<bool> {
    // One NaN or infinity makes this sum one.
    Ok((x.to_dtype(DType::F32)? * 0.)?.sum_all()?.to_scalar::<f32>()? == 0.)
}

pub fn f64s(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f64::from).collect())
}

/// What the rule must give for some heads of some sequences.
pub struct RuleSamples {
    /// The state before, of all sequences.
    pub state: Tensor,
    dim: usize,
    pairs: Vec<Pair>,
}

struct Pair {
    sequence: usize,
    head: usize,
    first: usize,
    tokens: usize,
    o: Vec<f64>,
    state: Vec<f64>,
}

#[derive(Debug)]
pub struct RuleErrors {
    pub o: f64,
    pub state: f64,
}

impl RuleErrors {
    /// Whether the errors of `algo` are within those of the tests.
    pub fn within(&self, dtype: DType, algo: Algo) -> bool {
        let (o, state) = match (algo, dtype) {
            (Algo::ChunkedSm80 | Algo::ChunkedSm90, _) => (5e-3, 5e-3),
            (_, DType::BF16) => (4e-3, 1e-5),
            (_, DType::F16) => (1e-3, 1e-5),
            _ => (1e-5, 1e-5),
        };
        self.o <= o && self.state <= state
    }
}

impl RuleSamples {
    pub fn new(x: &Inputs, lengths: &[usize], heads: Heads) -> Result<Self> {
        let Heads { hk, hv, dim } = heads;
        let starts: Vec<usize> = lengths
            .iter()
            .scan(0, |start, n| {
                *start += n;
                Some(*start - n)
            })
            .collect();
        let constants = Constants { l2norm: true, l2_eps: 1e-6, scale: (dim as f64).powf(-0.5), beta_scale: 1. };
        let dims = Dims { key_heads: 1, value_heads: 1, key_dim: dim, value_dim: dim };
        // Spread over sequences and heads, the first and the last of both among them.
        let all = lengths.len() * hv;
        let count = PAIRS.min(all);
        let mut jobs = vec![];
        for i in 0..count {
            let pair = if count == 1 { 0 } else { i * (all - 1) / (count - 1) };
            let (sequence, head) = (pair / hv, (pair + i) % hv);
            let (first, tokens, key_head) = (starts[sequence], lengths[sequence], head / (hv / hk));
            let rows = |t: &Tensor, head: usize, width: usize| {
                f64s(&t.narrow(0, first, tokens)?.narrow(1, head * width, width)?.contiguous()?)
            };
            let (q, k) = (rows(&x.q, key_head, dim)?, rows(&x.k, key_head, dim)?);
            let (v, a, b) = (rows(&x.v, head, dim)?, rows(&x.gates.a, head, 1)?, rows(&x.gates.b, head, 1)?);
            let a_log = f64s(&x.gates.a_log.narrow(0, head, 1)?)?;
            let dt_bias = f64s(&x.gates.dt_bias.narrow(0, head, 1)?)?;
            let mut state = f64s(&x.state.narrow(0, sequence, 1)?.narrow(1, head, 1)?)?;
            jobs.push(move || {
                let (q, k, v, a, b) = (&q[..], &k[..], &v[..], &a[..], &b[..]);
                let inputs = Reference { q, k, v, a, b, a_log: &a_log, dt_bias: &dt_bias };
                let o = gated_delta_rule(dims, constants, &[0, tokens], inputs, &mut state);
                Pair { sequence, head, first, tokens, o, state }
            });
        }
        let pairs = std::thread::scope(|scope| {
            let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
            threads.into_iter().map(|t| t.join().expect("the reference does not panic")).collect()
        });
        Ok(Self { state: x.state.copy()?, dim, pairs })
    }

    /// Compares o, `[tokens, HV, V]`, and the new state with the reference.
    pub fn errors(&self, o: &Tensor, state: &Tensor) -> Result<RuleErrors> {
        let (mut os, mut want_os, mut states, mut want_states) = (vec![], vec![], vec![], vec![]);
        for pair in &self.pairs {
            let rows = o.narrow(0, pair.first, pair.tokens)?.narrow(1, pair.head, 1)?.contiguous()?;
            os.extend(f64s(&rows)?);
            want_os.extend_from_slice(&pair.o);
            states.extend(f64s(&state.narrow(0, pair.sequence, 1)?.narrow(1, pair.head, 1)?)?);
            want_states.extend_from_slice(&pair.state);
        }
        ensure!(os.len() == want_os.len() && os.len() % self.dim == 0, "an output of {} elements", os.len());
        let finite = finite(o)? && finite(state)?;
        let or_nan = |error: f64| if finite { error } else { f64::NAN };
        Ok(RuleErrors { o: or_nan(relative(&os, &want_os)), state: or_nan(relative(&states, &want_states)) })
    }
}
