//! What every launch that updates a state says of it, on CUDA.

use crate::reference::Dims;
use candle_core::{DType, Layout, Result};
use candle_gdn_core::abi as gdn;
use candle_gdn_core::device::cuda::*;
use std::ffi::c_void;
use std::ptr::null;

/// A state on the device: where it is, its layout and its dtype.
pub(crate) type State<'a> = (&'a Pointer<'a>, &'a Layout, DType);

/// What the launches of the rule, the step and the ring have in common, with a state updated in place and without tokens, gates,
/// sequences and slots.
pub(crate) fn common_of(
    name: &str,
    sizes: Dims,
    io_dtype: DType,
    (state, layout, dtype): State<'_>,
) -> Result<gdn::Common> {
    let state: *mut c_void = state.at(layout.start_offset(), dtype.size_in_bytes());
    let slots = gdn::Slots { slots: null(), num_slots: 0, slot_stride: 0 };
    Ok(gdn::Common {
        a: gdn::NO_HEADS,
        b: gdn::NO_HEADS,
        a_log: null(),
        dt_bias: null(),
        state_in: state,
        state_out: state,
        in_slots: slots,
        out_slots: slots,
        seqs: sequences(0, 0, null()),
        num_k_heads: int(name, "key heads", sizes.key_heads)?,
        num_v_heads: int(name, "value heads", sizes.value_heads)?,
        head_k: sizes.key_dim as i32,
        head_v: sizes.value_dim as i32,
        io_dtype: dtype_code(io_dtype),
        gate_dtype: gdn::GDN_F32,
        state_dtype: dtype_code(dtype),
        l2norm: 0,
        l2_eps: 0.0,
        scale: 1.0,
        beta_scale: 1.0,
    })
}

/// Sequences of the same length, or with `cu_seqlens` of that length at most.
pub(crate) fn sequences(count: i32, tokens: i32, cu_seqlens: *const u32) -> gdn::Sequences {
    gdn::Sequences { cu_seqlens, num_seqs: count, tokens_per_seq: tokens, max_tokens_per_seq: tokens, total_tokens: 0 }
}
