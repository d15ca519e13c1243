//! Adapters of the families beside Qwen3-Next: of each projection that there is, against weights that were merged by hand.

use crate::gguf::IDS;
use crate::golden::{Goldens, LARA_MINI, OLMO_HYBRID, QWEN3_5};
use crate::lora::{by_hand, merged_by_hand, Adapter, ALPHA, RANK};
use crate::parallel::{check, BOUND};
use crate::support::{devices, refused, rel_rms};
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::GateActivation;
use candle_gdn_models::{shard_of, CausalLm};
use serde_json::{json, Value};

const CPU: Device = Device::Cpu;

/// A checkpoint, and its projections below a layer, in the order of the alphabet; `lm_head` with them.
struct Case {
    name: &'static str,
    tiny: Tiny,
    kinds: &'static [&'static str],
}

/// OLMo-Hybrid, Lara-4-Mini, and Qwen3.5 with another output gate.
fn cases() -> Result<Vec<Case>> {
    let mut cases = vec![];
    for (name, goldens, kinds) in
        [("olmo", &OLMO_HYBRID, OLMO), ("lara", &LARA_MINI, LARA), ("a sigmoid gate", &QWEN3_5, QWEN)]
    {
        if !goldens.is_here() {
            continue;
        }
        let mut tiny = checkpoint(goldens)?;
        if name == "a sigmoid gate" {
            tiny.config["text_config"]["output_gate_type"] = "sigmoid".into();
            assert_eq!(tiny.model_config()?.gdn.output_gate, GateActivation::Sigmoid);
        }
        cases.push(Case { name, tiny, kinds });
    }
    Ok(cases)
}

const OLMO: &[&str] = &[
    "linear_attn.a_proj",
    "linear_attn.b_proj",
    "linear_attn.g_proj",
    "linear_attn.k_proj",
    "linear_attn.o_proj",
    "linear_attn.q_proj",
    "linear_attn.v_proj",
    "lm_head",
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
];
const LARA: &[&str] = &[
    "linear_attn.in_proj",
    "linear_attn.out_proj",
    "mlp.gate",
    "mlp.shared_expert.down_proj",
    "mlp.shared_expert.gate_proj",
    "mlp.shared_expert.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
];
const QWEN: &[&str] = &[
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.out_proj",
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
];

fn checkpoint(goldens: &Goldens) -> Result<Tiny> {
    let config: Value = serde_json::from_str(&std::fs::read_to_string(goldens.dir() + "/config.json")?).unwrap();
    let weights = candle_core::safetensors::load(goldens.dir() + "/model.safetensors", &CPU)?;
    let weights = weights.into_iter().map(|(name, weight)| Ok((name, weight.to_dtype(DType::F32)?)));
    Ok(Tiny { config, weights: weights.collect::<Result<_>>()? })
}

/// The name of a module within its layer.
fn kind(module: &str) -> &str {
    let below = module.split_once(".layers.").map(|(_, rest)| rest);
    below.and_then(|rest| rest.split_once('.')).map_or(module, |(_, kind)| kind)
}

/// Every module of the text model with a matrix, but the embeddings.
fn modules(tiny: &Tiny) -> Vec<String> {
    let mut modules: Vec<String> = tiny
        .weights
        .iter()
        .filter(|(name, weight)| weight.rank() == 2 && !name.contains("visual") && !name.contains("embed_tokens"))
        .map(|(name, _)| name.strip_suffix(".weight").expect("a weight").to_string())
        .collect();
    modules.sort();
    modules
}

fn load(tiny: &Tiny, adapter: Option<&Adapter>, dtype: DType, device: &Device) -> Result<CausalLm> {
    load_as(tiny, adapter, dtype, device, None)
}

fn load_as(
    tiny: &Tiny,
    adapter: Option<&Adapter>,
    dtype: DType,
    device: &Device,
    quantize: Option<GgmlDType>,
) -> Result<CausalLm> {
    let (config, adapter) = (tiny.model_config()?, adapter.map(Adapter::open).transpose()?);
    CausalLm::loader(&config).lora(adapter.as_ref()).quantize(quantize).load(tiny.var_builder(dtype, device))
}

