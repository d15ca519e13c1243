//! Whole language models on top of [`GatedDeltaNet`](candle_gdn::GatedDeltaNet): Qwen3-Next and the
//! Qwen3.5 and 3.6 text models, dense and mixture of experts.
//!
//! The families share every block: gated softmax attention with partial rotary positions and a
//! key-value cache, zero-centred RMS norms in f32, SwiGLU and sparse mixture of experts. They
//! differ in `config.json` and in where and how the weights are stored, which
//! [`ModelConfig::from_json`] and [`CausalLm::load`] recognise. Weights may be quantised: in a GGUF file
//! ([`CausalLm::load_gguf`]), in fp8, or as they are loaded ([`Loader::quantize`]).
//!
//! A batch of sequences of one length goes through [`CausalLm::forward`] with a [`ModelState`]. Sequences that come
//! and go, of any lengths, forked, restored, or with drafts, go through [`CausalLm::feed`] with a [`SequencePool`];
//! and on CUDA a decode step of those is one launch as a [`DecodeGraph`]. [`Engine`] schedules requests on all of that.
//!
//! # Authors of other models
//! What [`SequencePool`] and [`DecodeGraph`] are made of is public, and holds for any model with Gated DeltaNet and
//! softmax layers.
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
//! * After the last layer [`AttentionCache::advance`](crate::ops::AttentionCache::advance) once: not before, since all
//!   layers read the same positions.
//! * Drafts: [`GatedDeltaNet::verify`](candle_gdn::GatedDeltaNet::verify) and
//!   [`GatedDeltaNet::commit`](candle_gdn::GatedDeltaNet::commit) on spare slots. Keys and values need nothing: behind a
//!   sequence's position anything may lie, and the next pass writes over it.
//!
//! A captured step (cudarc's `begin_capture` and `end_capture` on the device's stream):
//! * The device is one of [`single_stream_device`](candle_gdn::single_stream_device): a stream that belongs to a host thread,
//!   which `Device::new_cuda` gives, brings the driver down when it was captured and the thread ends. Meanwhile no other
//!   thread waits for the whole GPU (`cuCtxSynchronize`; making a candle device does): that fails, and the capture with it.
//! * Ids, slots and positions are tensors that stay where they are. New values go in with
//!   [`Slots::set`](candle_gdn::Slots::set) and `slice_set`, before the launch; positions advance in the graph. Everything
//!   else a sequence has, its length above all, is read on the device, so that one graph serves growing sequences.
//! * Rows of nobody have [`NO_SLOT`](candle_gdn::NO_SLOT): no state is read or written for them, and what they hold has
//!   only to be finite. All rows so is what to warm up with: nothing changes.
//! * The output is copied inside to a tensor made before. A tensor that is made inside and kept would be the graph's to
//!   overwrite; one that is older must not be dropped inside, since its release cannot be captured.
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
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod engine;
mod formats;
mod loader;
mod memory;
mod ops;
mod parallel;
mod prefix_cache;
mod slot_allocator;
mod state;

pub use causal_lm::CausalLm;
pub use config::{AttentionConfig, Family, FfnKind, Fp8Config, LayerConfig, MixerKind, ModelConfig, MoeConfig};
#[cfg(feature = "nccl")]
pub use cuda::nccl::{NcclId, NcclRank};
pub use engine::{
    DecodeGraph, DraftDepth, DraftTally, Drafts, Engine, EngineHandle, EngineOptions, EngineStats, Event, FinishReason,
    GraphChoice, HeadTally, Logprobs, Meter, PrefixTally, Request, RequestId, Rings, Sampling, Sequence, SequencePool,
    SequenceSnapshot, SplitMix64, Submitted,
};
pub use formats::{GgufFile, OtherType};
pub use loader::{DraftHeadChoice, Loader};
pub use memory::SequenceBytes;
pub use ops::{
    add_rms_norm, attention_decode, attention_prepare, rms_norm, rotary_frequencies, swiglu, AddRmsNorm,
    AttentionCache, AttentionDecode, AttentionPrepare, PrepareOptions, Swiglu,
};
pub use parallel::{part_of, part_of_safetensors, Collective, LocalRank};
pub use state::ModelState;
