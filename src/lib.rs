//! Gated DeltaNet, the linear attention of Qwen3-Next, Qwen3.5 and Qwen3.6, for [candle](candle_core).
//!
//! * [`GatedDeltaNet`] is the layer: load it from a checkpoint, give it a [`GdnState`], call `forward` with any number
//!   of tokens.
//! * A server keeps the states of its sequences in the slots of a [`StatePool`], one a layer, which a [`SlotAllocator`]
//!   hands out: [`GatedDeltaNet::forward_slots`] takes packed sequences of any lengths, prompts and decode steps in one
//!   call; [`PrefixCache`] keeps the states along a prompt for the next one that begins alike; and
//!   [`GatedDeltaNet::verify`] feeds drafted tokens that may be taken back. [`GatedDeltaNet::new_ring_pool`] makes a pool whose
//!   decode does not write its states with every token.
//! * The ops are for authors of their own layer: [`gdn_decode_in_place`] and [`gdn_prefill_in_place`] are the rule,
//!   [`causal_conv1d`] and [`gated_rms_norm`] stand before and behind it, and [`gdn_step_in_place`] is all three for up
//!   to 16 tokens, on CUDA in one kernel. All run on the CPU and, with the `cuda` feature, on CUDA.
//! * [`mod@reference`] is the rule in `f64` that every kernel is tested against.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_gdn::{gdn_prefill_in_place, Gates, RuleOptions};
//!
//! # fn main() -> candle_core::Result<()> {
//! let (batch, tokens, key_heads, value_heads, dim) = (1, 10, 2, 4, 128);
//! let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &Device::Cpu);
//! let q = randn(&[batch, tokens, key_heads, dim])?;
//! let k = randn(&[batch, tokens, key_heads, dim])?;
//! let v = randn(&[batch, tokens, value_heads, dim])?;
//! let gates = Gates {
//!     a: randn(&[batch, tokens, value_heads])?,
//!     b: randn(&[batch, tokens, value_heads])?,
//!     a_log: randn(&[value_heads])?,
//!     dt_bias: randn(&[value_heads])?,
//! };
//! let state = Tensor::zeros((batch, value_heads, dim, dim), DType::F32, &Device::Cpu)?;
//! let o = gdn_prefill_in_place(&q, &k, &v, &gates, &state, None, RuleOptions::default())?;
//! assert_eq!(o.dims(), [batch, tokens, value_heads, dim]);
//! # Ok(())
//! # }
//! ```
//!
//! # Threads
//! Layers, states and pools are `Send` and `Sync`. A layer is only read: any number of host threads may share one. What
//! writes a state or a pool takes it by `&mut`, so that one thread at a time does: several that serve one pool put it
//! behind a `Mutex`, or each have a pool of their own. The tensors of a state or pool (`conv()`, `recurrent()`) are views:
//! who keeps one sees later writes, whichever thread makes them. A state on another device than the layer's weights is
//! refused.
//!
//! A CUDA device that `Device::new_cuda` makes has a stream for each host thread, and nothing orders what two threads
//! launch. There a thread that takes over a state or pool from another one waits for the device once; other tensors that
//! it was handed, the inputs and [`Slots`] among them, are for the caller to wait for (`Device::synchronize`). Threads that
//! use a device at the same time should make it with [`single_stream_device`]: then all share one stream, which also
//! keeps candle's matrix products apart, whose handle they share. CUDA graphs need such a device.
#![warn(missing_docs)]

#[macro_use]
mod abi;
mod block_scaled;
#[allow(missing_docs)]
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod host;
mod layer;
mod linear;
mod ops;
#[doc(hidden)]
pub mod plumbing;
#[cfg(any(feature = "profile", test))]
pub mod profile;
pub mod reference;
mod state;

pub use device::{keep_freed_memory, single_stream_device};
pub use layer::{
    Accepted, CheckpointPlan, Checkpoints, Drafted, GatedDeltaNet, GdnConfig, GdnParts, InProjection, Projection,
};
pub use linear::Linear;
pub use ops::{
    causal_conv1d, checkpoint_rows, gated_rms_norm, gdn_decode, gdn_decode_in_place, gdn_prefill, gdn_prefill_in_place,
    gdn_step_in_place, Algo, CausalConv1d, CuSeqlens, GateActivation, GatedRmsNorm, Gates, GdnDecode, GdnPrefill,
    GdnStep, RuleOptions, Slots, StepAlgo, StepOptions, CHECKPOINT_MULTIPLE, NO_SLOT,
};
pub use state::{GdnState, PrefixCache, SlotAllocator, StatePool};
