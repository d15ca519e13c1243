//! The gated delta rule: 32 heads of 128 in f32, as llama.cpp times its own.

use crate::record::{Row, Shape};
use crate::results::{Suite, Work};
use crate::{assert_close, randn};
use candle_core::{Result, Tensor, D};
use candle_gdn::{gdn_decode_in_place, gdn_prefill_in_place, Gates, RuleOptions};
use candle_nn::ops::sigmoid;
use criterion::{Criterion, Throughput};

const HEADS: usize = 32;
const DIM: usize = 128;
/// So many states, of 2 MiB each, do not fit a cache: as many as a model of 36 layers has.
const LAYERS: usize = 36;

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: Tensor,
}

fn inputs(tokens: usize) -> Inputs {
    Inputs {
        q: randn(&[1, tokens, HEADS, DIM]),
        k: randn(&[1, tokens, HEADS, DIM]),
        v: randn(&[1, tokens, HEADS, DIM]),
        gates: Gates {
            a: randn(&[1, tokens, HEADS]),
            b: randn(&[1, tokens, HEADS]),
            a_log: randn(&[HEADS]),
            dt_bias: randn(&[HEADS]),
        },
        state: randn(&[1, HEADS, DIM, DIM]),
    }
}

/// The rule token by token in tensor ops: o `[1, tokens, HV, V]` and the new state.
fn tensor_rule(x: &Inputs) -> Result<(Tensor, Tensor)> {
    let unit = |t: &Tensor| {
        let norm = (t.sqr()?.sum_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
        let (b, tokens, heads, dim) = t.dims4()?;
        let r = HEADS / heads;
        let t = t.broadcast_div(&norm)?.unsqueeze(3)?;
        t.broadcast_as((b, tokens, heads, r, dim))?.reshape((b, tokens, HEADS, dim))
    };
    let q = (unit(&x.q)? * (DIM as f64).powf(-0.5))?;
    let k = unit(&x.k)?;
    let softplus = (x.gates.a.broadcast_add(&x.gates.dt_bias)?.exp()? + 1.)?.log()?;
    let decay = softplus.broadcast_mul(&x.gates.a_log.exp()?)?.neg()?.exp()?;
    let beta = sigmoid(&x.gates.b)?;
    let mut state = x.state.clone();
    let mut outs = vec![];
    for t in 0..x.q.dim(1)? {
        let at = |x: &Tensor| x.narrow(1, t, 1)?.squeeze(1)?.unsqueeze(D::Minus1); // [1, HV, .., 1]
        let (q, k, v) = (at(&q)?, at(&k)?, at(&x.v)?);
        state = state.broadcast_mul(&at(&decay)?.unsqueeze(D::Minus1)?)?;
        let delta = (v - state.matmul(&k)?)?.broadcast_mul(&at(&beta)?.unsqueeze(D::Minus1)?)?;
        state = (state + delta.matmul(&k.transpose(2, 3)?)?)?;
        outs.push(state.matmul(&q)?.squeeze(D::Minus1)?);
    }
    Ok((Tensor::stack(&outs, 1)?, state))
}

/// The rule in its variants, against tensor ops (to 64 tokens: they are slow), and one token with its state not in the
/// cache, as a model of many layers finds it.
pub fn bench(c: &mut Criterion) -> Vec<Work> {
    let mut suite = Suite::new(c, "rule");
    for tokens in [1, 64, 256, 512, 1024, 2048] {
        let x = inputs(tokens);
        let state = x.state.force_contiguous().unwrap();
        let (want, want_state) = tensor_rule(&x).unwrap();
        let shape = Shape::heads(HEADS, HEADS, DIM, DIM).batch(1).tokens(tokens);
        // q, k, v and o once, the state read and written.
        let bytes = (4 * (4 * tokens + 2 * DIM) * HEADS * DIM) as u64;
        let row = |contender: &str| {
            let row = Row::new("rule", &format!("T={tokens}"), contender).shape(shape).includes("gates, L2 norm");
            row.work(bytes, (6 * tokens * HEADS * DIM * DIM) as u64)
        };
        suite.group.throughput(Throughput::Elements(tokens as u64));
        let run = |state: &Tensor| {
            gdn_prefill_in_place(&x.q, &x.k, &x.v, &x.gates, state, None, RuleOptions::default()).unwrap()
        };
        let check = x.state.force_contiguous().unwrap();
        assert_close("o", &run(&check), &want);
        assert_close("state", &check, &want_state);
        suite.time("recurrent", tokens, row("candle-gdn").variant("recurrent").auto(true), || run(&state));
        if tokens == 1 {
            let at = |t: &Tensor| t.squeeze(1).unwrap();
            let (q, k, v) = (at(&x.q), at(&x.k), at(&x.v));
            let gates = Gates { a: at(&x.gates.a), b: at(&x.gates.b), ..x.gates.clone() };
            let states: Vec<_> = (0..LAYERS).map(|_| state.force_contiguous().unwrap()).collect();
            let mut next = states.iter().cycle();
            let row = row("candle-gdn").variant("decode").auto(true).l2("cold");
            suite.time("decode cold", tokens, row, || {
                let state = next.next().expect("a cycle has no end");
                gdn_decode_in_place(&q, &k, &v, &gates, state, RuleOptions::default()).unwrap()
            });
        }
        if tokens <= 64 {
            suite.time("tensor ops", tokens, row("tensor ops"), || tensor_rule(&x).unwrap());
        }
    }
    suite.works
}
