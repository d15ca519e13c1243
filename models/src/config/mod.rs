//! The configuration of a model, read from `config.json` of the Qwen3-Next family or from a GGUF file, and checked.

mod fields;
mod gguf;
mod json;
mod parse;
mod quantization;
mod rope;
mod sizes;
#[cfg(test)]
mod tests;

pub use json::json_as_python;
pub use quantization::Fp8Config;

use candle_gdn::GdnConfig;

/// Which published family a configuration belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Qwen3-Next: flat configuration, fused and interleaved `in_proj_qkvz` and `in_proj_ba`.
    Qwen3Next,
    /// Qwen3.5 and 3.6, dense: text configuration inside a multimodal wrapper.
    Qwen3_5,
    /// Qwen3.5 and 3.6 with a mixture of experts.
    Qwen3_5Moe,
}

/// What mixes the tokens of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MixerKind {
    /// Gated DeltaNet (`linear_attention`).
    LinearAttention,
    /// Gated softmax attention (`full_attention`).
    FullAttention,
}

impl MixerKind {
    /// The kinds of `layers` layers of which every `interval`-th has softmax attention.
    fn by_interval(layers: usize, interval: usize) -> Vec<Self> {
        let kind = |i: usize| if i.is_multiple_of(interval) { Self::FullAttention } else { Self::LinearAttention };
        (1..=layers).map(kind).collect()
    }
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FfnKind {
    /// One SwiGLU MLP of the given inner width.
    Dense {
        /// Inner width.
        intermediate_size: usize,
    },
    /// A sparse mixture of experts, as [`ModelConfig::moe`] describes it.
    Moe,
}

/// One decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// Token mixer.
    pub mixer: MixerKind,
    /// Feed-forward part.
    pub ffn: FfnKind,
    /// Softmax attention sees so many tokens, the token itself included (`sliding_attention`); `None`: all before it.
    pub window: Option<usize>,
}

/// Sizes of the gated softmax attention.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct AttentionConfig {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Radians per position of each rotated pair of a head, most rapid first: the leading
    /// `2 * rope_inv_freq.len()` values of a head are rotated, value `i` with value
    /// `i + rope_inv_freq.len()`.
    pub rope_inv_freq: Vec<f64>,
    /// What the rotated values of queries and of keys are multiplied by: 1, but for YaRN.
    pub rope_factor: f64,
}

/// Sizes of the mixture of experts.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MoeConfig {
    /// Routed experts.
    pub num_experts: usize,
    /// Experts of a token.
    pub experts_per_token: usize,
    /// Inner width of a routed expert.
    pub intermediate_size: usize,
    /// Inner width of the shared expert; 0 when there is none.
    pub shared_intermediate_size: usize,
    /// Whether the weights of the chosen experts are scaled to sum to one.
    pub norm_topk_prob: bool,
}

/// A whole model. Made by [`ModelConfig::from_json`] or [`ModelConfig::from_gguf`], which check that the parts agree.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// Published family.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Model width.
    pub hidden_size: usize,
    /// The longest sequence; a longer one is an error.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Softmax attention.
    pub attention: AttentionConfig,
    /// Gated DeltaNet.
    pub gdn: GdnConfig,
    /// Mixture of experts; present if a layer uses it.
    pub moe: Option<MoeConfig>,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
    /// Tokens that end a text; may be empty.
    pub eos_token_ids: Vec<u32>,
    /// Set where the checkpoint is in fp8: see [`CausalLm::load`](crate::CausalLm::load) for how such weights are kept.
    pub fp8: Option<Fp8Config>,
}
