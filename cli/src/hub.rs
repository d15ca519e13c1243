//! Checkpoints from the Hugging Face hub, kept in its usual cache.

use crate::checkpoint::shard_names;
use crate::status;
use anyhow::{bail, Context, Result};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const TEXT_FILES: &[&str] = &[
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// Whether `model` looks like `owner/name`, not like a path.
pub fn is_id(model: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && part.chars().all(plain);
    model.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// Downloads what a text model needs, its weights if asked, and returns the directory it lies in.
pub fn fetch(id: &str, revision: &str, weights: bool) -> Result<PathBuf> {
    let repo = Repo::with_revision(id.to_string(), RepoType::Model, revision.to_string());
    let api = ApiBuilder::from_env()
        .with_progress(std::io::stderr().is_terminal())
        .with_retries(3)
        .build()?
        .repo(repo.clone());
    let listed = match api.info() {
        Ok(info) => info.siblings.into_iter().map(|s| s.rfilename).collect::<Vec<_>>(),
        // Without the hub, a checkpoint fetched earlier still works.
        Err(e) => match Cache::from_env().repo(repo).get("config.json") {
            Some(config) => {
                status!("hub: {e}; using the cached files of {id}");
                return parent(&config);
            }
            None => return Err(e).with_context(|| format!("hub: cannot list {id} at revision {revision}")),
        },
    };
    let has = |name: &str| listed.iter().any(|n| n == name);
    if !has("config.json") {
        bail!("hub: {id} has no config.json at revision {revision}")
    }
    // `get` goes by what was current last time; this looks, so that all files are of one commit.
    api.download("config.json").with_context(|| format!("hub: cannot download config.json of {id}"))?;
    for name in TEXT_FILES.iter().filter(|n| has(n)) {
        get(&api, name)?;
    }
    if !weights {
        return parent(&get(&api, "config.json")?);
    }
    if has(INDEX) && !has(SINGLE) {
        let index = get(&api, INDEX)?;
        let text = std::fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
        for shard in shard_names(&text).with_context(|| format!("hub: {INDEX} of {id}"))? {
            get(&api, &shard)?;
        }
    } else if has(SINGLE) {
        get(&api, SINGLE)?;
    } else {
        bail!("hub: {id} has neither {SINGLE} nor {INDEX} at revision {revision}")
    }
    parent(&get(&api, "config.json")?)
}

fn get(api: &ApiRepo, name: &str) -> Result<PathBuf> {
    api.get(name).with_context(|| format!("hub: cannot download {name}"))
}

fn parent(path: &Path) -> Result<PathBuf> {
    path.parent().map(Path::to_path_buf).context("hub: a cached file without a directory")
}
