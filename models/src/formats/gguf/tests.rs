//! A rank's shard of each weight against that of the whole: to the bit.

use super::super::{Blocks, Format, Stored};
use super::{GgufFile, GgufWeights};
use crate::config::ModelConfig;
use crate::parallel::{Collective, LocalRank, WeightShards};
use candle_core::quantized::{gguf_file, GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};

const HIDDEN: usize = 256;
const HEADS: [usize; 4] = [4, 12, 16, 128]; // of keys and values, and their sizes
const KEYS: usize = HEADS[0] * HEADS[2];
const VALUES: usize = HEADS[1] * HEADS[3];
const EXPERTS: usize = 3;
/// Of the experts, and of the shared one.
const INNER: [usize; 2] = [1024, 256];
const VOCAB: usize = 40;

fn config() -> Result<ModelConfig> {
    let json = serde_json::json!({
        "model_type": "qwen3_next", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER[1],
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25, "tie_word_embeddings": true, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": HEADS[0], "linear_num_value_heads": HEADS[1], "linear_key_head_dim": HEADS[2],
        "linear_value_head_dim": HEADS[3], "num_experts": EXPERTS, "num_experts_per_tok": 1,
        "moe_intermediate_size": INNER[0], "shared_expert_intermediate_size": INNER[1], "norm_topk_prob": true,
    });
    ModelConfig::from_json(&json.to_string())
}

/// How ranks share a weight.
enum Shared {
    Along(usize),
    /// These sections of a dimension, each.
    Sections(usize, Vec<usize>),
    All,
}
use Shared::{All, Along, Sections};

impl Shared {
    fn part(&self, whole: &Tensor, rank: usize, ranks: usize) -> Result<Tensor> {
        let sections = match self {
            All => return Ok(whole.clone()),
            Along(dim) => vec![whole.dim(*dim)?],
            Sections(_, sizes) => sizes.clone(),
        };
        let (Along(dim) | Sections(dim, _)) = self else { unreachable!() };
        let mut parts = Vec::new();
        let mut start = 0;
        for size in sections {
            parts.push(whole.narrow(*dim, start + rank * size / ranks, size / ranks)?);
            start += size;
        }
        Tensor::cat(&parts, *dim)?.contiguous()
    }
}

/// Weights, the tensors they are in, their shapes, and how they are shared.
fn weights() -> Vec<(&'static str, &'static str, Vec<usize>, Shared)> {
    let mixed = vec![KEYS, KEYS, VALUES];
    vec![
        (
            "linear_attn.in_proj_qkv.weight",
            "attn_qkv.weight",
            vec![2 * KEYS + VALUES, HIDDEN],
            Sections(0, mixed.clone()),
        ),
        ("linear_attn.in_proj_z.weight", "attn_gate.weight", vec![VALUES, HIDDEN], Along(0)),
        ("linear_attn.in_proj_b.weight", "ssm_beta.weight", vec![HEADS[1], HIDDEN], Along(0)),
        ("linear_attn.conv1d.weight", "ssm_conv1d.weight", vec![2 * KEYS + VALUES, 4], Sections(0, mixed)),
        ("linear_attn.A_log", "ssm_a", vec![HEADS[1]], Along(0)),
        ("linear_attn.norm.weight", "ssm_norm.weight", vec![HEADS[3]], All),
        ("linear_attn.out_proj.weight", "ssm_out.weight", vec![HIDDEN, VALUES], Along(1)),
        ("self_attn.q_proj.weight", "attn_q.weight", vec![512, HIDDEN], Along(0)),
        ("self_attn.o_proj.weight", "attn_output.weight", vec![HIDDEN, 256], Along(1)),
        ("mlp.gate.weight", "ffn_gate_inp.weight", vec![EXPERTS, HIDDEN], All),
        ("mlp.experts.gate_proj", "ffn_gate_exps.weight", vec![EXPERTS, INNER[0], HIDDEN], Along(1)),
        ("mlp.experts.up_proj", "ffn_up_exps.weight", vec![EXPERTS, INNER[0], HIDDEN], Along(1)),
        ("mlp.experts.down_proj", "ffn_down_exps.weight", vec![EXPERTS, HIDDEN, INNER[0]], Along(2)),
        ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight", vec![INNER[1], HIDDEN], Along(0)),
        ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight", vec![HIDDEN, INNER[1]], Along(1)),
    ]
}

fn write(path: &std::path::Path, dtype: GgmlDType) -> Result<()> {
    let mut tensors = Vec::new();
    let embeddings = ("", "token_embd.weight", vec![VOCAB, HIDDEN], All);
    for (seed, (_, name, shape, _)) in weights().into_iter().chain([embeddings]).enumerate() {
        let number = |i: usize| ((i * 7919 + seed * 104729) as f32 * 0.37).sin() - f32::from(name == "ssm_a") * 1.5;
        let x = Tensor::from_iter((0..shape.iter().product()).map(number), &Device::Cpu)?.reshape(shape)?;
        let plain = ["ssm_a", "ssm_norm", "ssm_conv1d", "ffn_gate_inp"].iter().any(|part| name.starts_with(part));
        let name = if name.starts_with("token") { name.to_string() } else { format!("blk.0.{name}") };
        tensors.push((name, QTensor::quantize(&x, if plain { GgmlDType::F32 } else { dtype })?));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut std::fs::File::create(path)?, &[], &tensors)
}

