//! Dynamo's contract.

use crate::asked::{asked, invalid, Asked};
use crate::blocks::Router;
use crate::card::Card;
use crate::driver::{Driver, Output, Refusal, Running};
use crate::figures::Shared;
use crate::transfer::{Peers, Shelf, State, PATIENCE};
use crate::Args;
use anyhow::{anyhow, ensure, Context};
use async_trait::async_trait;
use candle_core::DType;
use candle_gdn_cli::args::ChatArgs;
use candle_gdn_cli::chat::Template;
use candle_gdn_cli::settings::Settings;
use candle_gdn_cli::Checkpoint;
use candle_gdn_models::{DraftHeadChoice, FinishReason, Logprobs, Request};
use dynamo_backend_common::{
    usage, AsyncEngineContext, BackendError, CompletionUsage, DisaggregationMode, DynamoError, EngineConfig, ErrorType,
    GenerateContext, KvEventSource, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, LlmRegistration, MetricsBindings,
    MetricsCtx, PreprocessedRequest, TopLogprob, WorkerConfig,
};
use dynamo_runtime::component::Endpoint;
use dynamo_runtime::traits::DistributedRuntimeProvider;
use futures::stream::BoxStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::RwLock;
use tokio::time::{sleep, timeout};

/// The endpoints that nobody named.
const BOTH: &str = "chat,completions";

type Outputs = BoxStream<'static, Result<LLMEngineOutput, DynamoError>>;

/// How often it is looked whether the last request has ended.
const LOOK: Duration = Duration::from_millis(50);

/// A model that Dynamo serves.
pub struct Worker {
    args: Arc<Args>,
    settings: Settings,
    name: String,
    /// Keeps the files that clients' frontends read.
    _card: Card,
    /// None before the start and from the end on.
    driver: RwLock<Option<Driver>>,
    shared: Arc<Shared>,
    router: Router,
    /// Requests so far.
    number: AtomicUsize,
    /// Of a worker that only feeds prompts, from the start on: their states.
    shelf: OnceLock<Arc<Shelf>>,
    /// The other workers, from the moment on when there is an endpoint.
    peers: OnceLock<Peers>,
    /// Bytes that a state has at most.
    state_bytes: u64,
}

impl Worker {
    /// Looks at the checkpoint's small files; the weights are read by [`LLMEngine::start`].
    ///
    /// # Errors
    /// When there is no such checkpoint, or it has no tokenizer.
    pub fn new(args: Args) -> anyhow::Result<(Self, WorkerConfig)> {
        let checkpoint = Checkpoint::find(&args.model)?;
        let config = checkpoint.config()?;
        let tokenizer = checkpoint.tokenizer()?;
        let mut settings = Settings::new(&args.sampling, &checkpoint, &config, tokenizer.as_ref())?;
        // As `generate --chat`: what the template writes behind an answer ends it. The frontend renders, so a template that minijinja
        // does not read is no error here.
        let chat = ChatArgs { chat_template: args.dynamo.custom_jinja_template.clone(), ..ChatArgs::default() };
        let mut endpoint_types = args.dynamo.endpoint_types.clone();
        match (Template::find(&checkpoint, &chat), &tokenizer) {
            (Ok(Some(template)), Some(tokenizer)) => settings.eos.extend(template.end_of_turn(tokenizer)),
            // The frontend would wait for one for ever, and serve no completions either.
            (Ok(None), _) if endpoint_types == BOTH => {
                tracing::warn!(
                    "the model has no chat template: it serves completions alone; --custom-jinja-template has one"
                );
                endpoint_types = "completions".into();
            }
            (Err(e), _) => tracing::warn!("the end of a turn is not read from the chat template: {e:#}"),
            _ => {}
        }
        let card = Card::new(&checkpoint, &config)?;
        let name = args.serve.served_model_name.clone().unwrap_or_else(|| card.name(args.model.model.as_deref()));
        let common = &args.dynamo;
        let mode = common.disaggregation_mode;
        let is_whole = args.serve.mtp == DraftHeadChoice::Off && args.model.tensor_parallel.get() == 1;
        ensure!(!mode.is_encode(), "--disaggregation-mode: expected agg, prefill or decode, got encode");
        ensure!(
            mode == DisaggregationMode::Aggregated || is_whole,
            "--disaggregation-mode {mode}: expected neither --mtp nor --tensor-parallel"
        );
        // Where the frontend looks for it, unless told.
        let is_default = common.component == DisaggregationMode::Aggregated.discovery_component();
        let component = if is_default { mode.discovery_component().into() } else { common.component.clone() };
        let worker = WorkerConfig {
            namespace: common.namespace.clone(),
            component,
            endpoint: common.endpoint.clone(),
            endpoint_types,
            custom_jinja_template: common.custom_jinja_template.clone(),
            tool_call_parser: common.dyn_tool_call_parser.clone(),
            reasoning_parser: common.dyn_reasoning_parser.clone(),
            exclude_tools_when_tool_choice_none: common.exclude_tools_when_tool_choice_none,
            disaggregation_mode: mode,
            runtime: common.runtime.clone(),
            model_name: card.folder().display().to_string(),
            served_model_name: Some(name.clone()),
            metrics_labels: vec![("model".into(), name.clone())],
            ..WorkerConfig::default()
        };
        let shared = Arc::new(Shared::new(args.serve.prefix_block, args.serve.batch));
        let driver = RwLock::new(None);
        let (router, number, shelf, peers) = (Router::default(), AtomicUsize::new(0), OnceLock::new(), OnceLock::new());
        // No number format takes more than f32; and the names of the tensors.
        let state_bytes = config.sequence_bytes(DType::F32).total(args.serve.max_seq_len).saturating_add(1 << 20);
        let args = Arc::new(args);
        let new = Self { args, settings, name, _card: card, driver, shared, router, number, shelf, peers, state_bytes };
        Ok((new, worker))
    }

