//! What ends a chat, where its template is found and what it is given.

use crate::chat::{asked, talk, FIRST, SECOND};
use crate::cli::{fails, generate, says_im_end, tokenizer, Copy, DEMO};
use candle_gdn_cli::args::Args;
use candle_gdn_cli::chat::Template;
use candle_gdn_cli::settings::Settings;
use candle_gdn_cli::Checkpoint;
use clap::Parser;
use serde_json::json;

const TEMPLATE: &str = "{%- for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {{ '<think>' if enable_thinking is not defined or enable_thinking }}\
    {{ mood }}{% endif %}";

fn chat(model: &str, more: &[&str]) -> String {
    generate(&[&["--model", model, "--chat", "--prompt", FIRST, "-n", "6"], more].concat()).stdout
}

fn plain(prompt: &str) -> String {
    generate(&["--prompt", prompt, "-n", "6"]).stdout
}

#[test]
fn the_tokenizer_s_own_end_and_the_template_s_stop() {
    let copy = says_im_end();
    let arg = copy.arg();
    let run = |more: &[&str]| generate(&[&["--model", &arg, "--prompt", FIRST, "-n", "60"], more].concat());
    run(&[]).says(&["stopped: 60 tokens"]);
    run(&["--chat"]).says(&["stopped: end of text"]);
    for token in [json!("<|im_end|>"), json!({"content": "<|im_end|>", "lstrip": false})] {
        copy.set("tokenizer_config.json", "eos_token", token);
        run(&[]).says(&["stopped: end of text"]);
    }
    copy.set("tokenizer_config.json", "eos_token", json!(null));
    run(&[]).says(&["stopped: 60 tokens"]);
    copy.write("special_tokens_map.json", r#"{"eos_token": "<|im_end|>"}"#);
    run(&[]).says(&["stopped: end of text"]);
}

#[test]
fn all_ends_count() {
    let copy = Copy::new();
    copy.set("config.json", "eos_token_id", json!([5, 6]));
    copy.set("generation_config.json", "eos_token_id", json!([7]));
    let args = Args::parse_from(["generate", "--cpu", "--model", &copy.arg()]);
    let checkpoint = Checkpoint::find(&args.model).unwrap();
    let tokenizer = tokenizer();
    let config = checkpoint.config().unwrap();
    let settings = Settings::new(&args.sampling, &checkpoint, &config, Some(&tokenizer)).unwrap();
    let end = |token| tokenizer.token_to_id(token).unwrap();
    assert_eq!(settings.eos, [5, 6, 7, end("<|endoftext|>")].into());
    let end_of_turn = || Template::load(&checkpoint, &args.chat).unwrap().end_of_turn(&tokenizer);
    assert_eq!(end_of_turn(), Some(end("<|im_end|>")));
    for without in ["{% for m in messages %}{{ m.content }}, and{% endfor %}", "{{ raise_exception('no') }}", "{{ n }}"]
    {
        copy.write("chat_template.jinja", without);
        assert_eq!(end_of_turn(), None, "{without}");
    }
}

#[test]
fn truncation_and_padding_are_for_training() {
    let copy = Copy::new();
    let truncation = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    copy.set("tokenizer.json", "truncation", truncation);
    let padding = json!({
        "strategy": {"Fixed": 30}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>"
    });
    copy.set("tokenizer.json", "padding", padding);
    let run = generate(&["--model", &copy.arg(), "--prompt", FIRST, "-n", "6"]);
    assert_eq!(run.stdout, plain(FIRST));
}

#[test]
fn a_vocabulary_and_merges_make_the_tokenizer() {
    let copy = Copy::new();
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(copy.file("tokenizer.json")).unwrap()).unwrap();
    let merge = |merge: &serde_json::Value| match merge.as_array() {
        Some(pair) => pair.iter().map(|part| part.as_str().unwrap()).collect::<Vec<_>>().join(" "),
        None => merge.as_str().unwrap().to_string(),
    };
    let merges: Vec<_> = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    copy.write("vocab.json", format!("\u{FEFF}{}", json["model"]["vocab"]));
    copy.write("merges.txt", format!("#version: 0.2\n{}\n", merges.join("\n")));
    let added = json["added_tokens"].as_array().unwrap();
    let ids = added.iter().map(|token| (token["content"].as_str().unwrap().to_string(), token["id"].clone()));
    copy.write("added_tokens.json", serde_json::Value::Object(ids.collect()).to_string());
    copy.remove(&["tokenizer.json"]);
    let arg = copy.arg();
    fails(
        "generate",
        &["--model", &arg, "--prompt", "x"],
        1,
        &["tokenizer_class", "expected one of Qwen2Tokenizer, ", "PreTrainedTokenizer"],
    );
    copy.set("tokenizer_config.json", "tokenizer_class", json!("GPT2TokenizerFast"));
    assert_eq!(chat(&arg, &[]), chat(DEMO, &[]));
}

