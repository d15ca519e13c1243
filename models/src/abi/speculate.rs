//! `models/cuda/gdn_speculate.h`, field for field.

use super::sampling::SamplingRow;

candle_gdn_core::c_header! {
    "gdn_speculate.h";
    constants {}
    structs {
        pub(crate) struct SpeculateParams = gdn_speculate_params {
            pub ids: *mut u32,
            pub rows: *mut SamplingRow,
            pub chosen: *mut u32,
            pub drawn: *mut u32,
            pub recent: *mut u32,
            pub accepted: *mut u32,
            pub last: *mut u32,
            pub positions: *mut u32,
            pub head_len: *mut u32,
            pub head_end: *mut u32,
            pub out: *mut u32,
            pub seqs: i32,
            pub tokens: i32,
            pub history: i32,
            pub forced_acceptance: f32,
        }
    }
}

#[cfg(feature = "cuda")]
extern "C" {
    pub(crate) fn gdn_speculate_begin(params: *const SpeculateParams, stream: *mut std::ffi::c_void)
        -> std::ffi::c_int;
    pub(crate) fn gdn_speculate_end(params: *const SpeculateParams, stream: *mut std::ffi::c_void) -> std::ffi::c_int;
}
