//! The README's examples: what stands there stands here too, and compiles.

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{CuSeqlens, TrainableGatedDeltaNet};
use candle_gdn::{DenseWeight, GdnParts, InProjection, Projection};
use candle_gdn::{GatedDeltaNet, GdnConfig};
use candle_nn::VarBuilder;
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarMap};

#[test]
fn the_layer_in_a_model() -> anyhow::Result<()> {
    let dir = "examples/generate/demo"; // any checkpoint of the family (all its files); this one is in the clone
    let device = Device::cuda_if_available(0)?;
    let config: GdnConfig = serde_json::from_str(&std::fs::read_to_string(format!("{dir}/config.json"))?)?;
    let vb =
        unsafe { VarBuilder::from_mmaped_safetensors(&[format!("{dir}/model.safetensors")], DType::BF16, &device)? };
    let layer = GatedDeltaNet::load(&config, vb.pp("model.layers.0.linear_attn"))?; // names of any published family

    let mut state = layer.new_state(1)?; // one sequence, all zeros, on the device of the weights
    let x = Tensor::randn(0f32, 1., (1, 7, config.hidden_size), &device)?.to_dtype(DType::BF16)?;
    let y = layer.forward(&x, &mut state)?; // a prompt of 7 tokens: [1, 7, hidden_size]
    let y = layer.forward(&y.narrow(1, 6, 1)?, &mut state)?; // one more token, from the state: [1, 1, hidden_size]
    assert_eq!(y.dims(), [1, 1, config.hidden_size]);
    Ok(())
}

#[test]
fn the_layer_in_training() -> candle_core::Result<()> {
    let (device, config) = (Device::Cpu, GdnConfig::new(32, (2, 16), (4, 16)));
    let weights = VarMap::new(); // or `weights.load(..)`, or `TrainableGatedDeltaNet::load_with` for LoRAs around a checkpoint
    let vb = VarBuilder::from_varmap(&weights, DType::F32, &device);
    let layer = TrainableGatedDeltaNet::init(&config, vb.pp("linear_attn"))?;
    let packed = CuSeqlens::from_lengths(&[40, 24], &device)?; // two sequences, one after the other: nothing crosses their border
    let x = Tensor::randn(0f32, 1., (64, config.hidden_size), &device)?;
    let loss = layer.forward(&x, Some(&packed))?.sqr()?.mean_all()?;
    AdamW::new(weights.all_vars(), ParamsAdamW::default())?.backward_step(&loss)?;
    let layer = layer.freeze()?; // a GatedDeltaNet, which decodes
    layer.new_state(1).map(drop)
}

#[test]
fn projections_of_your_own() -> candle_core::Result<()> {
    let (vb, x) = (VarBuilder::zeros(DType::F32, &Device::Cpu), Tensor::zeros((1, 3, 2048), DType::F32, &Device::Cpu)?);
    let config = GdnConfig::new(2048, (16, 128), (32, 128));
    let inner = config.key_size() * 2 + config.value_size() * 2 + config.num_value_heads * 2;
    let in_proj_weight = Tensor::zeros((inner, config.hidden_size), DType::F32, &Device::Cpu)?;
    let out_proj_weight = Tensor::zeros((config.hidden_size, config.value_size()), DType::F32, &Device::Cpu)?;
    // The rows of in_proj_weight are those of q, k, v, z, b and a, in this order. QMatMul works in f32, so all weights here are f32.
    let qmatmul = QMatMul::from_qtensor(QTensor::quantize(&in_proj_weight, GgmlDType::Q4K)?)?;
    let parts = GdnParts {
        in_proj: InProjection::Fused(Projection::module(qmatmul)), // or Interleaved { .. }, Split { .. }, Separate { .. }
        conv_weight: vb.get((config.conv_channels(), 1, config.conv_kernel), "conv1d.weight")?.into(),
        a_log: vb.get(config.num_value_heads, "A_log")?,
        dt_bias: vb.get(config.num_value_heads, "dt_bias")?,
        norm_weight: vb.get(config.value_head_dim, "norm.weight")?,
        out_proj: DenseWeight::new(out_proj_weight)?.into(), // a dense weight: the fast kernels of this crate
    };
    let layer = GatedDeltaNet::new(&config, parts)?;
    assert_eq!(layer.forward(&x, &mut layer.new_state(1)?)?.dims(), x.dims());
    Ok(())
}

