//! Models with YaRN against transformers 5.24, in f32 on the CPU.

use crate::golden::{max_diff, Goldens, DEMO, QWEN3_5};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn_models::{CausalLm, ModelConfig};
use serde_json::{json, Value};

/// A checkpoint with other rotary settings at `at` of its config.json; the last logits after `ids`, from id 0 on.
fn check(goldens: &Goldens, at: &str, settings: Value, ids: &[u32], want: &[f32]) -> Result<()> {
    let text = std::fs::read_to_string(goldens.dir() + "/config.json")?;
    let mut json: Value = serde_json::from_str(&text).map_err(candle_core::Error::wrap)?;
    let rope = json.pointer_mut(at).and_then(Value::as_object_mut).expect("rotary settings");
    rope.extend(settings.as_object().expect("an object").clone());
    let config = ModelConfig::from_json(&json.to_string())?;
    let model = CausalLm::load(&config, goldens.weights(DType::F32, &Device::Cpu)?)?;
    let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?;
    let logits = model.forward_last(&ids, &mut model.new_state(1)?)?.squeeze(0)?.to_vec1::<f32>()?;
    let off = max_diff(&logits[..want.len()], want);
    assert!(off < 2e-3, "{}: off by {off}: {:?}", goldens.dir(), &logits[..want.len()]);
    Ok(())
}

#[test]
fn logits_are_those_of_transformers() -> Result<()> {
    let yarn = |more: Value| {
        let mut all = json!({"rope_type": "yarn", "factor": 4.0});
        all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        all
    };
    // A small base, so that all kinds of frequencies lie within 100 tokens: without YaRN the fourth logit is 2.187.
    let ids: Vec<u32> = std::iter::once(0).chain((0..99).map(|i| (7 * i * i + 3 * i) % 1000 + 1)).collect();
    let settings = yarn(json!({"rope_theta": 100.0, "original_max_position_embeddings": 64}));
    let want = [-10.70127, -10.6149, -10.73307, -0.12564, -10.67691, -10.66907];
    check(&DEMO, "/rope_parameters", settings, &ids, &want)?;
    if QWEN3_5.is_here() {
        let settings = yarn(json!({"original_max_position_embeddings": 1024}));
        let ids = [43, 80, 261, 297, 73, 267, 80, 293]; // "In the beginning"
        let want = [-2.381287, 14.469439, -5.859707, 21.007566];
        check(&QWEN3_5, "/text_config/rope_parameters", settings, &ids, &want)?;
    }
    Ok(())
}