#[test]
fn templates_lie_in_several_places() {
    let copy = Copy::new();
    let arg = copy.arg();
    let want = plain("Q: In the beginning\n");
    let template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}";
    copy.set("tokenizer_config.json", "chat_template", json!(null));
    copy.write("chat_template.json", format!("\u{FEFF}{}", json!({"chat_template": template})));
    assert_eq!(chat(&arg, &[]), want, "chat_template.json");
    copy.set("tokenizer_config.json", "chat_template", json!({"default": template, "rag": "no"}));
    copy.write("chat_template.json", r#"{"chat_template": "no"}"#);
    assert_eq!(chat(&arg, &[]), want, "names");
    copy.set("tokenizer_config.json", "chat_template", json!("no"));
    std::fs::create_dir(copy.file("additional_chat_templates")).unwrap();
    copy.write("additional_chat_templates/rag.jinja", "no");
    fails("generate", &["--model", &arg, "--chat", "--prompt", "x"], 1, &["--chat", "default", "rag"]);
    copy.write("chat_template.jinja", format!("\u{FEFF}{template}"));
    assert_eq!(chat(&arg, &[]), want, "files");
    copy.write("mine", template);
    let file = copy.file("mine").display().to_string();
    assert_eq!(chat(DEMO, &["--chat-template", &file]), want, "--chat-template");
}

#[test]
fn a_template_is_given_what_the_options_say() {
    let copy = Copy::new();
    let arg = copy.arg();
    copy.write("chat_template.jinja", TEMPLATE);
    let user = "user: In the beginning<|im_end|>\nassistant: ";
    assert_eq!(chat(&arg, &[]), plain(&format!("{user}<think>")));
    assert_eq!(chat(&arg, &["--no-thinking"]), plain(user));
    for value in ["false", "False"] {
        assert_eq!(chat(&arg, &["--template-arg", &format!("enable_thinking={value}")]), plain(user));
    }
    // A name that the template sets from itself.
    let set = "{%- set enable_thinking = enable_thinking if enable_thinking is defined else true %}";
    copy.write("chat_template.jinja", format!("{set}{TEMPLATE}"));
    assert_eq!(chat(&arg, &["--no-thinking"]), plain(user));
    copy.write("chat_template.jinja", TEMPLATE);
    let system = ["--system", "Be brief", "--no-thinking", "--template-arg", "mood=And"];
    assert_eq!(chat(&arg, &system), plain(&format!("system: Be brief<|im_end|>\n{user}And")));

    let fails_with = |more: &[&str], says: &[&str]| {
        fails("generate", &[&["--model", &arg, "--prompt", "x"], more].concat(), 1, says);
    };
    fails_with(&["--chat", "--template-arg", "moood=x"], &["--template-arg", "`moood`"]);
    fails_with(&["--system", "x"], &["--system", "--chat or --interactive"]);
    fails_with(&["--chat", "--chat-template", "/nowhere"], &["--chat-template", "/nowhere"]);
    copy.write("chat_template.jinja", "{{ messages[0].content }}");
    fails_with(&["--chat", "--no-thinking"], &["--no-thinking", "enable_thinking"]);
    fails("generate", &["--chat", "--template-arg", "mood"], 2, &["--template-arg", "KEY=VALUE"]);
    fails("generate", &["--chat", "--template-arg", "messages=1"], 2, &["--template-arg", "messages"]);
}

#[test]
fn a_stop_text_ends_a_completion() {
    let all = generate(&["--prompt", FIRST, "-n", "30"]).stdout;
    // From the middle of a word to the middle of another.
    let stop: String = all.chars().skip(11).take(9).collect();
    let want = &all[..all.find(&stop).unwrap()];
    let run = generate(&["--prompt", FIRST, "-n", "30", "--stop", "never", "--stop", &stop]);
    assert_eq!(run.stdout, want);
    run.says(&["stopped: --stop"]);
    let several = generate(&["--prompt", FIRST, "--prompt", FIRST, "-n", "30", "--stop", &stop]);
    assert_eq!(several.stdout, format!("==> prompt 1 <==\n{want}\n==> prompt 2 <==\n{want}\n"));
    // What only begins one is printed.
    let begun = format!("{}#", &all[all.len() - 4..]);
    assert_eq!(generate(&["--prompt", FIRST, "-n", "30", "--stop", &begun]).stdout, all);
    fails("generate", &["--stop", ""], 2, &["--stop"]);
    // Text may begin like an option.
    assert!(!generate(&["--prompt", "- an item", "-n", "2", "--stop", "---"]).stdout.is_empty());
    // A special token is no text that could be found.
    let copy = says_im_end();
    generate(&["--model", &copy.arg(), "--prompt", FIRST, "-n", "60", "--stop", "<|im_end|>"])
        .says(&["stopped: end of text"]);
}

#[test]
fn a_talk_goes_on_behind_a_stop_text() {
    let first = generate(&["--prompt", &asked(FIRST), "-n", "15"]).stdout;
    let stop: String = first.chars().skip(8).take(6).collect();
    let said = &first[..first.find(&stop).unwrap()];
    let so_far = format!("{}{said}<|im_end|>\n{}", asked(FIRST), asked(SECOND));
    let second = generate(&["--prompt", &so_far, "-n", "15", "--stop", &stop]).stdout;
    let run = talk(&["-n", "15", "--stop", &stop], format!("{FIRST}\n{SECOND}\n"));
    assert_eq!(run.stdout, format!("{said}\n{second}\n"));
}

#[test]
fn a_template_that_raises_refuses_the_message_alone() {
    let copy = Copy::new();
    let raises = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('bad word') }}{% endif %}\
        <|im_start|>{{ m.role }}\n{{ '' }}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
    copy.write("chat_template.jinja", raises);
    let arg = copy.arg();
    let args = ["--model", &arg, "-n", "10", "--show-cache"];
    let run = talk(&args, format!("{FIRST}\na bad one\n{SECOND}\n"));
    assert_eq!(run.stdout, talk(&args, format!("{FIRST}\n{SECOND}\n")).stdout);
    run.says(&["skipped", "bad word"]);
}
