//! A model with quantised or fp8 weights in parts, one a rank, against the whole: on the CPU, where ranks are host threads.
//!
//! That each part is that of the whole to the bit is a unit test of `src/weights/gguf`. Sums in another order round what
//! goes into the next quantised product to other 8 bits, so that models agree as far as that rounding lets them.

use crate::fp8_files::{in_fp8, to_fp8};
use crate::gguf::{calm, wide, without_experts};
use crate::gguf_writer::{dequantized, in_a_folder, load, GgufOfTiny, Layout};
use crate::golden::{converted, DEMO};
use crate::parallel::{check, on_ranks, run_steps, BOUND};
use crate::support::{refused, rel_rms, values};
use crate::tiny::Tiny;
use candle_core::quantized::GgmlDType;
use candle_core::{safetensors, DType, Device, Result, Tensor};
use candle_gdn_models::{
    shard_of, CausalLm, Collective, GgufFile, LocalRank, ModelConfig, OtherType, SafetensorsFiles,
};
use candle_nn::VarBuilder;
use std::path::Path;
use std::sync::Arc;

const CPU: Device = Device::Cpu;
/// Of the logits of trained models, where 8 bits were rounded otherwise.
const ROUNDED: f64 = 2e-2;

fn part_of_gguf(path: &Path, group: Arc<dyn Collective>) -> Result<CausalLm> {
    let file = GgufFile::open(path)?;
    let config = ModelConfig::from_gguf(&file)?;
    CausalLm::loader(&config).group(group).load_gguf(&file, DType::F32, &CPU)
}

/// Four key heads, so that four ranks have one each.
fn four_heads() -> Tiny {
    calm(wide().set("linear_num_key_heads", 4).set("linear_num_value_heads", 12).fill())
}

/// Random models make much of little: parts are off from the whole no more than the whole is from its dequantised weights,
/// by the rounding of activations.
fn check_file(what: &str, path: &Path, ranks: usize) -> Result<Vec<OtherType>> {
    let (_dir, wide) = in_a_folder("f32.gguf");
    dequantized(path, &wide)?;
    let run = |model: &CausalLm| run_steps(model, 3);
    let (want, dense) = (run(&load(path)?)?.0, run(&load(&wide)?)?.0);
    let rounding = rel_rms(&want, &dense);
    assert!(rounding < 0.5, "{what}: the whole is off by {rounding:e}");
    let parts = on_ranks(ranks, |group| {
        let part = part_of_gguf(path, group)?;
        assert!(part.is_quantized());
        Ok((run(&part)?, part.other_types().to_vec()))
    });
    let parts = parts.into_iter().collect::<Result<Vec<_>>>()?;
    let ((logits, tokens), others) = &parts[0];
    let (error, of_dense) = (rel_rms(logits, &want), rel_rms(logits, &dense));
    println!("{what}, {ranks} ranks: {error:e}, of dense {of_dense:e}, the whole {rounding:e}");
    assert!(error < 2. * rounding && of_dense < 1.5 * rounding, "{what}, {ranks} ranks: {error:e}, {rounding:e}");
    assert!(parts.iter().all(|part| part.0 == (logits.clone(), tokens.clone())), "{what}: ranks differ");
    Ok(others.clone())
}

#[test]
fn converted_files() -> Result<()> {
    for (name, bound) in [
        ("demo-f16", BOUND),
        ("qwen3_5_tiny-f16", BOUND),
        ("qwen3_5_moe_tiny-f16", BOUND),
        ("demo-q8_0", ROUNDED),
        ("qwen3_5_moe_tiny-q8_0", ROUNDED),
    ] {
        let Some(path) = converted(&format!("{name}.gguf")) else { continue };
        check(name, &load(&path)?, 2, bound, |group| part_of_gguf(&path, group));
    }
    Ok(())
}

/// Value heads tiled or not, b and a interleaved or apart, with experts and without, embeddings quantised, tied or not.
#[test]
fn files_of_every_layout() -> Result<()> {
    let tied = without_experts(four_heads()).set("tie_word_embeddings", true);
    for (layout, tiny, ranks) in
        [(Layout::Qwen3Next, four_heads(), 2), (Layout::OldQwen3Next, tied, 2), (Layout::Qwen3_5, four_heads(), 4)]
    {
        let mut file = GgufOfTiny::new(&tiny, layout)?;
        if tiny.config["tie_word_embeddings"] == true {
            file.tensors.remove("output.weight");
        }
        let ((_dir, path), what) = (in_a_folder("tiny.gguf"), format!("{layout:?}"));
        file.write(&path)?;
        let part = |group| part_of_gguf(&path, group);
        check(&what, &load(&path)?, ranks, BOUND, part);
        file.clone().quantized(GgmlDType::Q8_0).write(&path)?;
        assert_eq!(check_file(&what, &path, ranks)?, []);
    }
    Ok(())
}

