//! A model hub of one repository on this machine.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How the hub behaves.
#[derive(Clone, PartialEq)]
pub enum Habit {
    Good,
    /// Accepts connections and says nothing.
    Silent,
    /// Lists files and then says nothing.
    SilentFiles,
    /// Ends each file's first transfer in the middle.
    Cuts,
    /// Sends the first half of a file again and again.
    NeverWhole,
    /// Says one byte less than each file has.
    Understates,
    /// Sends those who want a file to another server.
    Redirects(String),
    /// Refuses with a status and an `x-error-code`.
    Refuses(&'static str, &'static str),
}

#[derive(Debug)]
pub struct Request {
    pub path: String,
    /// The first byte that was wanted.
    pub start: usize,
    has_range: bool,
    pub token: Option<String>,
}

pub struct Hub {
    pub endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

pub const COMMIT: &str = "c0ffeec0ffeec0ffeec0ffeec0ffeec0ffeec0ff";

impl Hub {
    /// Serves the files of `dir` as the repository `someone/demo` at revision `v1`, which is [`COMMIT`], until the process ends.
    pub fn serve(dir: &Path, habit: Habit) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (dir, log) = (dir.to_path_buf(), requests.clone());
        let revisions = ["v1", COMMIT].map(|name| format!("/api/models/someone/demo/revision/{name}"));
        std::thread::spawn(move || {
            let mut begun = HashSet::new();
            for stream in listener.incoming().flatten() {
                let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
                if habit == Habit::Silent {
                    wait(stream);
                    continue;
                }
                let Some(request) = read(&stream) else { continue };
                let file = request.path.strip_prefix(&format!("/someone/demo/resolve/{COMMIT}/"));
                match (&habit, file) {
                    (Habit::Refuses(status, code), _) => {
                        answer(&stream, status, &format!("x-error-code: {code}\r\n"), b"")
                    }
                    (_, None) if revisions.contains(&request.path) => {
                        answer(&stream, "200 OK", "", list(&dir).as_bytes())
                    }
                    (_, None) => answer(&stream, "404 Not Found", "x-error-code: RepoNotFound\r\n", b""),
                    (Habit::SilentFiles, Some(_)) => wait(stream.try_clone().expect("a handle")),
                    (Habit::Redirects(to), Some(_)) => {
                        let headers = format!("location: {to}{}\r\nx-linked-etag: \"linked\"\r\n", request.path);
                        answer(&stream, "302 Found", &headers, b"")
                    }
                    (habit, Some(name)) => {
                        let cuts = match habit {
                            Habit::Cuts => begun.insert(name.to_string()),
                            other => *other == Habit::NeverWhole,
                        };
                        let start = if *habit == Habit::NeverWhole { 0 } else { request.start };
                        match dir.join(name).metadata() {
                            Ok(file) if file.len() == 0 && request.has_range => {
                                answer(&stream, "416 Range Not Satisfiable", "content-range: bytes */0\r\n", b"")
                            }
                            file => {
                                let less =
                                    file.ok().filter(|_| *habit == Habit::Understates).map(|file| file.len() - 1);
                                send(&stream, &dir.join(name), start, cuts, less)
                            }
                        }
                    }
                }
                log.lock().expect("the log").push(request);
            }
        });
        Self { endpoint, requests }
    }

    /// What was asked for since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.requests.lock().expect("the log"))
    }
}

/// That of the server of https, which nobody knows. `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 36500 -nodes -subj
/// /CN=localhost -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE` makes one; its key is in PKCS 8.
pub const CERTIFICATE: &str = include_str!("localhost.pem");

/// The address of a server of https before the one at `endpoint`.
pub fn with_tls(endpoint: &str) -> String {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).expect("a certificate");
    let key = PrivateKeyDer::Pkcs8(include_bytes!("localhost.key.der")[..].into());
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key);
    let config = Arc::new(config.expect("a server"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("https://localhost:{}", listener.local_addr().expect("an address").port());
    let behind = endpoint.strip_prefix("http://").expect("http").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut client = StreamOwned::new(ServerConnection::new(config.clone()).expect("a connection"), stream);
            // A request has no body, and there is none of a client that does not trust this server.
            let (mut request, mut answer) = (Vec::new(), Vec::new());
            let mut lines = BufReader::new(&mut client);
            while !request.ends_with(b"\r\n\r\n") && matches!(lines.read_until(b'\n', &mut request), Ok(1..)) {}
            if request.is_empty() {
                continue;
            }
            let mut server = TcpStream::connect(&behind).expect("the server behind");
            server.write_all(&request).and_then(|()| server.read_to_end(&mut answer)).expect("its answer");
            let _ = client.write_all(&answer);
            client.conn.send_close_notify();
            let _ = client.flush();
        }
    });
    address
}

/// Keeps a connection until the client closes it.
fn wait(mut stream: TcpStream) {
    std::thread::spawn(move || while matches!(stream.read(&mut [0; 1024]), Ok(1..)) {});
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_string();
    let mut request = Request { path, start: 0, has_range: false, token: None };
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ")?;
        match name.to_lowercase().as_str() {
            "range" => {
                request.has_range = true;
                request.start = value.strip_prefix("bytes=")?.split('-').next()?.parse().ok()?;
            }
            "authorization" => request.token = Some(value.to_string()),
            _ => {}
        }
    }
    Some(request)
}

fn list(dir: &Path) -> String {
    let names = std::fs::read_dir(dir).expect("a directory").map(|e| e.expect("an entry").file_name());
    let siblings: Vec<_> = names.map(|name| serde_json::json!({"rfilename": name.to_str().expect("a name")})).collect();
    serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string()
}

/// Sends a file from byte `start` on, or half of the rest. `linked` is a length that the hub says.
fn send(stream: &TcpStream, path: &Path, start: usize, cut: bool, linked: Option<u64>) {
    let Ok(bytes) = std::fs::read(path) else { return answer(stream, "404 Not Found", "", b"") };
    let name = path.file_name().expect("a name").display();
    let (rest, status) = (&bytes[start..], if start > 0 { "206 Partial Content" } else { "200 OK" });
    let range = format!("content-range: bytes {start}-{}/{}\r\n", bytes.len().max(1) - 1, bytes.len());
    let mut headers = format!("etag: W/\"{name}\"\r\n{}", if start > 0 { &range } else { "" });
    if let Some(len) = linked {
        headers += &format!("x-linked-size: {len}\r\n");
    }
    let end = if cut { rest.len() / 2 } else { rest.len() };
    answer_with(stream, status, &headers, rest.len(), &rest[..end]);
}

fn answer(stream: &TcpStream, status: &str, headers: &str, body: &[u8]) {
    answer_with(stream, status, headers, body.len(), body);
}

fn answer_with(mut stream: &TcpStream, status: &str, headers: &str, len: usize, body: &[u8]) {
    let head = format!("HTTP/1.1 {status}\r\n{headers}content-length: {len}\r\nconnection: close\r\n\r\n");
    // A client that went away is its own problem.
    let _ = stream.write_all(head.as_bytes()).and_then(|_| stream.write_all(body));
}
