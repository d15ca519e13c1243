//! A model hub of one repository on this machine.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub struct Hub {
    pub endpoint: String,
    served: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    /// Serves the files of `dir` as the repository `id` at `revision` until the process ends.
    pub fn serve(dir: &Path, id: &str, revision: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let served = Arc::new(Mutex::new(Vec::new()));
        let (dir, log) = (dir.to_path_buf(), served.clone());
        let listing = format!("/api/models/{id}/revision/{revision}");
        let files = format!("/{id}/resolve/{revision}/");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let Some((path, range)) = request(&stream) else { continue };
                if path == listing {
                    answer(&stream, "200 OK", "", list(&dir).as_bytes());
                } else if let Some(name) = path.strip_prefix(&files) {
                    file(&stream, &dir.join(name), range);
                } else {
                    answer(&stream, "404 Not Found", "", b"");
                }
                log.lock().expect("the log").push(path);
            }
        });
        Self { endpoint, served }
    }

    /// The paths asked for so far.
    pub fn served(&self) -> Vec<String> {
        self.served.lock().expect("the log").clone()
    }
}

/// The path, and the bounds of a `Range: bytes=first-last`.
fn request(stream: &TcpStream) -> Option<(String, (usize, usize))> {
    let mut lines = BufReader::new(stream).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_string();
    let mut range = (0, usize::MAX);
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        if let Some(bounds) = line.to_lowercase().strip_prefix("range: bytes=") {
            let (first, last) = bounds.split_once('-')?;
            range = (first.parse().ok()?, last.parse().unwrap_or(usize::MAX));
        }
    }
    Some((path, range))
}

fn list(dir: &Path) -> String {
    let names = std::fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry").file_name());
    let siblings: Vec<_> = names.map(|name| serde_json::json!({"rfilename": name.to_str().expect("a name")})).collect();
    serde_json::json!({"sha": "c0ffee", "siblings": siblings}).to_string()
}

fn file(stream: &TcpStream, path: &PathBuf, (first, last): (usize, usize)) {
    match std::fs::read(path) {
        Err(_) => answer(stream, "404 Not Found", "", b""),
        Ok(bytes) => {
            let end = last.saturating_add(1).min(bytes.len());
            let name = path.file_name().expect("a name").display();
            let headers = format!(
                "x-repo-commit: c0ffee\r\netag: \"{name}\"\r\ncontent-range: bytes {first}-{}/{}\r\n",
                end - 1,
                bytes.len()
            );
            answer(stream, "206 Partial Content", &headers, &bytes[first..end]);
        }
    }
}

fn answer(mut stream: &TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n", body.len());
    // A client that went away is its own problem.
    let _ = stream.write_all(head.as_bytes()).and_then(|_| stream.write_all(body));
}