    /// The state that another worker has made of the prompt. Without one the prompt is fed here.
    async fn fetched(&self, request: &PreprocessedRequest) -> Option<State> {
        let ticket = request.prefill_result.as_ref()?.disaggregated_params.clone();
        if ticket.as_object().is_some_and(|ticket| ticket.is_empty()) {
            return None;
        }
        let fetched = async {
            let peers = self.peers.get().context("no discovery, which knows the other workers")?;
            peers.fetch(serde_json::from_value(ticket)?, self.state_bytes).await
        };
        fetched.await.map_err(|e| tracing::warn!("the prompt is fed here: {e:#}")).ok()
    }

    fn has_prefixes(&self) -> bool {
        self.args.serve.prefix_cache > 0
    }
}

#[async_trait]
impl LLMEngine for Worker {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        tracing::info!("loading {}", self.name);
        let driver = Driver::start(self.args.clone(), self.shared.clone(), self.router.clone()).await;
        let driver = driver.map_err(|e| backend(BackendError::EngineShutdown, format!("{e:#}")))?;
        if self.args.dynamo.disaggregation_mode.is_prefill() {
            let serve = &self.args.serve;
            let room = serve.transfer_memory.saturating_mul(1 << 20);
            let shelf = Shelf::open(&serve.transfer_host, room, PATIENCE).await;
            let shelf = shelf.map_err(|e| backend(BackendError::CannotConnect, format!("{e:#}")))?;
            // Started once.
            let _ = self.shelf.set(Arc::new(shelf));
        }
        let (max_len, chunk) = (driver.max_len, driver.prefill_chunk);
        // Started once.
        let _ = self.shared.max_len.set(max_len);
        *self.driver.write().await = Some(driver);
        let llm = LlmRegistration {
            context_length: u32::try_from(max_len).ok(),
            kv_cache_block_size: self.has_prefixes().then_some(self.args.serve.prefix_block as u32),
            total_kv_blocks: Some(self.shared.total_blocks()),
            max_num_seqs: Some(self.args.serve.batch as u64),
            max_num_batched_tokens: Some(chunk as u64),
            ..LlmRegistration::default()
        };
        Ok(EngineConfig { model: self.name.clone(), llm: Some(llm), ..EngineConfig::default() })
    }

    async fn generate(&self, request: PreprocessedRequest, context: GenerateContext) -> Result<Outputs, DynamoError> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let Asked { request: mut wanted, ends } = asked(&request, &self.settings, self.args.sampling.seed, number)?;
        let prompt = wanted.tokens.len();
        let shelf = self.shelf.get().cloned();
        if shelf.is_some() {
            // Whoever completes the prompt is to feed the last token: it draws the first one of the completion.
            wanted.tokens.pop();
            wanted = Request { snapshot_end: true, ..Request::new(wanted.tokens, 0) };
            if prompt == 1 {
                return Ok(Box::pin(futures::stream::once(async { Ok(handed_on(serde_json::json!({}), 1)) })));
            }
        }
        let state = self.fetched(&request).await;
        let driver = self.driver.read().await;
        let driver = driver.as_ref().ok_or_else(unavailable)?;
        let running = match driver.submit(wanted, ends, state).await {
            Some(Ok(running)) => running,
            Some(Err(Refusal::Invalid(why))) => return Err(invalid(why)),
            Some(Err(Refusal::Full)) => {
                let serve = &self.args.serve;
                let why = format!("{} requests run and {} wait already", serve.batch, serve.max_waiting);
                let full = DynamoError::builder().error_type(ErrorType::WorkerOverloaded).message(why).build();
                // Only where Dynamo's own limit is higher (see `prepare`). As a stream: an error instead of one means to
                // the frontend that the worker is gone, for seconds.
                return Ok(Box::pin(futures::stream::once(async { Err(full) })));
            }
            None => return Err(unavailable()),
        };
        Ok(match shelf {
            Some(shelf) => Box::pin(ticket(running, shelf, prompt, context.inner_arc())),
            None => Box::pin(outputs(running, prompt, context.inner_arc())),
        })
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        // No request is taken in from here on; those under way go on for a while.
        let Some(driver) = self.driver.write().await.take() else { return Ok(()) };
        let ended = async {
            while self.shared.in_flight() > 0 {
                sleep(LOOK).await;
            }
        };
        if timeout(Duration::from_secs(self.args.serve.drain), ended).await.is_err() {
            tracing::warn!("{} requests have not ended and go elsewhere", self.shared.in_flight());
        }
        driver.end().await;
        Ok(())
    }

    async fn is_quiescent(&self) -> Result<Option<bool>, DynamoError> {
        Ok(Some(self.shared.in_flight() == 0 && self.shelf.get().is_none_or(|shelf| shelf.is_empty())))
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        if !self.has_prefixes() {
            return Ok(Vec::new());
        }
        let router = self.router.clone();
        let on_ready = Box::new(move |publisher| {
            // There is one.
            let _ = router.set(publisher);
            Ok(())
        });
        Ok(vec![KvEventSource::Push { on_ready, dp_rank: 0 }])
    }

    async fn setup_metrics(&self, context: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let (shared, name) = (self.shared.clone(), self.name.clone());
        context.metrics.add_expfmt_callback(Arc::new(move || Ok(shared.exposition(&name))));
        let shared = self.shared.clone();
        let ready = move |publisher| {
            shared.set_publisher(publisher);
            Ok(())
        };
        Ok(MetricsBindings { dp_ranks: vec![0], on_publisher_ready: Some(Box::new(ready)) })
    }

    async fn on_endpoint_ready(&self, endpoint: Endpoint) -> Result<(), DynamoError> {
        let component = endpoint.component();
        let peers = Peers::new(endpoint.drt().discovery(), component.namespace().name());
        if let Some(shelf) = self.shelf.get() {
            let registered = peers.register(component.name(), shelf).await;
            registered.map_err(|e| backend(BackendError::CannotConnect, format!("{e:#}")))?;
        }
        // There is one.
        let _ = self.peers.set(peers);
        Ok(())
    }

    async fn health_check_payload(&self) -> Result<Option<serde_json::Value>, DynamoError> {
        Ok(Some(serde_json::json!({
            "token_ids": [0],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": true},
            "sampling_options": {"temperature": 0.0},
            "output_options": {},
        })))
    }
}

