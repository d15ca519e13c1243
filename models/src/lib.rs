//! Whole language models on top of [`GatedDeltaNet`](candle_gdn::GatedDeltaNet): Qwen3-Next, the
//! Qwen3.5 to 3.8 text models, dense and mixture of experts, OLMo-Hybrid and Lara-4-Mini.
//!
//! The families share every block: softmax attention with a key-value cache, gated or not, with rotary positions or without, over all
//! tokens or a sliding window; RMS norms in f32, before a block or behind it; SwiGLU and sparse mixture of experts. They
//! differ in `config.json` and in where and how the weights are stored, which
//! [`ModelConfig::from_json`] and [`CausalLm::load`] recognise; of [`SafetensorsFiles`] nothing is left unread in silence
//! ([`Loader::load_safetensors`]). Weights may be quantised: in a GGUF file ([`CausalLm::load_gguf`]), in fp8, or as they are loaded ([`Loader::quantize`]). A
//! [`LoraAdapter`] is merged into them ([`Loader::lora`]).
//!
//! * A script calls [`CausalLm::forward`] with a [`ModelState`]: a batch of sequences of one length.
//! * A server gives [`Request`]s to an [`Engine`], or from other threads to an [`EngineHandle`], and receives [`Event`]s.
//!
//! Below the engine, [`CausalLm::feed`] with a [`SequencePool`] feeds sequences of any lengths that come and go, are forked, restored
//! or have drafts. On CUDA a decode step of them is one launch, a [`DecodeGraph`].
//!
//! # Authors of other models
//! The parts of [`SequencePool`] and [`DecodeGraph`] are public and serve any model with Gated DeltaNet and softmax layers.
//!
//! A pass: tokens packed, `[tokens, hidden]`; one [`CuSeqlens`](candle_gdn::CuSeqlens) and one [`Slots`](candle_gdn::Slots) for
//! all layers.
//! * A Gated DeltaNet layer: [`GatedDeltaNet::forward_slots`](candle_gdn::GatedDeltaNet::forward_slots) on a
//!   [`StatePool`](candle_gdn::StatePool) of its own. A batch of single tokens is best given as `[batch, 1, hidden]`,
//!   without boundaries.
//! * A softmax layer: [`AttentionCache`] over keys and values `[slots, kv_heads, capacity,
//!   head_dim]` of its own and positions that all layers share;
//!   [`AttentionPrepare`] on views of one projection, then
//!   [`AttentionDecode`].
//! * After the last layer [`AttentionCache::advance`] once: not before, since all layers read the same positions. These ops
//!   run on CUDA.
//! * Drafts: [`GatedDeltaNet::verify`](candle_gdn::GatedDeltaNet::verify) and
//!   [`GatedDeltaNet::commit`](candle_gdn::GatedDeltaNet::commit) on spare slots. Keys and values need no cleanup: entries past
//!   a sequence's length are ignored and overwritten.
//!
//! A captured step (cudarc's `begin_capture` and `end_capture` on the device's stream):
//! * The device is one of [`single_stream_device`](candle_gdn::single_stream_device): a stream that belongs to a host thread,
//!   which `Device::new_cuda` gives, brings the driver down when it was captured and the thread ends. Meanwhile no other
//!   thread waits for the whole GPU (`cuCtxSynchronize`; making a candle device does): that fails, and the capture with it.
//! * Ids, slots and positions are tensors that stay where they are. New values go in with
//!   [`Slots::set`](candle_gdn::Slots::set) and `slice_set`, before the launch; positions advance in the graph. Everything
//!   else a sequence has, its length above all, is read on the device, so that one graph serves growing sequences.
//! * Padding rows have [`NO_SLOT`](candle_gdn::NO_SLOT): no state is read or written for them, and their values only have
//!   to be finite. Warm up with padding alone: then nothing changes.
//! * The output is copied to a tensor that was made before the capture. A tensor made inside and kept would be overwritten by
//!   the graph. An older tensor must not be dropped inside, since its release cannot be captured.
//! * No copy to or from the host inside: no `to_vec1`, `Tensor::new`, [`CuSeqlens`](candle_gdn::CuSeqlens) or
//!   [`Slots`](candle_gdn::Slots). candle uploads shapes for some kernels: hold the guard of
//!   `CudaDevice::enable_cuda_graph_htod_cache` from before the first warm-up round to the end of the capture.
//! * cudarc's event tracking off meanwhile (`CudaContext::disable_event_tracking`), the device waited for before, and
//!   each kernel run at least once, so that modules are loaded and cuBLAS has chosen.
//! * A mixture of experts that asks the host which experts to run cannot be captured. The one here chooses on the
//!   device: in bf16 and f16 any number of tokens by kernels of its own, otherwise up to 32.
#![warn(missing_docs)]

mod abi;
mod blocks;
mod causal_lm;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod drafting;
mod engine;
mod formats;
mod loader;
mod memory;
mod ops;
mod parallel;
mod sampling;
mod sequences;
mod weights;

pub use blocks::attention::{rotary_frequencies, AttentionCache, AttentionDecode, AttentionPrepare, PrepareOptions};
pub use blocks::moe::experts_chosen;
pub use blocks::norm::AddRmsNorm;
pub use causal_lm::CausalLm;
pub use config::{
    json_as_python, AttentionConfig, Family, FfnKind, Fp8Config, LayerConfig, MixerKind, ModelConfig, MoeConfig,
    NormPlacement, QkNorm,
};
pub use engine::{
    DraftDepth, Engine, EngineHandle, EngineMessages, EngineOptions, EngineStats, Event, FinishReason, Follower,
    Followers, GraphChoice, MakeRequest, Observer, Progress, Request, RequestId, Submission, Submitted,
};
pub use formats::{GgufFile, LoraAdapter, OtherType, SafetensorsFiles};
pub use loader::{DraftHeadChoice, Loader};
pub use memory::{quantized_cpu_bytes, SequenceBytes};
pub use ops::Swiglu;
pub use parallel::{shard_of, Collective, LocalRank};
#[cfg(feature = "nccl")]
pub use parallel::{NcclId, NcclRank};
pub use sampling::{Logprobs, Sampling, SplitMix64};
pub use sequences::{DecodeGraph, Drafts, ModelState, Sequence, SequencePool, SequenceSnapshot, StateLayout};