/// Of two ranks: the value heads of the file in halves of 256 columns, which stay tiled; 128 columns of all else, which
/// become Q8_0.
#[test]
fn parts_of_large_blocks() -> Result<()> {
    let (_dir, path) = in_a_folder("tiny.gguf");
    GgufOfTiny::new(&four_heads(), Layout::Qwen3_5)?.quantized(GgmlDType::Q6K).write(&path)?;
    let others = check_file("Q6K", &path, 2)?;
    assert!(others.iter().all(|other| other.dtype == Some(GgmlDType::Q8_0)), "{others:?}");
    let mut names: Vec<_> = others.iter().map(|other| other.name.as_str()).collect();
    names.sort_unstable();
    let down = ["experts.down_proj", "shared_expert.down_proj.weight"];
    let down = (0..4).flat_map(|i| down.map(|name| format!("model.layers.{i}.mlp.{name}")));
    let want: Vec<_> = down.chain(["model.layers.3.self_attn.o_proj.weight".into()]).collect();
    assert_eq!(names, want);
    Ok(())
}

fn part_of_files(
    files: &[String],
    config: &ModelConfig,
    group: Arc<dyn Collective>,
    to: Option<GgmlDType>,
) -> Result<CausalLm> {
    // SAFETY: nobody writes the files.
    let files = unsafe { SafetensorsFiles::open(files)? };
    CausalLm::loader(config).group(group).quantize(to).load_safetensors(&files, DType::F32, &CPU)
}

#[test]
fn parts_are_quantised_as_they_load() -> Result<()> {
    let (config, files) = (DEMO.config()?, [DEMO.dir() + "/model.safetensors"]);
    // SAFETY: nobody writes the goldens.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &CPU)? };
    let whole = CausalLm::loader(&config).quantize(GgmlDType::Q8_0).load(vb)?;
    check("demo", &whole, 2, ROUNDED, |group| {
        let part = part_of_files(&files, &config, group, Some(GgmlDType::Q8_0))?;
        assert!(part.is_quantized() && part.other_types().is_empty());
        Ok(part)
    });
    // Of a part the width counts: 256 columns are whole blocks of Q4K, and half of them are not.
    let tiny = four_heads();
    let config = tiny.model_config()?;
    for rank in on_ranks(2, |group| {
        let vb = tiny.var_builder(DType::F32, &CPU);
        let part = shard_of(vb, &config, &*group)?;
        let part = CausalLm::loader(&config).group(group).quantize(GgmlDType::Q4K).load(part)?;
        Ok(part.other_types().to_vec())
    }) {
        let others = rank?;
        let all = |name: &str| others.iter().filter(|other| other.name.contains(name)).count();
        assert_eq!((all("down_proj"), all("o_proj"), others.len()), (2 * 4, 1, 2 * 4 + 1), "{others:?}");
        assert!(others.iter().all(|other| other.dtype == Some(GgmlDType::Q8_0)), "{others:?}");
    }
    Ok(())
}

/// Whether a part can be had as it is stored; then its bytes and the scales of its rows make the numbers in f32.
fn stored_part(part: &VarBuilder, name: &str, numbers: &Tensor, block: [usize; 2], half: usize) -> Result<bool> {
    let (n, k) = numbers.dims2()?;
    let whole_blocks = half != k || half.is_multiple_of(128);
    if block[1] != 128 || !whole_blocks || numbers.dtype() != DType::F32 {
        return Ok(false);
    }
    let get =
        |shape: (usize, usize), name: &str, dtype| part.get_with_hints_dtype(shape, name, Default::default(), dtype);
    let bytes = get((n, k), name, DType::F8E4M3)?;
    let scales = get((n, k.div_ceil(128)), &format!("{name}_scale_inv"), DType::F32)?;
    let wide = scales.unsqueeze(2)?.broadcast_as((n, k.div_ceil(128), 128))?.contiguous()?.flatten_from(1)?;
    let got = (bytes.to_dtype(DType::F32)? * wide.narrow(1, 0, k)?)?;
    assert_eq!(got.to_vec2::<f32>()?, numbers.to_vec2::<f32>()?, "{name} as it is stored");
    Ok(true)
}

