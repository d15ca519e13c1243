//! The rule in training: 16 key heads and 32 value heads of 128 in f32, one sequence. `forward` is the op that training calls;
//! `backward` is candle's backward pass from o to q|k|v and the gates, with what candle adds to every op of a graph: zeros, and a
//! sum onto them.

use crate::results::{Suite, Work};
use crate::{assert_close, randn};
use candle_core::{backprop::GradStore, Device, Result, Tensor, Var, D};
use candle_gdn::ops::{gdn_gates, gdn_rule_diff, Gates, RuleOptions};
use candle_gdn::reference::Dims;
use candle_gdn_benches::record::{Row, Shape};
use candle_gdn_benches::tensor_ops;
use criterion::{Criterion, Throughput};

const SIZES: Dims = Dims { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
const KEYS: usize = SIZES.key_heads * SIZES.key_dim;
const VALUES: usize = SIZES.value_heads * SIZES.value_dim;

/// q|k|v and b|a as variables, and the constants of the gates.
struct Inputs {
    qkv: Var,
    ba: Var,
    a_log: Tensor,
    dt_bias: Tensor,
}

impl Inputs {
    fn new(tokens: usize) -> Result<Self> {
        let heads = SIZES.value_heads;
        Ok(Self {
            qkv: Var::from_tensor(&randn(&[1, tokens, 2 * KEYS + VALUES]))?,
            ba: Var::from_tensor(&randn(&[1, tokens, 2 * heads]))?,
            // Decays as a new layer has them.
            a_log: Tensor::rand(0f32, 16., heads, &Device::Cpu)?.log()?,
            dt_bias: Tensor::full(-4f32, heads, &Device::Cpu)?,
        })
    }

    /// o by the op, and the gates as the argument that they are.
    fn op(&self) -> Result<(Tensor, Var)> {
        let gates = gdn_gates(&self.ba.as_detached_tensor(), &self.a_log, &self.dt_bias, 1.0)?;
        let gates = Var::from_tensor(&gates)?;
        Ok((gdn_rule_diff(&self.qkv, &gates, None, SIZES, None, RuleOptions::default())?.0, gates))
    }

    /// o by tensor operations, with gradients of q|k|v and b|a.
    fn tensor_ops(&self) -> Result<Tensor> {
        let (batch, tokens, _) = self.qkv.dims3()?;
        let part = |start, heads, dim| {
            let part = self.qkv.narrow(D::Minus1, start, heads * dim)?;
            part.contiguous()?.reshape((batch, tokens, heads, dim))
        };
        let Dims { key_heads, value_heads, key_dim, value_dim } = SIZES;
        let gates = Gates {
            a: self.ba.narrow(D::Minus1, value_heads, value_heads)?,
            b: self.ba.narrow(D::Minus1, 0, value_heads)?,
            a_log: self.a_log.clone(),
            dt_bias: self.dt_bias.clone(),
        };
        let state = Tensor::zeros((batch, value_heads, value_dim, key_dim), self.qkv.dtype(), &Device::Cpu)?;
        let (q, k) = (part(0, key_heads, key_dim)?, part(KEYS, key_heads, key_dim)?);
        Ok(tensor_ops::by_chunks(&q, &k, &part(2 * KEYS, value_heads, value_dim)?, &gates, &state)?.0)
    }
}

fn gradient(store: &GradStore, of: &Var) -> Tensor {
    store.get(of).expect("a gradient").clone()
}

/// The op's two passes, and the backward pass of tensor operations (to 512 tokens: they are slow).
pub fn bench(c: &mut Criterion) -> Vec<Work> {
    let mut suite = Suite::new(c, "backward");
    for tokens in [64, 512, 2048] {
        let x = Inputs::new(tokens).unwrap();
        let shape = Shape::heads(SIZES.key_heads, SIZES.value_heads, SIZES.key_dim, SIZES.value_dim);
        let row = |who: &str, pass: &str| {
            Row::new("backward", &format!("T={tokens}"), who).variant(pass).shape(shape.batch(1).tokens(tokens))
        };
        let (o, gates) = x.op().unwrap();
        suite.group.throughput(Throughput::Elements(tokens as u64));
        let ours = |pass| row("candle-gdn", pass).includes("L2 norm");
        let (qkv, ready) = (x.qkv.as_detached_tensor(), gates.as_detached_tensor());
        suite.time("forward", tokens, ours("forward"), || {
            gdn_rule_diff(&qkv, &ready, None, SIZES, None, RuleOptions::default()).unwrap()
        });
        suite.time("backward", tokens, ours("backward"), || o.backward().unwrap());
        if tokens <= 512 {
            let want = x.tensor_ops().unwrap();
            assert_close("o", &o, &want);
            let (got, want_store) = (o.backward().unwrap(), want.backward().unwrap());
            assert_close("the gradient of q|k|v", &gradient(&got, &x.qkv), &gradient(&want_store, &x.qkv));
            let row = row("tensor ops", "backward").includes("gates, L2 norm");
            suite.time("tensor ops", tokens, row, || want.backward().unwrap());
        }
    }
    suite.works
}
