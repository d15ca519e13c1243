//! The model of examples/candle_transformers against transformers, and the program around it.

use candle_core::{safetensors, DType, Device, Result, Tensor};
use candle_gdn_models_testing::demo::{Copy, DEMO};
use candle_gdn_models_testing::golden::{self, argmax, log_softmax};
use candle_gdn_testing::devices::{devices, rel_rms};
use candle_gdn_testing::program;
use candle_nn::VarBuilder;
use qwen3_next::{Config, ModelForCausalLM};
use tokenizers::Tokenizer;

/// Bound on the relative RMS error in f32.
const F32: f64 = 2e-4;
/// Below this difference of the two best logits, rounding may choose.
const MARGIN: f32 = 1e-3;

fn demo(dtype: DType, device: &Device) -> Result<ModelForCausalLM> {
    let config = std::fs::read_to_string(format!("{DEMO}/config.json"))?;
    let config: Config = serde_json::from_str(&config).expect("a config");
    assert_eq!(config.eos_token_id, 0);
    // SAFETY: nobody writes to the files of the repository during the tests.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[format!("{DEMO}/model.safetensors")], dtype, device)? };
    ModelForCausalLM::new(&config, vb)
}

fn prompt(i: usize) -> Result<golden::Prompt> {
    golden::DEMO.prompt(i)
}

/// Feeds one sequence; the logits after its last token.
fn feed(model: &mut ModelForCausalLM, ids: &[u32], offset: usize, device: &Device) -> Result<Vec<f32>> {
    let logits = model.forward(&Tensor::new(ids, device)?.unsqueeze(0)?, offset)?;
    logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec1()
}

#[track_caller]
fn check(what: &str, x: &[f32], want: &[f32], bound: f64) {
    let error = rel_rms(x, want);
    println!("{what}: relative error {error:e}");
    assert!(error <= bound, "{what}: relative error {error:e}");
}

#[test]
fn prompts_and_greedy_steps_match_transformers() -> Result<()> {
    for device in devices() {
        let mut model = demo(DType::F32, &device)?;
        for i in 0..golden::DEMO.prompts() {
            let want = prompt(i)?;
            let mut logits = feed(&mut model, &want.ids, 0, &device)?;
            check(&format!("prompt {i}"), &logits, &want.logits_last, F32);
            let mut clear = 0;
            for (step, (&token, &margin)) in want.greedy.iter().zip(&want.greedy_margin).enumerate() {
                if margin > MARGIN {
                    assert_eq!(argmax(&logits), token, "prompt {i}, step {step}, margin {margin}");
                    clear += 1;
                }
                // The golden token goes in either way, so a tie does not end the comparison.
                logits = feed(&mut model, &[token], want.ids.len() + step, &device)?;
            }
            assert!(clear > want.greedy.len() / 2, "prompt {i}: {clear} steps were compared");
        }
    }
    Ok(())
}

#[test]
fn token_by_token_matches_transformers() -> Result<()> {
    for device in devices() {
        let mut model = demo(DType::F32, &device)?;
        for i in 0..golden::DEMO.prompts() {
            let want = prompt(i)?;
            if want.ids.len() < 2 {
                continue;
            }
            let mut logprobs = Vec::new();
            for (t, pair) in want.ids.windows(2).enumerate() {
                logprobs.push(log_softmax(&feed(&mut model, &pair[..1], t, &device)?, pair[1]));
            }
            check(&format!("log-probabilities {i}"), &logprobs, &want.logprobs, F32);
        }
    }
    Ok(())
}

#[test]
fn a_batch_in_pieces_is_its_sequences() -> Result<()> {
    for device in devices() {
        let mut model = demo(DType::F32, &device)?;
        let (a, b) = (prompt(5)?.ids, prompt(6)?.ids);
        let n = a.len().min(b.len());
        let pair = Tensor::from_slice(&[&a[..n], &b[..n]].concat(), (2, n), &device)?;
        let mut logits = Tensor::zeros(1, DType::F32, &device)?;
        for (start, end) in [(0, n / 2), (n / 2, n - 1), (n - 1, n)] {
            logits = model.forward(&pair.narrow(1, start, end - start)?, start)?;
        }
        for (row, ids) in [a, b].iter().enumerate() {
            let alone = feed(&mut model, &ids[..n], 0, &device)?;
            check(&format!("sequence {row}"), &logits.get(row)?.to_vec1::<f32>()?, &alone, F32);
        }
    }
    Ok(())
}

