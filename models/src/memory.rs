//! The memory of a model, computed from its configuration alone.

use crate::blocks::attention::capacity;
use crate::config::{FfnKind, Fp8Config, LayerConfig, MixerKind, ModelConfig, QkNorm};
use crate::formats::{type_for, Fp8Format, LayerNames};
use crate::weights::cpu::quantized::Quantized;
use crate::weights::plan::{self, Kernel};
use crate::weights::BLOCK_COLUMNS;
use candle_core::quantized::GgmlDType;
use candle_core::DType;
use candle_gdn::RingSpans;

/// Bytes of device memory that one sequence of a model takes; see [`ModelConfig::sequence_bytes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceBytes {
    /// Recurrent states of the Gated DeltaNet layers, `[HV, V, K]` each in f32, whatever the length.
    pub recurrent: u64,
    /// Inputs that the convolutions look back at, `[width - 1, channels]` a Gated DeltaNet layer.
    pub conv: u64,
    /// What stands beside the recurrent states of a pool with [`StateLayout`](crate::StateLayout): of 32 tokens the convolution's inputs,
    /// keys, and in f32 updates and decays.
    pub ring: u64,
    /// Keys and values of the softmax layers without a window for each token that there is room for.
    pub kv_per_token: u64,
    /// Those of the softmax layers with a window for each token of its ring.
    pub window_kv_per_token: u64,
    /// Tokens of the ring: the largest window, and room for new tokens.
    pub window_tokens: usize,
}

impl SequenceBytes {
    /// All of it, with room for `tokens` tokens and without a ring.
    pub fn total(&self, tokens: usize) -> u64 {
        self.recurrent.saturating_add(self.conv).saturating_add(self.kv(tokens))
    }

    /// Keys and values with room for `tokens` tokens.
    pub fn kv(&self, tokens: usize) -> u64 {
        let ring = self.window_kv_per_token.saturating_mul(tokens.min(self.window_tokens) as u64);
        self.kv_per_token.saturating_mul(tokens as u64).saturating_add(ring)
    }
}

/// Bytes of so many numbers in whole blocks of a type.
pub(crate) fn quantized_bytes(dtype: GgmlDType, numbers: u64) -> u64 {
    numbers.div_ceil(dtype.block_size() as u64).saturating_mul(dtype.type_size() as u64)
}

/// Bytes that a matrix of so many numbers in a quantised type takes on this CPU, and those of the copy that candle makes at its first
/// product. Our layouts, on x86 with AVX2, need no copy.
pub fn quantized_cpu_bytes(dtype: GgmlDType, numbers: u64) -> [u64; 2] {
    cpu_bytes(dtype, numbers, Quantized::bytes(dtype, numbers), std::env::consts::ARCH)
}

/// `ours`: bytes in our layout, if there is one.
fn cpu_bytes(dtype: GgmlDType, numbers: u64, ours: Option<u64>, arch: &str) -> [u64; 2] {
    use GgmlDType::{Q4K, Q4_0, Q5K, Q6K, Q8_0};
    let stored = quantized_bytes(dtype, numbers);
    match ours {
        Some(ours) => [ours, 0],
        // It has the same blocks in another order.
        None if arch == "aarch64" && matches!(dtype, Q4_0 | Q8_0 | Q4K | Q5K | Q6K) => [stored, stored],
        None => [stored, 0],
    }
}

#[cfg(test)]
#[test]
fn candle_copies_some_types_on_arm() {
    use GgmlDType::{Q2K, Q4K, Q4_0, Q4_1, Q5K, Q6K, Q8_0};
    let types = [Q4_0, Q4K, Q5K, Q6K, Q8_0, Q2K, Q4_1];
    let on_arm = types.map(|dtype| cpu_bytes(dtype, 256, None, "aarch64"));
    assert_eq!(on_arm, [[144; 2], [144; 2], [176; 2], [210; 2], [272; 2], [84, 0], [160, 0]]);
    assert!(types.iter().all(|dtype| cpu_bytes(*dtype, 256, None, "x86_64")[1] == 0), "x86 without AVX2");
    assert_eq!(cpu_bytes(Q2K, 256, Some(100), "x86_64"), [100, 0]);
}