fn logits(model: &CausalLm) -> Result<Vec<f32>> {
    let ids = Tensor::from_slice(&IDS, (1, IDS.len()), model.device())?;
    model.forward(&ids, &mut model.new_state(1)?)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
}

/// To the bit: an adapter of one kind of projection, then of all of them, in f32 and bf16.
#[test]
fn every_projection_of_a_family() -> Result<()> {
    for Case { name, tiny, kinds } in cases()? {
        let modules = modules(&tiny);
        let mut found: Vec<&str> = modules.iter().map(|module| kind(module)).collect();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found, kinds, "{name}");
        for device in &devices() {
            let plain = logits(&load(&tiny, None, DType::F32, device)?)?;
            let compare = |what: &str, modules: &[&str], dtype: DType| -> Result<()> {
                let adapter = Adapter::new(&tiny, modules);
                let got = logits(&load(&tiny, Some(&adapter), dtype, device)?)?;
                let merged = merged_by_hand(&tiny, &adapter, modules)?;
                assert!(got == logits(&load(&merged, None, dtype, device)?)?, "{name}: {what} in {dtype:?}");
                let changed = rel_rms(&got, &plain);
                assert!(changed > 1e-3, "{name}: {what} changes logits by {changed:e} only");
                Ok(())
            };
            for one in kinds {
                let of_kind: Vec<&str> =
                    modules.iter().map(String::as_str).filter(|module| kind(module) == *one).collect();
                compare(one, &of_kind, DType::F32)?;
            }
            let all: Vec<&str> = modules.iter().map(String::as_str).collect();
            compare("all", &all, DType::F32)?;
            compare("all", &all, DType::BF16)?;
        }
    }
    Ok(())
}

#[test]
fn sums_are_quantised_and_divided_among_ranks() -> Result<()> {
    for Case { name, tiny, .. } in cases()? {
        let modules = modules(&tiny);
        let adapter = Adapter::new(&tiny, &modules.iter().map(String::as_str).collect::<Vec<_>>());
        let merged = merged_by_hand(&tiny, &adapter, &modules.iter().map(String::as_str).collect::<Vec<_>>())?;
        let quantize = Some(GgmlDType::Q8_0);
        let want = logits(&load_as(&merged, None, DType::F32, &CPU, quantize)?)?;
        assert!(logits(&load_as(&tiny, Some(&adapter), DType::F32, &CPU, quantize)?)? == want, "{name}");

        let (config, opened) = (tiny.model_config()?, adapter.open()?);
        check(name, &load(&merged, None, DType::F32, &CPU)?, 2, BOUND, |group| {
            let part = shard_of(tiny.var_builder(DType::F32, &CPU), &config, &*group)?;
            CausalLm::loader(&config).group(group).lora(&opened).load(part)
        });
    }
    Ok(())
}

