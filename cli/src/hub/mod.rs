//! Checkpoints from the Hugging Face hub, kept in its usual cache, which is laid out as huggingface_hub does.

mod client;
mod gguf;
mod name;
mod settings;

use crate::checkpoint::shard_names;
use crate::status;
use anyhow::{ensure, Context, Result};
use client::Client;
pub use name::Name;
use settings::Settings;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The revision where none is named.
const MAIN: &str = "main";
/// How long the hub may take by default, and where cached files can take its place.
const PATIENCE: Duration = Duration::from_secs(10);
const SHORT_PATIENCE: Duration = Duration::from_secs(3);

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const TEXT_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];
const TEMPLATES: &str = "additional_chat_templates/";

/// Downloads what a text model needs, its weights if asked: the directory it lies in, or its GGUF file. None where `model` is
/// no name of the hub. Where the hub does not answer, cached files take its place.
///
/// # Errors
/// When the hub refuses, or stays silent, and the cache does not have all files; when the name fits no files or too many.
pub fn fetch(model: &str, revision: Option<&str>, weights: bool) -> Result<Option<PathBuf>> {
    if !model.contains('/') {
        return Ok(None);
    }
    let settings = Settings::from_env()?;
    let Some(name) = Name::parse(model, revision, &settings.endpoint)? else { return Ok(None) };
    let path = fetch_named(&settings, &name, weights);
    path.map(Some).with_context(|| format!("--model: no directory and no file {model}, so taken from the hub"))
}

fn fetch_named(settings: &Settings, name: &Name, weights: bool) -> Result<PathBuf> {
    let Name { id, revision, .. } = name;
    let repo = settings.cache.join(format!("models--{}", id.replace('/', "--")));
    let cached = cached(&repo, name, weights);
    if settings.offline {
        let cached = cached.map(|path| use_cached(name, path));
        return cached.with_context(|| {
            format!("hub: HF_HUB_OFFLINE is set, and {} lacks {id} at revision {revision}", settings.cache.display())
        });
    }
    let client = Client::new(settings, name);
    let usual = if cached.is_ok() { SHORT_PATIENCE } else { PATIENCE };
    let listing = match (client.list(settings.describe.unwrap_or(usual)), &cached) {
        (Ok(listing), _) => listing,
        (Err(e), Ok(path)) => {
            status!("hub: {e:#}; using the cached files of {id}");
            return Ok(use_cached(name, path.clone()));
        }
        (Err(e), Err(_)) => return Err(e).with_context(|| format!("hub: cannot list {id} at revision {revision}")),
    };
    let failed = Cell::new(false);
    let get = |file: &str| client.download(&repo, &listing.sha, file).inspect_err(|_| failed.set(true));
    let path = match (select(&listing.files(), name, weights, &get), cached) {
        // The hub says no more, or the cache is read-only.
        (Err(e), Ok(path)) if failed.get() => {
            status!("{e:#}; using the cached files of {id}");
            return Ok(use_cached(name, path));
        }
        (path, _) => path?,
    };
    // Last, so that what the cache says is current is whole.
    let pointer = repo.join("refs").join(revision);
    let is_known = || std::fs::read_to_string(&pointer).is_ok_and(|sha| sha.trim() == listing.sha);
    if *revision != listing.sha && !is_known() {
        let made = std::fs::create_dir_all(pointer.parent().unwrap_or(&repo));
        // The files are there all the same.
        if let Err(e) = made.and_then(|()| std::fs::write(&pointer, &listing.sha)) {
            status!("hub: cannot write {}: {e}", pointer.display());
        }
    }
    Ok(path)
}

/// Says which GGUF file it is where, of all that the hub has, another one might be chosen.
fn use_cached(name: &Name, path: PathBuf) -> PathBuf {
    if gguf::is_guess(name, &path) {
        let file = path.file_name().unwrap_or_default().display();
        status!("hub: --model names no GGUF file of {}: {file} is used, as it is cached", name.id);
    }
    path
}

/// The cached model, if all its files are there.
fn cached(repo: &Path, name: &Name, weights: bool) -> Result<PathBuf> {
    let commit = match is_commit(&name.revision) {
        true => name.revision.clone(),
        false => std::fs::read_to_string(repo.join("refs").join(&name.revision))?.trim().to_string(),
    };
    let dir = repo.join("snapshots").join(commit);
    let mut listed = Vec::new();
    list(&dir, "", &mut listed)?;
    select(&listed, name, weights, &|file| {
        ensure!(dir.join(file).is_file(), "{} is missing", dir.join(file).display());
        Ok(dir.join(file))
    })
}

/// The files below `dir`, which is `under` of the repository.
fn list(dir: &Path, under: &str, files: &mut Vec<String>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = format!("{under}{}", entry.file_name().to_string_lossy());
        match entry.path().is_dir() {
            true => list(&entry.path(), &format!("{name}/"), files)?,
            false => files.push(name),
        }
    }
    Ok(())
}

/// Gets what the name needs of the listed files: GGUF files if it names one or there are no others, else a checkpoint's files.
fn select(listed: &[String], name: &Name, weights: bool, get: &dyn Fn(&str) -> Result<PathBuf>) -> Result<PathBuf> {
    let has = |file: &str| listed.iter().any(|listed| listed == file);
    let is_checkpoint = has("config.json") && (has(INDEX) || has(SINGLE) || !weights);
    let names_one = name.tag.is_some() || name.path.is_some();
    if names_one || !is_checkpoint && listed.iter().any(|file| gguf::is_model(file)) {
        let paths: Vec<PathBuf> = gguf::choose(listed, name)?.iter().map(|file| get(file)).collect::<Result<_>>()?;
        return paths.into_iter().next().context("hub: no GGUF file");
    }
    let Name { id, revision, .. } = name;
    ensure!(has("config.json"), "hub: {id} has no config.json and no GGUF file at revision {revision}");
    let templates = listed.iter().map(String::as_str).filter(|file| file.starts_with(TEMPLATES));
    for file in TEXT_FILES.iter().copied().filter(|file| has(file)).chain(templates) {
        get(file)?;
    }
    // As transformers: beside a single file the index is of an earlier save.
    if weights && has(SINGLE) {
        get(SINGLE)?;
    } else if weights {
        ensure!(has(INDEX), "hub: {id} has neither {SINGLE} nor {INDEX} nor a GGUF file at revision {revision}");
        let index = get(INDEX)?;
        let text = std::fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
        for shard in shard_names(&text).with_context(|| format!("hub: {INDEX} of {id}"))? {
            ensure!(has(&shard), "hub: {INDEX} of {id} names {shard}, which is not there at revision {revision}");
            get(&shard)?;
        }
    }
    let config = get("config.json")?;
    config.parent().map(Path::to_path_buf).context("hub: a cached file without a directory")
}

/// Whether a revision is a whole commit.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}
