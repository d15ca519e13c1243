//! A GGUF file as llama.cpp's `llama-bench` runs it, and printed as it prints: `benches/peers/llama_cpp.py` runs both in turn.

use anyhow::Result;
use candle_core::{DType, Device};
use candle_gdn_models::{CausalLm, GgufFile, ModelConfig, SequencePool};
use clap::Parser;
use std::path::PathBuf;
use std::time::Instant;

/// Times prompts and decode steps of a GGUF file and prints them as JSON.
#[derive(Parser)]
pub struct Args {
    #[arg(long)]
    pub gguf: PathBuf,

    /// Tokens of the prompts
    #[arg(long, value_delimiter = ',')]
    prompts: Vec<usize>,

    /// Tokens that are decoded one by one after --depth others
    #[arg(long, default_value_t = 128)]
    decode: usize,

    #[arg(long, default_value_t = 0)]
    depth: usize,

    /// Runs of each, after one that is not counted
    #[arg(long, default_value_t = 5)]
    repeats: usize,

    /// As cargo passes it to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tokens of any kind; what they say does not change the work.
fn ids(vocabulary: usize, n: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 % vocabulary) as u32).collect()
}

struct Runner {
    model: CausalLm,
    pool: SequencePool,
}

impl Runner {
    /// Nanoseconds of a prompt up to its logits.
    fn prompt(&mut self, tokens: usize) -> Result<u128> {
        let ids = ids(self.model.config().vocab_size, tokens);
        let sequence = self.pool.begin()?;
        let start = Instant::now();
        self.model.feed(&mut self.pool, &[(sequence, &ids)])?;
        let time = start.elapsed().as_nanos();
        self.pool.end(sequence)?;
        Ok(time)
    }

    /// Nanoseconds of so many steps after a prompt, the most likely token being the next.
    fn decode(&mut self, depth: usize, tokens: usize) -> Result<u128> {
        let sequence = self.pool.begin()?;
        if depth > 0 {
            self.model.feed(&mut self.pool, &[(sequence, &ids(self.model.config().vocab_size, depth))])?;
        }
        let mut next = 1u32;
        let start = Instant::now();
        for _ in 0..tokens {
            let logits = self.model.feed(&mut self.pool, &[(sequence, &[next])])?;
            next = logits.squeeze(0)?.argmax(0)?.to_scalar()?;
        }
        let time = start.elapsed().as_nanos();
        self.pool.end(sequence)?;
        Ok(time)
    }
}

pub fn run(args: &Args) -> Result<()> {
    let file = GgufFile::open(&args.gguf)?;
    let config = ModelConfig::from_gguf(&file)?;
    let model = CausalLm::loader(&config).load_gguf(&file, DType::F32, &Device::Cpu)?;
    let most = args.prompts.iter().copied().chain([args.depth + args.decode]).max().unwrap_or(0);
    let pool = model.new_sequences(1, most)?;
    let mut runner = Runner { model, pool };
    let mut rows = Vec::new();
    let mut row = |prompt: usize, decode: usize, run: &mut dyn FnMut() -> Result<u128>| -> Result<()> {
        run()?;
        let samples = (0..args.repeats).map(|_| run()).collect::<Result<Vec<_>>>()?;
        let samples: Vec<u64> = samples.into_iter().map(|ns| ns as u64).collect();
        rows.push(serde_json::json!({ "n_prompt": prompt, "n_gen": decode, "samples_ns": samples }));
        Ok(())
    };
    for &tokens in &args.prompts {
        row(tokens, 0, &mut || runner.prompt(tokens))?;
    }
    if args.decode > 0 {
        row(0, args.decode, &mut || runner.decode(args.depth, args.decode))?;
    }
    println!("{}", serde_json::to_string_pretty(&rows)?);
    Ok(())
}
