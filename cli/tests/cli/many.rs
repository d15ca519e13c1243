//! The generate example with several prompts at once, with drafts, and with a cache of common beginnings: none of it
//! changes what is said.

use crate::cli::{command, endless, ends_with_commas, fails, interrupt, tokenizer, Copy, Run};
use serde_json::json;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};

/// Of different lengths.
const PROMPTS: [&str; 4] = [
    "And it came to pass in those days, that there went out a decree",
    "In the beginning",
    "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he leadeth me beside",
    "Blessed are the poor in spirit:",
];

/// Some 100 tokens, in which three of the prompts below agree.
const COMMON: &str =
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; \
    and darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, \
    Let there be light: and there was light. And God saw the light, that it was good: and God divided the light from \
    the darkness. And God called the light Day, and the darkness he called Night.";

/// On one thread, since the tests share the cores.
fn generate(args: &[&str]) -> Run {
    on_threads(args, Some(1))
}

fn on_threads(args: &[&str], threads: Option<usize>) -> Run {
    let mut command = command("generate");
    if let Some(threads) = threads {
        command.env("RAYON_NUM_THREADS", threads.to_string());
    }
    Run::of(command.args(args).output().unwrap()).good()
}

fn many(prompts: &[&str], args: &[&str]) -> Run {
    generate(&with_prompts(prompts, args))
}

