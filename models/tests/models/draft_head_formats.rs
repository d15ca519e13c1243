//! The demo's draft head in fp8 and in GGUF files: against transformers, and against the numbers that its weights stand for.

use crate::fp8_files::in_fp8;
use crate::gguf_writer::{demo, demo_checkpoint, dequantized, in_a_folder, GgufOfTiny};
use crate::golden::{argmax, drafted, max_diff, DEMO};
use crate::support::{refused, rel_rms};
use crate::tiny::Tiny;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, DeviceLocation, Result, Tensor};
use candle_gdn_models::{CausalLm, DraftHeadChoice, GgufFile, ModelConfig};
use std::path::Path;

/// Behind one of the golden prompts.
#[derive(Debug, PartialEq)]
struct Answer {
    drafts: Vec<u32>,
    /// Of the first draft.
    logits: Vec<f32>,
}

fn answers(model: &CausalLm) -> Result<Vec<Answer>> {
    let answer = |i: usize| {
        let (asked, mut pool) = (drafted(i)?, model.new_sequences(1, 512)?);
        let s = pool.begin()?;
        model.feed_only(&mut pool, &[(s, &asked.ids)])?;
        let (mut drafts, logits) = model.draft(&mut pool, &[(s, asked.next, 4)])?;
        Ok(Answer { drafts: drafts.remove(0), logits: logits.squeeze(0)?.to_vec1()? })
    };
    (0..DEMO.prompts()).map(answer).collect()
}

/// What transformers says with the weights as they were trained.
fn golden() -> Result<Vec<Answer>> {
    let answer = |i: usize| drafted(i).map(|want| Answer { drafts: want.drafts, logits: want.logits });
    (0..DEMO.prompts()).map(answer).collect()
}

/// Relative errors of the logits, in order. The first drafts are the same wherever no error of this size could change the choice.
fn errors(got: &[Answer], want: &[Answer], what: &str) -> Vec<f32> {
    let mut sure = 0;
    for (got, want) in got.iter().zip(want) {
        let best = argmax(&want.logits);
        let rest = want.logits.iter().enumerate().filter(|(id, _)| *id as u32 != best);
        let margin = want.logits[best as usize] - rest.fold(f32::NEG_INFINITY, |most, (_, x)| most.max(*x));
        if margin > 2. * max_diff(&got.logits, &want.logits) {
            assert_eq!(got.drafts[0], want.drafts[0], "{what}");
            sure += 1;
        }
    }
    let mut errors: Vec<f32> =
        got.iter().zip(want).map(|(got, want)| rel_rms(&got.logits, &want.logits) as f32).collect();
    println!("{what}: relative errors {errors:?}, {sure} first drafts beyond doubt");
    assert!(sure > 0, "{what}");
    errors.sort_by(f32::total_cmp);
    errors
}

fn load(tiny: &Tiny) -> Result<CausalLm> {
    tiny.load_with(DType::F32, DraftHeadChoice::On)
}

#[test]
fn a_head_in_fp8_is_that_of_its_dequantised_weights() -> Result<()> {
    let demo = demo_checkpoint();
    let (fp8, wide) = in_fp8(&demo, [128, 128])?;
    let of_head = |name: &str| name.starts_with("mtp.");
    assert!(fp8.weights.iter().any(|(name, weight)| of_head(name) && weight.dtype() == DType::F8E4M3));
    assert_eq!(answers(&load(&fp8)?)?, answers(&load(&wide)?)?);

    // The model as it was, and only the head in fp8.
    let mut head = fp8;
    head.weights.retain(|name, _| of_head(name));
    let model = demo.weights.iter().filter(|(name, _)| !of_head(name));
    head.weights.extend(model.map(|(name, weight)| (name.clone(), weight.clone())));
    head.config["quantization_config"]["modules_to_not_convert"] =
        demo.weights.keys().filter(|name| !of_head(name)).filter_map(|name| name.strip_suffix(".weight")).collect();
    let (mut off, mut all) = (0., 0.);
    for (name, was) in demo.weights.iter().filter(|(name, was)| of_head(name) && was.rank() == 2) {
        let is = &wide.weights[name];
        if name != "mtp.fc.weight" {
            off += (is - was)?.sqr()?.sum_all()?.to_scalar::<f32>()?;
            all += was.sqr()?.sum_all()?.to_scalar::<f32>()?;
        }
    }
    // A product with weights that are off by `each`, in no common direction, is off by as much. Such products that follow each
    // other: v and o, with a share that q and k decide; gate and up together, and down.
    let each = (off / all).sqrt();
    let bound = 7f32.sqrt() * each;
    println!("weights are off by {each:e}");
    let errors = errors(&answers(&load(&head)?)?, &golden()?, "head in fp8");
    // Where its router is near a tie it may choose other experts: that is more, but seldom.
    assert!(errors[0] > 0.1 * each && errors[errors.len() * 3 / 4] < bound, "{errors:?} of {bound}");
    Ok(())
}

