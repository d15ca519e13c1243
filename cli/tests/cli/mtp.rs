//! The generate example with the draft head of its checkpoint.

use crate::cli::{fails, generate, Copy};
use crate::gguf_writer::demo;

const PROMPTS: [&str; 2] = ["And Moses went up from the plains of Moab", "In the beginning God created"];

/// The demo as it would be without a draft head.
fn headless() -> Copy {
    let copy = Copy::new();
    copy.weights(|all| all.retain(|name, _| !name.starts_with("mtp.")));
    copy
}

#[test]
fn the_head_changes_nothing_but_the_figures() {
    for sampling in
        [&[][..], &["--temperature", "0.9", "--top-p", "0.9"], &["--draft", "3"], &["--tensor-parallel", "2"]]
    {
        let with = |mtp: &str| {
            let prompts = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "-n", "80", "--mtp", mtp];
            generate(&[&prompts[..], sampling].concat())
        };
        let (off, auto, on) = (with("off"), with("auto"), with("on"));
        assert!(!off.stderr.contains("mtp:"), "{off:?}");
        for run in [&auto, &on] {
            assert_eq!(run.stdout, off.stdout, "{sampling:?}");
            run.says(&["\nmtp: ", " tokens a step"]);
        }
        // On the CPU, where this runs, `auto` drafts later.
        on.says(&[" accepted at depth 1, "]);
    }
}

#[test]
fn a_checkpoint_without_a_head() {
    let copy = headless();
    let auto = ["--model", &copy.arg(), "--prompt", PROMPTS[0], "-n", "20"];
    let plain = generate(&auto);
    assert_eq!(plain.stdout, generate(&["--prompt", PROMPTS[0], "-n", "20"]).stdout);
    assert!(!plain.stderr.contains("mtp:"), "{plain:?}");
    fails("generate", &[&auto[..], &["--mtp", "on"]].concat(), 1, &["--mtp on", &copy.arg(), "no draft head"]);
    fails("generate", &["--mtp", "maybe"], 2, &["--mtp", "maybe", "auto"]);
    // Part of one is none that could be loaded.
    copy.weights(|all| {
        let norm = all["model.norm.weight"].clone();
        all.insert("mtp.fc.weight".into(), candle_core::Tensor::cat(&[&norm, &norm], 0).expect("a tensor"));
    });
    fails("generate", &auto, 1, &["mtp."]);
}

#[test]
fn a_head_beside_a_gguf_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let [model, head] = demo().apart();
    let path = dir.path().join("demo.gguf");
    model.write(&path).expect("a file");
    let model = path.display().to_string();
    let with = |mtp: &str| generate(&["--model", &model, "--prompt", PROMPTS[0], "-n", "30", "--mtp", mtp]);
    fails("generate", &["--model", &model, "--prompt", "a", "--mtp", "on"], 1, &["--mtp on", "no draft head"]);
    head.write(&dir.path().join("mtp-demo.gguf")).expect("a file");
    let (off, on) = (with("off"), with("on"));
    on.says(&["\nmtp: ", " accepted at depth 1, "]);
    assert!(!off.stderr.contains("mtp:") && on.stdout == off.stdout, "{off:?} {on:?}");
    std::fs::copy(&path, dir.path().join("mtp-demo.gguf")).expect("a copy");
    let on = ["--model", &model, "--prompt", "a", "--mtp", "on"];
    fails("generate", &on, 1, &["--mtp", "mtp-demo.gguf", "expected a draft head"]);
    // Nobody asked for that file.
    let auto = with("auto");
    assert_eq!(auto.stdout, off.stdout);
    auto.says(&["no draft head: --mtp: ", "mtp-demo.gguf: expected a draft head"]);
}
