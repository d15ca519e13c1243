//! The rule itself: decode, prefill, and the contest's two sets.

use crate::check::{self, Wrong};
use crate::clock::Call;
use crate::record::{Row, Shape};
use crate::workloads::Heads;
use crate::Bench;
use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_gdn::{Algo, CuSeqlens, Gates, GdnDecode, GdnPrefill, RuleOptions};

/// One shape of the rule, in one of the suites.
pub struct Work {
    pub suite: &'static str,
    pub name: String,
    pub heads: Heads,
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
    /// One token of each sequence, through the decode op.
    pub decode: bool,
    /// The contest's formula and rule of correctness: q and k come normalised.
    pub contest: bool,
    /// Time it on a warm cache besides.
    pub warm: bool,
}

/// One set of inputs. q, k and v lie side by side in the rows of one tensor, the gates in another, as a layer has them.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub gates: Gates,
    /// `[sequences, HV, V, K]`
    pub state: Tensor,
}

impl Work {
    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Every input and output once, the state read and written.
    fn bytes(&self, element: usize) -> u64 {
        let Heads { hk, hv, dim } = self.heads;
        let token = (2 * hk + 2 * hv) * dim * element + 2 * hv * element;
        (self.tokens() * token + 2 * self.lengths.len() * hv * dim * dim * 4) as u64
    }

    /// Token by token 6 K V a token and head: two products with the state and its update. In chunks of 64 tokens the three
    /// products with the state remain, and four of 64 x K or V come: K K^T, Q K^T, and those with the inverse and the
    /// masked Q K^T. The floor asks for what the fastest form needs, so the chunked count where matrix units can be used.
    fn flop(&self) -> u64 {
        let dim = self.heads.dim as u64;
        let within = if self.decode { 0 } else { 2 * 64 * 4 * dim };
        (self.tokens() * self.heads.hv) as u64 * (6 * dim * dim + within)
    }

    fn inputs(&self, bench: &Bench) -> Result<Inputs> {
        let Heads { hk, hv, dim } = self.heads;
        let (tokens, device, dtype) = (self.tokens(), &bench.device, bench.dtype);
        let (keys, values) = (hk * dim, hv * dim);
        let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device);
        let mut qkv = randn(&[tokens, 2 * keys + values])?;
        if self.contest {
            let rows = qkv.narrow(1, 0, 2 * keys)?.reshape((tokens, 2 * hk, dim))?;
            let rows = rows.broadcast_div(&rows.sqr()?.sum_keepdim(2)?.sqrt()?)?.reshape((tokens, 2 * keys))?;
            qkv = Tensor::cat(&[&rows, &qkv.narrow(1, 2 * keys, values)?], 1)?;
        }
        let qkv = qkv.to_dtype(dtype)?;
        let ba = randn(&[tokens, 2 * hv])?.to_dtype(dtype)?;
        let gates = if self.contest {
            Gates {
                a: ba.narrow(1, hv, hv)?,
                b: ba.narrow(1, 0, hv)?,
                a_log: (randn(&[hv])? * 0.1)?,
                dt_bias: (randn(&[hv])? * 0.1)?,
            }
        } else {
            Gates {
                a: ba.narrow(1, hv, hv)?,
                b: ba.narrow(1, 0, hv)?,
                a_log: Tensor::rand(1f32, 16., hv, device)?.log()?,
                dt_bias: (randn(&[hv])? - 4.)?,
            }
        };
        let state = (randn(&[self.lengths.len(), hv, dim, dim])? * 0.1)?;
        let heads = |start: usize, n: usize| qkv.narrow(1, start * dim, n * dim);
        Ok(Inputs { q: heads(0, hk)?, k: heads(hk, hk)?, v: heads(2 * hk, hv)?, gates, state })
    }

    /// The op on one set of inputs, which it updates in place; the sequences' boundaries are on the device already.
    fn op(&self, x: &Inputs, algo: Algo, cu: &CuSeqlens) -> candle_core::Result<Op> {
        let options = RuleOptions { algo, l2norm: !self.contest, ..RuleOptions::default() };
        Ok(if self.decode {
            Op::Decode(GdnDecode::new(x.gates.clone(), &x.state, options)?)
        } else {
            Op::Prefill(GdnPrefill::new(x.gates.clone(), &x.state, Some(cu), options)?)
        })
    }

    pub fn shape(&self) -> Shape {
        let Heads { hk, hv, dim } = self.heads;
        let shape = Shape::heads(hk, hv, dim, dim).batch(self.lengths.len());
        match self.lengths.iter().all(|n| *n == self.lengths[0]) {
            true => shape.tokens(self.lengths[0]),
            false => shape.packed(&self.lengths),
        }
    }
}