/// In blocks of 128, of which a part begins in the middle of one, and of sizes that divide nothing.
#[test]
fn parts_of_fp8_are_those_of_the_dequantised_weights() -> Result<()> {
    let odd = wide().set("moe_intermediate_size", 160).set("shared_expert_intermediate_size", 96);
    for (tiny, block) in [(calm(odd.fill()), [128, 128]), (Tiny::qwen3_next(), [5, 7])] {
        let (fp8, dequantized) = in_fp8(&tiny, block)?;
        let config = fp8.model_config()?;
        let (dir, path) = in_a_folder("model.safetensors");
        safetensors::save(&fp8.weights, &path)?;
        let files = [path.display().to_string()];
        let (mut off_the_border, mut stored) = (0, 0);
        for group in LocalRank::group(2) {
            for dtype in [DType::F32, DType::BF16] {
                // SAFETY: nobody writes to the folder.
                let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, &CPU)? };
                let part = shard_of(vb, &config, &group)?;
                for (name, scales) in &fp8.weights {
                    let Some(name) = name.strip_suffix("_scale_inv") else { continue };
                    let whole = &dequantized.weights[name];
                    let columns = ["out_proj", "o_proj", "down_proj"].iter().any(|end| name.contains(end));
                    let dim = usize::from(columns);
                    let half = whole.dim(dim)? / 2;
                    let want = whole.narrow(dim, group.rank() * half, half)?.to_dtype(dtype)?;
                    let got = part.get(want.shape(), name)?;
                    let numbers = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                    assert_eq!(got.dtype(), dtype);
                    assert_eq!(numbers(&got)?, numbers(&want)?, "{name}, rank {}", group.rank());
                    stored += usize::from(stored_part(&part, name, &got, block, half)?);
                    off_the_border += usize::from(half % block[dim] != 0 && scales.dim(dim)? > 1);
                }
            }
        }
        assert!(off_the_border > 50, "{off_the_border}");
        assert!(block != [128, 128] || stored > 50, "{stored}");
        let part = |group| part_of_files(&files, &config, group, None);
        check("fp8", &dequantized.model()?, 2, BOUND, part);
        let q8_0 = |group| part_of_files(&files, &config, group, Some(GgmlDType::Q8_0));
        assert!(on_ranks(2, |group| run_steps(&q8_0(group)?, 2)).into_iter().all(|ran| ran.is_ok()));
        drop(dir);
    }
    Ok(())
}

/// All experts in one tensor, with a scale for each block of each.
#[test]
fn parts_of_fp8_experts_in_one_tensor() -> Result<()> {
    let tiny = Tiny::qwen3_next();
    let (config, _) = in_fp8(&tiny, [5, 7])?;
    let config = config.model_config()?;
    let mut fused = tiny.clone();
    fused.fuse_experts()?;
    let name = |part: &str| format!("model.layers.1.mlp.experts.{part}");
    for (weight, dim) in [("gate_up_proj", 1), ("down_proj", 2)] {
        let wide = fused.weights[&name(weight)].clone();
        let experts = (0..wide.dim(0)?).map(|j| to_fp8(&wide.get(j)?, [5, 7])).collect::<Result<Vec<_>>>()?;
        let (numbers, scales): (Vec<_>, Vec<_>) = experts.into_iter().unzip();
        fused.weights.insert(name(weight), Tensor::stack(&numbers, 0)?);
        fused.weights.insert(name(&format!("{weight}_scale_inv")), Tensor::stack(&scales, 0)?);
        let part = |group: &LocalRank, shape: &[usize]| {
            let vb = fused.var_builder(DType::F32, &CPU);
            shard_of(vb, &config, group)?.get(shape, &name(weight))
        };
        let whole = part(&LocalRank::group(1)[0], wide.dims())?;
        assert!(rel_rms(&values(&whole), &values(&wide)) < 0.05);
        for group in LocalRank::group(2) {
            // Of the gate and of up, each in the middle of a block.
            let inner = wide.dim(dim)? / if dim == 1 { 4 } else { 2 };
            let take = |first: usize| whole.narrow(dim, first + group.rank() * inner, inner);
            let want = match dim {
                1 => Tensor::cat(&[take(0)?, take(2 * inner)?], 1)?,
                _ => take(0)?.contiguous()?,
            };
            let numbers = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
            assert_eq!(numbers(&part(&group, want.dims())?)?, numbers(&want)?);
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_divided_is_named() -> Result<()> {
    let bad = |file: GgufOfTiny, ranks: usize, parts: &[&str]| -> Result<()> {
        let (_dir, path) = in_a_folder("tiny.gguf");
        file.write(&path)?;
        on_ranks(ranks, |group| part_of_gguf(&path, group).map(drop)).into_iter().for_each(|rank| refused(rank, parts));
        Ok(())
    };
    let file = |tiny: &Tiny| GgufOfTiny::new(tiny, Layout::Qwen3_5);
    bad(file(&wide())?, 4, &["at most as many ranks as key heads (2), got 4"])?;
    bad(file(&four_heads())?, 3, &["divides the key heads of Gated DeltaNet (4), got 3"])?;
    let odd = four_heads().set("moe_intermediate_size", 15).fill();
    bad(file(&odd)?, 2, &["divides the inner width of the experts (15), got 2"])?;
    // A tensor that is not that of the configuration is named, with the whole shape.
    let mut file = file(&four_heads())?.quantized(GgmlDType::Q8_0);
    let name = "blk.0.ffn_down_exps.weight";
    file.tensors.get_mut(name).expect("the tensor").0 = Tensor::zeros((4, 256, 128), DType::F32, &CPU)?;
    bad(file, 2, &["tiny.gguf", name, "expected [4, 256, 256]", "got [4, 256, 128]"])
}
