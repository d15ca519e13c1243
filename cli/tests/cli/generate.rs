//! The generate example as a program.

use crate::cli::{command, euro, fails, generate, interrupt, tokenizer, Copy, Run, DEMO, PROMPT};
use candle_core::{safetensors, Device};
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::process::{Child, Stdio};

#[test]
fn no_arguments_complete_the_demo_prompt() {
    let run = generate(&["-n", "24"]);
    // Only the completion is on stdout; what goes before and after is on stderr.
    assert!(!run.stdout.is_empty());
    assert!(!run.stdout.contains("tokens"), "{run:?}");
    run.says(&["prompt: ", "loaded F32", "decode: 23 tokens", "tokens/s", "stopped: 24 tokens"]);
    // No progress bar, since stderr is no terminal.
    assert!(!run.stderr.contains('\r') && !run.stderr.contains('\u{1b}'));
}

#[test]
fn a_model_without_a_prompt_gets_the_default_one() {
    let run = generate(&["--model", DEMO, "-n", "4"]);
    assert_eq!(run.stdout, generate(&["-n", "4"]).stdout);
    assert!(run.stderr.contains(PROMPT), "{run:?}");
}

#[test]
fn a_familiar_opening_continues_as_verse() {
    let run = generate(&["--prompt", PROMPT, "-n", "24"]);
    assert!(run.stdout.starts_with(" from Caesar Augustus, that all the world should be taxed."), "{:?}", run.stdout);
}

