//! How the command line and `generation_config.json` choose tokens.

use crate::cli::{fails, generate, Copy, Run, PROMPT};
use serde_json::{json, Value};

/// A demo whose `generation_config.json` has these keys.
fn recommends(keys: &[(&str, Value)]) -> Copy {
    let copy = Copy::new();
    keys.iter().for_each(|(key, value)| copy.set("generation_config.json", key, value.clone()));
    copy
}

fn says(copy: &Copy, more: &[&str]) -> Run {
    let n: &[&str] = if more.contains(&"-n") { &[] } else { &["-n", "24"] };
    generate(&[&["--model", &copy.arg(), "--prompt", PROMPT], n, more].concat())
}

fn text(copy: &Copy, more: &[&str]) -> String {
    says(copy, more).stdout
}

/// Random texts have several among four seeds.
fn texts(copy: &Copy, more: &[&str]) -> usize {
    let text = |seed| text(copy, &[more, &["--seed", seed]].concat());
    ["1", "2", "3", "4"].map(text).iter().collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn generation_config_gives_defaults() {
    let greedy = text(&Copy::new(), &[]);
    let (sampled, warm) = (("do_sample", json!(true)), ("temperature", json!(1.5)));
    let copy = recommends(&[sampled.clone(), warm.clone()]);
    assert!(texts(&copy, &[]) > 1);
    assert_eq!(text(&copy, &["--temperature", "0"]), greedy);
    // A bound that leaves one token.
    for (key, value) in [("min_p", json!(1)), ("top_k", json!(1)), ("top_p", json!(1e-6)), ("temperature", json!(0))] {
        let copy = recommends(&[sampled.clone(), warm.clone(), (key, value)]);
        assert_eq!(text(&copy, &["--seed", "3"]), greedy, "{key}");
    }
    let narrow = recommends(&[sampled.clone(), warm, ("min_p", json!(1))]);
    assert!(texts(&narrow, &["--min-p", "0"]) > 1, "the command line wins");
    assert!(texts(&recommends(&[sampled, ("top_k", json!(-1))]), &[]) > 1);
}

/// As in transformers.
#[test]
fn without_do_sample_the_file_has_no_temperature() {
    let greedy = text(&Copy::new(), &[]);
    for sampled in [json!(false), Value::Null] {
        let copy = recommends(&[("do_sample", sampled), ("temperature", json!(1.5)), ("min_p", json!(1e-9))]);
        let run = says(&copy, &[]);
        assert_eq!(run.stdout, greedy);
        run.says(&["generation_config.json: not obeyed without do_sample: temperature, min_p"]);
        // A bound draws, and at the file's temperature.
        let drawn = says(&copy, &["--top-k", "40"]);
        assert!(!drawn.stderr.contains("not obeyed"), "{drawn:?}");
        assert_eq!(drawn.stdout, text(&copy, &["--top-k", "40", "--temperature", "1.5"]));
    }
    let plain = Copy::new();
    assert_eq!(text(&plain, &["--min-p", "0.01"]), text(&plain, &["--min-p", "0.01", "--temperature", "1"]));
    assert!(texts(&plain, &["--min-p", "0.001"]) > 1);
}

/// The penalty of transformers has no window, that of the command line has one.
#[test]
fn the_penalty_of_the_file_is_of_all_tokens() {
    let copy = recommends(&[("repetition_penalty", json!(1.3))]);
    let long = |more: &[&str]| text(&copy, &[&["-n", "150"], more].concat());
    let flags = |n: &str| {
        let args = ["--prompt", PROMPT, "-n", "150", "--repeat-penalty", "1.3", "--repeat-last-n", n];
        generate(&args).stdout
    };
    assert_eq!(long(&[]), flags("4096"));
    assert_ne!(long(&[]), flags("64"));
    assert_eq!(long(&["--repeat-last-n", "64"]), flags("64"));
}

#[test]
fn penalties_of_the_completion_are_obeyed() {
    let plain = text(&Copy::new(), &[]);
    for (option, key) in [("--presence-penalty", "presence_penalty"), ("--frequency-penalty", "frequency_penalty")] {
        let penalised = text(&Copy::new(), &[option, "30"]);
        assert_ne!(penalised, plain);
        assert_eq!(text(&recommends(&[(key, json!(30))]), &[]), penalised);
        assert_eq!(text(&recommends(&[(key, json!(30))]), &[option, "0"]), plain);
    }
    assert!(
        text(&Copy::new(), &["--frequency-penalty=-30"]).contains(" from from from"),
        "below 0 a token comes again"
    );
}

#[test]
fn keys_that_are_not_obeyed_are_named() {
    let copy = recommends(&[
        ("num_beams", json!(4)),
        ("no_repeat_ngram_size", json!(1)),
        ("suppress_tokens", json!([3, 4])),
        ("forced_eos_token_id", json!(0)),
        ("temperature_last", json!(true)),
        ("never_heard_of", json!(0.5)),
        ("typical_p", json!(1.0)),
        ("num_return_sequences", json!(1)),
        ("epsilon_cutoff", json!(0.0)),
        ("bad_words_ids", Value::Null),
        ("sequence_bias", json!({})),
        ("max_new_tokens", json!(2048)),
        ("output_scores", json!(true)),
    ]);
    let named =
        "forced_eos_token_id, never_heard_of, no_repeat_ngram_size, num_beams, suppress_tokens, temperature_last\n";
    says(&copy, &["-n", "1"]).says(&[&format!("generation_config.json: not obeyed: {named}")]);
    assert!(!says(&Copy::new(), &["-n", "1"]).stderr.contains("not obeyed"));
}

#[test]
fn bad_values_are_named() {
    for (key, value, expected) in [
        ("temperature", json!(-1), "a number of at least 0"),
        ("temperature", json!("warm"), "a number of at least 0"),
        ("top_k", json!(-2), "a whole number of at least 0"),
        ("top_p", json!(1.5), "a number in (0, 1]"),
        ("min_p", json!(-0.5), "a number in [0, 1]"),
        ("repetition_penalty", json!(0), "a number above 0"),
        ("presence_penalty", json!(1e300), "a finite number"),
        ("do_sample", json!("yes"), "true or false"),
    ] {
        let copy = recommends(&[(key, value.clone())]);
        let says = format!("`{key}`: expected {expected}, got {value}");
        fails("generate", &["--model", &copy.arg(), "--prompt", PROMPT], 1, &["generation_config.json", &says]);
    }
    let copy = Copy::new();
    copy.write("generation_config.json", "[]");
    fails(
        "generate",
        &["--model", &copy.arg(), "--prompt", PROMPT],
        1,
        &["generation_config.json", "expected an object"],
    );
}
