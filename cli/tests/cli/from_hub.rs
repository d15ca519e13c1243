//! Models from the hub: what is fetched, what the cache is good for, and that nothing waits for ever.

use crate::cli::{command, Run, PROMPT};
use crate::generate::{shard, sharded};
use crate::gguf_writer::demo;
use crate::hub::{with_tls, Habit, Hub, CERTIFICATE, COMMIT};
use candle_core::quantized::GgmlDType;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NOBODY: &str = "http://127.0.0.1:9";

/// A user's machine, with an empty cache.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn command(&self, program: &str, endpoint: &str) -> Command {
        let mut command = command(program);
        for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            command.env_remove(proxy);
        }
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"] {
            command.env_remove(name);
        }
        command.env("HF_HOME", self.0.path()).env("HF_ENDPOINT", endpoint);
        command.env("HF_HUB_ETAG_TIMEOUT", "0.4").env("HF_HUB_DOWNLOAD_TIMEOUT", "0.4");
        command
    }

    fn run_with(&self, endpoint: &str, model: &str, variables: &[(&str, &str)]) -> Run {
        let mut command = self.command("generate", endpoint);
        command.args(["--model", model, "--prompt", PROMPT, "-n", "8"]);
        Run::of(command.envs(variables.iter().copied()).output().unwrap())
    }

    fn run(&self, endpoint: &str, model: &str) -> Run {
        self.run_with(endpoint, model, &[])
    }

    /// The run fails and says all `parts`.
    #[track_caller]
    fn fails(&self, endpoint: &str, model: &str, parts: &[&str]) {
        let run = self.run(endpoint, model);
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
        run.says(parts);
    }

    fn blob(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join("hub/models--someone--demo/blobs").join(name)
    }
}

const DEMO: &str = "someone/demo@v1";

fn want() -> String {
    crate::cli::generate(&["--prompt", PROMPT, "-n", "8"]).stdout
}

#[test]
fn what_is_needed_is_fetched_once() {
    let (copy, machine) = (sharded(), Machine::new());
    copy.write("training_state.bin", "not for us");
    let hub = Hub::serve(copy.path(), Habit::Good);
    assert_eq!(machine.run(&hub.endpoint, DEMO).good().stdout, want());
    let first = hub.requests();
    assert!(first.iter().any(|request| request.path.ends_with(&shard(2))));
    assert!(!first.iter().any(|request| request.path.contains("training_state")));
    let link = format!("{}/someone/demo/tree/v1", hub.endpoint);
    assert_eq!(machine.run(&hub.endpoint, &link).good().stdout, want());
    assert_eq!(hub.requests().len(), 1, "the list alone");

    // The hub gone, the cache answers; what is not there is named.
    let run = machine.run(NOBODY, DEMO).good();
    assert_eq!(run.stdout, want());
    run.says(&["cached files of someone/demo"]);
    let offline = machine.run_with(&hub.endpoint, DEMO, &[("HF_HUB_OFFLINE", "1")]).good();
    assert!(offline.stdout == want() && !offline.stderr.contains("hub:"), "{offline:?}");
    let elsewhere = machine.0.path().join("elsewhere");
    let other = [("HF_HUB_OFFLINE", "1"), ("HF_HUB_CACHE", elsewhere.to_str().unwrap())];
    let run = machine.run_with(&hub.endpoint, DEMO, &other);
    assert_eq!(run.code, Some(1));
    run.says(&["HF_HUB_OFFLINE", "elsewhere", "someone/demo at revision v1"]);
    assert!(hub.requests().is_empty());
    machine.run_with(&hub.endpoint, DEMO, &other[1..]).good();
    assert!(elsewhere.join("models--someone--demo/refs/v1").is_file());
    machine.fails(NOBODY, "someone/else", &["--model", "someone/else"]);
    // Half of a cache does not count.
    std::fs::remove_file(machine.blob(&shard(2))).unwrap();
    machine.fails(NOBODY, DEMO, &["cannot list someone/demo at revision v1"]);
    assert_eq!(machine.run(&hub.endpoint, DEMO).good().stdout, want());
    let run = machine.run_with(&hub.endpoint, DEMO, &[("HF_HUB_DOWNLOAD_TIMEOUT", "soon")]);
    assert_eq!(run.code, Some(1));
    run.says(&["HF_HUB_DOWNLOAD_TIMEOUT", "seconds", "soon"]);
}