/// The model of a file, and the head of another where there is one.
fn of_files(path: &Path, head: Option<&Path>) -> Result<CausalLm> {
    let mut file = GgufFile::open(path)?;
    let config = ModelConfig::from_gguf(&file)?;
    if let Some(head) = head {
        assert!(!file.has_draft_head(&config));
        file.add_draft_head(head)?;
        let mut with_head = config.clone();
        with_head.layers.extend(config.layers.last().copied());
        let bytes = |config| file.weight_bytes(config, DType::F32, None, DeviceLocation::Cpu, 1);
        let (more, of_head) = (bytes(&with_head) - bytes(&config), std::fs::metadata(head)?.len());
        assert!(more > 0 && 3 * more < 2 * of_head, "{more} of {of_head} bytes: the rest is the model's");
    }
    assert!(file.has_draft_head(&config));
    CausalLm::loader(&config).draft_head(DraftHeadChoice::On).load_gguf(&file, DType::F32, &Device::Cpu)
}

/// As one more block, and in a file of its own.
fn both(file: &GgufOfTiny) -> Result<[Vec<Answer>; 2]> {
    let (_dir, path) = in_a_folder("model.gguf");
    file.write(&path)?;
    let block = answers(&of_files(&path, None)?)?;
    let head_path = path.with_file_name("mtp-model.gguf");
    let [model, head] = file.apart();
    model.write(&path)?;
    head.write(&head_path)?;
    Ok([block, answers(&of_files(&path, Some(&head_path))?)?])
}

#[test]
fn a_head_in_a_gguf_file_matches_transformers() -> Result<()> {
    let want = golden()?;
    for got in both(&demo())? {
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got.drafts, want.drafts);
            let error = max_diff(&got.logits, &want.logits);
            assert!(error <= 1e-3, "{error}");
        }
    }
    Ok(())
}

#[test]
fn a_quantised_head_in_a_gguf_file_is_that_of_its_dequantised_weights() -> Result<()> {
    let file = demo().quantized(GgmlDType::Q8_0);
    let [block, own] = both(&file)?;
    assert_eq!(block, own);
    let (_dir, path) = in_a_folder("q8_0.gguf");
    file.write(&path)?;
    let wide = path.with_file_name("f32.gguf");
    dequantized(&path, &wide)?;
    // The products round activations to 8 bits too: of blocks of 32 normal numbers the largest is 2.4 deviations on average, so
    // that a step is 2.4 / 127 and the error a step / sqrt(12). Four products follow each other in each of 5 layers, and two more.
    let bound = 22f32.sqrt() * 2.4 / 127. / 12f32.sqrt();
    let errors = errors(&block, &answers(&of_files(&wide, None)?)?, "q8_0");
    // As above, with the routers of the model too.
    assert!(errors[errors.len() / 2] < bound, "{errors:?} of {bound}");
    Ok(())
}

#[test]
fn what_is_no_draft_head_is_refused() -> Result<()> {
    let [model, mut head] = demo().apart();
    let (_dir, path) = in_a_folder("model.gguf");
    model.write(&path)?;
    let mut file = GgufFile::open(&path)?;
    refused(file.add_draft_head(&path), &["model.gguf", "draft head", "nextn.eh_proj"]);
    head.metadata.insert("general.architecture".into(), Value::String("qwen35".into()));
    let other = path.with_file_name("other.gguf");
    head.write(&other)?;
    refused(file.add_draft_head(&other), &["other.gguf", "qwen35", "qwen3next"]);
    refused(file.add_draft_head(path.with_file_name("none.gguf")), &["none.gguf"]);
    let [_, mut head] = demo().apart();
    let projection = head.tensors.iter_mut().find(|(name, _)| name.ends_with("eh_proj.weight")).map(|(_, (x, _))| x);
    *projection.expect("a projection") = Tensor::zeros((64, 384), DType::F32, &Device::Cpu)?;
    head.write(&other)?;
    refused(file.add_draft_head(&other), &["other.gguf", "eh_proj", "[192, 384]", "[64, 384]"]);
    Ok(())
}