/// Statement by statement, however the lines are broken.
#[test]
fn what_the_readme_shows_is_what_compiles() {
    let squeezed = |text: &str| text.split_whitespace().collect::<String>();
    let (here, readme) = (squeezed(include_str!("readme.rs")), include_str!("../../README.md"));
    let blocks: Vec<&str> = readme.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 3);
    for statement in blocks.iter().flat_map(|block| block.split_inclusive(';')) {
        assert!(here.contains(&squeezed(statement)), "not compiled: {statement}");
    }
}

/// The files of this repository below the root that end so, without what is built or measured.
fn files(endings: &[&str]) -> Vec<(String, std::path::PathBuf)> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut folders, mut files) = (vec![root.to_owned()], vec![]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
            match entry.file_type().unwrap().is_dir() {
                true if !name.starts_with('.') && !["target", "results", "found"].contains(&&*name) => {
                    folders.push(path)
                }
                false if endings.iter().any(|ending| name.ends_with(ending)) => {
                    files.push((path.strip_prefix(root).unwrap().display().to_string(), path))
                }
                _ => {}
            }
        }
    }
    files
}

/// Pages for readers: folder pages have at most 60 lines, package pages 150; no commit hash outside the result files.
#[test]
fn pages_stay_short() {
    let is_hash = |word: &str| {
        let hex = word.len() == 7 && word.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        hex && word.bytes().any(|b| b.is_ascii_digit()) && word.bytes().any(|b| b.is_ascii_lowercase())
    };
    let pages = files(&[".md"]);
    for (page, path) in &pages {
        let text = std::fs::read_to_string(path).unwrap();
        let folder = (page.starts_with("cuda/") || page.starts_with("models/cuda/")) && page.ends_with("README.md");
        let lines = text.lines().count();
        assert!(lines <= if folder { 60 } else { 150 }, "{page}: {lines} lines");
        let hash = text.split(|c: char| !c.is_ascii_alphanumeric()).find(|word| is_hash(word));
        assert_eq!(hash, None, "{page}: a commit hash");
    }
    assert!(pages.len() > 20, "{} pages", pages.len());
}

/// What CONTRIBUTING says of a file. The one that is longer is the C ABI.
#[test]
fn files_have_one_job_and_at_most_400_lines() {
    let files = files(&[".rs", ".cu", ".cuh", ".h", ".c", ".cpp", ".py"]);
    let lines = |path| std::fs::read_to_string(path).unwrap().lines().count();
    let long: Vec<_> = files.iter().filter(|(_, path)| lines(path) > 400).map(|(name, _)| name.as_str()).collect();
    assert_eq!(long, ["cuda/gdn.h"], "more than 400 lines");
    assert!(files.len() > 300, "{} files", files.len());
}

/// Lists in pages are those of the files.
#[test]
fn pages_name_all_of_a_kind() {
    let manual = include_str!("../../examples/generate/README.md");
    let checks = include_str!("../../cuda/tests/README.md");
    let mut found = [0; 2];
    for (name, path) in files(&[".json", ".py"]) {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if name.starts_with("examples/generate/configs/") {
            assert!(manual.contains(&format!("`{stem}`")), "the manual lacks {stem}");
            found[0] += 1;
        } else if name.contains("cuda/tests/") && stem.starts_with("check_") {
            assert!(checks.contains(&format!("{stem}.py`")), "the page of the checks lacks {stem}");
            found[1] += 1;
        }
    }
    assert!(found.iter().all(|count| *count >= 7), "{found:?}");
}