/// A proxy that decrypts connections has a certificate of its own, which lies in the user's file.
#[test]
fn the_users_certificates_are_trusted() {
    let (copy, machine) = (sharded(), Machine::new());
    let endpoint = with_tls(&Hub::serve(copy.path(), Habit::Good).endpoint);
    machine.fails(&endpoint, DEMO, &["cannot list someone/demo", "certificate"]);
    let file = |name: &str, text: &str| {
        let path = machine.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (good, none) = (file("good.pem", CERTIFICATE), file("none.pem", "no certificate"));
    let broken = file("broken.pem", "-----BEGIN CERTIFICATE-----\n?");
    for (variables, part) in [
        ([("SSL_CERT_FILE", "/nowhere.pem"), ("REQUESTS_CA_BUNDLE", &good)], "/nowhere.pem"),
        ([("SSL_CERT_FILE", ""), ("REQUESTS_CA_BUNDLE", &none)], "REQUESTS_CA_BUNDLE"),
        ([("SSL_CERT_FILE", &broken), ("REQUESTS_CA_BUNDLE", "")], "PEM"),
    ] {
        let run = machine.run_with(&endpoint, DEMO, &variables);
        assert_eq!(run.code, Some(1), "{run:?}");
        run.says(&[part]);
    }
    assert_eq!(machine.run_with(&endpoint, DEMO, &[("SSL_CERT_FILE", &good)]).good().stdout, want());
    // Who needs no server needs no certificate.
    let offline = [("SSL_CERT_FILE", "/nowhere.pem"), ("HF_HUB_OFFLINE", "1")];
    assert_eq!(machine.run_with(&endpoint, DEMO, &offline).good().stdout, want());
}

/// Other programs leave a commit's weights in the cache without its tokenizer.
#[test]
fn what_a_cached_commit_lacks_is_fetched() {
    let (copy, machine) = (sharded(), Machine::new());
    let hub = Hub::serve(copy.path(), Habit::Good);
    let model = format!("someone/demo@{COMMIT}");
    assert_eq!(machine.run(&hub.endpoint, &model).good().stdout, want());
    let snapshot = machine.0.path().join("hub/models--someone--demo/snapshots").join(COMMIT);
    std::fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
    std::fs::remove_file(machine.blob("tokenizer.json")).unwrap();
    hub.requests();
    assert_eq!(machine.run(&hub.endpoint, &model).good().stdout, want());
    let requests = hub.requests();
    assert!(requests.len() == 2 && requests[1].path.ends_with("tokenizer.json"), "{requests:?}");
    // The hub gone, the cache answers.
    machine.run(NOBODY, &model).good().says(&["cached files of someone/demo"]);
}

/// A bound that is far above what two cores under load need, and far below for ever.
#[test]
fn a_silent_hub_is_not_waited_for() {
    let (copy, machine, start) = (sharded(), Machine::new(), Instant::now());
    let silent = Hub::serve(copy.path(), Habit::Silent);
    machine.fails(&silent.endpoint, DEMO, &["someone/demo", "did not answer within 0.4 s"]);
    let no_files = Hub::serve(copy.path(), Habit::SilentFiles);
    machine.fails(&no_files.endpoint, DEMO, &["cannot download config.json", "did not answer within 0.4 s"]);
    assert_eq!(no_files.requests().len(), 1 + 3, "three tries");
    machine.run(&Hub::serve(copy.path(), Habit::Good).endpoint, DEMO).good();
    let run = machine.run(&silent.endpoint, DEMO).good();
    assert_eq!(run.stdout, want());
    run.says(&["did not answer within 0.4 s; using the cached files of someone/demo"]);
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_cut_download_goes_on() {
    let (copy, machine) = (sharded(), Machine::new());
    let hub = Hub::serve(copy.path(), Habit::Cuts);
    assert_eq!(machine.run(&hub.endpoint, DEMO).good().stdout, want());
    assert!(hub.requests().iter().any(|request| request.path.ends_with(&shard(1)) && request.start > 0));

    let machine = Machine::new();
    let never = Hub::serve(copy.path(), Habit::NeverWhole);
    machine.fails(&never.endpoint, DEMO, &["cannot download config.json"]);
    let whole = std::fs::read(copy.file("config.json")).unwrap();
    let part = machine.blob("config.json.candle-gdn.incomplete");
    assert!(!machine.blob("config.json").exists() && part.metadata().unwrap().len() < whole.len() as u64);
    let hub = Hub::serve(copy.path(), Habit::Good);
    machine.run(&hub.endpoint, DEMO).good();
    assert!(hub.requests().iter().any(|request| request.path.ends_with("/config.json") && request.start > 0));
    assert_eq!(std::fs::read(machine.blob("config.json")).unwrap(), whole);
    // What is left of another process's try, longer than the file.
    let machine = Machine::new();
    std::fs::create_dir_all(machine.blob("")).unwrap();
    std::fs::write(machine.blob("config.json.candle-gdn.incomplete"), vec![b' '; whole.len() + 1]).unwrap();
    // And of another program's, which is left alone.
    let other = machine.blob("tokenizer.json.incomplete");
    std::fs::write(&other, vec![0; copy.file("tokenizer.json").metadata().unwrap().len() as usize]).unwrap();
    assert_eq!(machine.run(&hub.endpoint, DEMO).good().stdout, want());
    assert_eq!(std::fs::read(machine.blob("config.json")).unwrap(), whole);
    assert!(other.exists());

    let machine = Machine::new();
    let understates = Hub::serve(copy.path(), Habit::Understates);
    let why = format!("expected {} bytes of config.json", whole.len() - 1);
    machine.fails(&understates.endpoint, DEMO, &["cannot download config.json", &why]);
    assert!(!machine.blob("config.json").exists());
}

/// As transformers takes the files, whatever an index of an earlier save says.
#[test]
fn a_single_file_comes_before_shards() {
    let (copy, machine) = (sharded(), Machine::new());
    let single = format!("{}/model.safetensors", candle_gdn_models_testing::demo::DEMO);
    std::fs::copy(single, copy.file("model.safetensors")).unwrap();
    let hub = Hub::serve(copy.path(), Habit::Good);
    assert_eq!(machine.run(&hub.endpoint, DEMO).good().stdout, want());
    assert!(!hub.requests().iter().any(|request| request.path.ends_with(&shard(1))));
}

#[test]
fn refusals_are_sentences() {
    let (copy, machine) = (sharded(), Machine::new());
    for (status, code, part) in [
        ("403 Forbidden", "GatedRepo", "someone/demo is gated"),
        ("401 Unauthorized", "RepoNotFound", "or it is private and HF_TOKEN is not set"),
        ("404 Not Found", "RevisionNotFound", "someone/demo has no revision v1"),
        ("404 Not Found", "", "there is no someone/demo"),
        ("503 Service Unavailable", "", "the hub is out of order: status 503"),
    ] {
        let hub = Hub::serve(copy.path(), Habit::Refuses(status, code));
        machine.fails(&hub.endpoint, DEMO, &["someone/demo at revision v1", part]);
    }
}

/// The token goes to the hub, and not to whom the hub sends us.
#[test]
fn the_token_stays_with_the_hub() {
    let (copy, machine) = (sharded(), Machine::new());
    copy.remove(&["generation_config.json", "tokenizer.json", "tokenizer_config.json"]);
    let files = Hub::serve(copy.path(), Habit::Good);
    let hub = Hub::serve(copy.path(), Habit::Redirects(files.endpoint.clone()));
    let tokens = |hub: &Hub| hub.requests().into_iter().map(|request| request.token).collect::<Vec<_>>();
    std::fs::write(machine.0.path().join("token"), "of a file\n").unwrap();
    // A hub that answers late under load would be asked nothing in the other tests' time.
    let patient = [("HF_HUB_ETAG_TIMEOUT", "30"), ("HF_HUB_DOWNLOAD_TIMEOUT", "30")];
    let dummy = |variables: &[(&str, &str)]| {
        machine.run_with(&hub.endpoint, DEMO, &[&patient[..], variables].concat());
    };
    // All files have one ETag here, so that one is fetched and the rest is taken for the same.
    dummy(&[]);
    assert!(tokens(&hub).iter().all(|token| token.as_deref() == Some("Bearer of a file")));
    let there = tokens(&files);
    assert!(!there.is_empty() && there.iter().all(Option::is_none));
    dummy(&[("HF_TOKEN", " mine ")]);
    assert_eq!(tokens(&hub)[0].as_deref(), Some("Bearer mine"));
    dummy(&[("HF_TOKEN", "mine"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]);
    assert_eq!(tokens(&hub)[0], None);
}

#[test]
fn gguf_files_of_the_hub() {
    let (repo, machine) = (tempfile::tempdir().unwrap(), Machine::new());
    let write = |name: &str| demo().quantized(GgmlDType::Q8_0).write(&repo.path().join(name)).unwrap();
    let other = |name: &str| std::fs::write(repo.path().join(name), "not for us").unwrap();
    write("demo-Q8_0.gguf");
    other("mmproj-F16.gguf");
    let hub = Hub::serve(repo.path(), Habit::Good);
    let want = crate::cli::generate(&["--model", &path(&repo, "demo-Q8_0.gguf"), "--prompt", PROMPT, "-n", "8"]).stdout;
    let says = |model: &str| {
        let run = machine.run(&hub.endpoint, model).good();
        assert_eq!(run.stdout, want, "{model}");
    };
    // One model needs no type.
    says(DEMO);
    other("demo-Q2_K.gguf");
    other("demo-BF16.gguf");
    for model in [
        "someone/demo@v1:q8_0",
        "someone/demo@v1:demo-Q8_0.gguf",
        &format!("{}/someone/demo/blob/v1/demo-Q8_0.gguf", hub.endpoint),
    ] {
        says(model);
    }
    let files = hub.requests().into_iter().filter(|request| request.path.contains("resolve")).count();
    assert_eq!(files, 1, "what is cached is not fetched, and nothing else is needed");
    machine.fails(&hub.endpoint, DEMO, &["no Q4_K_M", "BF16, Q2_K, Q8_0"]);
    machine.fails(&hub.endpoint, "someone/demo@v1:Q6_K", &["no GGUF file of type Q6_K", "Q8_0"]);
    write("demo-UD-Q4_K_M.gguf");
    says(DEMO);
    let run = machine.run(NOBODY, "someone/demo@v1:Q8_0").good();
    assert_eq!(run.stdout, want);
    let offline = |machine: &Machine, model: &str| machine.run_with(NOBODY, model, &[("HF_HUB_OFFLINE", "1")]).good();
    // Where another file is cached than the hub's list would choose.
    let machine = Machine::new();
    machine.run(&hub.endpoint, "someone/demo@v1:Q8_0").good();
    let says = "hub: --model names no GGUF file of someone/demo: demo-Q8_0.gguf is used, as it is cached";
    offline(&machine, DEMO).says(&[says]);
    machine.run(NOBODY, DEMO).good().says(&[says]);
    assert!(!offline(&machine, "someone/demo@v1:Q8_0").stderr.contains("hub: "));
}

#[test]
fn an_empty_file_is_a_file() {
    let (copy, machine) = (sharded(), Machine::new());
    copy.write("added_tokens.json", "");
    let hub = Hub::serve(copy.path(), Habit::Good);
    assert_eq!(machine.run(&hub.endpoint, DEMO).good().stdout, want());
    assert_eq!(machine.blob("added_tokens.json").metadata().unwrap().len(), 0);
}

/// A hub that has new files and does not give them, and a cache in which nothing can be written.
#[test]
fn cached_files_take_the_place_of_a_failed_update() {
    let (copy, machine) = (sharded(), Machine::new());
    machine.run(&Hub::serve(copy.path(), Habit::Good).endpoint, DEMO).good();
    let repo = machine.0.path().join("hub/models--someone--demo");
    std::fs::rename(repo.join("snapshots").join(COMMIT), repo.join("snapshots/0ld")).unwrap();
    std::fs::write(repo.join("refs/v1"), "0ld").unwrap();
    let run = machine.run(&Hub::serve(copy.path(), Habit::SilentFiles).endpoint, DEMO).good();
    assert_eq!(run.stdout, want());
    run.says(&["cannot download config.json", "using the cached files of someone/demo"]);
    std::fs::rename(repo.join("snapshots/0ld"), repo.join("snapshots").join(COMMIT)).unwrap();
    std::fs::remove_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs"), "no folder").unwrap();
    let run = machine.run(&Hub::serve(copy.path(), Habit::Good).endpoint, DEMO).good();
    assert_eq!(run.stdout, want());
    run.says(&["hub: cannot write", "refs/v1"]);
}

/// Nothing is asked of the hub, let alone weights.
#[test]
fn mistakes_in_the_arguments_come_before_a_download() {
    let (copy, machine) = (sharded(), Machine::new());
    let hub = Hub::serve(copy.path(), Habit::Good);
    for (program, args, says) in [
        ("generate", &["--prompt-file", "/nowhere"][..], "--prompt-file: cannot read /nowhere"),
        ("generate", &["--prompts-file", "/nowhere"], "--prompts-file: cannot read /nowhere"),
        ("generate", &["--system", "x"], "--system: expected --chat or --interactive"),
        ("generate", &["--chat"], "--chat: expected a message"),
        (
            "generate",
            &["--chat", "--prompt", "x", "--chat-template", "/nowhere"],
            "--chat-template: cannot read /nowhere",
        ),
        (
            "generate",
            &["--interactive", "--no-thinking", "--template-arg", "enable_thinking=true"],
            "--no-thinking: expected no --template-arg enable_thinking, which",
        ),
        ("generate", &["--interactive", "--tensor-parallel", "2"], "--interactive: expected one device"),
        ("perplexity", &["--token-ids", "5,x"], "--token-ids: expected a token id"),
        ("perplexity", &["--file", "/nowhere"], "--file: cannot read /nowhere"),
        ("perplexity", &["--token-ids", "1,2", "--tensor-parallel", "2"], "--tensor-parallel: expected 1"),
        ("finetune", &["--text", "/nowhere"], "--text: cannot read /nowhere"),
        ("finetune", &["--warmup", "70"], "--warmup: expected at most --steps (60)"),
    ] {
        let mut command = machine.command(program, &hub.endpoint);
        let run = Run::of(command.args(["--model", DEMO]).args(args).output().unwrap());
        assert_eq!(run.code, Some(1), "{run:?}");
        run.says(&[says]);
        assert_eq!(hub.requests().len(), 0, "{args:?}");
    }
}

fn path(dir: &TempDir, name: &str) -> String {
    Path::join(dir.path(), name).display().to_string()
}

/// Programs that begin together fetch each file once, wait for each other, and all find it.
#[test]
fn programs_that_fetch_at_once_leave_each_other_alone() {
    let copy = sharded();
    let hub = Hub::serve(copy.path(), Habit::Good);
    for round in 0..6 {
        let machine = Machine::new();
        let start = || {
            let mut command = machine.command("generate", &hub.endpoint);
            command.args(["--model", DEMO, "--prompt", PROMPT, "-n", "1"]);
            // Four programs share what this machine has.
            command.env("HF_HUB_ETAG_TIMEOUT", "30").env("HF_HUB_DOWNLOAD_TIMEOUT", "30");
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let programs: Vec<_> = (0..4).map(|_| start()).collect();
        for program in programs {
            let end = program.wait_with_output().unwrap();
            assert!(end.status.success(), "round {round}: {}", String::from_utf8_lossy(&end.stderr));
        }
    }
}