/// Lara-4-Mini's experts lie in one tensor: an adapter of all as PEFT fuses them, and of each alone.
#[test]
fn experts_of_a_family() -> Result<()> {
    for Case { tiny, .. } in cases()?.into_iter().filter(|case| case.name == "lara") {
        let at = "model.layers.1.mlp.experts";
        let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
        let mut fused = Adapter::new(&tiny, &[]).set("target_parameters", json!(parameters));
        let mut apart = Adapter::new(&tiny, &[]);
        let (mut of_all, mut of_each) = (vec![], vec![]);
        for (module, weight, inner) in
            [(format!("{at}.base_layer"), "gate_up_proj", "up_proj"), (at.to_string(), "down_proj", "down_proj")]
        {
            let name = format!("{at}.{weight}");
            let (experts, outputs, inputs) = tiny.weights[&name].dims3()?;
            fused.add(&module, RANK * experts, [outputs, inputs]);
            let [a, b] = fused.factors(&module);
            let product = |expert: usize| -> Result<Tensor> {
                let columns = Tensor::from_iter((0..RANK).map(|j| (j * experts + expert) as u32), &CPU)?;
                b.index_select(&columns, 1)?.matmul(&a.narrow(0, expert * RANK, RANK)?)
            };
            let products = (0..experts).map(product).collect::<Result<Vec<_>>>()?;
            of_all.push((name.clone(), Tensor::stack(&products, 0)?));

            // The rows of the ups lie behind those of the gates.
            let rows = if inner == weight { outputs } else { outputs / 2 };
            let mut products = vec![];
            for expert in 0..experts {
                let module = format!("{at}.{expert}.{inner}");
                apart.add(&module, RANK, [rows, inputs]);
                let [a, b] = apart.factors(&module);
                products.push(b.matmul(a)?.pad_with_zeros(0, outputs - rows, 0)?);
            }
            of_each.push((name, Tensor::stack(&products, 0)?));
        }
        let plain = logits(&load(&tiny, None, DType::F32, &CPU)?)?;
        for (adapter, products) in [(&fused, &of_all), (&apart, &of_each)] {
            let merged = by_hand(&tiny, (ALPHA / RANK) as f64, products)?;
            let got = logits(&load(&tiny, Some(adapter), DType::F32, &CPU)?)?;
            assert!(got == logits(&load(&merged, None, DType::F32, &CPU)?)?);
            assert!(got != plain);
        }
    }
    Ok(())
}

/// What has no adapter, each by its name.
#[test]
fn other_weights_of_a_family() -> Result<()> {
    for Case { name, tiny, .. } in cases()? {
        let others: &[(&str, &str)] = match name {
            "olmo" => &[
                ("layers.0.linear_attn.q_conv1d", "a convolution"),
                ("layers.0.linear_attn.k_conv1d", "a convolution"),
                ("layers.0.linear_attn.v_conv1d", "a convolution"),
                ("layers.0.linear_attn.o_norm", "expected a matrix"),
                ("layers.0.attention_layer_norm", "expected a matrix"),
                ("layers.3.self_attn.q_norm", "expected a matrix"),
                ("layers.0.linear_attn.A_log", "the model has no weight"),
                ("layers.0.linear_attn.in_proj_qkv", "the model has no weight"),
                ("embed_tokens", "expected one of a layer's projections or of lm_head"),
            ],
            "lara" => &[
                ("layers.0.linear_attn.conv1d", "a convolution"),
                ("layers.0.linear_attn.out_norm", "expected a matrix"),
                ("layers.1.self_attn.k_norm", "expected a matrix"),
                ("layers.0.linear_attn.dt_bias", "the model has no weight"),
                ("layers.0.mlp.shared_expert_gate", "the model has no weight"),
                ("embed_tokens", "expected one of a layer's projections or of lm_head"),
            ],
            _ => &[
                ("language_model.layers.0.linear_attn.conv1d", "a convolution"),
                ("language_model.layers.0.linear_attn.norm", "expected a matrix"),
                ("language_model.layers.0.linear_attn.in_proj_ba", "the model has no weight"),
                ("language_model.embed_tokens", "expected one of a layer's projections or of lm_head"),
            ],
        };
        for (module, sentence) in others {
            let mut adapter = Adapter::new(&tiny, &[]);
            adapter.add(&format!("model.{module}"), RANK, [8, 4]);
            refused(load(&tiny, Some(&adapter), DType::F32, &CPU), &[module, sentence]);
        }
        // As PEFT has one of a convolution.
        let mut adapter = Adapter::new(&tiny, &[]);
        let module = "base_model.model.model.layers.0.linear_attn.conv1d";
        for (half, dims) in [("A", [2, 1, 4]), ("B", [8, 2, 1])] {
            let ones = Tensor::ones(&dims, DType::F32, &CPU)?;
            adapter.tensors.insert(format!("{module}.lora_{half}.weight"), ones);
        }
        refused(adapter.open(), &[module, "a convolution, which adapters are not merged into"]);
    }
    Ok(())
}
