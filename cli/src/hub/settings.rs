//! What the environment says about the hub, as huggingface_hub reads it.

use anyhow::{bail, Context, Result};
use std::path::PathBuf;
use std::time::Duration;

pub struct Settings {
    /// The hub's address, without a slash at its end.
    pub endpoint: String,
    /// The folder of repositories.
    pub cache: PathBuf,
    pub token: Option<String>,
    /// Whether only cached files may be used.
    pub offline: bool,
    /// How long the hub has to describe a repository, if that is set.
    pub describe: Option<Duration>,
    /// How long the hub may be silent.
    pub silence: Duration,
}

impl Settings {
    /// # Errors
    /// When a duration is no number of seconds, or there is no home directory.
    pub fn from_env() -> Result<Self> {
        let home = match (path("HF_HOME"), path("XDG_CACHE_HOME")) {
            (Some(home), _) => home,
            (None, Some(caches)) => caches.join("huggingface"),
            (None, None) => std::env::home_dir()
                .context("no home directory: HF_HOME says where files of the hub are kept")?
                .join(".cache/huggingface"),
        };
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub"));
        let kept = || std::fs::read_to_string(path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"))).ok();
        let implicit = !is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN");
        let token = var("HF_TOKEN").or_else(|| var("HUGGING_FACE_HUB_TOKEN")).or_else(kept).filter(|_| implicit);
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            cache,
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            offline: is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE"),
            describe: seconds("HF_HUB_ETAG_TIMEOUT")?,
            silence: seconds("HF_HUB_DOWNLOAD_TIMEOUT")?.unwrap_or(super::PATIENCE),
        })
    }
}

/// A variable that is set and not empty.
fn var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    let value = var(name)?;
    Some(match value.strip_prefix("~/") {
        Some(rest) => std::env::home_dir()?.join(rest),
        None => value.into(),
    })
}

fn is_true(name: &str) -> bool {
    var(name).is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()))
}

fn seconds(name: &str) -> Result<Option<Duration>> {
    let Some(text) = var(name) else { return Ok(None) };
    match text.trim().parse().map(Duration::try_from_secs_f64) {
        Ok(Ok(duration)) if !duration.is_zero() => Ok(Some(duration)),
        _ => bail!("{name}: expected a number of seconds above 0, got {text}"),
    }
}