/// The one answer of a worker that only feeds prompts: where the state is.
fn ticket(
    mut running: Running,
    shelf: Arc<Shelf>,
    prompt: usize,
    context: Arc<dyn AsyncEngineContext>,
) -> impl futures::Stream<Item = Result<LLMEngineOutput, DynamoError>> + Send {
    futures::stream::once(async move {
        let output = tokio::select! {
            biased;
            () = context.stopped() => return Ok(LLMEngineOutput::cancelled().with_usage(used(prompt, 0))),
            output = running.recv() => output,
        };
        match output {
            Some(Output { state: Some(state), .. }) => {
                let ticket = shelf.put(state).and_then(|ticket| Ok(serde_json::to_value(ticket)?));
                Ok(handed_on(ticket.unwrap_or_else(fed_there), prompt))
            }
            Some(Output { finished: Some(FinishReason::Failed(why)), .. }) => Err(backend(BackendError::Unknown, why)),
            // The prompt was fed, and its state could not be made or copied: as where the shelf is full.
            Some(Output { finished: Some(reason), .. }) if reason != FinishReason::Cancelled => {
                Ok(handed_on(fed_there(anyhow!("there is no copy of it")), prompt))
            }
            Some(_) => Err(backend(BackendError::Unknown, "the prompt was not fed".into())),
            None => Err(backend(BackendError::EngineShutdown, "the engine has ended".into())),
        }
    })
}

