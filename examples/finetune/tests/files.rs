//! What a run writes, and the program.

use crate::support::{config, options, run, run_on, TEXT};
use anyhow::Result;
use candle_core::{safetensors, DType, Device, Tensor};
use candle_gdn_models::CausalLm;
use candle_gdn_models_testing::demo::{Copy, DEMO};
use candle_gdn_testing::devices::{rel_rms, values};
use candle_gdn_testing::program;
use candle_nn::VarBuilder;
use finetune::adapter::Targets;
use finetune::data::Pack;
use finetune::train::Run;
use finetune::weights::Weights;
use std::path::Path;

fn json(path: &Path) -> Result<serde_json::Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
}

#[test]
fn an_adapter_is_in_pefts_format() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut run = run(options(false), DType::F32, &Device::Cpu)?;
    run.step()?;
    run.save(dir.path())?;
    let config = json(&dir.path().join("adapter_config.json"))?;
    let names = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"];
    assert_eq!(config["target_modules"], serde_json::json!(names));
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(4), Some(8.)));
    assert_eq!((config["peft_type"].as_str(), config["task_type"].as_str()), (Some("LORA"), Some("CAUSAL_LM")));
    assert_eq!((config["base_model_name_or_path"].as_str(), config["revision"].as_str()), (Some("demo"), Some("v1")));

    let tensors = safetensors::load(dir.path().join("adapter_model.safetensors"), &Device::Cpu)?;
    // Three projections in each of three layers, four in one, two matrices each.
    assert_eq!(tensors.len(), 2 * (3 * 3 + 4));
    let module = "model.layers.3.self_attn.v_proj";
    assert_eq!(tensors[&format!("base_model.model.{module}.lora_A.weight")].dims(), [4, 192]);
    assert_eq!(tensors[&format!("base_model.model.{module}.lora_B.weight")].dims(), [128, 4]);
    for (name, variable) in run.weights().variables() {
        let saved = &tensors[&format!("base_model.model.{name}")];
        assert_eq!((saved.dtype(), values(saved)), (DType::F32, values(variable)));
        assert!(values(saved).iter().any(|&x| x != 0.), "{name} was trained");
    }
    let curve = std::fs::read_to_string(dir.path().join("loss.svg"))?;
    assert!(curve.starts_with("<svg") && curve.contains("loss") && curve.ends_with("</svg>\n"), "{curve}");
    Ok(())
}

#[test]
fn target_modules_are_projections() -> Result<()> {
    let config = config(DEMO)?;
    let weights = Weights::load(&crate::support::files(DEMO), &config, DType::F32, &Device::Cpu)?;
    let targets = |names: &[&str]| -> Result<usize> {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        Ok(Targets::new(&names, &weights, &config)?.init(&weights, 2, 0)?.len())
    };
    assert_eq!(targets(&["out_proj", "self_attn.q_proj"])?, 2 * (3 + 1));
    assert_eq!(targets(&["shared_expert.up_proj", "lm_head", "model.layers.1.linear_attn.out_proj"])?, 2 * (4 + 2));
    for (name, says) in [
        ("proj", "names of projections (down_proj, gate_proj, in_proj_ba,"),
        ("up_proj", "model.layers.0.mlp.experts.0.up_proj is none in PEFT"),
        ("mlp.gate", "model.layers.0.mlp.gate is none"),
        ("embed_tokens", "model.embed_tokens is none"),
    ] {
        let error = targets(&[name]).expect_err(name).to_string();
        assert!(error.contains(says), "{error}");
    }
    Ok(())
}

/// The logits of a text by the models that serve.
fn served(dir: &Path, dtype: DType, ids: &[u32]) -> Result<Vec<f64>> {
    // SAFETY: nobody writes to the file.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&[dir.join("model.safetensors")], dtype, &Device::Cpu)? };
    let model = CausalLm::load(&config(&dir.display().to_string())?, vb)?;
    let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    let hidden = model.forward_hidden(&ids, &mut model.new_state(1)?)?;
    Ok(values(&model.logits(&hidden)?))
}

/// Some tokens, and their logits after two steps, which are saved.
fn trained(run: &mut Run, dir: &Path) -> Result<(Vec<u32>, Vec<f64>)> {
    run.step()?;
    run.step()?;
    run.save(dir)?;
    let ids: Vec<u32> = (1..30).map(|i| i * 31).collect();
    let pack = Pack::new(&[&ids], &Device::Cpu)?;
    let logits = values(&run.model()?.forward(&pack.inputs, &pack.sequences)?);
    Ok((ids, logits))
}

