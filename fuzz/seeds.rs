//! What the fuzzing of `inputs` begins with: the demo's files, command lines, and GGUF files of both layouts.

use candle_core::quantized::GgmlDType;
use candle_gdn_models_testing::demo::DEMO;
use candle_gdn_models_testing::gguf_writer::{GgufOfTiny, Layout};
use candle_gdn_models_testing::tiny::Tiny;
use std::path::Path;

/// Into the folder that `SEEDS` names, if it is set.
pub fn write() -> Result<(), Box<dyn std::error::Error>> {
    let Some(to) = std::env::var_os("SEEDS").map(std::path::PathBuf::from) else { return Ok(()) };
    std::fs::create_dir_all(&to)?;
    let write = |kind: u8, name: &str, data: &[u8]| std::fs::write(to.join(name), [&[kind], data].concat());
    for (i, line) in [
        "--prompt\0a\0-n\x005",
        "--prompts-file\0x\0--batch\x003\0--prefix-cache\x0064",
        "--temperature\x000.7\0--top-p\x000.9\0--top-k\x0040\0--seed\x001\0--repeat-penalty\x001.1",
        "--quantize\0q8_0\0--dtype\0bf16\0--tensor-parallel\x002\0--cpu",
        "--prompt-tokens\x00100\0--max-seq-len\x00200\0--load-format\0dummy\0--draft\x004",
    ]
    .into_iter()
    .enumerate()
    {
        write(0, &format!("arguments-{i}"), line.as_bytes())?;
    }
    for (kind, name) in [(1, "config.json"), (2, "generation_config.json"), (3, "tokenizer_config.json")] {
        write(kind, name, &std::fs::read(Path::new(DEMO).join(name))?)?;
    }
    for config in std::fs::read_dir(Path::new(DEMO).join("../configs"))? {
        let config = config?;
        write(1, &config.file_name().to_string_lossy(), &std::fs::read(config.path())?)?;
    }
    write(
        4,
        "tokenizer.json",
        br#"{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
    )?;
    let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    write(5, "safetensors", &[&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat())?;
    write(6, "index.json", br#"{"weight_map":{"a":"model.safetensors","b":"other.safetensors"}}"#)?;
    write(
        7,
        "template",
        b"{% for m in messages %}{{ m.role ~ m['content'] | trim }}{% endfor %}{{ messages | tojson(indent=2) }}",
    )?;
    for (i, layout) in [Layout::Qwen3Next, Layout::OldQwen3Next, Layout::Qwen3_5].into_iter().enumerate() {
        let file = GgufOfTiny::new(&Tiny::qwen3_next(), layout)?;
        let path = to.join("model.gguf");
        for (kind, file) in [("f32", file.clone()), ("small", file.quantized(GgmlDType::F16))] {
            file.write(&path)?;
            write(8, &format!("gguf-{i}-{kind}"), &std::fs::read(&path)?)?;
        }
        std::fs::remove_file(path)?;
    }
    Ok(())
}
