//! The contract, without Dynamo's frontend: the conformance kit, and what it does not look at.

use candle_gdn_dynamo::{Args, Worker};
use clap::Parser;
use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{
    BackendError, DynamoError, ErrorType, FinishReason, GenerateContext, LLMEngine, LLMEngineOutput, OutputOptions,
    PrefillResult, PreprocessedRequest, SamplingOptions, StopConditions,
};
use dynamo_llm::model_card::ModelDeploymentCard;
use dynamo_runtime::distributed::DistributedConfig;
use dynamo_runtime::{DistributedRuntime, Runtime};
use futures::future::join_all;
use futures::stream::BoxStream;
use futures::StreamExt;
use std::path::Path;
use std::time::{Duration, Instant};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/generate/demo");

type Outputs = BoxStream<'static, Result<LLMEngineOutput, DynamoError>>;

/// The demo in f32 on the CPU, or with `CANDLE_GDN_TEST_DEVICE=cuda` on the first GPU.
fn on_gpu() -> bool {
    let gpu = std::env::var("CANDLE_GDN_TEST_DEVICE").is_ok_and(|device| device == "cuda");
    assert!(!gpu || cfg!(feature = "cuda"), "CANDLE_GDN_TEST_DEVICE=cuda: expected --features cuda");
    gpu
}

fn arguments(args: &[&str]) -> Args {
    let device: &[&str] = if on_gpu() { &["--dtype", "f32"] } else { &["--cpu"] };
    Args::parse_from(["worker", "--max-seq-len", "512"].iter().chain(device).chain(args))
}

/// So many sequences at once.
fn worker(batch: usize, args: &[&str]) -> Worker {
    Worker::new(arguments(&[args, &["--batch", &batch.to_string()]].concat())).unwrap().0
}

/// Two ranks, where there are devices for them.
const TWO_RANKS: &[&str] = &["--tensor-parallel", "2"];

fn has_two_devices() -> bool {
    #[cfg(feature = "nccl")]
    if on_gpu() {
        use candle_core::cuda_backend::cudarc::driver::CudaContext;
        return CudaContext::device_count().unwrap() >= 2;
    }
    !on_gpu()
}

/// Ways to run the same model.
fn ways() -> Vec<&'static [&'static str]> {
    let one = [&[][..], &["--draft", "4"], &["--mtp", "on"]];
    one.into_iter().chain(has_two_devices().then_some(TWO_RANKS)).collect()
}

fn request(tokens: Vec<u32>, max_tokens: u32) -> PreprocessedRequest {
    PreprocessedRequest::builder()
        .model("demo".into())
        .token_ids(tokens)
        .stop_conditions(StopConditions {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..StopConditions::default()
        })
        .sampling_options(SamplingOptions::default())
        .output_options(OutputOptions::default())
        .build()
        .unwrap()
}

fn prompt(n: u32) -> Vec<u32> {
    (0..5 + 7 * n).map(|i| (i * 31 + n * 17) % 1000 + 1).collect()
}

async fn stream(worker: &Worker, request: PreprocessedRequest) -> Result<Outputs, DynamoError> {
    worker.generate(request, GenerateContext::new(mock_context(), None)).await
}

async fn tokens(worker: &Worker, request: PreprocessedRequest) -> (Vec<u32>, FinishReason) {
    tokens_or_error(worker, request).await.unwrap()
}

async fn tokens_or_error(
    worker: &Worker,
    request: PreprocessedRequest,
) -> Result<(Vec<u32>, FinishReason), DynamoError> {
    let items: Vec<_> = stream(worker, request).await?.collect().await;
    let items = items.into_iter().collect::<Result<Vec<_>, _>>()?;
    let reason = items.last().and_then(|item| item.finish_reason.clone()).unwrap();
    Ok((items.into_iter().flat_map(|item| item.token_ids).collect(), reason))
}

#[tokio::test]
async fn conformance() {
    for args in ways() {
        run_conformance(|| worker(4, args)).await.unwrap();
    }
    run_conformance(|| worker(4, &["--draft", "4", "--mtp", "on", "--prefix-cache", "0"])).await.unwrap();
}

