//! `models/cuda/gdn_moe.h`, field for field.

use super::scaled::Scales;
use std::ffi::c_void;

candle_gdn_core::c_header! {
    "gdn_moe.h";
    constants {
        pub(crate) GDN_MOE_AUTO: i32 = 0;
        pub(crate) GDN_MOE_FEW_TOKENS: usize = 128;
        pub(crate) GDN_MOE_EXPERTS: usize = 1024;
        pub(crate) GDN_MOE_TOP_K: usize = 16;
        pub(crate) GDN_MOE_PACKED_TOKENS: usize = 16;
        pub(crate) GDN_MOE_PACKED_INPUTS: usize = 65536;
    }
    structs {
        pub(crate) struct MoeParams = gdn_moe_params {
            pub x: *const c_void,
            pub router: *const c_void,
            pub gate_up: *const c_void,
            pub down: *const c_void,
            pub shared_gate_up: *const c_void,
            pub shared_down: *const c_void,
            pub gate_up_scales: Scales,
            pub down_scales: Scales,
            pub shared_gate_up_scales: Scales,
            pub shared_down_scales: Scales,
            pub quantized: i32,
            pub gate_up_type: i32,
            pub down_type: i32,
            pub shared_gate_up_type: i32,
            pub shared_down_type: i32,
            pub y: *mut c_void,
            pub workspace: *mut c_void,
            pub workspace_bytes: i64,
            pub x_stride: i64,
            pub y_stride: i64,
            pub tokens: i32,
            pub hidden: i32,
            pub num_experts: i32,
            pub top_k: i32,
            pub inner: i32,
            pub shared_inner: i32,
            pub io_dtype: i32,
            pub router_parts: i32,
            pub normalise: i32,
            pub algo: i32,
            pub overlap: i32,
        }
    }
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_moe(params: *const MoeParams, stream: *mut c_void) -> std::ffi::c_int;
    pub(crate) fn gdn_moe_workspace(params: *const MoeParams, bytes: *mut i64) -> std::ffi::c_int;
}