#[test]
fn a_seed_decides_the_text() {
    let sample = |seed: &str| {
        let args = ["--prompt", PROMPT, "-n", "20", "--temperature", "1.2", "--top-k", "50", "--top-p", "0.95"];
        generate(&[&args[..], &["--seed", seed]].concat()).stdout
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn sampling_options_end_at_the_most_likely_token() {
    let greedy = generate(&["--prompt", PROMPT, "-n", "12"]).stdout;
    for options in
        [["--temperature", "0"], ["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"], ["--temperature", "1e-6"]]
    {
        let args = [&["--prompt", PROMPT, "-n", "12"], &options[..]].concat();
        assert_eq!(generate(&args).stdout, greedy, "{options:?}");
    }
    let forty = |more: &[&str]| generate(&[&["--prompt", PROMPT, "-n", "40"], more].concat()).stdout;
    assert_eq!(forty(&["--repeat-penalty", "3", "--repeat-last-n", "0"]), forty(&[]));
    assert_ne!(forty(&["--repeat-penalty", "3", "--repeat-last-n", "64"]), forty(&[]));
}

#[test]
fn prefill_chunks_change_nothing() {
    let file = Copy::new();
    let text = "In the beginning God created the heaven and the earth. And the earth was without form, and void; \
                and darkness was upon the face of the deep. And the Spirit of God moved upon the face of the";
    let path = file.arg_of("prompt.txt", format!("\u{FEFF}{text}")); // a byte order mark is no text
    let with = |chunk: &str| generate(&["--prompt-file", &path, "-n", "12", "--prefill-chunk", chunk]).stdout;
    let whole = generate(&["--prompt", text, "-n", "12"]).stdout;
    for chunk in ["1", "7", "32", "1000"] {
        assert_eq!(with(chunk), whole, "chunks of {chunk}");
    }
}

const NAMES: &str = "auto, recurrent, recurrent_128, decode, chunked_sm80, chunked_sm90, step_whole, \
     step_split, step_heads, unfused";

#[test]
fn a_forced_kernel_says_the_same() {
    let args = ["--prompt", PROMPT, "-n", "24"];
    let with = |variable: Option<&str>, more: &[&str]| {
        let mut command = command("generate");
        variable.map(|value| command.env("CANDLE_GDN_ALGO", value));
        Run::of(command.args(args).args(more).output().expect("the example starts"))
    };
    let text = generate(&args).stdout;
    assert!(text.starts_with(" from Caesar Augustus"), "{text:?}");
    // What takes no f32 shows that it was asked.
    let refused = |run: Run| {
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
        run.says(&["algo: ChunkedSm80 supports q, k and v in bf16 or f16, got F32"]);
    };
    refused(with(None, &["--algo", "chunked_sm80"]));
    refused(with(Some("chunked_sm80"), &[]));
    // The option goes before the variable.
    refused(with(Some("recurrent"), &["--algo", "chunked_sm80"]));
    for (variable, option) in [
        (None, "recurrent"),
        (None, "auto"),
        (Some("chunked_sm80"), "recurrent"),
        (Some("chunked_sm80"), "auto"),
        (Some("nonsense"), "recurrent"),
    ] {
        assert_eq!(with(variable, &["--algo", option]).good().stdout, text, "{option} before {variable:?}");
    }
    assert_eq!(with(Some("recurrent"), &[]).good().stdout, text);
    assert_eq!(with(Some(""), &[]).good().stdout, text);
    let run = with(Some("fast"), &[]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
    assert_eq!(run.stderr, format!("error: CANDLE_GDN_ALGO: expected {NAMES}, got \"fast\"\n"));
}

#[test]
fn an_unknown_kernel_is_refused() {
    for program in ["generate", "perplexity"] {
        for name in ["fast", "", "all", "Recurrent"] {
            fails(program, &["--algo", name], 2, &["--algo", &format!("expected {NAMES}, got {name:?}")]);
        }
    }
}

#[test]
fn half_precision_runs() {
    for dtype in ["bf16", "f16", "f32"] {
        let run = generate(&["--prompt", PROMPT, "-n", "4", "--dtype", dtype]);
        assert!(run.stdout.starts_with(" from"), "{run:?}");
        assert!(run.stderr.contains(&format!("loaded {}", dtype.to_uppercase())));
    }
}

#[test]
fn no_tokens_asked_for() {
    let run = generate(&["-n", "0"]);
    assert_eq!(run.stdout, "");
    assert!(run.stderr.contains("stopped: 0 tokens"), "{run:?}");
}

#[test]
fn ends_of_text_come_from_both_files() {
    // The first token of the completion, as every config may name it.
    let first = first_token();
    for (file, value) in [
        ("config.json", json!(first)),
        ("config.json", json!([1, first])),
        ("generation_config.json", json!(first)),
        ("generation_config.json", json!([first, 2])),
    ] {
        let copy = Copy::new();
        copy.set(file, "eos_token_id", value);
        let run = generate(&["--model", &copy.arg(), "--prompt", PROMPT]);
        assert_eq!(run.stdout, "", "{file}");
        assert!(run.stderr.contains("end of text after 0 tokens"), "{run:?}");
    }
    let copy = Copy::new();
    copy.set("generation_config.json", "eos_token_id", json!("end"));
    fails("generate", &["--model", &copy.arg(), "--prompt", PROMPT], 1, &["eos_token_id", "\"end\""]);
}

fn first_token() -> u32 {
    let ids = |text: &str| tokenizer().encode(text, true).unwrap().get_ids().to_vec();
    let one = generate(&["--prompt", PROMPT, "-n", "1"]).stdout;
    let (prompt, longer) = (ids(PROMPT), ids(&format!("{PROMPT}{one}")));
    assert_eq!(longer.len(), prompt.len() + 1);
    longer[prompt.len()]
}

#[test]
fn generation_stops_at_the_position_limit() {
    let copy = Copy::new();
    copy.set("config.json", "max_position_embeddings", json!(32));
    let run = generate(&["--model", &copy.arg(), "--prompt", PROMPT]);
    assert!(run.stderr.contains("the model has 32 positions"), "{run:?}");
    assert!(!run.stdout.is_empty());
    let long = "Let there be light ".repeat(20);
    fails("generate", &["--model", &copy.arg(), "--prompt", &long], 1, &["prompt", "max_position_embeddings (32)"]);
}

#[test]
fn chat_templates() {
    let rendered = "<|im_start|>user\nIn the beginning<|im_end|>\n<|im_start|>assistant\n";
    let want = generate(&["--prompt", rendered, "-n", "6"]).stdout;
    let chat =
        |copy: &Copy| generate(&["--model", &copy.arg(), "--chat", "--prompt", "In the beginning", "-n", "6"]).stdout;
    let copy = Copy::new();
    assert_eq!(chat(&copy), want, "a string");

    let config = std::fs::read_to_string(copy.file("tokenizer_config.json")).unwrap();
    let template = serde_json::from_str::<serde_json::Value>(&config).unwrap()["chat_template"].take();
    let list = json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]);
    copy.set("tokenizer_config.json", "chat_template", list);
    assert_eq!(chat(&copy), want, "a list");

    copy.set("tokenizer_config.json", "chat_template", json!("no"));
    copy.write("chat_template.jinja", JINJA);
    assert_eq!(chat(&copy), want, "a file");
}

/// What published templates use beyond plain Jinja.
const JINJA: &str = r#"
{%- set ns = namespace(seen=false) -%}
{%- for message in messages[::-1] %}
    {%- if not message.role is string or message.content is not defined %}
        {{- raise_exception('Unexpected message') }}
    {%- endif %}
    {%- if message.content.startswith('In') and not message.content.strip().endswith('x') %}
        {%- set ns.seen = true %}
    {%- endif %}
{%- endfor %}
{%- if not ns.seen or tools is not none or {"a": ["<b>", 1]} | tojson != '{"a": ["<b>", 1]}' %}
    {{- raise_exception('The template went wrong') }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

#[test]
fn bad_chat_templates() {
    let copy = Copy::new();
    let arg = copy.arg();
    let args = ["--model", &arg, "--chat", "--prompt", "x"];
    copy.set("tokenizer_config.json", "chat_template", json!(null));
    fails("generate", &args, 1, &["--chat", "no chat template"]);
    copy.write("chat_template.jinja", "{{ raise_exception('only for machines') }}");
    fails("generate", &args, 1, &["--chat", "only for machines"]);
    copy.write("chat_template.jinja", "{% for %}");
    fails("generate", &args, 1, &["--chat", "chat template"]);
}

#[test]
fn bad_arguments() {
    fails("generate", &["--prefill-chunk", "0"], 2, &["--prefill-chunk"]);
    fails("generate", &["--temperature", "-1"], 2, &["--temperature"]);
    fails("generate", &["--temperature", "nan"], 2, &["--temperature", "at least 0"]);
    fails("generate", &["--top-p", "0"], 2, &["--top-p", "(0, 1]"]);
    fails("generate", &["--min-p", "-0.1"], 2, &["--min-p", "[0, 1]"]);
    fails("generate", &["--presence-penalty", "inf"], 2, &["--presence-penalty", "a finite number"]);
    fails("generate", &["--frequency-penalty", "1e39"], 2, &["--frequency-penalty", "a finite number"]);
    fails("generate", &["--repeat-penalty", "0"], 2, &["--repeat-penalty"]);
    fails("generate", &["--dtype", "f8"], 2, &["--dtype", "bf16"]);
    fails("generate", &["--prompt", "a", "--prompt-file", "b"], 2, &["--prompt-file"]);
    fails("generate", &["--prompt", ""], 1, &["prompt", "at least 1 token"]);
    fails("generate", &["--prompt-file", "/nowhere/at/all"], 1, &["--prompt-file", "/nowhere/at/all"]);
    fails("generate", &["--chat"], 1, &["--chat", "--prompt or --prompt-file"]);
}

#[test]
fn missing_files_are_named() {
    fails("generate", &["--model", "/nowhere/at/all"], 1, &["--model", "/nowhere/at/all"]);
    let empty = tempfile::tempdir().unwrap();
    fails("generate", &["--model", &empty.path().display().to_string()], 1, &["--model", "no config.json"]);
    std::fs::write(empty.path().join("model.gguf"), "").unwrap();
    fails("generate", &["--model", &empty.path().display().to_string()], 1, &["give the path of the file"]);
    for (name, says) in
        [("tokenizer.json", "tokenizer.json is missing"), ("model.safetensors", "neither model.safetensors nor")]
    {
        let copy = Copy::new();
        copy.remove(&[name]);
        fails("generate", &["--model", &copy.arg(), "--prompt", PROMPT], 1, &[says]);
    }
    let copy = Copy::new();
    copy.remove(&["generation_config.json"]);
    generate(&["--model", &copy.arg(), "--prompt", PROMPT, "-n", "1"]);
}

#[test]
fn broken_configurations_are_named() {
    let copy = Copy::new();
    let arg = copy.arg();
    let args = ["--model", &arg, "--prompt", PROMPT];
    copy.set("config.json", "model_type", json!("mamba"));
    fails("generate", &args, 1, &["config.json", "`model_type`", "\"mamba\""]);
    copy.write("config.json", "{ not json");
    fails("generate", &args, 1, &["config.json", "not valid JSON"]);
    let copy = Copy::new();
    copy.set("config.json", "vocab_size", json!(2048));
    let arg = copy.arg();
    let args = ["--model", &arg, "--prompt", PROMPT];
    fails("generate", &args, 1, &["`vocab_size`", "2048", "model.embed_tokens.weight", "[1024, 192]"]);
    copy.set("config.json", "vocab_size", json!(20));
    fails("generate", &[&args[..], &["--load-format", "dummy"]].concat(), 1, &["prompt", "20 tokens"]);
}

#[test]
fn damaged_weights_are_named() {
    let copy = Copy::new();
    let arg = copy.arg();
    let args = ["--model", &arg, "--prompt", PROMPT];
    let whole = std::fs::read(copy.file("model.safetensors")).unwrap();
    for len in [0, 4, 100, 20_000, whole.len() - 1] {
        copy.write("model.safetensors", &whole[..len]);
        fails("generate", &args, 1, &["model.safetensors", "truncated"]);
    }
    copy.write("model.safetensors", [&whole[..], &[0]].concat());
    fails("generate", &args, 1, &["model.safetensors", "damaged"]);
    copy.write("model.safetensors", [&2u64.to_le_bytes()[..], b"[]"].concat());
    fails("generate", &args, 1, &["model.safetensors", "no safetensors file"]);
}

/// The demo in two files with an index.
pub fn sharded() -> Copy {
    let copy = Copy::new();
    let all = safetensors::load(copy.file("model.safetensors"), &Device::Cpu).unwrap();
    copy.remove(&["model.safetensors"]);
    let mut shards = [HashMap::new(), HashMap::new()];
    let mut map = serde_json::Map::new();
    // By name, so that the same tensors are in the same shard every time.
    let all = BTreeMap::from_iter(all);
    for (i, (name, tensor)) in all.into_iter().enumerate() {
        map.insert(name.clone(), shard(i % 2 + 1).into());
        shards[i % 2].insert(name, tensor);
    }
    for (i, tensors) in shards.iter().enumerate() {
        safetensors::save::<String, _>(tensors, copy.file(&shard(i + 1))).unwrap();
    }
    copy.write("model.safetensors.index.json", json!({"metadata": {}, "weight_map": map}).to_string());
    copy
}

pub fn shard(i: usize) -> String {
    format!("model-{i:05}-of-00002.safetensors")
}

#[test]
fn sharded_weights() {
    let copy = sharded();
    let arg = copy.arg();
    let args = ["--model", &arg, "--prompt", PROMPT, "-n", "8"];
    assert_eq!(generate(&args).stdout, generate(&args[2..]).stdout);

    let second = copy.file(&shard(2));
    let whole = std::fs::read(&second).unwrap();
    std::fs::write(&second, &whole[..whole.len() / 2]).unwrap();
    fails("generate", &args, 1, &[&shard(2), "truncated"]);
    std::fs::remove_file(&second).unwrap();
    fails("generate", &args, 1, &[&shard(2), "cannot open"]);

    copy.write("model.safetensors.index.json", json!({"weight_map": {"a": "../model.safetensors"}}).to_string());
    fails("generate", &args, 1, &["index.json", "weight_map", "../model.safetensors"]);
    copy.write("model.safetensors.index.json", json!({"weight_map": {"lm_head.weight": shard(1)}}).to_string());
    fails("generate", &args, 1, &["cannot find tensor", "model.embed_tokens.weight"]);
}

#[test]
fn nan_weights_stop_the_run() {
    let copy = Copy::new();
    copy.weights(|all| {
        let norm = (&all["model.norm.weight"] * f64::NAN).unwrap();
        all.insert("model.norm.weight".into(), norm);
    });
    fails("generate", &["--model", &copy.arg(), "--prompt", PROMPT], 1, &["logit NaN"]);
}

/// Characters of several bytes and tokens are never cut, whatever the model says.
#[test]
fn stdout_is_text_at_every_moment() {
    // Random choices among all tokens: half of them are single bytes that fit nothing.
    let run = generate(&["--prompt", PROMPT, "-n", "200", "--temperature", "20"]);
    assert!(run.stdout.chars().count() > 100, "{run:?}");

    let copy = euro();
    let arg = copy.arg();
    let says = |n: &str| generate(&["--model", &arg, "--prompt", "€", "-n", n]).stdout;
    assert_eq!(says("6"), "€€");
    assert_eq!(says("5"), "€", "the half of a character at the end is left out");
}

/// A generation that goes on until something ends it.
fn long_run() -> Child {
    command("generate")
        .args(["--prompt", PROMPT, "-n", "100000", "--temperature", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_closed_output_is_no_panic() {
    let mut child = long_run();
    let mut first = [0u8; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    drop(child.stdout.take());
    Run::end(child).good().says(&["output closed"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_cleanly() {
    let mut child = long_run();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0u8; 1];
    stdout.read_exact(&mut first).unwrap();
    interrupt(&child);
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let run = Run::end(child);
    assert_eq!(run.code, Some(130), "{run:?}");
    run.says(&["decode: ", "interrupted after"]);
}
