//! What the environment says about the hub, as huggingface_hub reads it.

use anyhow::{bail, ensure, Context, Result};
use std::path::PathBuf;
use std::time::Duration;
use ureq::tls::{parse_pem, PemItem, RootCerts};

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
    /// Who vouches for servers.
    pub roots: RootCerts,
}

impl Settings {
    /// # Errors
    /// When a duration is no number of seconds, a file of certificates cannot be read or has none, or there is no home directory.
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
        let offline = is_true("HF_HUB_OFFLINE") || is_true("TRANSFORMERS_OFFLINE");
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            cache,
            token: token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty()),
            offline,
            describe: seconds("HF_HUB_ETAG_TIMEOUT")?,
            silence: seconds("HF_HUB_DOWNLOAD_TIMEOUT")?.unwrap_or(super::PATIENCE),
            roots: if offline { RootCerts::WebPki } else { roots()? },
        })
    }
}

/// The certificates of the user's file, which has that of a proxy that decrypts connections, or Mozilla's.
fn roots() -> Result<RootCerts> {
    let Some(name) = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"].into_iter().find(|name| var(name).is_some()) else {
        return Ok(RootCerts::WebPki);
    };
    let path = path(name).unwrap_or_default();
    let pem = std::fs::read(&path).with_context(|| format!("{name}: cannot read {}", path.display()))?;
    let items = parse_pem(&pem).collect::<Result<Vec<_>, _>>();
    let items = items.with_context(|| format!("{name}: {} is not in PEM format", path.display()))?;
    let certificates = items.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    ensure!(!certificates.is_empty(), "{name}: {} has no certificate in PEM format", path.display());
    Ok(certificates.into())
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
