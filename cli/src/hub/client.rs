//! Requests to the hub: what a repository has, and its files. Each waits for a bounded time.

use super::settings::Settings;
use super::Name;
use crate::progress::download_bar;
use crate::status;
use anyhow::{anyhow, ensure, Context, Error, Result};
use indicatif::ProgressBar;
use serde::Deserialize;
use std::fs::{create_dir_all, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::http::{HeaderMap, StatusCode};
use ureq::tls::TlsConfig;
use ureq::{Agent, Body};

/// Tries in a row that may bring nothing new of a file.
const TRIES: u32 = 3;
const REDIRECTS: usize = 10;
/// Bytes of the longest list of files.
const MOST_LISTED: u64 = 64 << 20;

/// A repository as the hub describes it.
#[derive(Deserialize)]
pub struct Listing {
    /// The commit of the revision.
    pub sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Listing {
    pub fn files(&self) -> Vec<String> {
        self.siblings.iter().map(|file| file.rfilename.clone()).collect()
    }
}

/// Why a request failed, and whether another one may succeed.
struct Failure {
    why: Error,
    again: bool,
}

impl From<Error> for Failure {
    fn from(why: Error) -> Self {
        Self { why, again: false }
    }
}

/// The beginning of an answer.
struct Answer {
    status: StatusCode,
    etag: Option<String>,
    /// Bytes of the whole file.
    total: Option<u64>,
    /// The first byte of the file that the body has.
    first: u64,
    body: Body,
}

pub struct Client<'a> {
    agent: Agent,
    settings: &'a Settings,
    name: &'a Name,
}

impl<'a> Client<'a> {
    pub fn new(settings: &'a Settings, name: &'a Name) -> Self {
        let limit = Some(settings.silence);
        let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).timeout_resolve(limit);
        let config = config.timeout_connect(limit).timeout_recv_response(limit).timeout_per_read(limit);
        let tls = TlsConfig::builder().root_certs(settings.roots.clone()).build();
        Self { agent: config.timeout_per_write(limit).tls_config(tls).build().into(), settings, name }
    }

    /// What the repository has; the hub answers within `limit`.
    pub fn list(&self, limit: Duration) -> Result<Listing> {
        let Name { id, revision, .. } = self.name;
        let url = format!("{}/api/models/{id}/revision/{}", self.settings.endpoint, revision.replace('/', "%2F"));
        let mut answer = self.open(&url, None, limit).map_err(|failure| failure.why)?;
        let text = answer.body.with_config().limit(MOST_LISTED).read_to_vec().map_err(|e| silent(e, limit))?;
        let listing: Listing = serde_json::from_slice(&text).context("the hub's answer is no list of files")?;
        ensure!(is_file_name(&listing.sha), "the hub's answer has no commit, but {:?}", listing.sha);
        Ok(listing)
    }

    /// A file of a commit, downloaded into `repo`, the repository's folder in the cache, unless it is there. A download that was cut
    /// goes on where it ended.
    pub fn download(&self, repo: &Path, commit: &str, file: &str) -> Result<PathBuf> {
        let depth = Path::new(file).components().count();
        ensure!(file.split('/').all(is_file_name), "the hub's list has {file:?}, which is no name of a file");
        let pointer = repo.join("snapshots").join(commit).join(file);
        if pointer.is_file() {
            return Ok(pointer);
        }
        let url = format!("{}/{}/resolve/{commit}/{}", self.settings.endpoint, self.name.id, escaped(file));
        let blob = self.blob(repo, &url, file).with_context(|| format!("hub: cannot download {file}"))?;
        let dir = pointer.parent().unwrap_or(repo);
        create_dir_all(dir).with_context(|| format!("hub: cannot make {}", dir.display()))?;
        let target = ["../"].repeat(depth + 1).concat() + "blobs/" + &blob;
        // Under a name of its own first, as another program may make the same link at this moment. One that is there and leads to no
        // file is of a cache that somebody has cleaned up.
        let made = dir.join(format!(".{}.{}", blob, std::process::id()));
        let _ = std::fs::remove_file(&made);
        link(&target, &repo.join("blobs").join(blob), &made)
            .and_then(|()| std::fs::rename(&made, &pointer))
            .with_context(|| format!("hub: cannot write {}", pointer.display()))?;
        Ok(pointer)
    }

    /// Downloads a file's content and returns the name that it has in the cache.
    fn blob(&self, repo: &Path, url: &str, file: &str) -> Result<String> {
        let mut tries = 0;
        let answer = loop {
            match self.open(url, Some(0), self.settings.silence) {
                Ok(answer) => break answer,
                Err(failure) => self.pause(failure, &mut tries)?,
            }
        };
        let etag = answer.etag.clone().context("the hub's answer has no ETag")?;
        let total = answer.total.context("the hub does not say how many bytes it has")?;
        let blob = repo.join("blobs").join(&etag);
        create_dir_all(repo.join("blobs")).with_context(|| format!("cannot make {}", repo.join("blobs").display()))?;
        if blob.is_file() {
            return Ok(etag);
        }
        // Other programs' unfinished files may have holes: theirs have other names.
        let path = repo.join("blobs").join(format!("{etag}.candle-gdn.incomplete"));
        let open = || OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut part = open().with_context(|| format!("cannot write {}", path.display()))?;
        // Another process may write it. Where the file system has no locks, it is not known.
        if part.try_lock().is_err() {
            status!("hub: waiting for another download of {file}");
            let _ = part.lock();
        }
        if blob.is_file() {
            return Ok(etag);
        }
        let (bar, mut most, mut next) = (download_bar(file, total), 0, Some(answer));
        let mut len = part.metadata()?.len();
        while len != total {
            if len > total {
                (len, next) = (0, None);
                part.set_len(0)?;
            }
            let answer = match next.take().filter(|_| len == 0) {
                Some(answer) => Ok(answer),
                None => self.open(url, Some(len), self.settings.silence),
            };
            let copied =
                answer.and_then(|answer| copy(answer, (&etag, total), &mut part, len, self.settings.silence, &bar));
            len = part.metadata()?.len();
            if len > most {
                (most, tries) = (len, 0);
            }
            if len < total {
                let cut = || Failure { why: anyhow!("the connection ended after {len} of {total} bytes"), again: true };
                self.pause(copied.err().unwrap_or_else(cut), &mut tries)?;
            } else {
                copied.map_err(|failure| failure.why)?;
                ensure!(len == total, "expected {total} bytes of {file} as the hub says, got more");
            }
        }
        bar.finish_and_clear();
        std::fs::rename(&path, &blob).with_context(|| format!("cannot rename {}", path.display()))?;
        Ok(etag)
    }

    /// Waits before the next try, or gives the failure back where no try is left.
    fn pause(&self, failure: Failure, tries: &mut u32) -> Result<()> {
        *tries += 1;
        if !failure.again || *tries >= TRIES {
            return Err(failure.why);
        }
        std::thread::sleep(Duration::from_millis(200 << *tries));
        Ok(())
    }

    /// Asks for `url`, from the byte `start` on, and follows redirects. The token goes to the hub only.
    fn open(&self, url: &str, start: Option<u64>, limit: Duration) -> Result<Answer, Failure> {
        let (mut url, mut etag, mut total) = (url.to_string(), None, None);
        for _ in 0..REDIRECTS {
            let mut request = self.agent.get(&url).header("accept-encoding", "identity");
            match start {
                None => request = request.config().timeout_global(Some(limit)).build(),
                // An empty file has no byte 0, and servers may refuse it.
                Some(0) => {}
                Some(start) => request = request.header("range", format!("bytes={start}-")),
            }
            if let Some(token) =
                self.settings.token.as_ref().filter(|_| origin(&url) == origin(&self.settings.endpoint))
            {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let answer = request.call().map_err(|e| silent(e, limit))?;
            let (status, headers) = (answer.status(), answer.headers());
            // The hub describes the file before it sends to where the bytes are.
            etag = etag.or_else(|| text(headers, "x-linked-etag").map(unquoted));
            total = total.or_else(|| text(headers, "x-linked-size")?.parse().ok());
            if let (true, Some(to)) = (status.is_redirection(), text(headers, "location")) {
                url = if to.starts_with('/') { origin(&url).to_string() + to } else { to.to_string() };
                continue;
            }
            if !status.is_success() {
                return Err(self.refused(status, headers));
            }
            let range = text(headers, "content-range").and_then(|range| range.strip_prefix("bytes "));
            let (first, of) = range.map_or((None, None), |range| {
                (
                    range.split('-').next().and_then(|n| n.parse().ok()),
                    range.rsplit('/').next().and_then(|n| n.parse().ok()),
                )
            });
            let is_part = status == StatusCode::PARTIAL_CONTENT;
            let own = if is_part { of } else { text(headers, "content-length").and_then(|n| n.parse().ok()) };
            let etag = etag.or_else(|| text(headers, "etag").map(unquoted)).filter(|etag| is_file_name(etag));
            let first = if is_part { first.unwrap_or(0) } else { 0 };
            return Ok(Answer { status, etag, total: total.or(own), first, body: answer.into_body() });
        }
        Err(anyhow!("the hub redirects more than {REDIRECTS} times").into())
    }

    /// What a status means.
    fn refused(&self, status: StatusCode, headers: &HeaderMap) -> Failure {
        let Name { id, revision, .. } = self.name;
        let Settings { endpoint, token, .. } = self.settings;
        let with = if token.is_some() { "the token in use (HF_TOKEN) does not open it" } else { "HF_TOKEN is not set" };
        let why = match (status.as_u16(), text(headers, "x-error-code")) {
            (401 | 403, Some("GatedRepo")) => {
                format!("{id} is gated: its terms are to be accepted at {endpoint}/{id}, and {with}")
            }
            (404, Some("RevisionNotFound")) => format!("{id} has no revision {revision}"),
            (404, Some("EntryNotFound")) => format!("{id} has no such file"),
            (401 | 404, _) => format!("there is no {id}, or it is private and {with}"),
            (403, _) => format!("{id} may not be read: {with}"),
            (429, _) => "the hub has had too many requests from here".to_string(),
            (code @ 500.., _) => format!("the hub is out of order: status {code}"),
            (code, _) => format!("the hub answers with status {code}"),
        };
        let message = text(headers, "x-error-message").map_or(String::new(), |message| format!(" ({message})"));
        let again = status.is_server_error() || matches!(status.as_u16(), 408 | 429);
        Failure { why: anyhow!("{why}{message}"), again }
    }
}

/// Writes the bytes of an answer behind the first `len` ones.
fn copy(
    answer: Answer,
    (etag, total): (&str, u64),
    part: &mut File,
    len: u64,
    limit: Duration,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    if answer.etag.as_deref() != Some(etag) || answer.total != Some(total) {
        return Err(anyhow!("the file has changed on the hub").into());
    }
    let written = |e| Failure::from(Error::new(e).context("cannot write into the cache"));
    // A server that knows no ranges begins again.
    let at = if answer.first == len { len } else { 0 };
    if answer.first > at {
        return Err(anyhow!(
            "expected the bytes from {len} on, got status {} and those from {}",
            answer.status,
            answer.first
        )
        .into());
    }
    part.set_len(at).and_then(|()| part.seek(SeekFrom::Start(at))).map_err(written)?;
    bar.set_position(at);
    // One byte more shows a body that is too long.
    let mut body = answer.body.into_reader().take(total - at + 1);
    let mut buffer = vec![0; 1 << 18];
    loop {
        let read = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(silent(ureq::Error::from(e), limit)),
        };
        part.write_all(&buffer[..read]).map_err(written)?;
        bar.inc(read as u64);
    }
    Ok(())
}

fn silent(e: ureq::Error, limit: Duration) -> Failure {
    let why = match e {
        ureq::Error::Timeout(_) => anyhow!("the hub did not answer within {} s", limit.as_secs_f64()),
        e => e.into(),
    };
    Failure { why, again: true }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.why
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

fn unquoted(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_string()
}

/// Scheme and host of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |i| i + 3);
    url[host..].find('/').map_or(url, |end| &url[..host + end])
}

/// Whether a text from the hub is safe as the name of one file.
fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name() == Some(name.as_ref()) && !name.contains('\\')
}

/// A path in an address.
fn escaped(file: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    file.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(unix)]
fn link(target: &str, _: &Path, pointer: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, pointer)
}

#[cfg(not(unix))]
fn link(_: &str, blob: &Path, pointer: &Path) -> std::io::Result<()> {
    std::fs::hard_link(blob, pointer)
}
