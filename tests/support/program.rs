//! The program of an example.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::SystemTime;

/// The example itself. `cargo test` builds the examples first and puts them beside the test's own directory; with
/// `--test` it leaves them as they are.
pub fn program(example: &str) -> Command {
    let test = std::env::current_exe().expect("the path of this test");
    let profile = test.parent().and_then(Path::parent).expect("target/<profile>/deps");
    let program = profile.join("examples").join(format!("{example}{}", std::env::consts::EXE_SUFFIX));
    assert!(program.is_file(), "{} is not built: cargo build --examples", program.display());
    let built = modified(&program);
    // Cargo leaves an example alone whose own sources are as they were.
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let examples = package.map(|dir| dir.join("examples")).find(|dir| dir.is_dir()).expect("the examples");
    let main = std::fs::read_to_string(examples.join(example).join("main.rs")).expect("its source");
    let common = if main.contains("../common/") { newest(&examples.join("common")) } else { SystemTime::UNIX_EPOCH };
    let sources = newest(&examples.join(example)).max(common);
    assert!(built >= sources, "{} is older than its sources: cargo build --examples", program.display());
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).env_remove("RUST_BACKTRACE").env_remove("RUST_LIB_BACKTRACE");
    command
}

fn modified(path: &Path) -> SystemTime {
    path.metadata().and_then(|m| m.modified()).expect("a time of modification")
}

fn newest(dir: &Path) -> SystemTime {
    let paths = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let times = paths.filter_map(|path| match path.extension() {
        _ if path.is_dir() => Some(newest(&path)),
        Some(ext) if ext == "rs" => Some(modified(&path)),
        _ => None,
    });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}