impl ModelConfig {
    /// Numbers in the weights of the text model; a head that is the embedding counts once.
    ///
    /// ```
    /// # fn main() -> candle_core::Result<()> {
    /// # let json = include_str!("../../examples/generate/configs/qwen3-next-80b-a3b.json");
    /// let config = candle_gdn_models::ModelConfig::from_json(json)?;
    /// assert_eq!(config.parameters(), 79_674_391_296);
    /// # Ok(())
    /// # }
    /// ```
    pub fn parameters(&self) -> u64 {
        let Weights { typed, f32 } = self.weights();
        typed.saturating_add(f32)
    }

    /// Bytes of the weights of a model in `dtype` on a GPU; norms, gates and routers are kept in f32
    /// (and counted so where CUDA keeps a router in bf16, which holds it). On the CPU
    /// matrices in f32 that bf16 or f16 holds exactly take what they do in bf16.
    pub fn weight_bytes(&self, dtype: DType) -> u64 {
        let Weights { typed, f32 } = self.weights();
        typed.saturating_mul(dtype.size_in_bytes() as u64).saturating_add(f32.saturating_mul(4))
    }

    /// The same where matrices in fp8 ([`ModelConfig::fp8`]) stay so, as on CUDA in 16 bits: a byte for each of their numbers,
    /// and 4 for each block of 128 x 128, or 1 x 128 where each row has a scale. A rank's shard stays in fp8 if it has
    /// whole blocks of columns.
    pub fn fp8_weight_bytes(&self, dtype: DType) -> u64 {
        let saved = (dtype.size_in_bytes() as u64).saturating_sub(1);
        let format = self.fp8.as_ref().and_then(|config| Fp8Format::new(config, true));
        let keeps = |columns| format.as_ref().is_some_and(|format| format.keeps(columns));
        let block_rows = self.fp8.as_ref().map_or(1, Fp8Config::block_rows);
        self.fp8_matrices(keeps).fold(self.weight_bytes(dtype), |bytes, [count, rows, columns]| {
            let scales = product(&[count, rows.div_ceil(block_rows), columns.div_ceil(BLOCK_COLUMNS), 4]);
            let numbers = product(&[count, rows, columns]);
            bytes.saturating_sub(numbers.saturating_mul(saved)).saturating_add(scales)
        })
    }

    /// Numbers in the matrices that a checkpoint has in fp8 ([`ModelConfig::fp8`]). On the CPU each is a number in the model's dtype: times
    /// its scale no dtype of 16 bits holds it exactly.
    pub fn fp8_parameters(&self) -> u64 {
        self.fp8_matrices(|_| true).fold(0, |sum, matrix| sum.saturating_add(product(&matrix)))
    }

    /// Bytes of the weights where [`Loader::quantize`](crate::Loader::quantize) is `dst`: the embedding in
    /// `dtype`, each matrix in `dst` or what takes its place, and a tied head once more.
    pub fn quantized_weight_bytes(&self, dtype: DType, dst: GgmlDType) -> u64 {
        let gates = [2 * self.gdn.num_value_heads, self.hidden_size];
        let of_layer = |layer: &LayerConfig| {
            let matrices = self.projections(layer).into_iter().chain(self.expert_matrices(layer));
            let gates =
                (layer.mixer == MixerKind::LinearAttention).then_some(([1, gates[0], gates[1]], GgmlDType::Q8_0));
            matrices.map(|(_, matrix)| (matrix, dst)).chain(gates).collect::<Vec<_>>()
        };
        let head = ([1, self.vocab_size, self.hidden_size], dst);
        let Weights { typed, f32 } = self.weights();
        // What is no such matrix stays dense.
        let dense = if self.tie_word_embeddings { typed.saturating_add(product(&head.0)) } else { typed };
        let bytes = dense.saturating_mul(dtype.size_in_bytes() as u64).saturating_add(f32.saturating_mul(4));
        self.layers.iter().flat_map(of_layer).chain([head]).fold(bytes, |bytes, (matrix, dst)| {
            let numbers = product(&matrix);
            let Some(of) = type_for(dst, matrix[2]) else { return bytes };
            let as_dense = numbers.saturating_mul(dtype.size_in_bytes() as u64);
            bytes.saturating_sub(as_dense).saturating_add(quantized_bytes(of, numbers))
        })
    }