/// Instead of a ticket: whoever completes the prompt feeds it too.
fn fed_there(why: anyhow::Error) -> serde_json::Value {
    tracing::warn!("a state is not handed on: {why:#}");
    serde_json::json!({})
}

/// A prompt that is fed, and the ticket for its state.
fn handed_on(ticket: serde_json::Value, prompt: usize) -> LLMEngineOutput {
    let output = LLMEngineOutput { disaggregated_params: Some(ticket), ..LLMEngineOutput::length() };
    output.with_usage(used(prompt, 0))
}

/// What comes of a request, as the frontend reads it. Dropping it ends the request.
fn outputs(
    mut running: Running,
    prompt: usize,
    context: Arc<dyn AsyncEngineContext>,
) -> impl futures::Stream<Item = Result<LLMEngineOutput, DynamoError>> + Send {
    async_stream::stream! {
        let mut sent = 0;
        loop {
            let output = tokio::select! {
                biased;
                () = context.stopped() => {
                    yield Ok(LLMEngineOutput::cancelled().with_usage(used(prompt, sent)));
                    return;
                }
                output = running.recv() => output,
            };
            let Some(Output { tokens, logprobs, finished, .. }) = output else {
                yield Err(backend(BackendError::EngineShutdown, "the engine has ended".into()));
                return;
            };
            sent += tokens.len();
            let end = match finished {
                None => {
                    yield Ok(told(LLMEngineOutput { token_ids: tokens, ..LLMEngineOutput::default() }, &logprobs));
                    continue;
                }
                Some(FinishReason::Stop) => LLMEngineOutput::stop(),
                Some(FinishReason::MaxNewTokens | FinishReason::MaxLen) => LLMEngineOutput::length(),
                Some(FinishReason::Cancelled) => LLMEngineOutput::cancelled(),
                Some(FinishReason::Failed(why)) => {
                    yield Err(backend(BackendError::Unknown, why));
                    return;
                }
            };
            yield Ok(told(end.with_tokens(tokens).with_usage(used(prompt, sent)), &logprobs));
            return;
        }
    }
}

/// The output with log-probabilities of all its tokens, or without where none were asked for.
fn told(output: LLMEngineOutput, logprobs: &[Logprobs]) -> LLMEngineOutput {
    if logprobs.is_empty() {
        return output;
    }
    let top = |(rank, (token_id, logprob)): (u32, &(u32, f32))| TopLogprob {
        rank,
        token_id: *token_id,
        // The frontend has the tokenizer.
        token: None,
        logprob: f64::from(*logprob),
        bytes: None,
    };
    let likeliest = |of: &Logprobs| (1..).zip(&of.likeliest).map(top).collect();
    LLMEngineOutput {
        log_probs: Some(logprobs.iter().map(|of| f64::from(of.token)).collect()),
        top_logprobs: Some(logprobs.iter().map(likeliest).collect()),
        ..output
    }
}

fn used(prompt: usize, completion: usize) -> CompletionUsage {
    let [prompt, completion] = [prompt, completion].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    usage(prompt, completion)
}

fn backend(kind: BackendError, message: String) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(kind)).message(message).build()
}

/// Another worker may take the request.
fn unavailable() -> DynamoError {
    let error = DynamoError::builder().error_type(ErrorType::WorkerUnavailable);
    error.message("the engine has not started, or has ended").build()
}
