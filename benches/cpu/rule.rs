//! The gated delta rule: 32 heads of 128 in f32, as llama.cpp times its own.

use crate::results::{Suite, Work};
use crate::{assert_close, randn};
use candle_core::Tensor;
use candle_gdn::ops::{gdn_decode_in_place, gdn_prefill_in_place, Gates, RuleOptions};
use candle_gdn_benches::record::{Row, Shape};
use candle_gdn_benches::tensor_ops;
use criterion::{Criterion, Throughput};

const HEADS: usize = 32;
const DIM: usize = 128;
/// So many states, of 2 MiB each, fit no processor's cache.
const STATES: usize = 512;

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

/// The rule in its variants, against tensor ops (to 64 tokens: they are slow), and one token with its state not in the
/// cache, as a model of many layers finds it.
pub fn bench(c: &mut Criterion) -> Vec<Work> {
    let mut suite = Suite::new(c, "rule");
    for tokens in [1, 64, 256, 512, 1024, 2048] {
        let x = inputs(tokens);
        let state = x.state.force_contiguous().unwrap();
        let by_tokens = || tensor_ops::by_tokens(&x.q, &x.k, &x.v, &x.gates, &x.state).unwrap();
        let (want, want_state) = by_tokens();
        let shape = Shape::heads(HEADS, HEADS, DIM, DIM).batch(1).tokens(tokens);
        let row = |contender: &str| {
            Row::new("rule", &format!("T={tokens}"), contender).shape(shape).includes("gates, L2 norm")
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
            let states: Vec<_> = (0..STATES).map(|_| state.force_contiguous().unwrap()).collect();
            let mut next = states.iter().cycle();
            // q, k, v and o once, the state read and written. The other rows repeat what a cache may hold: no floor of bytes.
            let bytes = (4 * (4 + 2 * DIM) * HEADS * DIM) as u64;
            let row = row("candle-gdn").variant("decode").auto(true).l2("cold").work(bytes, 0);
            suite.time("decode cold", tokens, row, || {
                let state = next.next().expect("a cycle has no end");
                gdn_decode_in_place(&q, &k, &v, &gates, state, RuleOptions::default()).unwrap()
            });
        }
        if tokens <= 64 {
            suite.time("tensor ops", tokens, row("tensor ops"), by_tokens);
        }
    }
    suite.works
}