    /// Bytes of the largest weights that a pass of `tokens` tokens, with logits of some, holds in `dtype` on CUDA besides what is stored,
    /// which is multiplied so where there are many rows: of a matrix in fp8 or, if they are `packed`, in q8_0, q4_K or q6_K; with more tokens
    /// all packed experts of a layer at once.
    pub fn dequantised_bytes(&self, dtype: DType, packed: bool, tokens: usize, logits: usize) -> u64 {
        let is_dense = |rows| packed && plan::packed(rows, dtype, false) == Kernel::Dequantised;
        let in_fp8 = self.fp8.is_some() && !packed && dtype != DType::F32;
        let experts = packed && dtype != DType::F32 && plan::packed_experts(tokens, self.hidden_size).is_none();
        let of_layer = |layer: &LayerConfig| {
            let numbers =
                |all: &[(&str, [usize; 3])]| all.iter().map(|(_, matrix)| product(matrix)).fold(0, u64::saturating_add);
            let of_experts = self.expert_matrices(layer);
            let mut most = if experts { numbers(&of_experts) } else { 0 };
            if in_fp8 || is_dense(tokens) {
                // Matrices of one input are multiplied at once.
                let mut all = self.projections(layer);
                all.extend(of_experts.into_iter().filter(|(name, _)| name.contains("shared")));
                all.retain(|(name, _)| !["out_proj", "o_proj", "down_proj"].iter().any(|end| name.ends_with(end)));
                let of_one = |a: &(&str, _), b: &(&str, _)| {
                    a.0.rsplit_once('.').map(|x| x.0) == b.0.rsplit_once('.').map(|x| x.0)
                };
                most = all.chunk_by(of_one).map(numbers).fold(most, u64::max);
            }
            most
        };
        let head = if is_dense(logits) { product(&[self.vocab_size, self.hidden_size]) } else { 0 };
        let most = self.layers.iter().map(of_layer).fold(head, u64::max);
        most.saturating_mul(dtype.size_in_bytes() as u64)
    }

    /// What a sequence of a model in `dtype` takes, recurrent states in f32.
    ///
    /// [`SequencePool::bytes_per_sequence`](super::SequencePool::bytes_per_sequence) is the same of a pool, to the byte
    /// on a GPU; on the CPU keys and values are padded.
    pub fn sequence_bytes(&self, dtype: DType) -> SequenceBytes {
        let (c, a) = (&self.gdn, &self.attention);
        let linear = self.layers.iter().filter(|layer| layer.mixer == MixerKind::LinearAttention).count();
        let windows = || self.layers.iter().filter_map(|layer| layer.window);
        let full = self.layers.len() - linear - windows().count();
        let (size, channels) = (dtype.size_in_bytes(), c.conv_channels() as u64);
        SequenceBytes {
            recurrent: product(&[linear, c.num_value_heads, c.value_head_dim, c.key_head_dim, 4]),
            conv: product(&[linear, c.conv_kernel.saturating_sub(1), size]).saturating_mul(channels),
            ring: product(&[linear, RingSpans::ROWS]).saturating_mul(
                product(&[c.num_key_heads, c.key_head_dim, size])
                    .saturating_add(channels.saturating_mul(size as u64))
                    .saturating_add(product(&[c.num_value_heads, c.value_head_dim.saturating_add(1), 4])),
            ),
            kv_per_token: product(&[full, 2, a.num_kv_heads, a.head_dim, size]),
            window_kv_per_token: product(&[windows().count(), 2, a.num_kv_heads, a.head_dim, size]),
            window_tokens: windows().map(|window| capacity(Some(window), usize::MAX)).max().unwrap_or(0),
        }
    }

    /// Number, rows and columns of the matrices in fp8 of which `keeps` accepts the columns.
    fn fp8_matrices<'a>(&'a self, keeps: impl Fn(usize) -> bool + 'a) -> impl Iterator<Item = [usize; 3]> + 'a {
        let layers = self.layers.iter().enumerate().filter_map(|(i, layer)| Some((i, layer, self.fp8.as_ref()?)));
        layers.flat_map(move |(i, layer, config)| {
            let stays = |&(module, [_, _, columns]): &(&str, [usize; 3])| {
                config.converts(&format!("layers.{i}.{module}")) && keeps(columns)
            };
            let mut experts = self.expert_matrices(layer);
            // All of them or none.
            if !experts.iter().all(stays) {
                experts.clear();
            }
            let others = self.projections(layer).into_iter().filter(stays);
            others.chain(experts).map(|(_, matrix)| matrix).collect::<Vec<_>>()
        })
    }

