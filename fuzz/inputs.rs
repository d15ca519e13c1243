//! Everything that `generate` reads before any weight: the command line and the files of a checkpoint. The first byte of an
//! input says which of them the rest is; the others are the demo's.
#![no_main]

mod seeds;

use candle_core::{DType, Device};
use candle_gdn_cli::args::Args;
use candle_gdn_cli::chat::{Message, Template};
use candle_gdn_cli::plan::Plan;
use candle_gdn_cli::settings::Settings;
use candle_gdn_cli::{Checkpoint, Need, Rank};
use candle_gdn_models::CausalLm;
use candle_gdn_models_testing::demo::DEMO;
use clap::Parser;
use libfuzzer_sys::{fuzz_target, Corpus};
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

/// By the first byte; an index of shards beside the weights, GGUF files of both layouts, a template as a file.
const FILES: [&str; 9] = [
    "arguments",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "chat_template.jinja",
    "model.gguf",
];

/// The demo, one file of which is replaced.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let shm = Path::new("/dev/shm");
    let folder = if shm.is_dir() { TempDir::new_in(shm) } else { TempDir::new() }.expect("a folder");
    for file in std::fs::read_dir(DEMO).expect("the demo") {
        let file = file.expect("a file").path();
        std::fs::copy(&file, folder.path().join(file.file_name().expect("a name"))).expect("a copy");
    }
    folder
});

fuzz_target!(init: seeds::write().expect("seeds"), |data: &[u8]| -> Corpus {
    let Some((kind, data)) = data.split_first() else { return Corpus::Reject };
    let Some(name) = FILES.get(*kind as usize) else { return Corpus::Reject };
    let folder = FOLDER.path().display().to_string();
    if *name == "arguments" {
        let Ok(text) = std::str::from_utf8(data) else { return Corpus::Reject };
        let arguments = ["generate", "--model", &folder].into_iter().chain(text.split('\0'));
        if let Ok(args) = Args::try_parse_from(arguments) {
            // A folder, or something on the network.
            if args.model.model.as_deref() == Some(folder.as_str()) {
                let _ = read(&args, name);
            }
        }
        return Corpus::Keep;
    }
    let path = FOLDER.path().join(name);
    std::fs::write(&path, data).expect("a file");
    let model = if path.extension().is_some_and(|e| e == "gguf") { path.display().to_string() } else { folder };
    let _ = read(&Args::parse_from(["generate", "--cpu", "--chat", "--model", &model]), name);
    let original = Path::new(DEMO).join(name);
    match original.is_file() {
        // Not `copy`, which the alarm of libFuzzer's `-timeout` ends with EINTR; these go on after it.
        true => std::fs::read(original).and_then(|content| std::fs::write(path, content)),
        false => std::fs::remove_file(path),
    }
    .expect("the file as it was");
    Corpus::Keep
});

/// As `generate` begins, as far as the file `name` is concerned.
fn read(args: &Args, name: &str) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::find(&args.model)?;
    let is = |names: &[&str]| names.contains(&name) || name == "model.gguf";
    if is(&["tokenizer_config.json", "chat_template.jinja"]) {
        if let Ok(Some(template)) = Template::find(&checkpoint, &args.chat) {
            let _ = template.render(&[Message::user("one"), Message::assistant("two"), Message::user("three")], true);
        }
    }
    if is(&["tokenizer.json"]) {
        if let Ok(Some(tokenizer)) = checkpoint.tokenizer() {
            let _ = tokenizer.encode("In the beginning", true);
        }
    }
    if is(&["model.safetensors", "model.safetensors.index.json"]) {
        let _ = checkpoint.weights();
    }
    if is(&["arguments", "config.json", "generation_config.json"]) {
        let config = checkpoint.config()?;
        let _ = Settings::new(&args.sampling, &checkpoint, &config, None);
        let room = Plan::new(args, &config, false, &[vec![1, 2, 3]]).room(false);
        let _ = Need::new(&args.model, &checkpoint, &config, &room, &Rank::single(Device::Cpu));
        if let Some(file) = checkpoint.gguf() {
            let _ = CausalLm::load_gguf(&config, file, DType::F32, &Device::Cpu);
        }
    }
    Ok(())
}