/// The numbers of a matrix, its columns in the model's order.
fn values(matrix: Stored) -> Result<Tensor> {
    match matrix {
        Stored::Dense(x) => Ok(x),
        Stored::E4m3(rows) => rows.dense(DType::F32, &Device::Cpu),
        Stored::Blocks(blocks) => blocks.tensor(),
        Stored::Tiled(blocks, t) => {
            let pieces = blocks.tensor()?.reshape((blocks.rows, t.per_group, t.groups, t.size))?;
            pieces.transpose(1, 2)?.contiguous()?.reshape((blocks.rows, blocks.columns))
        }
    }
}

fn bits(x: &Tensor) -> Result<Vec<u32>> {
    Ok(x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}

#[test]
fn parts_are_parts_of_the_whole() -> Result<()> {
    use GgmlDType::{F16, Q4K, Q4_0, Q8_0};
    let (dir, config) = (tempfile::tempdir()?, config()?);
    for dtype in [F16, Q8_0, Q4_0, Q4K] {
        let path = dir.path().join("tiny.gguf");
        write(&path, dtype)?;
        let file = GgufFile::open(&path)?;
        for (tiled, ranks) in [(false, 2), (true, 2), (true, 4)] {
            let whole = GgufWeights::new(&file, &config, tiled, None);
            for group in LocalRank::group(ranks) {
                let shards = WeightShards::new(&config, &group)?;
                let part = GgufWeights::new(&file, &config, tiled, Some(shards));
                let mut others = Vec::new();
                for (name, _, shape, shared) in weights() {
                    let (name, what) =
                        (format!("model.layers.0.{name}"), format!("{dtype:?}, {tiled}, {ranks}: {name}"));
                    let want = shared.part(&whole.dense(&shape.into(), &name)?, group.rank(), ranks)?;
                    let got = part.dense(want.shape(), &name)?;
                    assert_eq!((got.dims(), bits(&got)?), (want.dims(), bits(&want)?), "{what}");
                    // What is a matrix in the model.
                    let is_matrix = want.rank() == 3 || name.ends_with("_proj.weight") || name.contains("in_proj");
                    if !is_matrix || dtype == F16 {
                        continue;
                    }
                    let last = want.rank() - 1;
                    let flat = want.flatten_to(last - 1)?;
                    let got = part.stored(&name, want.dims())?.unwrap_or_else(|| panic!("{what}: not quantised"));
                    let kept = flat.dim(1)?.is_multiple_of(dtype.block_size())
                        && !(tiled && ranks == 4 && dtype == Q4K && name.contains("out_proj"));
                    let is_tiled = tiled && dtype == Q4K && kept && name.contains("out_proj");
                    assert_eq!(matches!(got, Stored::Tiled(..)), is_tiled, "{what}");
                    let want = match kept {
                        true => flat,
                        false => {
                            others.push(name.clone());
                            Blocks::quantize(&flat, Q8_0)?.tensor()?
                        }
                    };
                    assert_eq!(bits(&values(got)?)?, bits(&want)?, "{what}");
                }
                let listed: Vec<_> = part.other_types().into_iter().map(|other| other.name).collect();
                assert_eq!(listed, others, "{dtype:?}, {tiled}, {ranks}");
                assert_eq!(others.is_empty(), dtype != Q4K);
                assert!(part.other_types().iter().all(|other| other.dtype == Some(Q8_0)));
            }
        }
    }
    Ok(())
}

/// 16 columns of a type in blocks of 32 are left to the dense weights.
#[test]
fn half_a_small_block_is_dense() -> Result<()> {
    let (dir, mut config) = (tempfile::tempdir()?, config()?);
    let path = dir.path().join("tiny.gguf");
    write(&path, GgmlDType::Q8_0)?;
    let file = GgufFile::open(&path)?;
    // Of the file only the name counts: 16 ranks of 256 columns.
    (config.gdn.num_key_heads, config.gdn.num_value_heads, config.attention.num_heads) = (16, 16, 16);
    config.vocab_size = 48;
    let group = LocalRank::group(16).remove(5);
    let part = GgufWeights::new(&file, &config, false, Some(WeightShards::new(&config, &group)?));
    let name = "model.layers.0.mlp.shared_expert.down_proj.weight";
    assert!(part.stored(name, &[HIDDEN, 16])?.is_none());
    assert_eq!(
        part.other_types().iter().map(|other| (other.name.as_str(), other.dtype)).collect::<Vec<_>>(),
        [(name, None)]
    );
    let whole = GgufWeights::new(&file, &config, false, None).dense(&(HIDDEN, INNER[1]).into(), name)?;
    assert_eq!(bits(&part.dense(&(HIDDEN, 16).into(), name)?)?, bits(&whole.narrow(1, 80, 16)?)?);
    // Misshapen parts are named with the whole.
    let message = part.dense(&(HIDDEN, 17).into(), name).expect_err("an error").to_string();
    assert!(message.contains("blk.0.ffn_down_shexp.weight") && message.contains("expected [256, 272]"), "{message}");
    Ok(())
}