fn with_prompts<'a>(prompts: &[&'a str], args: &[&'a str]) -> Vec<&'a str> {
    let prompts: Vec<_> = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect();
    [&prompts[..], args].concat()
}

/// As several completions are printed.
fn under_headers<T: AsRef<str>>(texts: &[T]) -> String {
    let text = |(i, text): (usize, &T)| format!("==> prompt {} <==\n{}\n", i + 1, text.as_ref());
    texts.iter().enumerate().map(text).collect()
}

/// What each prompt says alone.
fn alone(prompts: &[&str], args: &[&str]) -> String {
    let texts: Vec<_> = prompts.iter().map(|prompt| many(&[prompt], args).stdout).collect();
    under_headers(&texts)
}

/// The numbers of the line of stderr that begins with `start`.
fn numbers(run: &Run, start: &str) -> Vec<f64> {
    let line = run.stderr.lines().find(|line| line.starts_with(start));
    let line = line.unwrap_or_else(|| panic!("expected a line {start:?} in {:?}", run.stderr));
    let words = line.split(|c: char| !c.is_ascii_digit() && c != '.');
    words.filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn several_prompts_say_what_each_says_alone() {
    let want = alone(&PROMPTS, &["-n", "24"]);
    let runs: [&[&str]; 6] = [
        &[],
        &["--batch", "1"],
        &["--batch", "3"],
        &["--batch", "100", "--prefill-chunk", "7"],
        &["--batch", "2", "--prefill-chunk", "1"],
        &["--cuda-graph", "off", "--prefix-cache", "0"],
    ];
    for args in runs {
        let run = on_threads(&with_prompts(&PROMPTS, &[&["-n", "24"], args].concat()), None);
        assert_eq!(run.stdout, want, "{args:?}");
        run.says(&["prompt 4: stopped: 24 tokens (-n)", "\nprompt: ", "\ndecode: 92 tokens in "]);
    }
}

#[test]
fn rows_that_end_make_room() {
    // At different places, of the prompts and of what each says.
    let copy = ends_with_commas();
    let arg = copy.arg();
    let want = alone(&PROMPTS, &["--model", &arg, "-n", "40"]);
    for args in [&["--batch", "2"][..], &["--batch", "4"], &["--batch", "3", "--draft", "4"]] {
        let run = many(&PROMPTS, &[&["--model", &arg, "-n", "40"], args].concat());
        assert_eq!(run.stdout, want, "{args:?}");
        let lengths: Vec<_> = (1..=4).map(|i| numbers(&run, &format!("prompt {i}: stopped"))[1]).collect();
        assert!(lengths.iter().any(|n| *n != lengths[0]), "{lengths:?}");
        assert!(run.stderr.contains("end of text after"), "{run:?}");
    }
}

#[test]
fn each_prompt_draws_its_own_numbers() {
    let prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[3]];
    let args = ["-n", "16", "--temperature", "1.1", "--top-k", "40", "--seed", "5"];
    let with = |more: &[&str]| many(&prompts, &[&args, more].concat()).stdout;
    let all = with(&[]);
    for more in [&["--batch", "1"][..], &["--batch", "2"], &["--draft", "3"]] {
        assert_eq!(with(more), all, "{more:?}");
    }
    let texts: Vec<_> = all.split("==> ").map(|text| text.split_once('\n').unwrap_or_default().1).collect();
    assert_ne!(texts[1], texts[2], "one prompt twice");
    // The first one's are those of the seed itself.
    assert_eq!(texts[1].strip_suffix('\n'), Some(many(&prompts[..1], &args).stdout.as_str()));
}

#[test]
fn prompts_come_from_the_lines_of_a_file() {
    let dir = Copy::new();
    let lines = format!("{}\r\n\n  \n{}\n{}", PROMPTS[0], PROMPTS[1], PROMPTS[3]);
    let path = dir.arg_of("prompts.txt", lines);
    let want = many(&[PROMPTS[0], PROMPTS[1], PROMPTS[3]], &["-n", "6"]).stdout;
    assert_eq!(generate(&["--prompts-file", &path, "-n", "6"]).stdout, want);
    // One line is one prompt, and streams.
    dir.write("prompts.txt", PROMPTS[0]);
    assert_eq!(generate(&["--prompts-file", &path, "-n", "6"]).stdout, many(&PROMPTS[..1], &["-n", "6"]).stdout);
    let chat = generate(&["--chat", "--prompt", "a", "--prompt", "b", "-n", "4"]).stdout;
    let one = |text| generate(&["--chat", "--prompt", text, "-n", "4"]).stdout;
    assert_eq!(chat, under_headers(&[one("a"), one("b")]));
}

#[test]
fn drafts_change_nothing() {
    // Repeats itself, and so does what follows.
    let again = "And God saw that it was good. And God saw that it was good. And God saw that it was good. And God";
    for sampling in
        [&["--temperature", "0"][..], &["--repeat-penalty", "1.2"], &["--temperature", "0.4", "--seed", "3"]]
    {
        let args = [&["-n", "32"], sampling].concat();
        let want = many(&[again], &args);
        assert!(!want.stderr.contains("\ndraft: "), "{want:?}");
        for count in ["1", "4", "20"] {
            let run = many(&[again], &[&args[..], &["--draft", count]].concat());
            assert_eq!(run.stdout, want.stdout, "{count} drafted, {sampling:?}");
            let [right, guessed, percent, a_step] = numbers(&run, "draft: ")[..] else { panic!("{run:?}") };
            assert!(right <= guessed && percent <= 100. && (1. ..=21.).contains(&a_step), "{run:?}");
            assert!(run.stderr.contains("decode: 31 tokens"), "{run:?}");
        }
    }
    let prompts = [PROMPTS[0], again, PROMPTS[2]];
    let run = many(&prompts, &["-n", "32", "--draft", "4"]);
    assert_eq!(run.stdout, alone(&prompts, &["-n", "32"]));
    assert!(run.stderr.contains("decode: 93 tokens"), "{run:?}");
    assert!(numbers(&run, "draft: ")[0] > 0., "{run:?}");
}

/// A head that says one token for ever: every guess after the first is right.
#[test]
fn right_guesses_save_steps() {
    let copy = Copy::new();
    // All logits are equal, so that the first token wins; it must not end the text.
    copy.weights(|all| drop(all.insert("lm_head.weight".into(), all["lm_head.weight"].zeros_like().unwrap())));
    copy.set("config.json", "eos_token_id", json!(9));
    copy.set("generation_config.json", "eos_token_id", json!(9));
    copy.set("tokenizer_config.json", "eos_token", json!(null));
    let run = many(&PROMPTS[..1], &["--model", &copy.arg(), "-n", "21", "--draft", "4"]);
    // The first token is the prompt's. The second step guesses nothing, or wrong; the others give 5 each.
    let [right, _, _, a_step] = numbers(&run, "draft: ")[..] else { panic!("{run:?}") };
    assert!(right >= 15. && a_step >= 3.9, "{run:?}");
}

#[test]
fn common_beginnings_are_fed_once() {
    let [a, b, c] = [" And the evening", " And the earth was", " Behold"].map(|end| format!("{COMMON}{end}"));
    let prompts = [a.as_str(), PROMPTS[1], &b, &c, &a];
    let args = ["-n", "12", "--show-cache"];
    let without = many(&prompts, &[&args[..], &["--prefix-cache", "0"]].concat());
    assert!(without.stderr.contains("cache: 0 of "), "{without:?}");
    let all = numbers(&without, "cache: ")[1];
    let runs: [&[&str]; 6] = [
        &[],
        &["--batch", "1"],
        &["--batch", "2"],
        &["--prefill-chunk", "50"],
        &["--draft", "3"],
        &["--prefix-cache", "10000000000000000"],
    ];
    for more in runs {
        let run = many(&prompts, &[&args[..], more].concat());
        assert_eq!(run.stdout, without.stdout, "{more:?}");
        let [reused, of, hits, asked, ..] = numbers(&run, "cache: ")[..] else { panic!("{run:?}") };
        assert_eq!((of, hits, asked), (all, 3., 5.), "{more:?}: {run:?}");
        assert!(reused >= 3. * 64. && reused % 64. == 0., "{more:?}: {run:?}");
        assert_eq!(numbers(&run, "prompt: ")[0], all - reused, "{more:?}: {run:?}");
    }
    // Room for one state: some are gone when they are needed.
    let small = many(&prompts, &[&args[..], &["--batch", "1", "--prefix-cache", "1"]].concat());
    assert_eq!(small.stdout, without.stdout);
    assert!((64. ..3. * 128.).contains(&numbers(&small, "cache: ")[0]), "{small:?}");
    let whole = many(&prompts, &[&args[..], &["--prefix-block", "1024"]].concat());
    assert_eq!(numbers(&whole, "cache: ")[0], 0., "no whole block");
    assert_eq!(whole.stdout, without.stdout);
    let one = many(&prompts[..1], &args);
    assert!(one.stderr.contains("--prefix-cache is 0"), "{one:?}");
}

#[test]
fn lengths_are_bounded() {
    let run = many(&PROMPTS[..2], &["--max-seq-len", "20"]);
    assert!(run.stderr.contains("tokens, --max-seq-len gives 20 positions"), "{run:?}");
    assert_eq!(many(&PROMPTS[..2], &["--max-seq-len", "20", "--draft", "8"]).stdout, run.stdout);
    assert_eq!(many(&PROMPTS[..2], &["-n", "0"]).stdout, under_headers(&["", ""]));
    let copy = Copy::new();
    copy.set("config.json", "max_position_embeddings", json!(40));
    let args = ["--model", &copy.arg(), "--max-seq-len", "1000"];
    let run = many(&PROMPTS[..2], &args);
    assert!(run.stderr.contains("prompt 2: stopped: ") && run.stderr.contains("the model has 40 positions"), "{run:?}");
    let bad = ["--prompt", "a", "--prompt", PROMPTS[0], "--max-seq-len", "4"];
    fails("generate", &bad, 1, &["prompt 2", "--max-seq-len (4)"]);
}

#[test]
fn bad_arguments() {
    fails("generate", &["--batch", "0"], 2, &["--batch", "at least 1"]);
    fails("generate", &["--max-seq-len", "0"], 2, &["--max-seq-len", "at least 1"]);
    fails("generate", &["--draft", "99999"], 2, &["--draft", "0 to 64"]);
    fails("generate", &["--draft", "-1"], 2, &["-1"]);
    fails("generate", &["--prefix-block", "100"], 2, &["--prefix-block", "multiple of 64"]);
    fails("generate", &["--prefix-block", "0"], 2, &["--prefix-block", "multiple of 64"]);
    fails("generate", &["--prefix-cache", "much"], 2, &["--prefix-cache"]);
    fails("generate", &["--cuda-graph", "maybe"], 2, &["--cuda-graph", "auto"]);
    fails("generate", &["--cuda-graph", "on"], 1, &["--cuda-graph on", "expected one on CUDA"]);
    fails("generate", &["--prompt", "a", "--prompts-file", "b"], 2, &["--prompts-file"]);
    fails("generate", &["--prompt-file", "a", "--prompts-file", "b"], 2, &["--prompts-file"]);
    fails("generate", &["--prompts-file", "/nowhere/at/all"], 1, &["--prompts-file", "/nowhere/at/all"]);
    fails("generate", &["--prompt", "a", "--prompt", ""], 1, &["prompt 2", "at least 1 token"]);
    let dir = Copy::new();
    let empty = dir.arg_of("empty.txt", "\n \n");
    fails("generate", &["--prompts-file", &empty], 1, &["--prompts-file", "has none"]);
    let bytes = dir.arg_of("bytes.txt", [0xff, 0xfe]);
    fails("generate", &["--prompts-file", &bytes], 1, &["--prompts-file", "UTF-8"]);
}

/// Prompts of which the first ends soon, for want of positions, and the others go on: its completion is there, theirs
/// is on the way.
fn long_run() -> (Child, BufReader<ChildStdout>, Copy) {
    let copy = endless(30000);
    let long = "Let there be light. ".repeat(500);
    let room = tokenizer().encode(long.as_str(), true).unwrap().get_ids().len() + 2;
    copy.write("prompts.txt", [&long, PROMPTS[0], PROMPTS[1], PROMPTS[2]].join("\n"));
    let mut child = command("generate")
        .args(["--model", &copy.arg(), "-n", "100000", "--batch", "2", "--max-seq-len", &room.to_string()])
        .env("RAYON_NUM_THREADS", "1")
        .arg("--prompts-file")
        .arg(copy.file("prompts.txt"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut header = String::new();
    stdout.read_line(&mut header).unwrap();
    assert_eq!(header, "==> prompt 1 <==\n");
    (child, stdout, copy)
}

#[cfg(unix)]
#[test]
fn ctrl_c_prints_what_there_is() {
    let (child, mut stdout, _copy) = long_run();
    interrupt(&child);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let run = Run::end(child);
    assert_eq!(run.code, Some(130), "{run:?}");
    assert!(rest.contains("==> prompt 2 <==") && !rest.contains("==> prompt 4 <=="), "{rest}");
    // The third follows the first, if there was time.
    let missing = if rest.contains("==> prompt 3 <==") { 1 } else { 2 };
    let last = format!("stopped: {missing} of 4 prompts have no completion");
    run.says(&["prompt 2: stopped: interrupted after", "decode: ", &last]);
}

/// Seen when the next completion is written.
#[test]
fn a_closed_output_is_no_panic() {
    let (child, stdout, _copy) = long_run();
    drop(stdout);
    Run::end(child).good().says(&["\nstopped: output closed"]);
}
