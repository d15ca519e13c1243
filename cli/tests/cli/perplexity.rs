//! The perplexity example as a program.

use crate::cli::{fails, run, Copy, DEMO};
use crate::golden;
use candle_core::Result;
use serde_json::{json, Value};

/// What a run printed: (id, logprob) a line, then the last line.
pub fn score(args: &[&str]) -> (Vec<(u32, f64)>, Value) {
    let run = run("perplexity", args).good();
    let lines: Vec<Value> = run.stdout.lines().map(|l| serde_json::from_str(l).expect(l)).collect();
    let (last, tokens) = lines.split_last().expect("a last line");
    let token = |v: &Value| (v["id"].as_u64().unwrap() as u32, v["logprob"].as_f64().unwrap());
    (tokens.iter().map(token).collect(), last.clone())
}

pub fn list(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn the_format_is_exact() {
    let run = run("perplexity", &["--token-ids", "49,68,7"]).good();
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines.len(), 3);
    for (line, id) in lines.iter().zip([68, 7]) {
        let logprob = line.strip_prefix(&format!("{{\"id\":{id},\"logprob\":")).expect(line);
        let (whole, digits) = logprob.strip_suffix('}').expect(line).split_once('.').expect(line);
        assert!(whole.starts_with('-') && digits.len() == 6, "{line}");
    }
    assert!(lines[2].starts_with("{\"count\":2,\"mean_nll\":"), "{}", lines[2]);
    assert!(lines[2].contains(",\"perplexity\":") && lines[2].ends_with('}'));
    assert!(run.stdout.ends_with("}\n"));
    assert!(!run.stderr.contains('\r'));
}

#[test]
fn agrees_with_transformers() -> Result<()> {
    let all = [golden::DEMO, golden::QWEN3_5, golden::QWEN3_5_MOE];
    for goldens in all.into_iter().filter(|g| g.is_here()) {
        let dir = goldens.dir();
        for i in 0..goldens.prompts() {
            let g = goldens.prompt(i)?;
            if g.ids.len() < 2 {
                continue;
            }
            let ids = list(&g.ids);
            let (tokens, last) = score(&["--model", &dir, "--token-ids", &ids]);
            assert_eq!(tokens.iter().map(|t| t.0).collect::<Vec<_>>(), g.ids[1..]);
            for (t, (token, want)) in tokens.iter().zip(&g.logprobs).enumerate() {
                assert!((token.1 - f64::from(*want)).abs() < 2e-3, "prompt {i}, token {t}: {} for {want}", token.1);
            }
            let mean = -tokens.iter().map(|t| t.1).sum::<f64>() / tokens.len() as f64;
            assert_eq!(last["count"], json!(tokens.len()));
            assert!((last["mean_nll"].as_f64().unwrap() - mean).abs() < 2e-6);
            assert!((last["perplexity"].as_f64().unwrap() / mean.exp() - 1.).abs() < 1e-4);
        }
    }
    Ok(())
}

#[test]
fn chunks_change_nothing() -> Result<()> {
    let ids = list(&golden::DEMO.prompt(6)?.ids);
    let (whole, _) = score(&["--token-ids", &ids]);
    for chunk in ["1", "63", "64", "100"] {
        let (parts, _) = score(&["--token-ids", &ids, "--prefill-chunk", chunk]);
        assert_eq!(parts.len(), whole.len());
        for (a, b) in parts.iter().zip(&whole) {
            assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-3, "chunks of {chunk}: {a:?} for {b:?}");
        }
    }
    Ok(())
}

#[test]
fn a_forced_kernel_scores_the_same() {
    let args = ["--token-ids", "49,68,7"];
    assert_eq!(score(&[&args[..], &["--algo", "recurrent"]].concat()), score(&args));
    let args = [&args[..], &["--algo", "chunked_sm80"]].concat();
    fails("perplexity", &args, 1, &["algo: ChunkedSm80 supports q, k and v in bf16 or f16, got F32"]);
}

#[test]
fn files_and_dtypes() {
    let copy = Copy::new();
    let path = copy.arg_of("text", "In the beginning God created the heaven and the earth.");
    let (tokens, last) = score(&["--model", DEMO, "--file", &path]);
    assert_eq!(last["count"], json!(tokens.len()));
    for dtype in ["bf16", "f16"] {
        let (half, _) = score(&["--file", &path, "--dtype", dtype]);
        assert_eq!(half.len(), tokens.len());
        let mean = |t: &[(u32, f64)]| t.iter().map(|t| t.1).sum::<f64>() / t.len() as f64;
        assert!((mean(&half) - mean(&tokens)).abs() < 0.1);
    }
}

#[test]
fn bad_input_is_named() {
    fails("perplexity", &[] as &[&str], 2, &["--file"]);
    fails("perplexity", &["--file", "a", "--token-ids", "1,2"], 2, &["--token-ids"]);
    fails("perplexity", &["--token-ids", "1,2", "--prefill-chunk", "0"], 2, &["--prefill-chunk"]);
    fails("perplexity", &["--token-ids", "5"], 1, &["--token-ids", "at least 2 tokens", "got 1"]);
    fails("perplexity", &["--token-ids", "5,x"], 1, &["--token-ids", "token id", "\"x\""]);
    fails("perplexity", &["--token-ids", "5,-1"], 1, &["--token-ids", "\"-1\""]);
    fails("perplexity", &["--token-ids", ""], 1, &["--token-ids", "\"\""]);
    fails("perplexity", &["--token-ids", "5,1024"], 1, &["--token-ids", "vocab_size (1024)", "got 1024"]);
    fails("perplexity", &["--file", "/nowhere/at/all"], 1, &["--file", "/nowhere/at/all"]);
    fails("perplexity", &["--token-ids", "1,2", "--model", "/nowhere/at/all"], 1, &["--model", "/nowhere/at/all"]);
    let copy = Copy::new();
    let empty = copy.arg_of("text", "");
    fails("perplexity", &["--file", &empty], 1, &["--file", "at least 2 tokens", "got 0"]);
    copy.set("config.json", "max_position_embeddings", json!(4));
    let args = ["--model", &copy.arg(), "--token-ids", "1,2,3,4,5"];
    fails("perplexity", &args, 1, &["--token-ids", "max_position_embeddings (4)", "got 5"]);
    let whole = std::fs::read(copy.file("model.safetensors")).unwrap();
    copy.write("model.safetensors", &whole[..whole.len() / 2]);
    let args = ["--model", &copy.arg(), "--token-ids", "1,2,3"];
    fails("perplexity", &args, 1, &["model.safetensors", "truncated"]);
}
