//! The files that are built into the programs: the demo checkpoint, and the configurations of published models.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../examples/generate/", $name)))),*]
    };
}

const FILES: &[(&str, &[u8])] = files![
    "demo/config.json",
    "demo/generation_config.json",
    "demo/model.safetensors",
    "demo/tokenizer.json",
    "demo/tokenizer_config.json",
    "configs/lara-4-mini.json",
    "configs/olmo-hybrid-7b.json",
    "configs/qwen3-next-80b-a3b-fp8.json",
    "configs/qwen3-next-80b-a3b.json",
    "configs/qwen3.5-0.8b.json",
    "configs/qwen3.5-27b.json",
    "configs/qwen3.5-35b-a3b-fp8.json",
    "configs/qwen3.5-35b-a3b.json",
    "configs/qwen3.5-4b.json",
    "configs/qwen3.8-27b.json",
];

/// The folder of these files: in the checkout that the program was built from, or where that is gone, in the user's cache, into
/// which they are written once.
pub fn folder() -> Result<PathBuf> {
    let checkout = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/generate"));
    if checkout.join(FILES[0].0).is_file() {
        return Ok(checkout.to_path_buf());
    }
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if Path::new(&cache).is_absolute() => PathBuf::from(cache),
        (_, Some(home)) => Path::new(&home).join(".cache"),
        _ => std::env::temp_dir(),
    };
    let folder = cache.join(concat!("candle-gdn-", env!("CARGO_PKG_VERSION")));
    for (name, bytes) in FILES {
        let path = folder.join(name);
        if path.metadata().is_ok_and(|file| file.len() == bytes.len() as u64) {
            continue;
        }
        // Another process may be doing the same: a file appears whole or not at all.
        let part = path.with_extension(format!("part-{}", std::process::id()));
        let write = || {
            std::fs::create_dir_all(path.parent().unwrap_or(&folder))?;
            std::fs::write(&part, bytes)?;
            std::fs::rename(&part, &path)
        };
        write().with_context(|| format!("cannot write the built-in file {}", path.display()))?;
    }
    Ok(folder)
}

/// The short names of the configurations.
pub fn known_models() -> impl Iterator<Item = &'static str> {
    FILES.iter().filter_map(|(name, _)| name.strip_prefix("configs/")?.strip_suffix(".json"))
}
