//! What `--model` names on the hub: a repository, and maybe a type or a file in it.

use anyhow::{ensure, Result};

#[derive(Debug, PartialEq, Eq)]
pub struct Name {
    /// `owner/name`
    pub id: String,
    pub revision: String,
    /// A GGUF file of the repository, or a folder with such files.
    pub path: Option<String>,
    /// The type of a GGUF file, as in `Q4_K_M`.
    pub tag: Option<String>,
}

impl Name {
    /// Reads `owner/name`, `owner/name@revision`, `owner/name:TYPE`, `owner/name/FILE.gguf` and links to pages and files of the hub
    /// at `endpoint`; None where `model` is none of them.
    ///
    /// # Errors
    /// When `model` has a revision other than `revision`.
    pub fn parse(model: &str, revision: Option<&str>, endpoint: &str) -> Result<Option<Self>> {
        let own_host = endpoint.split_once("://").map_or(endpoint, |(_, host)| host);
        let (scheme, rest) = model.split_once("://").map_or((None, model), |(scheme, rest)| (Some(scheme), rest));
        let hosts = ["huggingface.co", "www.huggingface.co", "hf.co", own_host];
        let on_host = hosts.iter().find_map(|host| rest.strip_prefix(host)?.strip_prefix('/'));
        let rest = match (scheme, on_host) {
            (None | Some("http" | "https"), Some(rest)) => rest.split(['?', '#']).next().unwrap_or(rest),
            (None | Some("hf"), None) => rest,
            _ => return Ok(None),
        };
        let rest = if scheme.is_some() || on_host.is_some() { rest.trim_end_matches('/') } else { rest };
        let (rest, tag) = rest.rsplit_once(':').map_or((rest, None), |(rest, tag)| (rest, Some(tag)));
        let (rest, own_revision) = rest.split_once('@').map_or((rest, None), |(rest, own)| (rest, Some(own)));
        let mut parts: Vec<&str> = rest.split('/').collect();
        let mut own_revision = own_revision.map(String::from);
        let is_page = on_host.is_some() && matches!(parts.get(2), Some(&("tree" | "blob" | "resolve")));
        if is_page && parts.len() > 3 {
            // Those of pull requests have three parts: refs/pr/1.
            let end = if parts[3] == "refs" { parts.len().min(6) } else { 4 };
            own_revision = Some(parts[3..end].join("/").replace("%2F", "/"));
            parts.drain(2..end);
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_name = |part: &&str| !part.is_empty() && !part.starts_with('.') && part.chars().all(plain);
        let is_file = parts.last().is_some_and(|name| super::gguf::is_gguf(name));
        let is_short = parts.len() == 2 || is_page || is_file;
        let is_whole = tag != Some("") && own_revision.as_deref() != Some("");
        if parts.len() < 2 || !is_short || !is_whole || !parts[..2].iter().all(is_name) {
            return Ok(None);
        }
        if parts[2..].iter().any(|part| matches!(*part, "" | "." | "..")) {
            return Ok(None);
        }
        if let (Some(own), Some(revision)) = (own_revision.as_deref(), revision) {
            ensure!(own == revision, "--revision: expected {own}, which --model names, got {revision}");
        }
        Ok(Some(Self {
            id: parts[..2].join("/"),
            revision: own_revision.unwrap_or_else(|| revision.unwrap_or(super::MAIN).to_string()),
            path: (parts.len() > 2).then(|| parts[2..].join("/")),
            tag: tag.map(String::from),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn is(model: &str, want: Option<[&str; 4]>) {
        let got = Name::parse(model, None, "http://localhost:8080").unwrap();
        let got = got.map(|n| [n.id, n.revision, n.path.unwrap_or_default(), n.tag.unwrap_or_default()]);
        assert_eq!(got, want.map(|parts| parts.map(String::from)), "{model}");
    }

    #[test]
    fn every_form() {
        let plain = Some(["a/b-1.5", "main", "", ""]);
        for model in ["a/b-1.5", "hf.co/a/b-1.5", "https://huggingface.co/a/b-1.5/", "hf://a/b-1.5"] {
            is(model, plain);
        }
        is("http://localhost:8080/a/b-1.5", plain);
        is("https://huggingface.co/a/b-1.5/tree/main?x=1", plain);
        is("a/b:q4_k_m", Some(["a/b", "main", "", "q4_k_m"]));
        is("hf.co/a/b:UD-Q4_K_XL", Some(["a/b", "main", "", "UD-Q4_K_XL"]));
        is("a/b@refs/pr/1:Q8_0", Some(["a/b", "refs/pr/1", "", "Q8_0"]));
        is("a/b/c/D.GGUF", Some(["a/b", "main", "c/D.GGUF", ""]));
        is("https://hf.co/a/b/resolve/v1/d.gguf?download=true", Some(["a/b", "v1", "d.gguf", ""]));
        is("https://huggingface.co/a/b/blob/refs%2Fpr%2F2/d.gguf", Some(["a/b", "refs/pr/2", "d.gguf", ""]));
        is("https://huggingface.co/a/b/tree/main/UD-Q4", Some(["a/b", "main", "UD-Q4", ""]));
    }

    #[test]
    fn what_is_none() {
        for model in ["", "a", "a/", "/a/b", "../a", "a/b/c", "a/b:", "a/b@", "a b/c", "./a/b.gguf", "a/b/../c.gguf"] {
            is(model, None);
        }
        for model in ["https://example.com/a/b", "s3://a/b", "https://huggingface.co/a"] {
            is(model, None);
        }
    }

    #[test]
    fn two_revisions() {
        let parse = |revision| Name::parse("a/b@v2", Some(revision), "");
        assert_eq!(parse("v2").unwrap().unwrap().revision, "v2");
        for other in ["v1", "main"] {
            assert!(parse(other).unwrap_err().to_string().contains("expected v2"));
        }
    }
}
