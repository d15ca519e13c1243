//! The generate example as one talks to it: what is kept between turns changes nothing of what is said.

use crate::cli::{command, endless, ends_with_commas, euro, fails, generate, interrupt, tokenizer, Copy, Run};
use candle_core::{DType, Device, Tensor};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::time::Duration;

fn start(args: &[&str]) -> Child {
    let mut command = command("generate");
    command.args(["--interactive"]).args(args).env("RAYON_NUM_THREADS", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// All that was said, and the end of the input.
pub fn talk(args: &[&str], input: impl AsRef<[u8]>) -> Run {
    let mut child = start(args);
    child.stdin.take().unwrap().write_all(input.as_ref()).unwrap();
    Run::end(child).good()
}

/// What a prompt that says all of it at once is completed with.
fn once(prompt: &str, args: &[&str]) -> String {
    generate(&[&["--prompt", prompt], args].concat()).stdout
}

pub fn asked(message: &str) -> String {
    format!("<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
}

/// Kept and all tokens of each turn.
fn cache(run: &Run) -> Vec<[usize; 2]> {
    let lines = run.stderr.lines().filter(|line| line.starts_with("cache: "));
    let numbers = |line: &str| {
        let mut words = line.split_whitespace().filter_map(|word| word.parse().ok());
        [words.next().unwrap(), words.next().unwrap()]
    };
    lines.map(numbers).collect()
}

pub const FIRST: &str = "In the beginning";
pub const SECOND: &str = "And God said";
const THIRD: &str = "The LORD is my shepherd; I shall not want";

#[test]
fn a_talk_is_what_the_whole_of_it_gives_at_once() {
    for more in [&[][..], &["--draft", "4"], &["--prefill-chunk", "5"], &["--temperature", "0", "--top-k", "3"]] {
        let args = [&["-n", "15"], more].concat();
        let run = talk(&[&args[..], &["--show-cache"]].concat(), format!("{FIRST}\n{SECOND}\r\n\n  \n{THIRD}"));
        let mut said = String::new();
        let mut stdout = String::new();
        for message in [FIRST, SECOND, THIRD] {
            said += &asked(message);
            let answer = once(&said, &args);
            said += &format!("{answer}<|im_end|>\n");
            stdout += &format!("{answer}\n");
        }
        assert_eq!(run.stdout, stdout, "{more:?}");
        let [first, second, third] = cache(&run)[..] else { panic!("{run:?}") };
        assert_eq!(first[0], 0);
        // All but the last token of the answers had been fed.
        assert_eq!([second[0], third[0]], [first[1] + 14, second[1] + 14], "{run:?}");
        let fed: usize = [first, second, third].iter().map(|[kept, all]| all - kept).sum();
        assert!(run.stderr.contains(&format!("prompt: {fed} tokens")) && run.stderr.contains("decode: "), "{run:?}");
    }
}

#[test]
fn an_answer_that_ends_by_itself_goes_on() {
    let copy = ends_with_commas();
    let arg = copy.arg();
    let args = ["--model", &arg, "-n", "200"];
    let run = talk(&[&args[..], &["--show-cache"]].concat(), format!("{FIRST}\n{SECOND}\n"));
    let first = once(&asked(FIRST), &args);
    let second = once(&format!("{}{first}<|im_end|>\n{}", asked(FIRST), asked(SECOND)), &args);
    assert_eq!(run.stdout, format!("{first}\n{second}\n"));
    assert!(!run.stderr.contains("stopped"), "{run:?}");
    assert!(cache(&run)[1][0] > cache(&run)[0][1], "{run:?}");
}

#[test]
fn a_template_may_write_the_past_otherwise() {
    let copy = Copy::new();
    let arg = copy.arg();
    let args = ["--model", &arg, "-n", "12"];
    // As those do that leave out earlier thoughts.
    let rewriting = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n\
        {{- '\n' ~ (m.content[:6] if m.role == 'assistant' else m.content) }}<|im_end|>\n{% endfor -%}\
        {%- if add_generation_prompt -%}<|im_start|>assistant\n<|im_start|>{% endif -%}";
    copy.write("chat_template.jinja", rewriting);
    let mut said = String::new();
    let mut stdout = String::new();
    for message in [FIRST, SECOND, THIRD] {
        said += &format!("<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n");
        let answer = once(&format!("{said}<|im_start|>"), &args);
        said += &format!("{}<|im_end|>\n", answer.chars().take(6).collect::<String>());
        stdout += &format!("{answer}\n");
    }
    let run = talk(&[&args[..], &["--show-cache"]].concat(), [FIRST, SECOND, THIRD].join("\n"));
    assert_eq!(run.stdout, stdout);
    assert_eq!(run.stderr.matches("as it is not what was fed before").count(), 2, "{run:?}");
    let turns = cache(&run);
    // What comes before the opening of an answer is kept.
    assert!(turns.iter().skip(1).zip(&turns).all(|(now, then)| now[0] > 0 && now[0] < then[1]), "{turns:?}");
    let silent = talk(&args, [FIRST, SECOND, THIRD].join("\n"));
    assert_eq!(silent.stdout, stdout);
    assert!(!silent.stderr.contains("cache"), "{silent:?}");

    // Nothing stays as it was.
    copy.write("chat_template.jinja", "{{ messages | length }} {% for m in messages %}{{ m.content }}{% endfor %}");
    let run = talk(&[&args[..], &["--show-cache"]].concat(), format!("{FIRST}\n{SECOND}"));
    assert!(cache(&run)[1][0] == 0, "{run:?}");
    let first = once(&format!("1 {FIRST}"), &args);
    assert_eq!(run.stdout, format!("{first}\n{}\n", once(&format!("3 {FIRST}{first}{SECOND}"), &args)));
}

#[test]
fn without_a_template_it_is_one_text() {
    let copy = Copy::new();
    copy.remove(&["tokenizer_config.json"]);
    let arg = copy.arg();
    let args = ["--model", &arg, "-n", "12"];
    let run = talk(&[&args[..], &["--show-cache"]].concat(), format!("{FIRST}\n{SECOND}\n"));
    let first = once(FIRST, &args);
    assert_eq!(run.stdout, format!("{first}\n{}\n", once(&format!("{FIRST}{first}\n{SECOND}"), &args)));
    assert!(run.stderr.contains("no chat template"), "{run:?}");
    let [first, second] = cache(&run)[..] else { panic!("{run:?}") };
    assert_eq!(second[0], first[1] + 11);
    fails("generate", &["--model", &arg, "--interactive", "--chat"], 1, &["--chat", "no chat template"]);
}

#[test]
fn reset_and_quit() {
    let args = ["-n", "10"];
    let first = once(&asked(FIRST), &args);
    let run = talk(&args, format!("{FIRST}\n/reset\n{FIRST}\n /quit \n{SECOND}\n"));
    assert_eq!(run.stdout, format!("{first}\n{first}\n"));
    let nothing = talk(&args, "/reset\n\n/reset\n");
    assert_eq!(nothing.stdout, "");
    // Only whole lines are commands.
    let message = "/reset is what I said";
    assert_eq!(talk(&args, message).stdout, format!("{}\n", once(&asked(message), &args)));
}

#[test]
fn lines_that_are_no_messages_are_left_out() {
    let args = ["-n", "10", "--max-seq-len", "60"];
    let first = once(&asked(FIRST), &args);
    let long = "Let there be light ".repeat(30);
    let run = talk(&args, [b"\xff\xfe half\n", long.as_bytes(), b"\n", FIRST.as_bytes(), b"\n"].concat());
    assert_eq!(run.stdout, format!("{first}\n"));
    run.says(&["skipped: a line that is not UTF-8", "skipped: expected at most --max-seq-len (60)", "/reset"]);
}

#[test]
fn a_talk_ends_where_its_room_does() {
    let run = talk(&["--max-seq-len", "40"], format!("{FIRST}\n{SECOND}\n/reset\n{FIRST}\n"));
    run.says(&["--max-seq-len gives 40 positions", "skipped: expected at most --max-seq-len (40)"]);
    let answers: Vec<_> = run.stdout.split_inclusive('\n').collect();
    let first = once(&asked(FIRST), &["--max-seq-len", "40"]);
    assert_eq!(run.stdout, first + "\n" + &answers[answers.len() / 2..].concat());
}

#[test]
fn characters_are_never_cut() {
    let copy = euro();
    copy.remove(&["tokenizer_config.json"]);
    let run = talk(&["--model", &copy.arg(), "-n", "5"], "€\n€\n");
    assert_eq!(run.stdout, "€\n€\n", "{run:?}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_answer_and_twice_the_program() {
    let copy = endless(1000000);
    let mut child = start(&["--model", &copy.arg(), "--max-seq-len", "900000", "--show-cache"]);
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // A full pipe would stop the answer.
    let reader = std::thread::spawn(move || stdout.read_to_end(&mut Vec::new()));
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut until = |part: &str| {
        let mut line = String::new();
        while !line.contains(part) {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "expected {part:?}");
        }
    };
    for _ in 0..3 {
        writeln!(stdin, "{FIRST}").unwrap();
        // The message has been read: what comes now is for its answer.
        until("cache: ");
        interrupt(&child);
        until("stopped: interrupted");
        // One between the answers is only the first of two.
        interrupt(&child);
        std::thread::sleep(Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none());
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    reader.join().unwrap().unwrap();
}

/// A word whose embedding is not finite: the answer to it fails, and the talk goes on as if it had not been said.
#[test]
fn a_failed_answer_ends_no_talk() {
    let copy = Copy::new();
    let ids = |text: &str| tokenizer().encode(text, false).unwrap().get_ids().to_vec();
    let plain = talk(&["-n", "9"], format!("{FIRST}\n{THIRD}\n"));
    let all = ids(&(asked(FIRST) + &asked(THIRD) + &plain.stdout));
    let word = ids(SECOND).into_iter().find(|id| !all.contains(id)).expect("a token of its own");
    copy.weights(|weights| {
        let name = "model.embed_tokens.weight";
        let table = weights[name].to_dtype(DType::F32).unwrap();
        let rows = table.dims()[0];
        let row = |id: u32| if id == word { f32::INFINITY } else { 0. };
        let more = Tensor::from_iter((0..rows as u32).map(row), &Device::Cpu).unwrap().reshape((rows, 1)).unwrap();
        weights.insert(name.into(), table.broadcast_add(&more).unwrap());
    });
    let run = talk(&["--model", &copy.arg(), "-n", "9"], format!("{FIRST}\n{SECOND}\n{THIRD}\n"));
    run.says(&["failed: the model gave", "the message is skipped, /reset starts again"]);
    assert_eq!(run.stdout, plain.stdout);
}

#[test]
fn a_closed_output_is_no_panic() {
    let copy = endless(1000000);
    let mut child = start(&["--model", &copy.arg(), "--max-seq-len", "900000"]);
    writeln!(child.stdin.as_mut().unwrap(), "{FIRST}").unwrap();
    let mut byte = [0u8; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
    drop(child.stdout.take());
    Run::end(child).good().says(&["output closed"]);
}

#[test]
fn bad_arguments() {
    for other in [
        &["--prompt", "a"][..],
        &["--prompt-file", "a"],
        &["--prompts-file", "a"],
        &["--prompt-tokens", "4"],
        &["--batch", "2"],
        &["--prefix-cache", "64"],
        &["--prefix-block", "128"],
    ] {
        fails("generate", &[&["--interactive"], other].concat(), 2, &["--interactive"]);
    }
    let copy = Copy::new();
    let arg = copy.arg();
    copy.write("chat_template.jinja", "{% for %}");
    fails("generate", &["--model", &arg, "--interactive"], 1, &["--interactive", "chat template"]);
    copy.remove(&["tokenizer.json"]);
    fails("generate", &["--model", &arg, "--interactive"], 1, &["tokenizer.json is missing"]);
    let dummy = ["--model", &arg, "--interactive", "--load-format", "dummy"];
    fails("generate", &dummy, 1, &["--interactive", "no tokenizer.json"]);

    let copy = Copy::new();
    copy.write("chat_template.jinja", "{{ raise_exception('only for machines') }}");
    let arg = copy.arg();
    talk(&["--model", &arg], "a\n").says(&["skipped", "only for machines"]);
}
