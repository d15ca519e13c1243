//! Text from a Qwen3-Next checkpoint, the small one of this repository where no other is named.

use anyhow::{ensure, Context, Error, Result};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::generation::LogitsProcessor;
use clap::Parser;
use std::io::{self, ErrorKind, Write};
use std::{path::PathBuf, time::Instant};
use tokenizers::Tokenizer;

#[derive(Parser)]
struct Args {
    /// Directory with config.json, tokenizer.json and the weights as safetensors
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../generate/demo"))]
    model: PathBuf,

    #[arg(long, default_value = "In the beginning God created")]
    prompt: String,

    /// Tokens to generate
    #[arg(short = 'n', long, default_value_t = 100)]
    sample_len: usize,

    /// Without a temperature the likeliest token is taken, with --top-p it is 1
    #[arg(long)]
    temperature: Option<f64>,

    #[arg(long)]
    top_p: Option<f64>,

    #[arg(long, default_value_t = 299792458)]
    seed: u64,

    /// Run on the CPU, in f32, also where there is a GPU
    #[arg(long)]
    cpu: bool,
}

fn main() -> Result<()> {
    match run(&Args::parse()) {
        // Nobody reads the rest.
        Err(e) if e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => Ok(()),
        done => done,
    }
}

/// At once, and without the panic of `print!` where that cannot be.
fn print(text: &str) -> Result<()> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to stdout")
}

fn run(args: &Args) -> Result<()> {
    let device = if args.cpu { Device::Cpu } else { Device::cuda_if_available(0)? };
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let here = |name: &str| format!("--model: {}", args.model.join(name).display());
    let config = std::fs::read(args.model.join("config.json")).with_context(|| here("config.json"))?;
    let config: qwen3_next::Config = serde_json::from_slice(&config).with_context(|| here("config.json"))?;
    let tokenizer = Tokenizer::from_file(args.model.join("tokenizer.json")).map_err(Error::msg);
    let tokenizer = tokenizer.with_context(|| here("tokenizer.json"))?;
    let entries = std::fs::read_dir(&args.model).with_context(|| here(""))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
    // SAFETY: sound as long as nobody writes to the files.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, &device)? };
    let mut model = qwen3_next::ModelForCausalLM::new(&config, vb)?;

    let temperature = args.temperature.or(args.top_p.map(|_| 1.));
    let mut sampler = LogitsProcessor::new(args.seed, temperature, args.top_p);
    let mut text = tokenizer.decode_stream(true);
    let mut tokens = tokenizer.encode(args.prompt.as_str(), true).map_err(Error::msg)?.get_ids().to_vec();
    let limit = config.max_position_embeddings;
    ensure!(
        (1..=limit).contains(&tokens.len()),
        "--prompt: expected 1 to max_position_embeddings ({limit}) tokens, got {}",
        tokens.len()
    );
    print(&args.prompt)?;
    let (mut offset, start) = (0, Instant::now());
    for _ in 0..args.sample_len {
        if offset + tokens.len() > limit {
            break;
        }
        // The whole prompt, then token by token.
        let ids = Tensor::new(&tokens[..], &device)?.unsqueeze(0)?;
        let token = sampler.sample(&model.forward(&ids, offset)?.squeeze(0)?)?;
        offset += tokens.len();
        tokens = vec![token];
        if token == config.eos_token_id {
            break;
        }
        if let Some(text) = text.step(token).map_err(Error::msg)? {
            print(&text)?;
        }
    }
    print("\n")?;
    let _ = writeln!(
        io::stderr(),
        "{:.1} tokens/s of prompt and completion together",
        offset as f64 / start.elapsed().as_secs_f64()
    );
    Ok(())
}
