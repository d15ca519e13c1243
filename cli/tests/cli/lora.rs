//! `--lora` of both programs: adapters that PEFT wrote.

use crate::cli::{fails, generate, Copy, Run, DEMO, PROMPT};
use crate::gguf_writer;
use crate::golden;
use crate::perplexity::{list, score};
use candle_core::quantized::GgmlDType;
use candle_core::Result;
use candle_gdn_models::{LoraAdapter, ModelConfig};

const ADAPTERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/goldens/lora");

fn adapter(name: &str) -> String {
    format!("{ADAPTERS}/{name}")
}

#[test]
fn perplexity_agrees_with_peft() -> Result<()> {
    for (dir, model) in golden::adapters() {
        for i in 0..2 {
            let (ids, want) = golden::adapted(&dir, i)?;
            let (tokens, _) = score(&["--model", &model.dir(), "--lora", &dir, "--token-ids", &list(&ids)]);
            let got: Vec<f32> = tokens.iter().map(|token| token.1 as f32).collect();
            let error = golden::max_diff(&got, &want);
            assert!(error < 5e-4, "{dir}, prompt {i}: off by {error:e}");
        }
    }
    Ok(())
}

#[test]
fn a_text_is_that_of_the_adapted_model() {
    let dir = adapter("demo_gdn");
    let args = ["--prompt", PROMPT, "-n", "24", "--temperature", "0"];
    let with = |more: &[&str]| generate(&[&args[..], more].concat());
    let adapted = with(&["--lora", &dir]);
    assert_ne!(adapted.stdout, with(&[]).stdout);
    assert!(adapted.stderr.contains("loaded F32 weights with the adapter on the CPU"), "{}", adapted.stderr);
    assert_eq!(with(&["--lora", &dir, "--tensor-parallel", "2"]).stdout, adapted.stdout);
    let quantised = with(&["--lora", &dir, "--quantize", "q8_0"]);
    assert!(quantised.stderr.contains("with the adapter, matrices Q8_0, on"), "{}", quantised.stderr);
    assert_ne!(quantised.stdout, with(&["--quantize", "q8_0"]).stdout);
}

/// Of the line `memory: 9.8 MiB of the .. free on the machine: 6.7 MiB weights, ..`.
fn mib_of_weights(run: &Run) -> f64 {
    let weights = run.stderr.split(" MiB weights").next().and_then(|line| line.rsplit(' ').next());
    weights.expect("a line").parse().expect("a number")
}

/// Sums are in f32 where the file has 16 bits; in 16 bits they take what the weights do. The adapter's own numbers are there once, and once more
/// for each rank that adds them.
#[test]
fn the_memory_line_counts_the_sums() -> Result<()> {
    let config = ModelConfig::from_json(&std::fs::read_to_string(format!("{DEMO}/config.json"))?)?;
    let ranks = config.split(2)?;
    for name in ["demo_attention", "demo_gdn", "demo_experts"] {
        let dir = adapter(name);
        let mib = |args: &[&str]| mib_of_weights(&generate(&[&["-n", "1"], args].concat()));
        let opened = LoraAdapter::open(&dir)?;
        let changed = 2 * opened.changed_parameters(&config);
        assert!(changed > 300_000, "{name}");
        for (args, sums, count) in [
            (&[][..], changed, 1),
            (&["--tensor-parallel", "2"][..], 2 * 2 * opened.changed_parameters(&ranks), 2),
            (&["--dtype", "bf16"][..], 0, 1),
            (&["--quantize", "q8_0"][..], 0, 1),
        ] {
            let more = (sums + (1 + count) * opened.size_in_bytes()) as f64 / f64::from(1 << 20);
            let got = mib(&[args, &["--lora", &dir]].concat()) - mib(args);
            assert!((got - more).abs() < 0.11, "{name} {args:?}: {got} MiB more, expected {more}");
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_merged_is_named() {
    let dir = adapter("demo_attention");
    for program in ["generate", "perplexity"] {
        let fails = |args: &[&str], parts: &[&str]| {
            let tokens = ["--token-ids", "1,2,3"];
            let args = if program == "perplexity" { [&tokens[..], args].concat() } else { args.to_vec() };
            fails(program, &args, 1, parts);
        };
        fails(&["--lora", "/nowhere/at/all"], &["--lora: /nowhere/at/all/adapter_config.json", "No such file"]);
        let copy = Copy::new();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            copy.write(name, std::fs::read(format!("{dir}/{name}")).unwrap());
        }
        copy.set("adapter_config.json", "use_dora", true.into());
        fails(&["--lora", &copy.arg()], &["--lora: ", "adapter_config.json: `use_dora`", "got true"]);
        let (_dir, path) = gguf_writer::in_a_folder("demo.gguf");
        gguf_writer::demo().quantized(GgmlDType::Q8_0).write(&path).unwrap();
        let gguf = path.display().to_string();
        fails(&["--model", &gguf, "--lora", &dir], &["lora: weight model.layers.3.self_attn.", "got it in Q8_0"]);
    }
}
