//! `models/cuda/gdn_attention.h`, field for field.

use candle_gdn_core::abi as gdn;
use std::ffi::c_void;

candle_gdn_core::c_header! {
    "gdn_attention.h";
    constants {}
    structs {
        #[derive(Clone, Copy)]
        pub(crate) struct KvCache = gdn_kv_cache {
            pub k: *mut c_void,
            pub v: *mut c_void,
            pub slots: gdn::Slots,
            pub head_stride: i64,
            pub token_stride: i64,
            pub capacity: i32,
            pub window: i32,
        }
        pub(crate) struct PrepareParams = gdn_attention_prepare_params {
            pub q: gdn::Heads,
            pub k: gdn::Heads,
            pub v: gdn::Heads,
            pub q_out: gdn::Heads,
            pub q_weight: *const f32,
            pub k_weight: *const f32,
            pub inv_freq: *const f32,
            pub inv_freq_low: *const f32,
            pub positions: *const u32,
            pub cache: KvCache,
            pub seqs: gdn::Sequences,
            pub num_heads: i32,
            pub num_kv_heads: i32,
            pub head_dim: i32,
            pub rotary_dim: i32,
            pub io_dtype: i32,
            pub zero_centred: i32,
            pub overlap: i32,
            pub eps: f32,
        }
        pub(crate) struct AttentionParams = gdn_attention_params {
            pub q: gdn::Heads,
            pub gate: gdn::Heads,
            pub o: gdn::Heads,
            pub positions: *const u32,
            pub cache: KvCache,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub seqs: gdn::Sequences,
            pub num_heads: i32,
            pub num_kv_heads: i32,
            pub head_dim: i32,
            pub io_dtype: i32,
            pub max_len: i32,
            pub splits: i32,
            pub overlap: i32,
            pub scale: f32,
        }
        pub(crate) struct AdvanceParams = gdn_advance_params {
            pub positions: *mut u32,
            pub slots: gdn::Slots,
            pub seqs: gdn::Sequences,
            pub overlap: i32,
        }
    }
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_advance(params: *const AdvanceParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_attention_prepare(params: *const PrepareParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_attention(params: *const AttentionParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_attention_workspace(params: *const AttentionParams, bytes: *mut i64) -> std::ffi::c_int;
}
