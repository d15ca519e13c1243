//! The epsilon of a whole model's norms, large enough to be missed.

use crate::gguf::without_experts;
use crate::support::{rel_rms, values};
use crate::tiny::Tiny;
use candle_core::Result;

const EPS: f64 = 0.1;

fn norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + EPS).sqrt() * (1. + w)).collect()
}

fn product(weight: &[f64], x: &[f64]) -> Vec<f64> {
    weight.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn sigmoid(x: f64) -> f64 {
    1. / (1. + (-x).exp())
}

fn add(x: &mut [f64], update: Vec<f64>) {
    x.iter_mut().zip(update).for_each(|(x, update)| *x += update);
}

/// The logits of one token, to which the layers of Gated DeltaNet add nothing. Attention to itself is its value.
fn definition(tiny: &Tiny, id: u32) -> Vec<f64> {
    let get = |name: &str| values(&tiny.weights[name]);
    let n = |field: &str| tiny.config[field].as_u64().unwrap() as usize;
    let (heads, kv_heads, dim) = (n("num_attention_heads"), n("num_key_value_heads"), n("head_dim"));
    let last = get("model.norm.weight");
    let mut x = get("model.embed_tokens.weight")[id as usize * last.len()..][..last.len()].to_vec();
    for i in 0..4 {
        let of = |name: &str| get(&format!("model.layers.{i}.{name}.weight"));
        if i == 3 {
            let normed = norm(&x, &of("input_layernorm"));
            let (q_gate, v) = (product(&of("self_attn.q_proj"), &normed), product(&of("self_attn.v_proj"), &normed));
            let value = |j: usize| {
                let (head, column) = (j / dim, j % dim);
                v[head / (heads / kv_heads) * dim + column] * sigmoid(q_gate[(2 * head + 1) * dim + column])
            };
            add(&mut x, product(&of("self_attn.o_proj"), &(0..heads * dim).map(value).collect::<Vec<_>>()));
        }
        let normed = norm(&x, &of("post_attention_layernorm"));
        let (gate, up) = (product(&of("mlp.gate_proj"), &normed), product(&of("mlp.up_proj"), &normed));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
        add(&mut x, product(&of("mlp.down_proj"), &inner));
    }
    product(&get("lm_head.weight"), &norm(&x, &last))
}

#[test]
fn norms_between_the_mixers_read_it() -> Result<()> {
    let mut tiny = without_experts(Tiny::qwen3_next().set("rms_norm_eps", EPS));
    for i in 0..3 {
        let out = tiny.weights.get_mut(&format!("model.layers.{i}.linear_attn.out_proj.weight")).expect("a weight");
        *out = out.zeros_like()?;
    }
    for id in [3, 30, 17] {
        let got: Vec<f64> = tiny.logits(&[id])?.into_iter().map(f64::from).collect();
        let error = rel_rms(&got, &definition(&tiny, id));
        assert!(error < 1e-5, "token {id}: {error:e}");
    }
    Ok(())
}

#[test]
fn another_epsilon_gives_other_logits() -> Result<()> {
    let ids = [3, 30, 17, 5, 9];
    let logits = |eps: f64| Tiny::qwen3_next().set("rms_norm_eps", eps).logits(&ids);
    assert!(rel_rms(&logits(EPS)?, &logits(1e-6)?) > 0.05);
    Ok(())
}