#[test]
fn a_trained_checkpoint_is_served() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut run = run(options(true), DType::F32, &Device::Cpu)?;
    let (ids, trained) = trained(&mut run, dir.path())?;
    let error = |dir: &Path| -> Result<f64> { Ok(rel_rms(&served(dir, DType::F32, &ids[..28])?, &trained)) };
    // The file has matrices in bf16, as the checkpoint before.
    let (after, before) = (error(dir.path())?, error(Path::new(DEMO))?);
    assert!(after < 0.02 && before > 10. * after, "error {after:e}, of the old checkpoint {before:e}");

    let [old, new] =
        [Path::new(DEMO), dir.path()].map(|dir| safetensors::load(dir.join("model.safetensors"), &Device::Cpu));
    let (old, new) = (old?, new?);
    assert_eq!(old.len(), new.len());
    for (name, old) in &old {
        let new = &new[name];
        let is_trained = run.weights().variables().contains_key(name);
        assert_eq!(new.dims(), old.dims());
        assert_eq!(new.dtype(), if is_trained && old.rank() == 1 { DType::F32 } else { old.dtype() }, "{name}");
        assert!(is_trained || values(new) == values(old), "{name}");
    }
    let tokenizer = |dir: &Path| std::fs::read(dir.join("tokenizer.json"));
    assert_eq!(tokenizer(dir.path())?, tokenizer(Path::new(DEMO))?);
    Ok(())
}

/// config.json says that the embedding is the head, and the file has a head beside it: a copy is not kept, another one is trained.
#[test]
fn a_head_beside_a_tied_embedding_is_trained_or_left_out() -> Result<()> {
    for is_own in [false, true] {
        let (copy, dir) = (Copy::new(), tempfile::tempdir()?);
        copy.set("config.json", "tie_word_embeddings", true.into());
        if !is_own {
            copy.weights(|all| {
                all.insert("lm_head.weight".into(), all["model.embed_tokens.weight"].clone());
            });
        }
        let mut run = run_on(&copy.arg(), TEXT, options(true), DType::F32, &Device::Cpu)?;
        let (ids, trained) = trained(&mut run, dir.path())?;
        let error = rel_rms(&served(dir.path(), DType::F32, &ids[..28])?, &trained);
        assert!(error < 0.02, "own head: {is_own}: {error:e}");
        let saved = safetensors::load(dir.path().join("model.safetensors"), &Device::Cpu)?;
        assert_eq!(saved.contains_key("lm_head.weight"), is_own);
    }
    Ok(())
}

/// Of a checkpoint that is read-only, over what an interrupted save left: twice, as a run saves.
#[test]
fn a_save_copies_content_and_leaves_nothing_else() -> Result<()> {
    let (copy, dir) = (Copy::new(), tempfile::tempdir()?);
    let template = "additional_chat_templates/tool_use.jinja";
    std::fs::create_dir(copy.file("additional_chat_templates"))?;
    copy.write(template, "{{ tools }}");
    for name in ["config.json", template] {
        let mut mode = copy.file(name).metadata()?.permissions();
        mode.set_readonly(true);
        std::fs::set_permissions(copy.file(name), mode)?;
    }
    std::fs::create_dir(dir.path().join(".saving"))?;
    std::fs::write(dir.path().join(".saving/half"), "of a file")?;
    let run = run_on(&copy.arg(), TEXT, options(true), DType::F32, &Device::Cpu)?;
    let usual = dir.path().join("usual");
    std::fs::write(&usual, "")?;
    for _ in 0..2 {
        run.save(dir.path())?;
        for name in ["config.json", template, "model.safetensors", "training_state.safetensors"] {
            let saved = dir.path().join(name).metadata()?.permissions();
            assert_eq!(saved, usual.metadata()?.permissions(), "{name}");
        }
        let names = std::fs::read_dir(dir.path())?.map(|entry| Ok(entry?.file_name().into_string().expect("a name")));
        let names = names.collect::<Result<Vec<_>>>()?;
        assert!(!names.iter().any(|name| name.starts_with('.') || name == "half"), "{names:?}");
    }
    Ok(())
}

fn with<'a>(args: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [args, more].concat()
}

const LINE: &str = "Shall I compare thee to a summer's day?";

