//! The configuration of a model, read from `config.json` of a published family or from a GGUF file, and checked.

mod families;
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
    /// Qwen3.5, 3.6 and 3.8, dense: text configuration inside a multimodal wrapper.
    Qwen3_5,
    /// Qwen3.5 and 3.6 with a mixture of experts.
    Qwen3_5Moe,
    /// OLMo-Hybrid: separate projections and convolutions.
    OlmoHybrid,
    /// Lara-4-Mini: one `in_proj`, and softmax attention of which most layers have a sliding window.
    LaraMini,
}

/// What mixes the tokens of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MixerKind {
    /// Gated DeltaNet (`linear_attention`).
    LinearAttention,
    /// Softmax attention (`full_attention`, `sliding_attention`).
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

/// Where the two norms of a layer stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NormPlacement {
    /// Of what the mixer and the feed-forward read.
    Before,
    /// Of what they add to the residual sum.
    Behind,
}

/// One decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// Token mixer.
    pub mixer: MixerKind,
    /// Feed-forward part.
    pub ffn: FfnKind,
    /// Where its norms stand.
    pub norms: NormPlacement,
    /// Whether the queries and keys of softmax attention have rotary positions.
    pub positions: bool,
    /// Softmax attention sees so many tokens, the token itself included (`sliding_attention`); `None`: all before it.
    pub window: Option<usize>,
}

impl LayerConfig {
    /// One of Qwen's.
    pub(crate) fn new(mixer: MixerKind, ffn: FfnKind) -> Self {
        Self { mixer, ffn, norms: NormPlacement::Before, positions: true, window: None }
    }
}

/// What the norm of queries and keys takes the mean square of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkNorm {
    /// A head; its weight is one for all heads.
    Head,
    /// All heads of the projection together.
    Projection,
}

/// Sizes of the softmax attention.
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
    /// Whether the output is multiplied by the sigmoid of a gate, whose rows lie behind each head's in `q_proj`.
    pub output_gate: bool,
    /// The norm of queries and keys.
    pub qk_norm: QkNorm,
}

impl AttentionConfig {
    /// Rows of `q_proj`.
    pub(crate) fn query_rows(&self) -> usize {
        self.num_heads * self.head_dim * if self.output_gate { 2 } else { 1 }
    }
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
    /// Whether the shared expert is scaled by the sigmoid of a gate of its own.
    pub shared_gate: bool,
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
    /// Epsilon of every RMS norm but the gated one, which has [`GdnConfig::rms_norm_eps`].
    pub rms_norm_eps: f64,
    /// Whether these norms multiply by `1 + weight` instead of by the weight.
    pub zero_centred_norms: bool,
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
