//! Command line.

use candle_gdn_cli::args::{block, drafted, graph, head, positive, SamplingArgs};
use candle_gdn_cli::ModelArgs;
use candle_gdn_models::{DraftHeadChoice, GraphChoice};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::Parser;
use dynamo_backend_common::CommonArgs;

/// Serves a Qwen3-Next model as a worker of NVIDIA Dynamo: its frontend, `python -m dynamo.frontend`, answers OpenAI's
/// requests with it. Without arguments: the demo checkpoint. SIGTERM ends the worker once its requests have ended.
#[derive(Parser, Debug)]
#[command(version)]
pub struct Args {
    #[command(flatten)]
    pub dynamo: CommonArgs,

    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub serve: ServeArgs,

    /// How tokens are chosen where a request does not say
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// How much is served at once, and how.
#[derive(clap::Args, Debug)]
pub struct ServeArgs {
    /// What clients call the model [default: --model, of a path its last part; demo]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Requests that run at once at most; further ones wait
    #[arg(long, value_name = "N", default_value = "16", value_parser = positive)]
    pub batch: usize,

    /// Requests that may wait, at least 2; further ones are refused, and with its --migration-limit the frontend tries
    /// another worker
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_waiting: usize,

    /// Tokens of prompt and completion together that there is room for, within the positions of the model
    #[arg(long, value_name = "N", default_value = "8192", value_parser = positive)]
    pub max_seq_len: usize,

    /// Memory for the states of prefixes that prompts share, which then run once; 0 keeps none
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub prefix_cache: usize,

    /// Shared prefixes are cut to a multiple of this, itself a multiple of 64; the router's blocks have this length
    #[arg(long, value_name = "TOKENS", default_value = "64", value_parser = block)]
    pub prefix_block: usize,

    /// So many of the last prompts stand for those to come: the most that a prompt shares with one is kept, and its end
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub prefix_recent: usize,

    /// Tokens to guess at most at each step, from what followed the last tokens earlier in the text; 0 guesses none
    #[arg(long, value_name = "N", default_value = "0", value_parser = drafted)]
    pub draft: usize,

    /// Let the draft head of the checkpoint draft tokens; auto goes on without where there is no head, on fails
    #[arg(long, default_value = "off", value_parser = PossibleValuesParser::new(["auto", "on", "off"]).map(head))]
    pub mtp: DraftHeadChoice,

    /// Record a decode step once and replay it, on a GPU: auto goes on without where that cannot be, on fails
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(["auto", "on", "off"]).map(graph))]
    pub cuda_graph: GraphChoice,

    /// With --disaggregation-mode prefill: the address of this machine where workers fetch the states of prompts
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub transfer_host: String,

    /// With --disaggregation-mode prefill: memory for states that wait to be fetched. Where they leave no room, the other
    /// worker reads the prompt itself
    #[arg(long, value_name = "MIB", default_value_t = 8192)]
    pub transfer_memory: usize,

    /// After SIGTERM requests under way may take so long to end; the rest goes to another worker. Bounded by
    /// DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT too
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub drain: u64,
}
