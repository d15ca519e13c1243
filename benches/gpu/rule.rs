//! The rule itself: decode and prefill.

use crate::check;
use crate::clock::Call;
use crate::inputs::Inputs;
use crate::workloads::{Heads, Work};
use crate::Bench;
use anyhow::{Context, Result};
use candle_core::Tensor;
use candle_gdn::ops::{Gates, GdnDecode, GdnPrefill, RuleOptions};
use candle_gdn::{Algo, CuSeqlens};
use candle_gdn_benches::record::Row;
use candle_gdn_benches::tensor_ops;

/// The op on one set of inputs, which it updates in place; the sequences' boundaries are on the device already.
fn op(work: &Work, x: &Inputs, algo: Algo, cu: &CuSeqlens) -> candle_core::Result<Op> {
    let options = RuleOptions::with(|o| o.algo = algo);
    Ok(if work.decode() {
        Op::Decode(GdnDecode::new(x.gates.clone(), &x.state, options)?)
    } else {
        Op::Prefill(GdnPrefill::new(x.gates.clone(), &x.state, Some(cu), options)?)
    })
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

/// What an error says, without the backtrace that candle may print behind it.
pub fn not_taken(e: &candle_core::Error) -> String {
    format!("not taken: {}", e.to_string().lines().next().unwrap_or_default())
}

/// Checks and times one shape with every algorithm asked for.
pub fn run(bench: &mut Bench, work: &Work) -> Result<()> {
    let (bytes, flop) = (work.bytes(bench.dtype.size_in_bytes()), work.flop());
    let cu = CuSeqlens::from_lengths(&work.lengths, &bench.device)?;
    let first = Inputs::new(work, bench.dtype, &bench.device)?;
    let auto = op(work, &first, Algo::Auto, &cu)?.algo(&first).with_context(|| work.name.clone())?;
    let samples = check::RuleSamples::new(&first, &work.lengths, work.heads)?;
    let mut sets = vec![first];
    while sets.len() < bench.clock.cold_sets(bytes)? {
        sets.push(Inputs::new(work, bench.dtype, &bench.device)?);
    }

    // `auto` runs the kernel it takes, which is timed under that kernel's name.
    let mut algos = vec![];
    for algo in bench.algos.iter().map(|algo| if *algo == Algo::Auto { auto } else { *algo }) {
        if !algos.contains(&algo) {
            algos.push(algo);
        }
    }
    for algo in algos {
        let row = Row::new(work.suite, &work.name, "candle-gdn").variant(algo.name()).auto(algo == auto);
        let row = row.shape(work.shape()).includes("gates, L2 norm").work(bytes, flop);

        let x = &sets[0];
        x.state.slice_set(&samples.state, 0, 0)?; // as it was when the reference was computed
        check::poison(&[work.tokens(), work.heads.hv, work.heads.dim], bench.dtype, &bench.device)?;
        let o = match op(work, x, algo, &cu).and_then(|op| op.forward(x)) {
            Ok(o) => o,
            Err(e) if bench.all_algos => {
                // A variant that does not take the shape is a gap among all of them, an error where it was asked for.
                bench.push(row.note(&not_taken(&e)))?;
                continue;
            }
            Err(e) => return Err(anyhow::Error::new(e).context(work.name.clone())),
        };
        let errors = samples.errors(&o, &x.state)?;
        drop(o);
        let row = row.error("o", errors.o).error("state", errors.state);
        if !errors.within(bench.dtype, algo) {
            bench.failures += 1;
            bench.push(row.note("over its bound, not timed"))?;
            continue;
        }

        let mut calls: Vec<Call> = vec![];
        for x in &sets {
            let op = op(work, x, algo, &cu)?;
            calls.push(Box::new(move || op.forward(x).map(|_| ())));
        }
        bench.time(row.clone().l2("cold"), &calls)?;
        if work.suite == "decode" {
            bench.time(row.l2("warm"), &calls[..1])?;
        }
    }
    if work.has_baseline() {
        baseline(bench, work, &sets, &samples)?;
    }
    Ok(())
}

/// The same in candle's tensor operations: o `[tokens, HV, V]` and the new state.
fn in_tensor_ops(work: &Work, x: &Inputs) -> candle_core::Result<(Tensor, Tensor)> {
    let Heads { hk, hv, dim } = work.heads;
    let (batch, tokens) = (work.lengths.len(), work.lengths[0]);
    let heads = |x: &Tensor, n: usize| x.reshape((batch, tokens, n, dim));
    let gate = |x: &Tensor| x.reshape((batch, tokens, hv));
    let gates = Gates { a: gate(&x.gates.a)?, b: gate(&x.gates.b)?, ..x.gates.clone() };
    let (q, k, v) = (heads(&x.q, hk)?, heads(&x.k, hk)?, heads(&x.v, hv)?);
    let rule = if work.decode() { tensor_ops::by_tokens } else { tensor_ops::by_chunks };
    let (o, state) = rule(&q, &k, &v, &gates, &x.state)?;
    Ok((o.flatten(0, 1)?, state))
}

/// Checks and times what a candle user has without this crate.
fn baseline(bench: &mut Bench, work: &Work, sets: &[Inputs], samples: &check::RuleSamples) -> Result<()> {
    let row = Row::new(work.suite, &work.name, "candle").shape(work.shape()).includes("gates, L2 norm").l2("cold");
    let row = row.work(work.bytes(bench.dtype.size_in_bytes()), work.flop());
    sets[0].state.slice_set(&samples.state, 0, 0)?;
    let (o, state) = in_tensor_ops(work, &sets[0])?;
    let errors = samples.errors(&o, &state)?;
    drop((o, state));
    let row = row.error("o", errors.o).error("state", errors.state);
    if !errors.within(bench.dtype, Algo::ChunkedSm80) {
        bench.failures += 1;
        return bench.push(row.note("over its bound, not timed"));
    }
    let calls: Vec<Call> =
        sets.iter().map(|x| -> Call { Box::new(move || in_tensor_ops(work, x).map(|_| ())) }).collect();
    bench.time(row, &calls)
}