    /// The projections of a layer but those of experts: names, numbers, rows and columns.
    fn projections(&self, layer: &LayerConfig) -> Vec<(&'static str, [usize; 3])> {
        let (c, a, h) = (&self.gdn, &self.attention, self.hidden_size);
        let mut all = match layer.mixer {
            MixerKind::LinearAttention => {
                let names = LayerNames::of(self.family);
                let mut all: Vec<_> =
                    (names.gdn_inputs)(c).into_iter().map(|(name, rows)| (name, [1, rows, h])).collect();
                all.push((names.gdn_output, [1, h, c.value_size()]));
                all
            }
            MixerKind::FullAttention => vec![
                ("self_attn.q_proj", [1, a.query_rows(), h]),
                ("self_attn.k_proj", [1, a.num_kv_heads * a.head_dim, h]),
                ("self_attn.v_proj", [1, a.num_kv_heads * a.head_dim, h]),
                ("self_attn.o_proj", [1, h, a.num_heads * a.head_dim]),
            ],
        };
        if let FfnKind::Dense { intermediate_size: inner } = layer.ffn {
            all.extend([
                ("mlp.gate_proj", [1, inner, h]),
                ("mlp.up_proj", [1, inner, h]),
                ("mlp.down_proj", [1, h, inner]),
            ]);
        }
        all
    }

    fn expert_matrices(&self, layer: &LayerConfig) -> Vec<(&'static str, [usize; 3])> {
        let (FfnKind::Moe, Some(moe), h) = (layer.ffn, &self.moe, self.hidden_size) else { return Vec::new() };
        let (n, inner, shared) = (moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size);
        let mut all = vec![
            ("mlp.experts.0.gate_proj", [n, inner, h]),
            ("mlp.experts.0.up_proj", [n, inner, h]),
            ("mlp.experts.0.down_proj", [n, h, inner]),
        ];
        if shared > 0 {
            all.extend([
                ("mlp.shared_expert.gate_proj", [1, shared, h]),
                ("mlp.shared_expert.up_proj", [1, shared, h]),
                ("mlp.shared_expert.down_proj", [1, h, shared]),
            ]);
        }
        all
    }

    fn weights(&self) -> Weights {
        let (c, a, h) = (&self.gdn, &self.attention, self.hidden_size as u64);
        let channels = c.conv_channels() as u64;
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        let mut all = Weights { typed: product(&[tables, self.vocab_size, self.hidden_size]), f32: h };
        for layer in &self.layers {
            all.add(0, 2 * h);
            for (_, matrix) in self.projections(layer).into_iter().chain(self.expert_matrices(layer)) {
                all.add(product(&matrix), 0);
            }
            match layer.mixer {
                MixerKind::LinearAttention => {
                    let heads = c.num_value_heads as u64;
                    // The projections of decay and beta, and the convolution.
                    all.add(h.saturating_mul(2 * heads), 2 * heads + c.value_head_dim as u64);
                    all.add(channels.saturating_mul(c.conv_kernel as u64), 0);
                }
                MixerKind::FullAttention => {
                    let heads = match a.qk_norm {
                        QkNorm::Head => 2,
                        QkNorm::Projection => a.num_heads.saturating_add(a.num_kv_heads),
                    };
                    all.add(0, product(&[heads, a.head_dim]));
                }
            }
            if let (FfnKind::Moe, Some(moe)) = (layer.ffn, &self.moe) {
                let gate = if moe.shared_gate && moe.shared_intermediate_size > 0 { h } else { 0 };
                all.add(0, product(&[moe.num_experts, self.hidden_size]).saturating_add(gate));
            }
        }
        all
    }
}

/// Numbers, by how the model holds them.
struct Weights {
    /// In its dtype.
    typed: u64,
    /// In f32 always.
    f32: u64,
}

impl Weights {
    fn add(&mut self, typed: u64, f32: u64) {
        self.typed = self.typed.saturating_add(typed);
        self.f32 = self.f32.saturating_add(f32);
    }
}

/// A configuration may be nonsense that nobody could load: too much is too much.
fn product(factors: &[usize]) -> u64 {
    factors.iter().fold(1, |product, &factor| product.saturating_mul(factor as u64))
}