enum Op {
    Decode(GdnDecode),
    Prefill(GdnPrefill),
}

impl Op {
    fn forward(&self, x: &Inputs) -> candle_core::Result<Tensor> {
        match self {
            Op::Decode(op) => op.forward(&x.q, &x.k, &x.v),
            Op::Prefill(op) => op.forward(&x.q, &x.k, &x.v),
        }
    }

    fn algo(&self, x: &Inputs) -> candle_core::Result<Algo> {
        match self {
            Op::Decode(op) => op.algo(&x.q, &x.k, &x.v),
            Op::Prefill(op) => op.algo(&x.q, &x.k, &x.v),
        }
    }
}

pub fn name_of(algo: Algo) -> &'static str {
    match algo {
        Algo::Auto => "auto",
        Algo::Recurrent => "recurrent",
        Algo::Recurrent128 => "recurrent_128",
        Algo::Chunked => "chunked",
        Algo::Decode128 => "decode_128",
        Algo::ChunkedSm80 => "chunked_sm80",
        Algo::ChunkedSm90 => "chunked_sm90",
    }
}

/// Checks and times one shape with every algorithm asked for.
pub fn run(bench: &mut Bench, work: &Work) -> Result<()> {
    let (bytes, flop) = (work.bytes(bench.dtype.size_in_bytes()), work.flop());
    let cu = CuSeqlens::from_lengths(&work.lengths, &bench.device)?;
    let first = work.inputs(bench)?;
    let auto = work.op(&first, Algo::Auto, &cu)?.algo(&first).with_context(|| work.name.clone())?;
    let samples = check::RuleSamples::new(&first, &work.lengths, work.heads, !work.contest)?;
    let mut sets = vec![first];
    while sets.len() < bench.clock.cold_sets(bytes)? {
        sets.push(work.inputs(bench)?);
    }

    // `auto` runs the kernel it takes, which is timed under that kernel's name.
    let mut algos = bench.algos.clone();
    algos.iter_mut().filter(|algo| **algo == Algo::Auto).for_each(|algo| *algo = auto);
    let mut seen = vec![];
    for algo in algos {
        if seen.contains(&algo) {
            continue;
        }
        seen.push(algo);
        let row = Row::new(work.suite, &work.name, "candle-gdn").variant(name_of(algo)).auto(algo == auto);
        let includes = if work.contest { "gates" } else { "gates, L2 norm" };
        let row = row.shape(work.shape()).includes(includes).work(bytes, flop);

        let x = &sets[0];
        x.state.slice_set(&samples.state, 0, 0)?; // as it was when the reference was computed
        check::poison(&[work.tokens(), work.heads.hv, work.heads.dim], bench.dtype, &bench.device)?;
        let o = match work.op(x, algo, &cu).and_then(|op| op.forward(x)) {
            Ok(o) => o,
            Err(e) if bench.all_algos => {
                // A variant that does not take the shape is a gap among all of them, an error where it was asked for.
                bench.push(row.note(&format!("not taken: {e}")))?;
                continue;
            }
            Err(e) => return Err(anyhow::Error::new(e).context(work.name.clone())),
        };
        let errors = samples.errors(&o, &x.state)?;
        drop(o);
        let mut row = row.error("o", errors.o).error("state", errors.state);
        if work.contest {
            let Wrong { elements, of } = errors.contest;
            row = row.note(&match elements {
                0 => format!("contest: pass, {of} elements compared"),
                _ => format!("contest: FAIL, {elements} of {of} elements off by more than 1e-2"),
            });
        }
        if !errors.within(bench.dtype, algo) || (work.contest && errors.contest.elements > 0) {
            bench.failures += 1;
            bench.push(row.note("over its bound, not timed"))?;
            continue;
        }

        let mut calls: Vec<Call> = vec![];
        for x in &sets {
            let op = work.op(x, algo, &cu)?;
            calls.push(Box::new(move || op.forward(x).map(|_| ())));
        }
        let sample = bench.clock.time(&calls)?;
        bench.push_sample(row.clone().l2("cold"), sample)?;
        if work.warm {
            let sample = bench.clock.time(&calls[..1])?;
            bench.push_sample(row.l2("warm"), sample)?;
        }
    }
    Ok(())
}

/// All the dtypes the ops take.
pub fn dtype(name: &str) -> Option<DType> {
    match name {
        "bf16" => Some(DType::BF16),
        "f16" => Some(DType::F16),
        "f32" => Some(DType::F32),
        _ => None,
    }
}