#[test]
fn the_program_trains_and_resumes() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (text, out) = (dir.path().join("text"), dir.path().join("out"));
    std::fs::write(&text, format!("\u{FEFF}{LINE}"))?;
    let (text, out) = (text.display().to_string(), out.display().to_string());
    let args = ["--text", &text, "--out", &out, "--steps", "3"];
    let run = program::run("finetune", &args).good();
    run.says(&["training ", "in 1 sequences", "step 3 of 3: saved in "]);
    assert_eq!(run.stdout, "");
    program::fails("finetune", &args, 1, &["--out: ", "has a run already: --resume goes on with it"]);
    // The mark of byte order was no text.
    std::fs::write(&text, LINE)?;
    program::run("finetune", &with(&args, &["--resume"])).good().says(&["step 3 of 3: saved in "]);
    program::fails("finetune", &with(&args, &["--resume", "--rank", "2"]), 1, &["--resume: rank: expected 8"]);
    std::fs::write(&text, "Shall I compare thee to a winter's day?")?;
    program::fails("finetune", &with(&args, &["--resume"]), 1, &["--resume: --text: expected the text of the"]);
    Ok(())
}

/// As a folder stands where a file is to be.
#[test]
fn a_save_that_fails_ends_no_run_but_the_last() -> Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::create_dir_all(dir.path().join("loss.svg"))?;
    let (text, out) = (dir.path().join("text"), dir.path().display().to_string());
    std::fs::write(&text, LINE)?;
    let text = text.display().to_string();
    let args = ["--text", &text, "--steps", "2", "--save-every", "1"];
    let last = ["step 1: not saved, training goes on: cannot write", "error: cannot write", "loss.svg"];
    program::fails("finetune", &with(&args, &["--out", &out]), 1, &last);
    assert!(!dir.path().join(".saving").exists());
    // Where nothing can be written, nothing is trained.
    #[cfg(target_os = "linux")]
    {
        let run = program::run("finetune", &with(&args, &["--out", "/proc"]));
        assert_eq!(run.code, Some(1));
        run.says(&["error: --out: cannot write into /proc"]);
        assert!(!run.stderr.contains("step 1"), "{run:?}");
    }
    Ok(())
}

#[test]
fn a_diverged_run_says_what_is_saved() -> Result<()> {
    let (dir, copy) = (tempfile::tempdir()?, Copy::new());
    let (text, out) = (copy.arg_of("text", LINE), dir.path().display().to_string());
    let args = ["--text", &text, "--out", &out, "--learning-rate", "1e30"];
    program::fails("finetune", &args, 1, &["step 2: the loss is", "lower --learning-rate; nothing was saved yet"]);
    program::fails(
        "finetune",
        &with(&args, &["--save-every", "1"]),
        1,
        &["step 2: ", "has step 1, from which --resume goes"],
    );
    program::fails("finetune", &with(&args, &["--resume"]), 1, &["step 2: ", "has step 1, from which --resume goes"]);
    Ok(())
}

#[test]
fn bad_arguments_are_named() {
    let copy = Copy::new();
    let empty = copy.arg_of("empty.txt", " ");
    for (args, says) in [
        (&["--warmup", "70"][..], "--warmup: expected at most --steps (60), got 70"),
        (&["--pass-tokens", "10"], "--pass-tokens: expected at least --sequence-len (256), got 10"),
        (
            &["--sequence-len", "5000", "--pass-tokens", "5000"],
            "--sequence-len: expected at most max_position_embeddings (4096), got 5000",
        ),
        (&["--learning-rate", "0"], "--learning-rate: expected a number above 0, got 0"),
        (&["--weight-decay=-1"], "--weight-decay: expected a number of at least 0, got -1"),
        (&["--text", "/nowhere"], "--text: cannot read /nowhere"),
        (&["--text", &empty], "--text: expected at least 2 tokens of text"),
        (&["--model", "nowhere"], "--model: no directory nowhere"),
        (&["--revision", "v1"], "--revision: expected --model to be a name on the hub, got the demo and revision v1"),
    ] {
        program::fails("finetune", args, 1, &[says]);
    }
    program::fails("finetune", &["--full", "--rank", "4"], 2, &["cannot be used with"]);
    let same = ["--full", "--model", &copy.arg(), "--out", &format!("{}/.", copy.arg())];
    program::fails("finetune", &same, 1, &["--out: expected another folder than the checkpoint's"]);
}