/// As the program runs on a GPU. Each layer rounds: near, not equal.
#[test]
fn bf16_is_near() -> Result<()> {
    for device in devices() {
        let want = prompt(2)?;
        let logits = feed(&mut demo(DType::BF16, &device)?, &want.ids, 0, &device)?;
        check("bf16", &logits, &want.logits_last, 0.1);
    }
    Ok(())
}

#[test]
fn the_first_tokens_begin_the_sequence() -> Result<()> {
    let mut model = demo(DType::F32, &Device::Cpu)?;
    let error = feed(&mut model, &[1, 2], 3, &Device::Cpu).expect_err("no state yet");
    assert!(error.to_string().contains("offset 0"), "{error}");
    Ok(())
}

/// One file with the rotary parameters of transformers 5, and shards with those of older versions.
#[test]
fn the_program_continues_a_text() -> Result<()> {
    let tokenizer = Tokenizer::from_file(format!("{DEMO}/tokenizer.json")).expect("a tokenizer");
    let want = prompt(0)?;
    let text = |ids: &[u32]| tokenizer.decode(ids, true).expect("text");
    let start = text(&want.ids);
    assert_eq!(tokenizer.encode(start.as_str(), true).expect("tokens").get_ids(), want.ids);

    let shards = Copy::new();
    let all = safetensors::load(shards.file("model.safetensors"), &Device::Cpu)?;
    std::fs::remove_file(shards.file("model.safetensors"))?;
    let (first, second): (std::collections::HashMap<_, _>, _) =
        all.into_iter().partition(|(name, _)| name.contains("layers.1."));
    safetensors::save(&first, shards.file("model-00001-of-00002.safetensors"))?;
    safetensors::save(&second, shards.file("model-00002-of-00002.safetensors"))?;
    shards.set("config.json", "rope_parameters", serde_json::Value::Null);
    shards.set("config.json", "rope_theta", 10_000_000.into());

    for model in [DEMO, &shards.arg()] {
        let args = ["--model", model, "--prompt", &start, "-n", "16", "--temperature", "0"];
        let run = program::run("candle_transformers", &args);
        assert_eq!(run.code, Some(0), "{run:?}");
        assert_eq!(run.stdout, format!("{start}{}\n", text(&want.greedy[..16])));
    }
    let sampled = |seed: &str| {
        let args =
            ["--model", DEMO, "--prompt", &start, "-n", "16", "--temperature", "2", "--top-p", "0.9", "--seed", seed];
        program::run("candle_transformers", &args).stdout
    };
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));
    Ok(())
}

fn elsewhere(args: &[&str]) -> program::Run {
    let mut command = program::command("candle_transformers");
    program::Run::of(command.args(args).current_dir(std::env::temp_dir()).output().expect("it starts"))
}

#[test]
fn the_program_as_one_starts_it() {
    let text = |args: &[&str]| elsewhere(args).good().stdout;
    let plain = text(&["-n", "8"]);
    assert_eq!(plain, text(&["-n", "8", "--temperature", "0"]));
    // Bounds on the candidates are for draws.
    let drawn = |seed| text(&["-n", "16", "--top-p", "0.99", "--seed", seed]);
    assert_ne!(drawn("1"), drawn("2"));
    let copy = Copy::new();
    copy.set("config.json", "max_position_embeddings", 12.into());
    let short = text(&["--model", &copy.arg(), "-n", "100"]);
    assert!(short.len() < text(&["-n", "20"]).len(), "{short}");
    let long = "In the beginning God created the heaven and the earth. And the earth was without form";
    for (args, says) in [
        (&["--model", "/nowhere"][..], "/nowhere/config.json"),
        (&["--model", &copy.arg(), "--prompt", long], "max_position_embeddings (12) tokens, got "),
    ] {
        let run = elsewhere(args);
        assert_eq!(run.code, Some(1), "{run:?}");
        run.says(&[says]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn output_that_is_lost_changes_nothing_else() {
    candle_gdn_testing::streams::check(&[("candle_transformers", &["-n", "4", "--model", DEMO])]);
}