#[tokio::test]
async fn together_as_alone_whatever_runs_it() {
    let want = worker(1, &["--prefix-cache", "0"]);
    want.start(0).await.unwrap();
    let mut alone = Vec::new();
    for n in 0..12 {
        alone.push(tokens(&want, request(prompt(n), 30 + n)).await);
    }
    assert!(alone.iter().enumerate().all(|(n, (tokens, _))| tokens.len() == 30 + n));
    for args in ways() {
        let worker = worker(4, args);
        worker.start(0).await.unwrap();
        let together = join_all((0..12).map(|n| tokens(&worker, request(prompt(n), 30 + n)))).await;
        assert!(together == alone, "{args:?}");
        worker.cleanup().await.unwrap();
    }
}

/// Log-probabilities come with each token, whoever is beside, and are what they are without drafts; they change no token.
#[tokio::test]
async fn log_probabilities_come_with_the_tokens() {
    let asking = |n: u32, logprobs| {
        let mut request = request(prompt(n), 30);
        request.output_options.logprobs = logprobs;
        request.sampling_options.presence_penalty = Some([0., 0.8][n as usize % 2]);
        request
    };
    let plain = worker(1, &[]);
    plain.start(0).await.unwrap();
    let mut known: Vec<LLMEngineOutput> = Vec::new();
    for args in ways() {
        let worker = worker(4, args);
        worker.start(0).await.unwrap();
        let counts = [Some(3), None, Some(0), Some(20), None, Some(1)];
        let answers = (0..6u32).map(|n| {
            let request = asking(n, counts[n as usize]);
            async { stream(&worker, request).await.unwrap().map(Result::unwrap).collect::<Vec<_>>().await }
        });
        for (n, (items, count)) in join_all(answers).await.into_iter().zip(counts).enumerate() {
            let mut all = LLMEngineOutput::default();
            let (mut logprobs, mut tops) = (Vec::new(), Vec::new());
            for item in items {
                assert_eq!(item.log_probs.as_ref().map(Vec::len), count.map(|_| item.token_ids.len()));
                all.token_ids.extend(item.token_ids);
                logprobs.extend(item.log_probs.unwrap_or_default());
                tops.extend(item.top_logprobs.unwrap_or_default());
            }
            assert_eq!(all.token_ids, tokens(&plain, asking(n as u32, None)).await.0);
            assert_eq!(tops.len(), count.map_or(0, |_| all.token_ids.len()));
            for (top, (token, logprob)) in tops.iter().zip(all.token_ids.iter().zip(&logprobs)) {
                assert_eq!(Some(top.len() as u32), count);
                assert!(top.iter().zip(1..).all(|(one, rank)| one.rank == rank));
                assert!(top.is_sorted_by(|a, b| a.logprob >= b.logprob) && *logprob <= 0.);
                let own = top.iter().find(|one| one.token_id == *token);
                assert!(own.is_none_or(|own| own.logprob == *logprob), "{top:?}");
                // Nothing is left for the others than what these leave.
                let sum: f64 = top.iter().map(|one| one.logprob.exp()).sum();
                assert!(sum < 1. + 1e-5 && (own.is_some() || sum + logprob.exp() < 1. + 1e-5), "{top:?}");
            }
            (all.log_probs, all.top_logprobs) = (Some(logprobs), Some(tops));
            match known.get(n) {
                None => known.push(all),
                Some(first) => {
                    let of = |all: &LLMEngineOutput| all.log_probs.clone().unwrap_or_default();
                    let near = |(a, b): (f64, f64)| (a - b).abs() < 1e-3;
                    assert!(of(first).into_iter().zip(of(&all)).all(near), "{args:?}");
                }
            }
        }
        worker.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn a_full_queue_refuses() {
    for (batch, waiting) in [(2, 1), (3, 0)] {
        let worker = worker(batch, &["--max-waiting", &waiting.to_string()]);
        worker.start(0).await.unwrap();
        let room = batch + waiting;
        // All at once: the engine has seen none of them.
        let long = join_all((0..room as u32).map(|n| stream(&worker, request(prompt(n), 400)))).await;
        let mut long: Vec<_> = long.into_iter().map(Result::unwrap).collect();
        let refused: Vec<_> = stream(&worker, request(prompt(3), 1)).await.unwrap().collect().await;
        let [Err(error)] = &refused[..] else { panic!("{refused:?}") };
        assert_eq!(error.error_type(), ErrorType::WorkerOverloaded);
        long.pop();
        // Until the engine has seen that one is gone.
        let end = Instant::now() + Duration::from_secs(10);
        while tokens_or_error(&worker, request(prompt(3), 1)).await.is_err() {
            assert!(Instant::now() < end, "one has made room");
        }
    }
}

#[tokio::test]
async fn what_cannot_run_is_refused() {
    let worker = worker(4, &[]);
    worker.start(0).await.unwrap();
    let [mut with_logprobs, mut of_the_prompt] = [0; 2].map(|_| request(prompt(1), 4));
    with_logprobs.output_options.logprobs = Some(21);
    of_the_prompt.output_options.prompt_logprobs = Some(1);
    for (request, word) in [
        (request(vec![1; 513], 4), "at most 512 tokens"),
        (request(vec![5000], 4), "vocab_size"),
        (request(vec![], 4), "at least 1 token"),
        (with_logprobs, "at most 20 tokens"),
        (of_the_prompt, "prompt_logprobs"),
    ] {
        let error = stream(&worker, request).await.err().unwrap();
        assert_eq!(error.error_type(), ErrorType::Backend(BackendError::InvalidArgument));
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[tokio::test]
async fn the_end_waits_for_what_runs() {
    let worker = worker(4, &[]);
    worker.start(0).await.unwrap();
    let outputs = stream(&worker, request(prompt(1), 200)).await.unwrap();
    let (items, ended) = tokio::join!(outputs.collect::<Vec<_>>(), worker.cleanup());
    ended.unwrap();
    assert!(matches!(items.last(), Some(Ok(item)) if matches!(item.finish_reason, Some(FinishReason::Length))));
    let error = stream(&worker, request(prompt(1), 1)).await.err().unwrap();
    assert_eq!(error.error_type(), ErrorType::WorkerUnavailable);
}

#[tokio::test]
async fn the_end_does_not_wait_for_ever() {
    let worker = worker(4, &["--drain", "0"]);
    worker.start(0).await.unwrap();
    let mut outputs = stream(&worker, request(prompt(1), 500)).await.unwrap();
    outputs.next().await.unwrap().unwrap();
    let start = Instant::now();
    worker.cleanup().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
    let last = outputs.collect::<Vec<_>>().await.pop().unwrap();
    // Of this kind are the errors with which the frontend takes a request elsewhere.
    assert_eq!(last.err().unwrap().error_type(), ErrorType::Backend(BackendError::EngineShutdown));
}

#[tokio::test]
async fn a_prompt_is_fed_here_and_completed_there() {
    let whole = worker(4, &["--prefix-cache", "0"]);
    let [first, second] = ["prefill", "decode"].map(|mode| worker(4, &["--disaggregation-mode", mode]));
    for worker in [&whole, &first, &second] {
        worker.start(0).await.unwrap();
    }
    let runtime = Runtime::from_current().unwrap();
    let runtime = DistributedRuntime::new(runtime, DistributedConfig::process_local()).await.unwrap();
    for (worker, component) in [(&first, "prefill"), (&second, "backend")] {
        let component = runtime.namespace("here").unwrap().component(component).unwrap();
        worker.on_endpoint_ready(component.endpoint("generate")).await.unwrap();
    }
    for prompt in [vec![9], prompt(0), prompt(9), prompt(20)] {
        let want = tokens(&whole, request(prompt.clone(), 20)).await;
        let mut items: Vec<_> = stream(&first, request(prompt.clone(), 1)).await.unwrap().collect().await;
        let item = items.pop().unwrap().unwrap();
        assert!(items.is_empty() && matches!(item.finish_reason, Some(FinishReason::Length)));
        let ticket = item.disaggregated_params.unwrap();
        assert_eq!(ticket.as_object().unwrap().is_empty(), prompt.len() == 1);
        assert_eq!(first.is_quiescent().await.unwrap(), Some(prompt.len() == 1), "until the state is fetched");
        let mut request = request(prompt, 20);
        request.prefill_result = Some(PrefillResult { disaggregated_params: ticket, prompt_tokens_details: None });
        // The second time the state is gone: the prompt is fed there.
        for _ in 0..2 {
            assert_eq!(tokens(&second, request.clone()).await, want);
        }
        assert_eq!(first.is_quiescent().await.unwrap(), Some(true));
    }
}

#[tokio::test]
async fn a_gguf_file_has_all_that_a_frontend_reads() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("small.gguf");
    candle_gdn_models_testing::gguf_writer::demo().write(&path).unwrap();
    let (of_file, config) = Worker::new(arguments(&["--model", path.to_str().unwrap()])).unwrap();
    let card = ModelDeploymentCard::load_from_disk(&config.model_name, None).unwrap();
    let text = "In the beginning God created";
    let encode = |card: &ModelDeploymentCard| card.tokenizer().unwrap().encode(text).unwrap().token_ids().to_vec();
    let prompt = encode(&card);
    assert_eq!(prompt, encode(&ModelDeploymentCard::load_from_disk(DEMO, None).unwrap()));
    assert!(card.prompt_formatter.is_some());
    assert_eq!(of_file.start(0).await.unwrap().model, "small");
    let of_folder = worker(1, &[]);
    of_folder.start(0).await.unwrap();
    assert_eq!(tokens(&of_file, request(prompt.clone(), 20)).await, tokens(&of_folder, request(prompt, 20)).await);
}

/// The demo with another tokenizer_config.json, without tokenizer.json unless it is to keep it.
fn demo_with(tokenizer_config: &serde_json::Value, has_tokenizer: bool) -> tempfile::TempDir {
    let (dir, demo) = (tempfile::tempdir().unwrap(), Path::new(DEMO));
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        if has_tokenizer || name != "tokenizer.json" {
            std::os::unix::fs::symlink(demo.join(name), dir.path().join(name)).unwrap();
        }
    }
    std::fs::write(dir.path().join("tokenizer_config.json"), tokenizer_config.to_string()).unwrap();
    dir
}

fn read_json(path: impl AsRef<Path>) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_checkpoint_without_tokenizer_json_has_a_card() {
    let demo = Path::new(DEMO);
    let (tokenizer, mut config) =
        (read_json(demo.join("tokenizer.json")), read_json(demo.join("tokenizer_config.json")));
    let added = tokenizer["added_tokens"].as_array().unwrap();
    config["tokenizer_class"] = "GPT2Tokenizer".into();
    config["added_tokens_decoder"] = added.iter().map(|token| (token["id"].to_string(), token.clone())).collect();
    let dir = demo_with(&config, false);
    std::fs::write(dir.path().join("vocab.json"), tokenizer["model"]["vocab"].to_string()).unwrap();
    let pair = |merge: &serde_json::Value| format!("{} {}\n", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let merges: String = tokenizer["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    std::fs::write(dir.path().join("merges.txt"), merges).unwrap();

    let (_worker, config) = Worker::new(arguments(&["--model", dir.path().to_str().unwrap()])).unwrap();
    let card = ModelDeploymentCard::load_from_disk(&config.model_name, None).unwrap();
    let text = "In the beginning God created <|im_end|>";
    let encode = |card: &ModelDeploymentCard| card.tokenizer().unwrap().encode(text).unwrap().token_ids().to_vec();
    assert_eq!(encode(&card), encode(&ModelDeploymentCard::load_from_disk(DEMO, None).unwrap()));
    assert!(card.prompt_formatter.is_some());
    assert_eq!(config.endpoint_types, "chat,completions");
}

#[test]
fn without_a_chat_template_completions_are_served_alone() {
    let mut tokenizer_config = read_json(Path::new(DEMO).join("tokenizer_config.json"));
    tokenizer_config.as_object_mut().unwrap().remove("chat_template").unwrap();
    let dir = demo_with(&tokenizer_config, true);
    let model = ["--model", dir.path().to_str().unwrap()];
    let types = |args: &[&str]| Worker::new(arguments(&[&model, args].concat())).unwrap().1.endpoint_types;
    assert_eq!(types(&[]), "completions");
    // Who names a template has both.
    let template = dir.path().join("own.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    assert_eq!(types(&["--custom-jinja-template", template.to_str().unwrap()]), "chat,completions");
}

#[tokio::test]
async fn the_canary_is_a_request() {
    let worker = worker(4, &[]);
    worker.start(0).await.unwrap();
    let payload = worker.health_check_payload().await.unwrap().unwrap();
    let (tokens, reason) = tokens(&worker, serde_json::from_value(payload).unwrap()).await;
    assert_eq!((tokens.len(), reason), (1, FinishReason::Length));
}
