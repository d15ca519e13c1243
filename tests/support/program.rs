//! Runs an example as a user does.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};

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
    let shared =
        if main.contains("candle_gdn_cli") { newest(&examples.join("../cli/src")) } else { SystemTime::UNIX_EPOCH };
    let sources = newest(&examples.join(example)).max(shared);
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
        // A program is not built of its tests.
        _ if path.file_stem().is_some_and(|name| name == "tests") => None,
        _ if path.is_dir() => Some(newest(&path)),
        Some(ext) if ext == "rs" => Some(modified(&path)),
        _ => None,
    });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// What a run printed and how it ended.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// Of a program that has ended.
    pub fn of(out: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Self { code: out.status.code(), stdout: text(out.stdout), stderr: text(out.stderr) }
    }

    /// Waits for the end.
    pub fn end(child: Child) -> Self {
        Self::of(child.wait_with_output().expect("an end"))
    }

    /// Waits for the end, but not longer than any program should take. What it writes must fit into pipes.
    #[track_caller]
    pub fn soon(mut child: Child) -> Self {
        let start = Instant::now();
        while child.try_wait().expect("a status").is_none() {
            if start.elapsed() > Duration::from_secs(60) {
                child.kill().expect("it can be killed");
                panic!("it hangs: {:?}", Self::end(child));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Self::end(child)
    }

    /// Fails unless it ended well.
    #[track_caller]
    pub fn good(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// Fails unless stderr says all `parts`.
    #[track_caller]
    pub fn says(&self, parts: &[&str]) {
        for part in parts {
            assert!(self.stderr.contains(part), "expected {part:?} in {self:?}");
        }
    }
}

/// An example that runs models, on the CPU.
pub fn command(example: &str) -> Command {
    let mut command = program(example);
    command.arg("--cpu");
    command
}

pub fn run(example: &str, args: &[impl AsRef<OsStr>]) -> Run {
    Run::of(command(example).args(args).output().expect("the example starts"))
}

/// Fails with exit status `code`, says `parts`, prints nothing on stdout and does not panic.
#[track_caller]
pub fn fails(example: &str, args: &[impl AsRef<OsStr>], code: i32, parts: &[&str]) {
    let run = run(example, args);
    assert_eq!((run.code, run.stdout.as_str()), (Some(code), ""), "{run:?}");
    assert!(!run.stderr.contains("panicked"), "{run:?}");
    run.says(parts);
}
