//! Programs as a user runs them, and checkpoints that make them behave in a known way.

use candle_core::{Device, Tensor};
pub use candle_gdn_models_testing::demo::{Copy, DEMO};
pub use candle_gdn_testing::program::{command, fails, run, Run};
use std::process::{Child, Command};
use tokenizers::Tokenizer;

pub const PROMPT: &str = "And it came to pass in those days, that there went out a decree";

#[track_caller]
pub fn generate(args: &[&str]) -> Run {
    run("generate", args).good()
}

/// Ctrl-C.
#[cfg(unix)]
pub fn interrupt(child: &Child) {
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(kill.success());
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(format!("{DEMO}/tokenizer.json")).expect("a tokenizer")
}

/// A checkpoint whose texts end with a comma, which is frequent.
pub fn ends_with_commas() -> Copy {
    let copy = Copy::new();
    let comma = tokenizer().encode(",", false).expect("tokens").get_ids().to_vec();
    copy.set("generation_config.json", "eos_token_id", comma.into());
    copy
}

/// A checkpoint whose texts do not end before `positions` do.
pub fn endless(positions: usize) -> Copy {
    let copy = Copy::new();
    for file in ["config.json", "generation_config.json"] {
        copy.set(file, "eos_token_id", serde_json::Value::Null);
    }
    copy.set("tokenizer_config.json", "eos_token", serde_json::Value::Null);
    copy.set("config.json", "max_position_embeddings", positions.into());
    copy
}

/// A checkpoint that says `<|im_end|>` where the demo says a comma.
pub fn says_im_end() -> Copy {
    let copy = Copy::new();
    let [comma, end] = [",", "<|im_end|>"].map(|token| tokenizer().token_to_id(token).expect("a token") as usize);
    copy.weights(|all| {
        let head = all.get_mut("lm_head.weight").expect("a head");
        let rows = (0..head.dims()[0] as u32).map(|row| match row as usize {
            row if row == comma => end as u32,
            row if row == end => comma as u32,
            row => row as u32,
        });
        let rows = Tensor::from_iter(rows, &Device::Cpu).expect("rows");
        *head = head.index_select(&rows, 0).expect("a head");
    });
    copy
}

/// A checkpoint that says the three bytes of a euro sign in turn, each a token, over and over.
pub fn euro() -> Copy {
    let copy = Copy::new();
    let euro = tokenizer().encode("€", false).expect("tokens").get_ids().to_vec();
    assert_eq!(euro.len(), 3, "the demo's vocabulary has a token a byte");
    let (embed, head) = chain(&euro, 1024, 192);
    copy.weights(|all| {
        all.insert("model.embed_tokens.weight".into(), embed);
        all.insert("lm_head.weight".into(), head);
        // Without mixers and feed-forward the head sees the token alone.
        let silent = ["out_proj.weight", "o_proj.weight", "down_proj.weight"];
        for (_, t) in all.iter_mut().filter(|(name, _)| silent.iter().any(|end| name.ends_with(end))) {
            *t = t.zeros_like().expect("zeros");
        }
    });
    copy
}

/// Embedding and head `[vocab, hidden]` under which each of `cycle` is followed by the next.
fn chain(cycle: &[u32], vocab: usize, hidden: usize) -> (Tensor, Tensor) {
    let (mut embed, mut head) = (vec![0f32; vocab * hidden], vec![0f32; vocab * hidden]);
    for (i, &id) in cycle.iter().enumerate() {
        let next = cycle[(i + 1) % cycle.len()];
        embed[id as usize * hidden + i] = 1.;
        head[next as usize * hidden + i] = 1.;
    }
    let tensor = |v| Tensor::from_vec(v, (vocab, hidden), &Device::Cpu).expect("a tensor");
    (tensor(embed), tensor(head))
}
